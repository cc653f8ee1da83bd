"""A network from random rows: more neurons than it has descend, and those that can be spared leave.

Statement.  A network of m neurons on a sphere is found from points alone where Hessians are too
            small to tell the neurons apart (m >= k (k - 1) / 2), from about six numbers for each
            of its parameters.
Queries.    None: points and answers are given.
Algebra.    Outer, linear part and offset are eliminated (thin QR), with a ridge on outer; damped
            Gauss-Newton steps move the rows. The normal matrix is, blockwise, (outerᵀ outer) *
            (Hᵀ H), H the slopes times the points less what the eliminated columns take of them;
            far from the end single precision is enough for it. With more neurons than there are, a
            descent ends where the ridge is all that is left: what is left of the answers themselves
            is then far below what the ridge costs, which tells at once whether the neurons were
            enough. A lower ridge follows, and neurons that cost little leave on the way; gated ones
            with the same gate become one. Where two neurons imitate one, random ones join, and the
            descent begins again.
            Of answers behind a norm one direction is not seen (`observation`): what is missing is
            linear, too, and is eliminated by conjugate gradients; the normal matrix loses what the
            rows do along it.
Fails.      Where there are too few neurons, or their activation is another one.
Source.     Variable projection (Golub and Pereyra 1973, Kaufman 1975); that students with more
            neurons than the teacher find it is folklore (e.g. Safran and Shamir 2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.linalg import solve_triangular
from scipy.linalg.blas import dsyrk, ssyrk

from keyhole.arrays import SINGLE_ROUNDOFF, TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.solver import NormalSystem, Problem, Stopping, System
from keyhole.fitting.solver import descend as solve_problem
from keyhole.linalg.rank import count_above_share
from keyhole.network.observation import Observation, Value
from keyhole.network.weights import Weights, chosen, hidden_layer, joined, random_start, with_one

ALIKE = (("gelu", "gelu_tanh"), ("silu",), ("tanh",))  # activations that are alike from afar


@dataclass(frozen=True)
class PruningOptions:
    """What a person might tune. ridges: on outer, per point, one descent with each; steps: of a
    descent, at most. rounds: of descents, random neurons joining in between. enough: what may be
    left of the answers relative to the ridge's cost where neurons are enough. spare: what neurons
    that leave for good may cost, relative to what is left; bold: those that leave in an attempt to
    settle. settled: steps of such an attempt. alike: what it leaves, relative to the answers, where
    the activation is another one that is alike, at most. hopeful: from where single neurons are
    tried to be left out; candidates: so many of them."""

    ridges: tuple[float, ...] = (5e-6, 5e-7, 5e-8)
    steps: int = 80
    rounds: int = 4
    enough: float = 0.5
    spare: float = 0.3
    bold: float = 2.0
    settled: int = 40
    alike: float = 3e-3
    hopeful: float = 1e-5
    candidates: int = 5


@dataclass(frozen=True, eq=False)
class Data:
    """Points, with a one at the end, and answers, of which so much is seen."""

    points: Float[Array, "n e"]
    answers: Float[Array, "n d"]
    observation: Observation = field(default=Value())


@dataclass(frozen=True, eq=False)
class State:
    """A network whose linear part is eliminated: columns are basis times triangle times norms.
    `left`, `cost`: root mean squares of the answers' and of the ridge's part."""

    weights: Weights
    slopes: list[Array]
    basis: Float[Array, "n c"]
    triangle: Float[Array, "c c"]
    norms: Float[Array, " c"]
    residual: Float[Array, "n d"]
    left: float
    cost: float

    @property
    def total(self) -> float:
        return float(np.hypot(self.left, self.cost))


def eliminate(weights: Weights, data: Data, ridge: float) -> State:
    points, answers, count = data.points, data.answers, weights.neurons
    hidden, slopes = hidden_layer(weights, points)
    columns = np.column_stack([hidden, points])
    norms = np.linalg.norm(columns, axis=0)
    # neurons that are silent at all points have no linear part to speak of
    norms = np.maximum(norms, UNIT_ROUNDOFF**2 * norms.max() + TINY)
    columns = columns / norms
    # a trace of a ridge where there is none: columns may coincide
    level = np.sqrt(max(ridge * len(points), 1e-26)) * np.ones(count)
    held = np.zeros((count, columns.shape[1]))
    held[np.arange(count), np.arange(count)] = level / (norms[:count] if ridge else 1.0)
    basis, triangle = np.linalg.qr(np.vstack([columns, held]))
    basis, below = basis[: len(points)], basis[len(points) :]
    answers = data.observation.completed(basis, answers)
    inside = basis.T @ answers
    residual = answers - basis @ inside
    linear = solve_triangular(triangle, inside, check_finite=False) / norms[:, None]
    fitted = replace(weights, outer=linear[:count].T, affine=linear[count:].T)
    size = np.sqrt(answers.size)
    cost = float(np.linalg.norm(below @ inside)) / size
    left = float(np.linalg.norm(residual)) / size
    return State(fitted, slopes, basis, triangle, norms, residual, left, cost)


def step_matrix(
    state: State, data: Data, single: bool
) -> tuple[Float[Array, "u u"], Float[Array, " u"]]:
    """Normal matrix and gradient by the rows, inner before gate."""
    outer, points = state.weights.outer, data.points
    total, entries = points.shape
    tall = np.concatenate(
        [(slope[:, :, None] * points[:, None]).reshape(total, -1) for slope in state.slopes], axis=1
    )
    tall -= state.basis @ (state.basis.T @ tall)
    blocks, count = len(state.slopes), outer.shape[1]
    pulled = np.tile(state.residual @ outer, blocks)
    gradient = np.einsum("nje,nj->je", tall.reshape(total, -1, entries), pulled).ravel()
    short = np.asarray(tall, dtype=np.float32 if single else np.float64)
    multiply = ssyrk if single else dsyrk
    upper = multiply(1.0, short.T).astype(np.float64)
    weighed = np.tile(outer.T @ outer, (blocks, blocks))
    units = blocks * count
    upper = upper.reshape(units, entries, units, entries) * weighed[:, None, :, None]
    upper = upper.reshape(units * entries, -1)
    if (hides := data.observation.hides(outer)) is not None:
        along = np.tile(hides, blocks).astype(short.dtype)
        short = (short.reshape(total, units, entries) * along[:, :, None]).reshape(total, -1)
        upper = upper - multiply(1.0, short.T)
    upper = np.triu(upper)
    return upper + np.triu(upper, 1).T, gradient


def moved(weights: Weights, step: Float[Array, " u"]) -> Weights:
    """With other rows; the scale of a gated neuron's other factor is held."""
    parts = step.reshape(-1, *weights.inner.shape)
    inner = weights.inner + parts[0]
    if weights.gate is None:
        return replace(weights, inner=inner)
    inner = inner / np.maximum(np.linalg.norm(inner, axis=1, keepdims=True), TINY)
    return replace(weights, inner=inner, gate=weights.gate + parts[1])


