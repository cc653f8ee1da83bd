"""Where the weights moved: evidence for each weight of the model, and a low-rank update of one.

Statement: the residual r of a suspect whose weight W_m moved by a small random dW is Gaussian, with
a covariance that the reference's own gradients give. The weight under which the residual is most
likely is the one that moved.
Algebra: for row x and direction u_j of the answers, rho = u_j . r(x) = <A_xj, dW> with
A_xj = sum_t g_xjt h_xt' (g: gradient at the output of the module, h: its input). Hence the kernel
K_m = rms(W)^2 <A, A'>, and log p(rho | m) = max over (tau, eta) of the Gaussian with covariance
tau^2 K_m + eta^2. tau is the size of the move, relative to the weight.
The rank and the numbers of an update: see low_rank_update.
When it fails: evidence ranks changes of weights. A fault that is none is placed near its layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.diagnosis.anatomy import Projection
from keyhole.diagnosis.experiment import Experiment
from keyhole.diagnosis.simulate import Bench, Row

CLEAR = 10.0  # nats between the first place and the second: one in twenty thousand
LARGE = 0.5  # of a weight: a move so large is no small change of it, and may be no change of it


@dataclass(frozen=True, eq=False)
class Place:
    """A weight, or several, with its evidence."""

    name: str
    layer: int | None
    evidence: float
    size: float  # of the move, relative to the weight


@dataclass(frozen=True, eq=False)
class Traces:
    """Inputs of a module and gradients at its output, token by token."""

    inputs: Array  # (tokens, inputs)
    gradients: Array  # (directions, tokens, outputs)
    row: Array  # (tokens,): which row each belongs to


def trace(
    bench: Bench, rows: Sequence[Row], directions: Array, projections: Sequence[Projection]
) -> dict[str, Traces]:
    """Runs rows through the reference, and gradients of the answers along directions (rows, count,
    outputs) back to the outputs of some projections."""
    import torch

    inputs: dict[str, list] = {key_of(p): [] for p in projections}
    gradients: dict[str, list] = {key_of(p): [] for p in projections}
    owners: list[Array] = []
    for pack in _packs(rows):
        kept: dict[int, tuple[Any, Any]] = {}

        def keep(module: Any, given: Any, answer: Any, kept: Any = kept) -> Any:
            answer = answer if answer.requires_grad else answer.detach().requires_grad_()
            kept[id(module)] = (given[0].detach(), answer)
            return answer

        modules = {id(p.module): p.module for p in projections}
        handles = [m.register_forward_hook(keep) for m in modules.values()]
        try:
            answers, mask = _answer(bench, [rows[n] for n in pack])
        finally:
            for handle in handles:
                handle.remove()
        flat = mask.ravel()
        owners.append(np.repeat(pack, mask.shape[1])[flat.numpy()])
        ends = [kept[n][1] for n in modules]
        along = torch.from_numpy(np.ascontiguousarray(directions[pack]))
        each = dict(zip(modules, _pull_back(answers, ends, along, flat), strict=True))
        for p in projections:
            found = each[id(p.module)][:, :, p.start : p.stop]
            inputs[key_of(p)].append(kept[id(p.module)][0].flatten(0, 1)[flat].numpy())
            gradients[key_of(p)].append(found)
    row = np.concatenate(owners)
    order = np.argsort(row, kind="stable")
    return {
        name: Traces(
            np.concatenate(inputs[name])[order],
            np.concatenate(gradients[name], axis=1)[:, order],
            row[order],
        )
        for name in inputs
    }


def _pull_back(answers: Any, ends: list[Any], along: Any, flat: Any) -> list[Array]:
    """Gradients of the answers along each direction, at each of these ends: (directions, tokens,
    features), padding left out."""
    import torch

    pulled: list[list[Array]] = [[] for _ in ends]
    for j in range(along.shape[1]):
        way = along[:, j].to(answers.dtype)
        gradients = torch.autograd.grad(answers, ends, way, retain_graph=True, allow_unused=True)
        for kept, end, gradient in zip(pulled, ends, gradients, strict=True):
            gradient = torch.zeros_like(end) if gradient is None else gradient
            kept.append(gradient.flatten(0, 1)[flat].numpy())
    return [np.stack(kept) for kept in pulled]


def key_of(projection: Projection) -> str:
    """What a projection is called: its module, and its part of it."""
    return f"{projection.name}:{projection.role}"


def _packs(rows: Sequence[Row], most: int = 24) -> list[Array]:
    """Numbers of rows that run together: of about one length."""
    order = np.argsort([len(row) for row in rows], kind="stable")
    return [order[k : k + most] for k in range(0, len(rows), most)]


def _answer(bench: Bench, rows: list[Row]) -> tuple[Any, Any]:
    """Answers with a graph behind them, and the mask of tokens."""
    import torch

    from keyhole.diagnosis.attention import attending
    from keyhole.diagnosis.simulate import Inputs, pad
    from keyhole.oracles.torch import first_tensor

    ids, mask = pad(Inputs(rows), bench.reference.pad)
    with attending((), mask), torch.enable_grad():
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.long()}
        if hasattr(bench.model.config, "use_cache"):
            arguments["use_cache"] = False
        states = first_tensor(bench.model(**arguments))
        return bench.reference.readout(states, mask), mask


def kernel(traces: Traces, rows: int) -> Array:
    """<A_xj, A_x'j'> for all rows and directions, (rows * directions) square."""
    count = len(traces.gradients)
    tokens = traces.inputs @ traces.inputs.T
    starts = np.searchsorted(traces.row, np.arange(rows))
    result = np.zeros((rows, count, rows, count))
    for j in range(count):
        for k in range(j, count):
            product = (traces.gradients[j] @ traces.gradients[k].T) * tokens
            summed = np.add.reduceat(np.add.reduceat(product, starts, axis=0), starts, axis=1)
            result[:, j, :, k] = summed
            result[:, k, :, j] = summed.T
    return result.reshape(rows * count, rows * count)


def weigh(matrix: Array, values: Array, noise: float) -> tuple[float, float]:
    """Log evidence of Gaussian values with covariance tau^2 K + eta^2, and the best tau."""
    size, vectors = np.linalg.eigh(matrix)
    size = np.maximum(size, 0)
    turned = (vectors.T @ values) ** 2
    best = (-np.inf, 0.0)
    total = float(np.sum(turned))
    unit = np.sqrt(total / max(float(np.sum(size)), 1e-300))
    floor = max(noise, 1e-4 * np.sqrt(total / len(values)))
    for tau in unit * np.geomspace(0.05, 20, 40):
        for eta in floor * np.geomspace(1, 1e4, 25):
            spread = tau**2 * size + eta**2
            value = -0.5 * float(np.sum(np.log(spread) + turned / spread))
            if value > best[0]:
                best = (value, float(tau))
    return best


@dataclass(frozen=True, eq=False)
class Change:
    """A change of weights that explains the residual.

    Attributes:
        module: the dotted name of the weight that moved, or "" where all did.
        layer: its layer, or None.
        size: of the move, relative to the weight.
        margin: by how many nats it is more likely than the next place.
        rank: of the update, where it was determined.
        delta: the update itself, (outputs, inputs), where answers determine it.
        errors: standard errors of the update's numbers; as large as the update where no row shows
            them.
        rivals: other weights of which a move explains rows that were not fitted as well.
    """

    module: str
    layer: int | None
    size: float
    margin: float
    rank: int | None = None
    delta: Array | None = None
    errors: Array | None = None
    places: tuple[Place, ...] = ()
    rivals: tuple[str, ...] = ()

    def describe(self) -> str:
        """Where, in words: a weight where it is clearly the one, else near a layer."""
        if not self.module:
            return f"all weights moved, by about {self.size:.0e} of their size"
        rank = "" if self.rank is None else f", an update of rank {self.rank}"
        if (self.margin >= CLEAR or self.rank is not None) and self.size < LARGE:
            moved = " or ".join([self.module, *self.rivals])
            return f"most likely a move of {moved} by {self.size:.0e} of its size{rank}"
        return f"most likely near layer {self.layer} ({self.module})"

    def to_record(self) -> dict[str, Any]:
        """What there is to say, without the update itself."""
        return {
            "module": self.module,
            "layer": self.layer,
            "size": self.size,
            "margin": self.margin,
            "rank": self.rank,
            "rivals": list(self.rivals),
        }


def locate(
    experiment: Experiment, rows: Sequence[int], noise: float, directions: int, rng: Any
) -> Change:
    """The weight whose move explains the residual of some rows best."""
    bench = experiment.bench
    rest = experiment.answers[list(rows)] - experiment.simulate((), rows)
    basis = choose_directions(rest, directions, rng)
    projections = list(bench.anatomy.projections)
    given = [experiment.rows[n] for n in rows]
    values = (rest @ basis.T).ravel()
    unit = float(np.median(np.linalg.norm(experiment.answers[list(rows)], axis=1)))
    scale = noise * unit / np.sqrt(rest.shape[1])
    places: list[Place] = []
    layers: dict[int, Array] = {}
    everything = np.zeros((len(values), len(values)))
    found = trace(bench, given, np.broadcast_to(basis, (len(given), *basis.shape)), projections)
    for p in projections:
        rms = float(p.matrix.pow(2).mean().sqrt())
        matrix = kernel(found[key_of(p)], len(given)) * rms**2
        everything += matrix
        layers[p.layer] = layers.get(p.layer, 0) + matrix
        evidence, tau = weigh(matrix, values, scale)
        places.append(Place(key_of(p), p.layer, evidence, tau))
    by_layer = [Place(f"layer {k}", k, *weigh(m, values, scale)) for k, m in layers.items()]
    whole = Place("everything", None, *weigh(everything, values, scale))
    ordered = sorted(places, key=lambda p: -p.evidence)
    top = ordered[0]
    second = ordered[1].evidence if len(ordered) > 1 else -np.inf
    ranked = tuple(sorted([*places, *by_layer, whole], key=lambda p: -p.evidence))
    if whole.evidence > max(top.evidence, max(p.evidence for p in by_layer)) + 5:
        return Change("", None, whole.size, whole.evidence - top.evidence, places=ranked)
    module = top.name.partition(":")[0]
    return Change(module, top.layer, top.size, top.evidence - second, places=ranked)


def choose_directions(rest: Array, count: int, rng: Any) -> Array:
    """Orthonormal directions of the answers: the residual's own, then random ones."""
    outputs = rest.shape[1]
    count = min(count, outputs)
    own = np.linalg.svd(rest, full_matrices=False)[2][: count // 2]
    mixed = np.vstack([own, rng.standard_normal((count - len(own), outputs))])
    return np.linalg.qr(mixed.T)[0].T
