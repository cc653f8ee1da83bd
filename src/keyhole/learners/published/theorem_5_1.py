"""Theorem 5.1: a score of low rank from a fixed set of queries, by the nuclear norm.

Statement.  About 6rd Gaussian rank-one measurements of a score of rank r determine it: among all
            matrices with these measurements, the one of least nuclear norm is the score.
Queries.    [a_k + b_k; b_k] with Gaussian a_k and b_k of one common length each measures
            a_k · score b_k. All are asked at once, after twelve of them have told that length:
            nothing else depends on the answers. Some are held out.
Algebra.    minimise ‖W‖_*  subject to  a_k · W b_k = t_k  is a semidefinite program, which cvxpy
            states and solves to six digits; Gauss–Newton on the factors finds the rest. Its dual,
            maximise t · y with ‖Σ_k y_k a_k b_kᵀ‖ ≤ 1, tells how good the answer is: the two values
            are equal at the optimum, and if only rank(W) singular values of the dual matrix reach
            one, no other matrix does as well. At large widths the program is out of reach and the
            factors are fitted directly, the rank growing from one.
Fails.      A matrix is returned only if it has fewer unknowns than there are measurements, fits all
            of them to their errors and predicts those held out: too few measurements, or a score
            that is not of low rank, end as IllConditioned.
Source.     Theorem 5.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Queries" (2026). Held-out measurements, standard errors and the fit of the factors are
            ours.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import IllConditioned
from keyhole.extras import need
from keyhole.learners.single_head import Calibration, RankSearch, Score
from keyhole.linalg.bases import DenseBasis
from keyhole.linalg.low_rank_fit import (
    Factored,
    LowRankFit,
    Measured,
    count_unknowns,
    fit,
    fit_by_rank,
    scatter,
)
from keyhole.linalg.rank import count_above, count_above_share
from keyhole.measurement.linear_response import answer_noise
from keyhole.measurement.log_odds import SHRINK, TARGET_SPREAD
from keyhole.oracles.queries import ArrayBank

PROGRAM_WIDTH = 32  # up to which the semidefinite program is practical
FEWEST_HELD_OUT = 8  # measurements; as many more than unknowns must be left
MISFIT = 8.0  # root mean square deviation, in standard errors, of a matrix that does not fit


# -- how many queries --------------------------------------------------------------------------


def plan_measurements(width: int, rank: int | None, measurements: int | None) -> int:
    """How many measurements are taken: without a rank, enough for an eighth of the width."""
    if measurements is not None:
        return measurements
    return count_enough(width, -(-width // 8) if rank is None else rank)


def count_enough(width: int, rank: int) -> int:
    """Measurements that tell a score of this rank, and leave some to check it by: the program
    needs six times rank · width in practice."""
    return max(6 * width * rank, count_unknowns(width, rank) + 2 * FEWEST_HELD_OUT)


def highest_rank(width: int, count: int) -> int:
    """The highest rank that so many measurements could tell from chance."""
    usable = count - count_held_out(count) - FEWEST_HELD_OUT
    ranks = [r for r in range(1, width + 1) if count_unknowns(width, r) <= usable]
    return max(ranks, default=0)


def count_held_out(count: int) -> int:
    """One measurement of sixteen."""
    return max(FEWEST_HELD_OUT, count // 16)


def refuse_impossible(width: int, rank: int | None, count: int) -> None:
    """Raises before any query where so many measurements cannot be enough, or where the program
    has no solver."""
    refuse_too_few(width, rank, count, count)
    if width <= PROGRAM_WIDTH:
        need("cvxpy", "convex", "the nuclear norm program")


def refuse_too_few(width: int, rank: int | None, count: int, asked: int) -> None:
    """Raises IllConditioned where `count` usable answers, of those `asked`, cannot be enough."""
    wanted, reach = rank or 1, highest_rank(width, count)
    if wanted > reach:
        least = count_enough(width, wanted)
        more = least if asked < least else 2 * asked
        raise IllConditioned(
            f"{count} measurements cannot determine a score of rank {wanted} and width {width}: "
            f"it has {count_unknowns(width, wanted)} unknowns, and some measurements must be left "
            f"to check it. Take measurements={more}, or method='adaptive'"
        )


# -- the measurements and what they tell -------------------------------------------------------


def measure_fixed_set(
    calibration: Calibration, rng: np.random.Generator, search: RankSearch, count: int
) -> Score:
    """The score from one fixed set of measurements."""
    width, rank = calibration.width, search.rank
    task = _FixedSet(calibration, rng, rank, search.tolerance, count)
    everything, factor = task.measure()
    refuse_too_few(width, rank, len(everything), count)
    if task.misfit(everything, Factored.zero(width)) <= 1.0:
        return Score.zero(width, rank=0)
    spare = count_held_out(len(everything))
    seen, held = everything.part(slice(spare, None)), everything.part(slice(spare))
    found = task.search(seen, held)
    final = fit(everything, task.trim(seen, held, found.fit).matrix)
    return task.assemble(everything, final, found, factor)


@dataclass(frozen=True, eq=False)
class _Accepted:
    fit: LowRankFit
    how: str
    details: dict[str, Any]


@dataclass(frozen=True, eq=False)
class _FixedSet:
    """Gaussian measurements of one score, and what can be made of them."""

    calibration: Calibration
    rng: np.random.Generator
    rank: int | None
    tolerance: float
    count: int

    @property
    def width(self) -> int:
        return self.calibration.width

    def measure(self) -> tuple[Measured, float]:
        """All measurements whose answers are usable, in Gaussian coordinates, and the length of
        their probes in units of the calibrated ones."""
        group = self.calibration.group
        queries = -(-self.count // group)
        left = self.rng.standard_normal((queries * group, self.width))
        right = self.rng.standard_normal((queries, self.width))
        anchors = right / np.sqrt(self.width)
        tokens, factor = self._scale_probes(left)
        first = -(-min(12, self.count) // group)
        length, products, errors = self._find_length(tokens, anchors, first, factor)
        parts = [(products, errors)]
        if first < queries:
            parts.append(self._ask(tokens[first * group :], anchors[first:], length))
        scores = np.concatenate([p for p, _ in parts])
        noise = np.concatenate([e for _, e in parts])
        usable = np.isfinite(scores)
        if not usable.any():
            raise IllConditioned("every query of the fixed set was answered by one token alone")
        repeated = np.repeat(right, group, axis=0)[usable]
        return Measured(left[usable], repeated, scores[usable], noise[usable]), factor

    def _scale_probes(self, left: Float[Array, "n d"]) -> tuple[Float[Array, "n d"], float]:
        """Gaussian probes at the length, and with the equilibration, of the calibrated ones. A
        Gaussian may be longer than is typical: a common factor keeps all inside the domain."""
        probes, tokens = self.calibration.probes, left / np.sqrt(self.width)
        if probes.equilibration is not None:
            tokens = tokens @ probes.equilibration.matrix
        tokens = probes.scale(tokens)
        longest = float(np.linalg.norm(tokens, axis=1).max())
        factor = min(1.0, 0.5 * self.calibration.longest / longest)
        return factor * tokens, factor

    def _find_length(
        self, tokens: Array, anchors: Array, count: int, factor: float
    ) -> tuple[float, Array, Array]:
        """The length of the anchors, and the first measurements, taken with it or near it.
        Products have heavy tails: a larger scale than was seen is assumed."""
        group, caution = self.calibration.group, 1.5
        length = TARGET_SPREAD / (caution * self.calibration.scale * factor)
        limit = 0.5 * self.calibration.longest / float(np.linalg.norm(anchors, axis=1).max())
        for _ in range(12):
            length = min(length, limit)
            products, errors = self._ask(tokens[: count * group], anchors[:count], length)
            seen = products[np.isfinite(products)] / self.width  # per unit of anchor length
            if 2 * len(seen) > len(products):
                size = float(np.sqrt(np.mean(seen**2)))
                return min(TARGET_SPREAD / (caution * size), limit), products, errors
            length *= SHRINK
        raise IllConditioned("at every length of the tokens, one token takes all the attention")

    def _ask(self, tokens: Array, anchors: Array, length: float) -> tuple[Array, Array]:
        """left · W right for Gaussian left, right, with W the score as the probes see it; NaN
        where one token took all the attention."""
        calibration, group = self.calibration, self.calibration.group
        numbers = np.arange(len(anchors))
        found = calibration.meter_of(tokens, group).ask(
            ArrayBank(length * anchors),
            len(anchors),
            numbers,
            numbers,
            calibration.linear.at(length * anchors),
        )
        scale = self.width / length
        scores = np.where(found.saturated[:, None], np.nan, found.scores)
        errors = np.hypot(found.errors, calibration.bias_error)
        errors = np.hypot(errors, self._value_error(tokens)[:, None] * (1.0 + np.exp(found.scores)))
        return scale * (scores.ravel() - tokens @ calibration.key_bias), scale * errors.ravel()

    def _value_error(self, tokens: Float[Array, "n d"]) -> Float[Array, " q"]:
        """Relative error of what a query's probes read, by the rounding of their values: a
        Gaussian probe may be nearly orthogonal to the value map, so that its terms cancel."""
        linear, group = self.calibration.linear, self.calibration.group
        noise = answer_noise(linear.noise, self.width)
        terms = np.linalg.norm(np.abs(tokens) @ np.abs(linear.value), axis=1)
        terms = noise * terms + np.linalg.norm(np.abs(tokens) @ linear.value_error, axis=1)
        values = linear.at(tokens).reshape(-1, group, linear.offset.size)
        weakest = np.linalg.svd(values, compute_uv=False)[:, -1]
        return terms.reshape(-1, group).max(axis=1) / np.maximum(weakest, TINY)

    # -- the matrix ------------------------------------------------------------------------

    def search(self, search: Measured, held: Measured) -> _Accepted:
        """The first matrix that fits, from the program or from the factors alone."""
        highest = highest_rank(self.width, len(search) + len(held))
        if self.rank is not None:
            highest = min(highest, self.rank)
        reasons = []
        if self.width <= PROGRAM_WIDTH and len(search) < self.width**2:
            program = minimise_nuclear_norm(search.left, search.right, search.products)
            details = {"program_gap": program.gap, "program_rank": program.rank}
            left, singular, right = np.linalg.svd(program.matrix)
            rank = min(program.rank, highest)
            start = Factored(left[:, :rank], singular[:rank], right[:rank])
            found = fit(search, start)
            if self._fits(search, held, found):
                how = "the matrix of least nuclear norm with these measurements has it"
                return _Accepted(found, how, details)
            reasons.append(f"the matrix of least nuclear norm has rank {program.rank}")
        for attempt in range(4):
            for found in self._fits_of_growing_rank(search, highest, attempt):
                if self._fits(search, held, found):
                    how = "it is the lowest at which the factors fit all measurements"
                    return _Accepted(found, how, {})
        reasons.append(f"no matrix up to rank {highest} was found that fits all of them")
        raise IllConditioned(
            f"{len(search) + len(held)} measurements did not determine the score: "
            + "; ".join(reasons)
            + ". Ask more (measurements=), or queries that depend on the answers "
            "(method='adaptive')"
        )

    def _fits_of_growing_rank(
        self, search: Measured, highest: int, attempt: int
    ) -> Iterator[LowRankFit]:
        """From all measurements; in later attempts from a random part of them."""
        if attempt == 0:
            yield from fit_by_rank(search, highest, self.rng)
            return
        chosen = self.rng.random(len(search)) < 0.8
        for rough in fit_by_rank(search.part(chosen), highest, self.rng):
            yield fit(search, rough.matrix)

    def _fits(self, search: Measured, held: Measured, found: LowRankFit) -> bool:
        return all(self.misfit(part, found.matrix) <= 1.0 for part in (held, search))

    def misfit(self, measured: Measured, matrix: Factored) -> float:
        """Above one: more than the errors of the measurements, or the tolerance, explain."""
        rest = measured.products - matrix.predict(measured)
        limit = MISFIT * measured.errors
        if self.tolerance > 0:
            limit = np.hypot(limit, self.tolerance * np.sqrt(np.mean(measured.products**2)))
        return float(np.sqrt(np.mean((rest / limit) ** 2)))

    def trim(self, search: Measured, held: Measured, found: LowRankFit) -> LowRankFit:
        """Without singular values that are no larger than six times their errors."""
        noise = max(float(c.singular[0]) for c in scatter(search, found.matrix, 2, self.rng))
        rank = max(1, count_above(found.matrix.singular, 6.0 * noise))
        if rank == found.matrix.rank:
            return found
        lower = fit(search, found.matrix.cut(rank))
        return lower if self._fits(search, held, lower) else found

    # -- the result ------------------------------------------------------------------------

    def assemble(
        self, everything: Measured, final: LowRankFit, found: _Accepted, factor: float
    ) -> Score:
        matrix, rank = final.matrix, final.matrix.rank
        left, right = self._as_score(matrix.left * matrix.singular, factor), matrix.right
        rest = float(np.sqrt(np.mean((everything.products - matrix.predict(everything)) ** 2)))
        truncation = rest / self.width / (self.calibration.probes.across * factor)
        noisy = float(np.sqrt(np.mean(everything.errors**2)))
        if rest <= MISFIT * noisy:
            truncation = 0.0  # nothing but noise is left over
        else:  # what is left over disturbs the fit as noise of its size would
            everything = replace(everything, errors=np.hypot(everything.errors, rest))
        count = len(everything)
        reason = f"{found.how}, {count} measurements and {count_held_out(count)} of them held out"
        return Score.of_rank(
            rank,
            (np.ascontiguousarray(left), right),
            self._errors(everything, matrix, truncation, factor),
            reason=reason,
            singular=Factored.of(left, right, rank).singular,
            truncation=truncation,
            measurements=count,
            **found.details,
        )

    def _as_score(self, left: Float[Array, "d n"], factor: float) -> Float[Array, "d n"]:
        """From the score as the probes see it to the score."""
        plain = replace(self.calibration.probes, basis=DenseBasis(np.eye(self.width)))
        return plain.solve(np.ascontiguousarray(left.T)).T / factor

    def _errors(
        self, everything: Measured, matrix: Factored, truncation: float, factor: float
    ) -> tuple[Array, Array]:
        """Standard errors of rank one with the right root mean square in each row and column."""
        by_row, by_column, draws = np.zeros(self.width), np.zeros(self.width), 6
        for change in scatter(everything, matrix, draws, self.rng):
            left = self._as_score(change.left * change.singular, factor)
            by_row += np.sum(left**2, axis=1) / draws
            by_column += np.einsum("rd,rs,sd->d", change.right, left.T @ left, change.right) / draws
        by_row += self.width * truncation**2
        by_column += self.width * truncation**2
        total = float(by_row.sum())
        if total > 0:
            by_row /= total
        return np.sqrt(by_row)[:, None], np.sqrt(by_column)[None]


# -- the program -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LeastNuclearNorm:
    matrix: Float[Array, "d d"]
    rank: int  # to the program's accuracy
    gap: float  # between the values of program and dual, relative
    unique: bool  # whether the dual matrix shows that there is no other


def minimise_nuclear_norm(
    left: Float[Array, "m d"], right: Float[Array, "m d"], products: Float[Array, " m"]
) -> LeastNuclearNorm:
    """Solves the program; accurate to about six digits."""
    cvxpy: Any = need("cvxpy", "convex", "the nuclear norm program")
    width = left.shape[1]
    # one scale for everything: the solver's tolerances are absolute
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    size = float(np.sqrt(np.mean((products / norms) ** 2))) or 1.0
    design = (left[:, :, None] * right[:, None, :]).reshape(len(left), -1) / norms[:, None]
    goal = products / norms / size
    unknown = cvxpy.Variable((width, width))
    agreement = design @ cvxpy.vec(unknown, order="C") == goal
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.normNuc(unknown)), [agreement])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an inaccurate end is seen in the gap
            problem.solve(solver=cvxpy.CLARABEL)
    except cvxpy.error.SolverError as error:
        raise IllConditioned(f"the nuclear norm program was not solved: {error}") from error
    if unknown.value is None or agreement.dual_value is None:
        raise IllConditioned(f"the nuclear norm program ended as {problem.status}")
    singular = np.linalg.svd(unknown.value, compute_uv=False)
    accuracy = 1e-4  # of singular values, relative
    rank = count_above_share(singular, accuracy)
    dual = np.linalg.svd((agreement.dual_value @ design).reshape(width, width), compute_uv=False)
    value = abs(float(agreement.dual_value @ goal))
    gap = abs(value - singular.sum()) / max(float(singular.sum()), TINY)
    reached = int(np.sum(dual > 1.0 - accuracy))
    return LeastNuclearNorm(size * unknown.value, rank, gap, reached == rank)
