"""A low-rank update of one weight, from answers: Gauss–Newton on its factors.

Statement: the suspect is the reference with one weight W moved by dW = U V' of small rank r. Rows x
and directions u_xj of the answers give equations rho_xj = <A_xj, dW>, A_xj = sum_t g_xjt h_xt' (g:
gradient at the module's output, h: its input), exact in the limit of a small dW. Neither dW nor the
A_xj are formed: there are r (outputs + inputs - r) unknowns.
Queries: none of its own; three equations for each unknown, where answers have as many numbers.
Algebra:
1.  Coordinates. With S_h = sum |g|^2 h h' and S_g = sum |h|^2 g g', the Gram matrix of the A_xj is
    about S_g (x) S_h. Where both are one the map is nearly an isometry, and a rank
    stays what it is. Inputs and outputs along which an update of this size would move answers by
    less than their noise are left out: their numbers get bars as wide as the update.
2.  Begin. The smallest update of any rank that solves the equations, cut to its leading singular
    vectors.
3.  Fit. On matrices of rank r, steps P V' + U Q' by conjugate gradients, brought back to rank r by
    their singular vectors. Of all P, Q that are the same step the smallest is found: that U and V
    may be turned against each other needs no rule.
4.  Rank. The smallest that explains rows which were not fitted as well as the highest does: no
    worse beyond chance, by Wilcoxon's test of the pairs.
5.  The weight is moved by what was found and the fit repeated with what is left of answers, with
    gradients taken anew where a step was slow, until noise is left or nothing is gained.
6.  Errors. Noise sent through the same equations: the spread of what a step makes of it.
When it fails: fewer equations than unknowns, or no move of this weight; rows that were not fitted
are then not explained, and `Update.explains` says so.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import wilcoxon

from keyhole.arrays import Array
from keyhole.diagnosis.anatomy import Projection
from keyhole.diagnosis.experiment import Experiment
from keyhole.diagnosis.localise import CLEAR, LARGE, Change, Traces, key_of, trace
from keyhole.diagnosis.probes import Call

CHANCE = 0.01  # that a rank is believed though it explains nothing
HIGHEST = 12  # rank that is looked for
LIMIT = 2  # rank that is looked for at first
EQUATIONS = 3  # for each unknown
CONTENDERS = 3  # weights that are tried where evidence does not tell them apart
SAMPLES = 24  # of noise, that error bars are taken from
STEPS = 12  # of Gauss–Newton, in the equations and of the weight itself
INNER = 60  # steps of conjugate gradients
SLOW = 0.25  # of what was left: a step that leaves more wants gradients taken anew
MOSTLY = 0.5  # of rows that were not fitted, which an update may leave and still be one
STILL = 0.9  # of what was left: a step that leaves more gains nothing


@dataclass(frozen=True, eq=False)
class Update:
    """A low-rank update with its standard errors."""

    left: Array  # (outputs, rank)
    right: Array  # (inputs, rank)
    errors: Array  # (outputs, inputs)
    held: Array  # (rows left out,): squares of what is left of them
    shown: Array  # (rows left out,): the squares of these rows before
    room: bool  # whether equations could have shown a higher rank

    @property
    def delta(self) -> Array:
        """The update (outputs, inputs)."""
        return self.left @ self.right.T

    @property
    def explains(self) -> bool:
        """Whether most of the rows that were not fitted is explained by it, too. Not all need be:
        they may hold inputs that no other row has, and bars say so."""
        return self.room and bool(np.sum(self.held) < MOSTLY**2 * np.sum(self.shown))

    @property
    def helps(self) -> bool:
        """Whether it says anything about rows that were not fitted, beyond chance."""
        return bool(wilcoxon(self.held - self.shown, alternative="less").pvalue < CHANCE)

    @property
    def rank(self) -> int:
        """How many directions it has."""
        return self.left.shape[1]


class Equations:
    """The map dW -> <A_xj, dW>, in coordinates in which it is nearly an isometry.

    Attributes:
        values: what the update should give, (rows, directions).
        left: coordinates of outputs, (outputs, kept).
        right: coordinates of inputs, (inputs, kept).
        blind_left: the share of each output that lies along directions which no row shows.
        blind_right: the same for inputs.
    """

    def __init__(self, traces: Traces, values: Array, noise: float) -> None:
        """`noise` is the standard deviation of a value."""
        gradients, inputs = traces.gradients, traces.inputs
        count, _, outputs = gradients.shape
        strength = np.einsum("ti,ti->t", inputs, inputs)
        loudness = np.einsum("jto,jto->t", gradients, gradients)
        spread = np.zeros((outputs, outputs), dtype=gradients.dtype)
        for one in gradients:
            spread += (strength[:, None] * one).T @ one
        seen = float(np.sum(values**2)) / max(noise**2, 1e-300)
        self.values = values.astype(np.float32)
        self.right, self.blind_right = _whiten((loudness[:, None] * inputs).T @ inputs, seen)
        self.left, self.blind_left = _whiten(spread, seen)
        self.left *= np.sqrt(float(loudness @ strength), dtype=np.float32)
        ends = np.searchsorted(traces.row, np.arange(len(values) + 1))
        lengths = np.diff(ends)
        self._groups: list[tuple[Array, Array, Array]] = []
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            place = ends[rows][:, None] + np.arange(length)
            pulled = np.stack([gradients[:, at] @ self.left for at in place])
            self._groups.append((rows, inputs[place] @ self.right,
                                 pulled.reshape(len(rows), count, -1)))  # fmt: skip

    @property
    def shape(self) -> tuple[int, int]:
        """Of an update in these coordinates."""
        return self.left.shape[1], self.right.shape[1]

    @property
    def held(self) -> Array:
        """Which rows are left out of fits that a rank is chosen by."""
        return np.arange(len(self.values)) % 4 == 3

    @property
    def highest(self) -> int:
        """The highest rank that the rows that are fitted can determine."""
        enough = int(np.sum(~self.held)) * self.values.shape[1] // (2 * sum(self.shape))
        return max(1, min(HIGHEST, enough, *self.shape))

    def give(self, *factors: tuple[Array, Array]) -> Array:
        """<A_xj, sum of U V'> for pairs of factors (..., width, rank): (..., rows, directions)."""
        ahead = np.broadcast_shapes(*(x.shape[:-2] for pair in factors for x in pair))
        found = np.zeros((*ahead, *self.values.shape), dtype=np.float32)
        for rows, inputs, gradients in self._groups:
            outputs: Any = 0.0
            for u, v in factors:
                mixed = inputs @ v[..., None, :, :] @ np.swapaxes(u, -1, -2)[..., None, :, :]
                outputs = outputs + mixed
            flat = np.moveaxis(outputs.reshape(-1, len(rows), gradients.shape[2]), 0, 1)
            given = flat @ np.swapaxes(gradients, 1, 2)  # (rows, stack, directions)
            found[..., rows, :] = np.moveaxis(given, 1, 0).reshape(*ahead, len(rows), -1)
        return found

    def take(self, rest: Array) -> list[tuple[Array, Array]]:
        """sum_j rest_xj g_xjt for every token, with the inputs there: what sum rest_xj A_xj is made
        of. Rests are (..., rows, directions)."""
        ahead, found = rest.shape[:-2], []
        for rows, inputs, gradients in self._groups:
            stacked = np.moveaxis(
                rest[..., rows, :].reshape(-1, *rest[..., rows, :].shape[-2:]), 0, 1
            )
            mixed = np.moveaxis(stacked @ gradients, 1, 0)
            tokens = mixed.reshape(*ahead, len(rows) * inputs.shape[1], -1)
            found.append((tokens, inputs.reshape(-1, inputs.shape[2])))
        return found

    def pull(self, rest: Array, left: Array, right: Array) -> list[Array]:
        """The adjoint of (P, Q) -> values of P V' + U Q': M V and M' U, M = sum rest_xj A_xj."""
        taken = self.take(rest)
        return [
            np.asarray(
                sum(np.swapaxes(tokens, -1, -2) @ (inputs @ right) for tokens, inputs in taken)
            ),
            np.asarray(sum(inputs.T @ (tokens @ left) for tokens, inputs in taken)),
        ]

    def unfold(self, left: Array, right: Array) -> tuple[Array, Array]:
        """Factors in the coordinates of the weight."""
        return self.left @ left, self.right @ right


