"""A network of hundreds of neurons from random points: a wider one descends, and is thinned out.

Statement.  The neurons of z(x) = affine (x, 1) + outer φ(rows (x, 1)), their number included, from
            random points at which z, or its direction, is seen, some four numbers per unknown of a
            network with more neurons than there are.
Queries.    None: points and answers are given.
Algebra.    From random rows damped Gauss-Newton steps of few products each (`fitting.structured`)
            take the wide network to the noise of the answers: with half as many neurons more as
            there are, it does not stall. Some rows are then those of the neurons, the others
            cancel, or repeat them. Rows held, what a neuron's leaving costs with all outer weights
            adjusted is |outer_j|² / (G⁻¹)_jj, G the Gram matrix beside the affine part: the
            cheapest leaves, again and again, and the costs rise by orders of magnitude behind the
            last one that can be spared.
When it fails. Too few neurons, or another activation: the descent stalls. Neurons that are as good
            as linear at all points: no rise of the costs.
Source.     LeCun, Denker, Solla (1990) and Hassibi, Stork (1993) for the costs; that students with
            more neurons than the teacher find it is folklore (e.g. Safran and Shamir 2018).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.conjugate_gradients import Ending
from keyhole.fitting.forward.block import Batch, Parts
from keyhole.fitting.forward.network import run_network
from keyhole.fitting.gauss_newton import Blocks
from keyhole.fitting.solver import Stopping
from keyhole.fitting.structured import Network, settle
from keyhole.network.weights import Weights, hidden_layer, random_start, with_one


@dataclass(frozen=True)
class WideOptions:
    """What a person might tune.

    shares: neurons of the wide networks that are tried, per number of an answer. products: of a
    step while the residual is no noise: more would follow what is only curvature. steps: of the
    descent, at most. window, share: it has stalled where so many steps took less than this share
    off the squares. plenty: numbers per unknown of the wide network. outer: size of the outer
    weights at the start, relative to what explains the answers. hopeful: what a wide network
    leaves that is wide enough, at most. told: what it leaves where its rows are told apart. spare:
    factor by which what is left may grow when neurons leave, which explain errors of points and
    answers. clear: rise of what leaving costs behind which neurons may begin. exact: products of a
    step once the neurons are told apart.
    """

    shares: tuple[float, ...] = (1.5, 6.0)
    products: int = 20
    steps: int = 150
    window: int = 10
    share: float = 0.3
    plenty: float = 4.0
    outer: float = 0.5
    hopeful: float = 0.03
    told: float = 1e-3
    spare: float = 3.0
    clear: float = 10.0
    exact: int = 200


@dataclass(frozen=True, eq=False)
class Seen:
    """Points and what was seen there: values, or unit vectors where `direction`."""

    points: Float[Array, "n k"]
    answers: Float[Array, "n o"]
    direction: bool

    @property
    def size(self) -> float:
        return float(np.sqrt(np.mean(self.answers**2)))


def points_for(neurons: int, width: int, outputs: int, plenty: float) -> int:
    """Points at which a network of so many neurons is asked."""
    unknowns = neurons * (width + 1 + outputs) + outputs * (width + 1)
    return int(plenty * unknowns / outputs) + 1


def search_wide(
    look: Callable[[int], Seen],
    activations: Sequence[str],
    level: float,
    explained: float,
    rng: np.random.Generator,
    options: WideOptions | None = None,
) -> tuple[Weights, float]:
    """A network that explains what is seen, from wide ones of more and more neurons.

    Args:
        look: as many random points, and all that were asked before.
        activations: that the network may have.
        level: of the roundings, relative to the answers: a descent ends there.
        explained: what the network may leave, relative to the answers.
        rng: draws the starts.
        options: what a person might tune.

    Returns:
        The network that leaves least, and what it leaves; more than `explained` where none was
        found.
    """
    options = WideOptions() if options is None else options
    best: Weights | None = None
    seen, least = look(8), np.inf
    width, outputs = seen.points.shape[1], seen.answers.shape[1]
    for share in options.shares:
        neurons = int(share * outputs)
        seen = look(points_for(neurons, width, outputs, options.plenty))
        for name in activations:
            found, left = find_wide(seen, neurons, name, level, explained, rng, options)
            if best is None or left < least:
                best, least = found, left
            if least <= explained:
                return best, least
    assert best is not None
    return best, least


def find_wide(
    seen: Seen,
    neurons: int,
    activation: str,
    level: float,
    explained: float,
    rng: np.random.Generator,
    options: WideOptions | None = None,
) -> tuple[Weights, float]:
    """A network of at most so many neurons, and what it leaves, root mean square, relative to the
    answers: of only as many as it takes, where that shows. The rows show long before the wide
    network has explained the last digits."""
    options = WideOptions() if options is None else options
    wide, left = begin(seen, neurons, activation, options, rng), np.inf
    few = Ending(0.1, options.products, 0.1, options.products)
    for goal in (options.told, level):
        wide = descend_wide(wide, seen, goal, few, rng, options)
        left = misfit_of(wide, seen)
        if left > options.hopeful:
            break
        allowed = options.spare * max(left, level)
        if goal > level:  # fewer neurons explain more, if they are the right ones
            allowed = max(options.spare * level, min(explained, left / options.spare))
        for narrow in thinned(wide, seen, left, options.clear):
            fewer, rest = settle_narrow(narrow, seen, level, rng, options)
            if rest < allowed:
                return fewer, rest
    return wide, left


def settle_narrow(
    narrow: Weights, seen: Seen, level: float, rng: np.random.Generator, options: WideOptions
) -> tuple[Weights, float]:
    """The fit of a network that has no neurons to spare, and what it leaves."""
    exact = Ending(0.1, 20, 0.01, options.exact)
    fits = [
        descend_wide(replace(narrow, activation=name), seen, level, exact, rng, options)
        for name in alike(narrow.activation)
    ]
    best = min(fits, key=lambda one: misfit_of(one, seen))
    return best, misfit_of(best, seen)


def alike(activation: str) -> tuple[str, ...]:
    """Activations between which a wide network does not tell."""
    return ("gelu", "gelu_tanh") if activation == "gelu" else (activation,)


def begin(
    seen: Seen, neurons: int, activation: str, options: WideOptions, rng: np.random.Generator
) -> Weights:
    """Random rows and outer weights; the affine part explains what it can."""
    start = random_start(neurons, seen.points, seen.answers.shape[1], activation, False, rng)
    outer = options.outer * seen.size * rng.standard_normal(start.outer.shape) / np.sqrt(neurons)
    affine, *_ = np.linalg.lstsq(with_one(seen.points), seen.answers, rcond=None)
    return replace(start, outer=outer, affine=affine.T)


def parts_of(weights: Weights) -> Parts:
    return {"affine": weights.affine, "outer": weights.outer, "rows": weights.inner}


def problem_of(weights: Weights, seen: Seen) -> Network:
    """The fit of all matrices, in parts that stay near the processor."""
    parts, most = parts_of(weights), 256
    places = [slice(at, at + most) for at in range(0, len(seen.points), most)]
    batches = [Batch(seen.points[some, None], None, seen.answers[some]) for some in places]
    return Network(
        lambda parts, one: run_network(parts, weights.activation, one, seen.direction),
        lambda parts, moves: {name: part + moves[name] for name, part in parts.items()},
        batches,
        [np.full(len(one.answers), 1.0 / seen.size) for one in batches],
        Blocks.of(parts),
        float(sum(part.size for part in parts.values())),
    )


def misfit_of(weights: Weights, seen: Seen) -> float:
    """Root mean square of what is left, relative to the answers, degrees of freedom taken off: more
    neurons explain more of what is noise."""
    network = problem_of(weights, seen)
    residual = network.weigh(network.residuals(parts_of(weights)))
    return float(np.sqrt(residual @ residual / max(network.numbers - network.freedom, 1.0)))


def descend_wide(
    weights: Weights, seen: Seen, level: float, ending: Ending, rng: np.random.Generator,
    options: WideOptions,
) -> Weights:  # fmt: skip
    """To this level, or to where steps gain little; all points have the same leverage."""
    network = problem_of(weights, seen)
    target = network.numbers * level**2
    network = network.evened(parts_of(weights), rng)
    scale = np.mean(np.concatenate(network.weights) ** 2) * seen.size**2
    stopping = Stopping(
        steps=options.steps,
        target=float(target * scale),
        tolerance=1e-3,
        window=options.window,
        share=options.share,
        damping=0.0,
    )
    end = settle(network, parts_of(weights), stopping, ending, rng)
    return replace(
        weights, affine=end.parts["affine"], outer=end.parts["outer"], inner=end.parts["rows"]
    )


def thinned(weights: Weights, seen: Seen, left: float, clear: float) -> Iterator[Weights]:
    """Networks of the neurons behind each clear rise of what leaving costs, the fewest neurons
    first, outer weights adjusted; what costs less than is left of the answers costs nothing.
    Several rises: rows at which only a few points are on one side cost little, and not nothing."""
    x = with_one(seen.points)
    hidden = hidden_layer(weights, x)[0]
    z = weights.linear_sum(hidden, x)
    row = 1.0 / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), TINY)
    row = row if seen.direction else np.ones_like(row)
    basis = np.linalg.qr(x * row)[0]
    beside = hidden * row
    for _ in range(2):
        beside -= basis @ (basis.T @ beside)
    sizes = np.linalg.norm(beside, axis=0)
    live = np.flatnonzero(sizes > UNIT_ROUNDOFF**0.5 * sizes.max(initial=0.0))
    if not len(live):
        return
    order, costs = order_of_leaving(beside[:, live] / sizes[live], z * row)
    nothing = max(left, UNIT_ROUNDOFF**0.5) ** 2 * float(np.sum((z * row) ** 2))
    rises = np.maximum(np.maximum.accumulate(np.append(nothing, costs)), nothing)
    for first in np.flatnonzero(rises[1:] > clear * rises[:-1])[::-1]:
        kept = np.sort(live[order[first:]])
        columns = np.column_stack([x, hidden[:, kept]]) * row
        table, *_ = np.linalg.lstsq(columns, z * row, rcond=None)
        affine, outer = table[: x.shape[1]].T, table[x.shape[1] :].T
        yield Weights(weights.inner[kept], outer, affine, weights.activation)


def order_of_leaving(
    columns: Float[Array, "n m"], answers: Float[Array, "n o"]
) -> tuple[Array, Float[Array, " m"]]:
    """Columns in the order in which they leave a least squares fit, the cheapest first, and what
    each costs in squares."""
    count = columns.shape[1]
    gram = columns.T @ columns
    gram[np.diag_indices(count)] += UNIT_ROUNDOFF**0.75
    inverse = cho_solve(cho_factor(gram), np.eye(count))
    weights = inverse @ (columns.T @ answers)
    here, order, costs = np.arange(count), [], []
    while len(here):
        diagonal = np.maximum(np.diag(inverse), TINY)
        each = np.sum(weights**2, axis=1) / diagonal
        j = int(np.argmin(each))
        order.append(int(here[j]))
        costs.append(float(each[j]))
        others = np.delete(np.arange(len(here)), j)
        share = inverse[others, j] / diagonal[j]
        weights = weights[others] - np.outer(share, weights[j])
        inverse = inverse[np.ix_(others, others)] - np.outer(share, inverse[j, others])
        here = here[others]
    return np.array(order), np.array(costs)
