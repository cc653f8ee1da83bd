"""Low rank from a fixed set of queries: Gaussian rank-one measurements and the nuclear norm.

Query k, [a_k + b_k; b_k] with Gaussian a_k and b_k of one common length each, measures
a_k · score b_k. All are asked at once, after CALIBRATION of them have told that length: nothing
depends on the answers. Among all matrices with these measurements the one of least nuclear norm is
the score, once there are about 6rd (Theorem 5.1 of the paper); a semidefinite program finds it to
six digits, Gauss–Newton on the factors to the last. Above CONE_LIMIT the program is out of reach
and the factors are fitted directly, the rank growing from one.

Some measurements are held out. A matrix is returned only if it has fewer unknowns than there are
measurements, fits all of them to their errors and predicts those held out: too few measurements,
or a score that is not of low rank, end as IllConditioned.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import IllConditioned
from keyhole.learners.base import Hypothesis
from keyhole.learners.published.nuclear_norm import least_nuclear_norm
from keyhole.learners.single_head.pairs import Pairs, assemble_low_rank, without_score
from keyhole.linalg.bases import DenseBasis
from keyhole.linalg.low_rank_fit import (
    Factored,
    Fit,
    Measured,
    fit,
    fits_by_rank,
    scatter,
    unknowns,
)
from keyhole.measurement.linear_response import answer_noise
from keyhole.measurement.log_odds import SHRINK, TARGET_SPREAD
from keyhole.oracles.queries import ArrayBank

OVERSAMPLING = 6  # measurements over rank · width: what the program needs in practice
ASSUMED_RANK = 8  # without a rank, enough is asked for width / ASSUMED_RANK
CALIBRATION = 12  # measurements that tell the common length
ROUNDS = 12  # of calibration; each shortens the anchors
CAUTION = 1.5  # products have heavy tails: assume a larger scale than was seen
CONE_LIMIT = 32  # width up to which the semidefinite program is practical
HELD_OUT = 16  # one measurement of so many is held out,
FEWEST_HELD_OUT = 8  # and at least these; as many more than unknowns must be left
MISFIT = 8.0  # root mean square deviation, in standard errors, of a matrix that does not fit
RESTARTS = 3  # of the fit, each from another part of the measurements
PART = 0.8  # of the measurements in a restart
DRAWS = 6  # of measurement errors, for the standard errors of the score
VISIBLE = 6.0  # singular values below so many standard errors are not there


def planned(width: int, rank: int | None, measurements: int | None) -> int:
    """How many measurements are taken."""
    if measurements is not None:
        return measurements
    return enough(width, -(-width // ASSUMED_RANK) if rank is None else rank)


def enough(width: int, rank: int) -> int:
    """Measurements that tell a score of this rank, and leave some to check it by."""
    return max(OVERSAMPLING * width * rank, unknowns(width, rank) + 2 * FEWEST_HELD_OUT)


def highest_rank(width: int, count: int) -> int:
    """The highest rank that so many measurements could tell from chance."""
    usable = count - held_out(count) - FEWEST_HELD_OUT
    ranks = [r for r in range(1, width + 1) if unknowns(width, r) <= usable]
    return max(ranks, default=0)


def held_out(count: int) -> int:
    return max(FEWEST_HELD_OUT, count // HELD_OUT)


def refuse_too_few(width: int, rank: int | None, count: int, asked: int) -> None:
    """Raises IllConditioned where `count` usable answers, of those `asked`, cannot be enough."""
    wanted, reach = rank or 1, highest_rank(width, count)
    if wanted > reach:
        least = enough(width, wanted)
        more = least if asked < least else 2 * asked
        raise IllConditioned(
            f"{count} measurements cannot determine a score of rank {wanted} and width {width}: "
            f"it has {unknowns(width, wanted)} unknowns, and some measurements must be left to "
            f"check it. Take measurements={more}, or method='adaptive'"
        )


@dataclass(frozen=True, eq=False)
class _Accepted:
    fit: Fit
    how: str
    details: dict[str, Any]


class Convex:
    """One fixed set of measurements and what can be made of them."""

    def __init__(
        self,
        pairs: Pairs,
        rng: np.random.Generator,
        rank: int | None,
        tolerance: float,
        measurements: int | None,
    ) -> None:
        self.pairs, self.rng, self.width = pairs, rng, pairs.probes.width
        self.rank, self.tolerance = rank, tolerance
        self.count = planned(self.width, rank, measurements)

    def run(self) -> Hypothesis:
        everything = self._measure()
        refuse_too_few(self.width, self.rank, len(everything), self.count)
        if self._misfit(everything, Factored.zero(self.width)) <= 1.0:
            return without_score(self.pairs, details={"rank": 0})
        spare = held_out(len(everything))
        search, held = everything.part(slice(spare, None)), everything.part(slice(spare))
        found = self._search(search, held)
        final = fit(everything, self._trimmed(search, held, found.fit).matrix)
        return self._assembled(everything, final, found)

    # -- queries -------------------------------------------------------------------------

    def _measure(self) -> Measured:
        """All measurements whose answers are usable, in Gaussian coordinates."""
        group = self.pairs.group
        queries = -(-self.count // group)
        left = self.rng.standard_normal((queries * group, self.width))
        right = self.rng.standard_normal((queries, self.width))
        anchors = right / np.sqrt(self.width)
        tokens = self._tokens(left)
        first = -(-min(CALIBRATION, self.count) // group)
        length, products, errors = self._calibrated(tokens, anchors, first)
        parts = [(products, errors)]
        if first < queries:
            parts.append(self._ask(tokens[first * group :], anchors[first:], length))
        scores = np.concatenate([p for p, _ in parts])
        noise = np.concatenate([e for _, e in parts])
        usable = np.isfinite(scores)
        if not usable.any():
            raise IllConditioned("every query of the fixed set was answered by one token alone")
        return Measured(
            left[usable], np.repeat(right, group, axis=0)[usable], scores[usable], noise[usable]
        )

    def _tokens(self, left: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Gaussian probes at the length (and in the shape) of the pairs' probes."""
        probes, tokens = self.pairs.probes, left / np.sqrt(self.width)
        if probes.shape is not None:
            tokens = tokens @ probes.shape.matrix
        tokens = probes.stretched(tokens)
        # a Gaussian may be longer than is typical: a common factor keeps all inside the domain
        longest = float(np.linalg.norm(tokens, axis=1).max())
        self.factor = min(1.0, 0.5 * self.pairs.longest / longest)
        return self.factor * tokens

    def _calibrated(self, tokens: Array, anchors: Array, count: int) -> tuple[float, Array, Array]:
        """The length of the anchors, and the first measurements, taken with it or near it."""
        group = self.pairs.group
        length = TARGET_SPREAD / (CAUTION * self.pairs.scale * self.factor)
        limit = 0.5 * self.pairs.longest / float(np.linalg.norm(anchors, axis=1).max())
        for _ in range(ROUNDS):
            length = min(length, limit)
            products, errors = self._ask(tokens[: count * group], anchors[:count], length)
            seen = products[np.isfinite(products)] / self.width  # per unit of anchor length
            if 2 * len(seen) > len(products):
                size = float(np.sqrt(np.mean(seen**2)))
                return min(TARGET_SPREAD / (CAUTION * size), limit), products, errors
            length *= SHRINK
        raise IllConditioned("at every length of the tokens, one token takes all the attention")

    def _ask(self, tokens: Array, anchors: Array, length: float) -> tuple[Array, Array]:
        """left · W right for Gaussian left, right, with W the score as the probes see it; NaN
        where one token took all the attention."""
        pairs, group = self.pairs, self.pairs.group
        numbers = np.arange(len(anchors))
        found = pairs.meter_of(tokens, group).ask(
            ArrayBank(length * anchors),
            len(anchors),
            numbers,
            numbers,
            pairs.linear.at(length * anchors),
        )
        scale = self.width / length
        scores = np.where(found.saturated[:, None], np.nan, found.scores)
        errors = np.hypot(found.errors, pairs.bias_error)
        errors = np.hypot(errors, self._blur(tokens)[:, None] * (1.0 + np.exp(found.scores)))
        return scale * (scores.ravel() - tokens @ pairs.key_bias), scale * errors.ravel()

    def _blur(self, tokens: Float[Array, "n d"]) -> Float[Array, " q"]:
        """Relative error of what a query's probes read, by the rounding of their values: a
        Gaussian probe may be nearly orthogonal to the value map, so that its terms cancel."""
        linear, group = self.pairs.linear, self.pairs.group
        noise = answer_noise(linear.noise, self.width)
        terms = np.linalg.norm(np.abs(tokens) @ np.abs(linear.value), axis=1)
        terms = noise * terms + np.linalg.norm(np.abs(tokens) @ linear.value_error, axis=1)
        values = linear.at(tokens).reshape(-1, group, linear.offset.size)
        weakest = np.linalg.svd(values, compute_uv=False)[:, -1]
        return terms.reshape(-1, group).max(axis=1) / np.maximum(weakest, TINY)

    # -- the matrix ------------------------------------------------------------------------

    def _search(self, search: Measured, held: Measured) -> _Accepted:
        """The first matrix that fits, from the program or from the factors alone."""
        highest = highest_rank(self.width, len(search) + len(held))
        if self.rank is not None:
            highest = min(highest, self.rank)
        reasons = []
        if self.width <= CONE_LIMIT and len(search) < self.width**2:
            program = least_nuclear_norm(search.left, search.right, search.products)
            details = {"program_gap": program.gap, "program_rank": program.rank}
            left, singular, right = np.linalg.svd(program.matrix)
            rank = min(program.rank, highest)
            start = Factored(left[:, :rank], singular[:rank], right[:rank])
            found = fit(search, start)
            if self._fits(search, held, found):
                how = "the matrix of least nuclear norm with these measurements has it"
                return _Accepted(found, how, details)
            reasons.append(f"the matrix of least nuclear norm has rank {program.rank}")
        for attempt in range(RESTARTS + 1):
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

    def _fits_of_growing_rank(self, search: Measured, highest: int, attempt: int) -> Any:
        if attempt == 0:
            yield from fits_by_rank(search, highest, self.rng)
            return
        chosen = self.rng.random(len(search)) < PART
        for rough in fits_by_rank(search.part(chosen), highest, self.rng):
            yield fit(search, rough.matrix)

    def _fits(self, search: Measured, held: Measured, found: Fit) -> bool:
        return all(self._misfit(part, found.matrix) <= 1.0 for part in (held, search))

    def _misfit(self, measured: Measured, matrix: Factored) -> float:
        """Above one: more than the errors of the measurements, or the tolerance, explain."""
        rest = measured.products - matrix.predict(measured)
        limit = MISFIT * measured.errors
        if self.tolerance > 0:
            limit = np.hypot(limit, self.tolerance * np.sqrt(np.mean(measured.products**2)))
        return float(np.sqrt(np.mean((rest / limit) ** 2)))

    def _trimmed(self, search: Measured, held: Measured, found: Fit) -> Fit:
        """Without singular values that are no larger than their errors."""
        noise = max(float(c.singular[0]) for c in scatter(search, found.matrix, 2, self.rng))
        rank = max(1, int(np.sum(found.matrix.singular > VISIBLE * noise)))
        if rank == found.matrix.rank:
            return found
        lower = fit(search, found.matrix.cut(rank))
        return lower if self._fits(search, held, lower) else found

    # -- the result ------------------------------------------------------------------------

    def _assembled(self, everything: Measured, final: Fit, found: _Accepted) -> Hypothesis:
        matrix, rank = final.matrix, final.matrix.rank
        left, right = self._as_score(matrix.left * matrix.singular), matrix.right
        rest = float(np.sqrt(np.mean((everything.products - matrix.predict(everything)) ** 2)))
        truncation = rest / self.width / (self.pairs.probes.across * self.factor)
        noisy = float(np.sqrt(np.mean(everything.errors**2)))
        if rest <= MISFIT * noisy:
            truncation = 0.0  # nothing but noise is left over
        else:  # what is left over disturbs the fit as noise of its size would
            everything = replace(everything, errors=np.hypot(everything.errors, rest))
        reason = f"{found.how}, {len(everything)} measurements and {held_out(len(everything))} of "
        reason += "them held out"
        return assemble_low_rank(
            self.pairs,
            (np.ascontiguousarray(left), right),
            self._errors(everything, matrix, truncation),
            rank=rank,
            reason=reason,
            singular=Factored.of(left, right, rank).singular,
            truncation=truncation,
            details={"measurements": len(everything), **found.details},
        )

    def _as_score(self, left: Float[Array, "d n"]) -> Float[Array, "d n"]:
        """From the score as the probes see it to the score."""
        plain = replace(self.pairs.probes, basis=DenseBasis(np.eye(self.width)))
        return plain.solve(np.ascontiguousarray(left.T)).T / self.factor

    def _errors(
        self, everything: Measured, matrix: Factored, truncation: float
    ) -> tuple[Array, Array]:
        """Standard errors of rank one with the right root mean square in each row and column."""
        by_row, by_column = np.zeros(self.width), np.zeros(self.width)
        for change in scatter(everything, matrix, DRAWS, self.rng):
            left = self._as_score(change.left * change.singular)
            by_row += np.sum(left**2, axis=1) / DRAWS
            by_column += np.einsum("rd,rs,sd->d", change.right, left.T @ left, change.right) / DRAWS
        by_row += self.width * truncation**2
        by_column += self.width * truncation**2
        total = float(by_row.sum())
        if total > 0:
            by_row /= total
        return np.sqrt(by_row)[:, None], np.sqrt(by_column)[None]