def _whiten(gram: Array, seen: float) -> tuple[Array, Array]:
    """Coordinates in which a Gram matrix is one, for the directions that signal over noise `seen`
    reaches, and the share of each number that lies in the other directions."""
    size, vectors = np.linalg.eigh(gram.astype(np.float64))
    reached = size * seen > size.sum()
    reached[-1] = True
    blind = 1.0 - np.sum(vectors[:, reached] ** 2, axis=1)
    coordinates = vectors[:, reached] / np.sqrt(size[reached])
    return coordinates.astype(np.float32), np.clip(blind, 0.0, 1.0)


def solve(
    give: Callable[[list[Array]], Array],
    pull: Callable[[Array], list[Array]],
    rest: Array,
    enough: float,
) -> list[Array]:
    """The smallest x that solves give(x) = rest best, by conjugate gradients on the normal
    equations; stacks of rests all at once. Ends where the gradient is `enough` of the first."""
    residual = pull(rest)
    toward, x = residual, [np.zeros_like(part) for part in residual]
    norm = first = _squares(residual)
    for _ in range(INNER):
        image = give(toward)
        length = _spread(norm / np.maximum(np.sum(image**2, axis=(-1, -2)), 1e-30))
        x = [a + length * b for a, b in zip(x, toward, strict=True)]
        rest = rest - length * image
        residual = pull(rest)
        now = _squares(residual)
        if np.all(now <= enough**2 * first):
            break
        ratio = _spread(now / np.maximum(norm, 1e-30))
        toward = [a + ratio * b for a, b in zip(residual, toward, strict=True)]
        norm = now
    return x