def descend(
    weights: Weights,
    data: Data,
    ridge: float,
    steps: int,
    target: float = 0.0,
    single: bool = False,
) -> State:
    """Damped steps until `target` is left, or twenty of them take less than 1.5% off."""
    roundoff = SINGLE_ROUNDOFF if single else UNIT_ROUNDOFF

    def linearize(state: State) -> System:
        return NormalSystem(*step_matrix(state, data, single), roundoff)

    def move(state: State, step: Array) -> State:
        return eliminate(moved(state.weights, step), data, ridge)

    numbers = data.answers.size
    problem = Problem[State](lambda state: numbers * state.total**2, linearize, move)
    stopping = Stopping(
        steps=steps, target=numbers * target**2, window=19, share=0.03, hasty=True, damping=1e-2,
        eager=True,
    )  # fmt: skip
    return solve_problem(problem, eliminate(weights, data, ridge), stopping).state


def without_cheap(state: State, data: Data, spare: float) -> Weights:
    """Neurons leave, the cheapest first, while what is left stays below `spare`: without neuron
    j squares of |B_j|^2 / P_jj more are left, P the inverse normal matrix, B the linear part."""
    weights = state.weights
    while True:
        one = eliminate(weights, data, 0.0)
        count = weights.neurons
        inverse = solve_triangular(one.triangle, np.eye(len(one.triangle)), check_finite=False)
        table = inverse @ inverse.T
        linear = np.vstack([one.weights.outer.T, one.weights.affine.T]) * one.norms[:, None]
        left = one.left**2 * data.answers.size
        here = np.arange(count)
        # formulas for one neuron after the other lose digits: anew after an eighth of them
        for _ in range(max(1, count // 8)):
            diagonal = np.maximum(np.diag(table)[here], TINY)
            costs = (linear[here] ** 2).sum(axis=1) / diagonal
            place = int(np.argmin(costs))
            if len(here) == 1 or left + costs[place] > spare**2 * data.answers.size:
                break
            j = here[place]
            left += costs[place]
            linear = linear - np.outer(table[:, j], linear[j]) / table[j, j]
            table = table - np.outer(table[:, j], table[j]) / table[j, j]
            here = np.delete(here, place)
        if len(here) == count:
            return one.weights
        weights = chosen(weights, here)


def merge_gates(weights: Weights, near: float = 0.02) -> Weights:
    """Gated neurons whose gates are the same become as few as their outer_j inner_jᵀ have ranks:
    φ(g) (o u + o' u') may be one neuron. `near`: relative, of gates and of ranks."""
    if weights.gate is None:
        return weights
    left = list(range(weights.neurons))
    inner, outer, gate = [], [], []
    while left:
        first = weights.gate[left[0]]
        gaps = np.linalg.norm(weights.gate[left] - first, axis=1)
        own = [j for j, gap in zip(left, gaps, strict=True) if gap <= near * np.linalg.norm(first)]
        left = [j for j in left if j not in own]
        together = weights.outer[:, own] @ weights.inner[own]
        axes, sizes, rows = np.linalg.svd(together, full_matrices=False)
        rank = 1 if len(own) == 1 else max(1, count_above_share(sizes, near))
        for j in range(min(rank, len(own))):
            inner.append(rows[j])
            outer.append(sizes[j] * axes[:, j])
            gate.append(weights.gate[own].mean(axis=0))
    return replace(weights, inner=np.array(inner), outer=np.array(outer).T, gate=np.array(gate))


def costs_of_leaving(weights: Weights, data: Data) -> tuple[Float[Array, " m"], float]:
    """Squares that each neuron alone would leave more, if the others' linear parts took over; and
    the squares that are left as it is."""
    one = eliminate(weights, data, 0.0)
    inverse = solve_triangular(one.triangle, np.eye(len(one.triangle)), check_finite=False)
    linear = np.vstack([one.weights.outer.T, one.weights.affine.T]) * one.norms[:, None]
    costs = (linear**2).sum(axis=1) / (inverse**2).sum(axis=1)
    return np.asarray(costs[: weights.neurons]), one.left**2 * data.answers.size


@dataclass(frozen=True, eq=False)
class Attempt:
    """The network, if it was found, and what the last descent left, relative to the answers."""

    network: Weights | None
    left: float


def accepted_of(answers: Float[Array, "n k"], relative: float) -> float:
    """Root mean square that a network may leave of answers with this relative error; what is far
    above rounding the refinement takes."""
    return float(np.sqrt(np.mean(answers**2))) * max(1e-7, 30.0 * relative)


def fit_likely(
    points: Float[Array, "n d"],
    answers: Float[Array, "n k"],
    neurons: int,
    names: Sequence[str],
    gated: bool,
    relative: float,
    rng: np.random.Generator,
) -> Weights | None:
    """The network of the activation that explains the answers, which have this relative error, with
    the fewest neurons, from a start with so many; None if none of the activations does."""
    accepted = accepted_of(answers, relative)
    for group in ALIKE:
        alike = tuple(name for name in group if name in names)
        if alike:
            tried = fit_network(points, answers, neurons, alike, gated, accepted, rng)
            if tried.network is not None:
                return tried.network
    return None


def repair(
    weights: Weights,
    points: Float[Array, "n d"],
    answers: Float[Array, "n k"],
    relative: float,
    rng: np.random.Generator,
) -> Weights | None:
    """A network of which a few neurons are missing or wrong: some random ones join it."""
    more = max(4, weights.neurons // 12)
    return fit_network(
        points,
        answers,
        weights.neurons + more,
        (weights.activation,),
        weights.gate is not None,
        accepted_of(answers, relative),
        rng,
        options=PruningOptions(ridges=PruningOptions.ridges[-1:], rounds=1),
        known=weights,
    ).network


def fit_network(
    points: Float[Array, "n k"],
    answers: Float[Array, "n d"],
    neurons: int,
    names: tuple[str, ...],
    gated: bool,
    accepted: float,
    rng: np.random.Generator,
    observation: Observation | None = None,
    options: PruningOptions | None = None,
    known: Weights | None = None,
) -> Attempt:
    """The network with the fewest neurons that explains the answers.

    Args:
        points: Where the network was asked.
        answers: What came out, as far as it is seen.
        neurons: Of a random start, more than the network has.
        names: Activations that are alike, of which the network has one.
        gated: Whether each neuron is multiplied by a linear map.
        accepted: Root mean square that the network may leave of the answers.
        rng: Draws the starts.
        observation: What is seen of the answers; None for all.
        options: What a person might tune.
        known: A network of which a few neurons may be missing or wrong: the first start, with
            random neurons beside it up to that number.
    """
    options = PruningOptions() if options is None else options
    scale = float(np.sqrt(np.mean(answers**2)))
    data = Data(with_one(points), answers, Value() if observation is None else observation)

    def draw(count: int) -> Weights:
        return random_start(count, points, answers.shape[1], names[0], gated, rng)

    start = draw(neurons if known is None else neurons - known.neurons)
    start, left = start if known is None else joined(known, start), 1.0
    for _ in range(options.rounds):
        enough = False  # whether the first ridge was all that was left
        for place, ridge in enumerate(options.ridges):
            single = ridge > 1e-7  # what is left is then far above the roundings
            state = descend(start, data, ridge, options.steps, single=single)
            explained = state.left <= options.enough * state.cost
            left = state.left / scale
            enough = enough or (explained and not place)
            if not explained and place:
                if gated and enough:
                    break
                return Attempt(None, left)
            spare = options.spare * state.total
            start = without_cheap(state, data, max(spare, 1.1 * state.left))
            if not explained:
                continue
            bold = without_cheap(state, data, options.bold * state.total)
            bold = merge_gates(bold)
            for name in names:
                tried = replace(bold, activation=name)
                settled = descend(tried, data, 0.0, options.settled, 0.1 * accepted)
                fewer = merge_gates(settled.weights)
                if fewer.neurons < settled.weights.neurons:
                    settled = descend(fewer, data, 0.0, options.settled, 0.1 * accepted)
                network = leave_out(settled, data, accepted, scale, options)
                if network is not None:
                    return Attempt(network, settled.left / scale)
                if settled.left > options.alike * scale:
                    break
        # a gate that is turned the wrong way stays so
        start = draw(neurons) if gated else joined(start, draw(max(neurons - start.neurons, 4)))
    return Attempt(None, left)


def leave_out(
    state: State,
    data: Data,
    accepted: float,
    scale: float,
    options: PruningOptions,
) -> Weights | None:
    """Single neurons leave while that explains the answers; None if they are not explained."""
    if state.left > max(options.hopeful * scale, accepted):
        return None
    best = state.weights if state.left <= accepted else None
    weights = state.weights
    while weights.neurons > 1:
        fewer = merge_gates(weights)
        if fewer.neurons < weights.neurons:
            tried = descend(fewer, data, 0.0, options.settled, 0.1 * accepted)
            if tried.left <= accepted:
                best = weights = tried.weights
                continue
        costs = np.sqrt(costs_of_leaving(weights, data)[0] / data.answers.size)
        order = np.argsort(costs)[: options.candidates]
        if best is not None:  # two that do nearly the same leave little behind
            order = order[costs[order] < max(1e3 * accepted, 10.0 * options.hopeful * scale)]
        for j in order:
            fewer = chosen(weights, np.delete(np.arange(weights.neurons), j))
            tried = descend(fewer, data, 0.0, options.settled, 0.1 * accepted)
            if tried.left <= accepted:
                best = weights = tried.weights
                break
        else:
            break
    return None if best is None or has_open_gates(best, data.points) else best


def has_open_gates(weights: Weights, points: Float[Array, "n e"]) -> bool:
    """Whether some gate is open, or shut, at every point: such a neuron is a quadratic form, which
    makes up for others whose gates are turned the wrong way."""
    if weights.gate is None:
        return False
    return bool((np.abs(points @ weights.gate.T).min(axis=0) > 4.0).any())