def _squares(parts: Sequence[Array]) -> Array:
    return np.asarray(sum(np.sum(part**2, axis=(-1, -2)) for part in parts))


def _spread(numbers: Any) -> Array:
    return np.asarray(numbers, dtype=np.float32)[..., None, None]


def begin(equations: Equations, used: Array, rank: int) -> tuple[Array, Array]:
    """Factors to begin with: the leading singular vectors of the smallest update, of whatever rank,
    that solves the equations."""
    one = np.eye(equations.shape[1], dtype=np.float32)

    def pull(rest: Array) -> list[Array]:
        taken = equations.take(rest * used)
        return [np.asarray(sum(tokens.T @ inputs for tokens, inputs in taken))]

    (found,) = solve(
        lambda x: equations.give((x[0], one)) * used, pull, equations.values * used, 0.1
    )
    u, s, v = np.linalg.svd(found, full_matrices=False)
    return u[:, :rank] * s[:rank], v[:rank].T


def fit(
    equations: Equations, used: Array, start: tuple[Array, Array], enough: float = CHANCE
) -> tuple[Array, Array]:
    """Factors (U with its sizes, V orthonormal) that solve the equations of some rows best. Ends
    where a step takes less than `enough` of the squares that are left."""
    left, right = start
    rest = (equations.values - equations.give((left, right))) * used
    for _ in range(STEPS):
        basis = np.linalg.qr(left)[0]
        p, q = step(equations, used, rest, basis, right)
        new = cut(np.hstack([left + p, basis]), np.hstack([right, q]), left.shape[1])
        after = (equations.values - equations.give(new)) * used
        before = float(np.sum(rest**2))
        gained = before - float(np.sum(after**2))
        if gained > 0:
            (left, right), rest = new, after
        if gained <= enough * before:
            break
    return left, right


def step(
    equations: Equations,
    used: Array,
    rest: Array,
    left: Array,
    right: Array,
    enough: float = 0.1,
) -> list[Array]:
    """The smallest P, Q for which P V' + U Q' solves the equations for what is left best."""
    return solve(
        lambda x: equations.give((x[0], right), (left, x[1])) * used,
        lambda left_over: equations.pull(left_over * used, left, right),
        rest * used,
        enough,
    )


def cut(left: Array, right: Array, rank: int) -> tuple[Array, Array]:
    """The nearest matrix of a rank to U V': left vectors with their sizes, right orthonormal."""
    one, upper = np.linalg.qr(left)
    other, lower = np.linalg.qr(right)
    u, s, v = np.linalg.svd(upper @ lower.T)
    return one @ (u[:, :rank] * s[:rank]), other @ v[:rank].T


def find_rank(equations: Equations) -> tuple[tuple[Array, Array], Array]:
    """Factors of the smallest rank that explains rows which were not fitted as well as the highest
    does, fitted to all rows, and the squares of what that rank leaves of the rows left out."""
    held = equations.held
    used = np.where(held, 0.0, 1.0).astype(np.float32)[:, None]
    highest = equations.highest
    fits: dict[int, tuple[tuple[Array, Array], Array]] = {}

    def leave(rank: int, start: tuple[Array, Array]) -> Array:
        found = fit(equations, used, start)
        rest = np.sum((equations.values - equations.give(found))[held] ** 2, axis=1)
        fits[rank] = (found, rest)
        return rest

    leave(highest, begin(equations, used, highest))
    low, high = 0, highest  # no update is too little, the highest rank is enough
    while high - low > 1:
        rank = (low + high) // 2
        rest = leave(rank, cut(*fits[high][0], rank))
        low, high = (rank, high) if is_less(fits[high][1], rest) else (low, rank)
    found, rest = fits[high]
    return fit(equations, np.ones_like(used), found), rest


def is_less(these: Array, those: Array) -> bool:
    """Whether squares are less than others, pair by pair, beyond chance."""
    ratio = np.log(np.maximum(these, 1e-300) / np.maximum(those, 1e-300))
    return bool(wilcoxon(ratio, alternative="less").pvalue < CHANCE)


def errors_of(
    equations: Equations, left: Array, right: Array, noise: float, rng: np.random.Generator
) -> Array:
    """Standard errors of the numbers of the update, in the coordinates of the weight.

    Args:
        equations: that the update solves.
        left: its factors.
        right: its factors.
        noise: of a value, at least; rounding is correlated in a row, and a fit hides some of it.
        rng: draws the noise.
    """
    rest = equations.values - equations.give((left, right))
    unknowns = left.shape[1] * (sum(equations.shape) - left.shape[1])
    spread = np.sqrt(float(np.sum(rest**2)) / max(rest.size - unknowns, 1))
    drawn = max(spread, noise) * rng.standard_normal((SAMPLES, *rest.shape))
    basis = np.linalg.qr(left)[0]
    everything = np.ones((len(equations.values), 1), dtype=np.float32)
    p, q = step(equations, everything, drawn.astype(np.float32), basis, right, CHANCE)
    ahead, behind = equations.unfold(basis, right)
    variance = np.zeros((len(equations.left), len(equations.right)))
    for x, y in zip(p, q, strict=True):
        variance += ((equations.left @ x) @ behind.T + ahead @ (equations.right @ y).T) ** 2
    variance /= SAMPLES
    # numbers along inputs or outputs that no row reached may be as large as those that were seen
    whole, part = equations.unfold(left, right)
    size = (whole @ part.T) ** 2
    across = np.sum(size, axis=1) / max(float(np.sum(1 - equations.blind_right)), 1e-30)
    along = np.sum(size, axis=0) / max(float(np.sum(1 - equations.blind_left)), 1e-30)
    variance += np.outer(across, equations.blind_right) + np.outer(equations.blind_left, along)
    return np.sqrt(variance)


@dataclass(frozen=True)
class Measurement:
    """What the equations of one weight are made of.

    Attributes:
        rest: answers less those of the reference with its weight moved by dW, (rows, outputs).
        differentiate: given dW and directions (rows, count, outputs), gradients there.
        shape: of the weight.
        noise: standard deviation of a number in an answer.
    """

    rest: Callable[[Array], Array]
    differentiate: Callable[[Array, Array], Traces]
    shape: tuple[int, int]
    noise: float


def find_update(measurement: Measurement, rng: np.random.Generator) -> Update | None:
    """The update of smallest rank that explains the answers.

    Args:
        measurement: answers and gradients, as functions of the update so far.
        rng: draws directions of the answers, and noise for the error bars.

    Returns:
        The update, without error bars where it says nothing about rows that were not fitted; None
        where there are too few equations for rank one.
    """
    delta = np.zeros(measurement.shape)
    rest = first = measurement.rest(delta)
    rows, outputs = first.shape
    if first.size < EQUATIONS * sum(measurement.shape):
        return None
    noise = 2 * measurement.noise * np.sqrt(first.size)  # both sides round
    sketch = Sketch(measurement, rng, delta, rows, outputs)
    for _ in range(STEPS):
        equations = sketch.linearise(rest, delta)
        fitted, held = find_rank(equations)
        left, right = equations.unfold(*fitted)
        shown = np.sum(equations.values[equations.held] ** 2, axis=1)
        room = left.shape[1] < equations.highest
        update = Update(left, right, np.full(measurement.shape, np.inf), held, shown, room)
        if not update.explains and sketch.widen():
            continue
        if not update.helps:
            return update
        moved = _move(measurement, delta, left @ right.T, rest)
        before = float(np.linalg.norm(rest))
        if moved is not None:
            delta, rest = moved
        kept = float(np.linalg.norm(rest)) / before
        if before <= noise:
            break
        if sketch.exact and kept > STILL:  # more than noise is left: perhaps of a higher rank
            if not sketch.widen():
                break
            continue
        sketch.exact = False
        if kept > SLOW:
            sketch.take_at(delta)
    return replace(update, errors=errors_of(equations, *fitted, measurement.noise, rng))


class Sketch:
    """Gradients at one value of the weight, along as many directions as the rank needs."""

    def __init__(
        self,
        measurement: Measurement,
        rng: np.random.Generator,
        delta: Array,
        rows: int,
        outputs: int,
    ) -> None:
        self.measurement = measurement
        drawn = rng.standard_normal((rows, outputs, outputs))
        self.basis = np.swapaxes(np.linalg.qr(drawn)[0], 1, 2)
        self.count = self.needed(LIMIT)
        self.take_at(delta)

    def needed(self, rank: int) -> int:
        """Directions of each row's answer, so that equations are enough for a rank."""
        rows, outputs, _ = self.basis.shape
        return min(outputs, -(-EQUATIONS * rank * sum(self.measurement.shape) // rows))

    def take_at(self, delta: Array) -> None:
        """Gradients with the weight moved by an update."""
        self.at, self.exact = delta, True
        self.traces = self.measurement.differentiate(delta, self.basis[:, : self.count])

    def widen(self) -> bool:
        """More directions, for higher ranks; False where there are no more."""
        count = min(self.needed(HIGHEST), max(2 * self.count, 1))
        if count <= self.count:
            return False
        more = self.measurement.differentiate(self.at, self.basis[:, self.count : count])
        gradients = np.concatenate([self.traces.gradients, more.gradients])
        self.traces = replace(self.traces, gradients=gradients)
        self.count = count
        return True

    def linearise(self, rest: Array, delta: Array) -> "Equations":
        """Equations for the whole update, given what one so far leaves of the answers."""
        values = np.einsum("xjd,xd->xj", self.basis[:, : self.count], rest, optimize=True)
        traces = self.traces
        if delta.any():
            starts = np.searchsorted(traces.row, np.arange(len(rest)))
            moved = traces.inputs @ delta.T.astype(traces.inputs.dtype)
            along = np.einsum("jto,to->tj", traces.gradients, moved, optimize=True)
            values = values + np.add.reduceat(along.astype(np.float64), starts, axis=0)
        return Equations(traces, values, self.measurement.noise)


def _move(
    measurement: Measurement, delta: Array, found: Array, before: Array
) -> tuple[Array, Array] | None:
    """The update, or a part of the way to it, that leaves less; None where none does."""
    for share in (1.0, 0.5, 0.25, 0.1):
        tried = delta + share * (found - delta)
        rest = measurement.rest(tried)
        if np.linalg.norm(rest) < np.linalg.norm(before):
            return tried, rest
    return None


@dataclass(frozen=True, eq=False)
class SolvedUpdate:
    """A change with its update, where that is determined; and whether more rows might do so."""

    change: Change
    determined: bool
    promising: bool


def contenders(experiment: Experiment, change: Change) -> list[Projection]:
    """The weights that a small move may be one of: the best by evidence, and what is near it."""
    if not change.module or change.size > LARGE:
        return []
    named = {key_of(p): p for p in experiment.bench.anatomy.projections}
    places = [place for place in change.places if place.name in named]
    best = places[0].evidence
    near = [named[place.name] for place in places if best - place.evidence < CLEAR]
    return near[:CONTENDERS]


def with_rank(
    experiment: Experiment, rows: Sequence[int], change: Change, noise: float, rng: Any
) -> SolvedUpdate:
    """The change with the rank and the numbers of its update, where answers determine them.

    Weights that evidence does not tell apart are all tried, and kept as rivals where rows that were
    not fitted do not tell them apart either.
    """
    found = [(p, find_update(measure(experiment, rows, p, noise), rng))
             for p in contenders(experiment, change)]  # fmt: skip
    fits = [(p, update) for p, update in found if update is not None]
    if not fits:
        return SolvedUpdate(change, False, bool(found))
    projection, update = min(fits, key=lambda pair: float(np.sum(pair[1].held)))
    if not update.explains:
        return SolvedUpdate(change, False, update.helps)
    rivals = [p.name for p, other in fits if p is not projection
              and not is_less(update.held, other.held)]  # fmt: skip
    size = np.linalg.norm(update.delta) / float(projection.matrix.norm())
    solved = replace(
        change,
        module=projection.name,
        layer=projection.layer,
        size=float(size),
        rivals=tuple(rivals),
        rank=update.rank,
        delta=update.delta,
        errors=update.errors,
    )
    return SolvedUpdate(solved, True, True)


def measure(
    experiment: Experiment, rows: Sequence[int], projection: Projection, noise: float
) -> Measurement:
    """The equations of one weight of the reference, for rows that were asked.

    Args:
        experiment: what was asked and answered.
        rows: the rows to use.
        projection: the weight.
        noise: of the answers, relative to their size.
    """
    import torch

    given = [experiment.rows[n] for n in rows]
    answers = experiment.answers[list(rows)]
    size = float(np.median(np.linalg.norm(answers, axis=1))) / np.sqrt(answers.shape[1])

    @contextlib.contextmanager
    def moved(delta: Array) -> Iterator[None]:
        kept = projection.matrix.clone()
        projection.matrix.add_(torch.from_numpy(delta).to(kept.dtype))
        try:
            yield
        finally:
            projection.matrix.copy_(kept)

    def rest(delta: Array) -> Array:
        fresh = Experiment(experiment.bench)
        fresh.add(Call(tuple(given), "again"), answers)
        with moved(delta):
            return answers - fresh.simulate(())

    def differentiate(delta: Array, directions: Array) -> Traces:
        with moved(delta):
            (found,) = trace(experiment.bench, given, directions, [projection]).values()
        return found

    return Measurement(rest, differentiate, tuple(projection.matrix.shape), noise * size)
