"""Which faults of the catalogue explain the answers: one alone, one with a value, two together.

Statement: among single faults and pairs, find the hypothesis under which every row's residual is
within the tolerance.
Queries: none beyond those already answered; all of this is simulation.
Algebra: all single faults are simulated on a few short rows, the best on all rows. A free parameter
is refined by Gauss-Newton steps on its logarithm. Pairs are ranked without simulating them: to
first order two faults add, so that |r - d1 - d2| of all pairs follows from the differences d of the
single ones; readouts are exact, since they are computed from kept states. The best are simulated.
When it fails: two large faults of the same group do not add; pairs of the best single faults with
everything are then simulated one by one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.diagnosis.catalogue import MULTIPLIED, Variant, changes_rows
from keyhole.diagnosis.experiment import Experiment, in_order, relative
from keyhole.diagnosis.scores import score
from keyhole.diagnosis.simulate import Hypothesis

SEEN = 0.1  # decades above the tolerance, on average: short rows with less show hardly anything
STEPS = (1e-3, 1e-2, 1e-1)  # of the logarithm of a free parameter, for its slope
STEEP = 4.0  # tolerances that a step should move answers by
GAIN = 0.08  # decades that a single fault must explain to be tried together with all others
EQUAL = 3.0  # two hypotheses whose largest residuals differ by less do the same, within rounding


@dataclass(frozen=True)
class Candidate:
    """A hypothesis with its residuals."""

    hypothesis: Hypothesis
    residuals: Array
    score: float

    @property
    def largest(self) -> float:
        """The residual of the row that it explains worst."""
        return float(np.max(self.residuals))

    def __str__(self) -> str:
        return describe_hypothesis(self.hypothesis)


def describe_hypothesis(hypothesis: Hypothesis) -> str:
    """The faults in words, joined."""
    return ", and ".join(str(v) for v in hypothesis) or "the reference"


@dataclass
class Search:
    """A search over the catalogue.

    Attributes:
        experiment: what was asked and answered.
        variants: all faults and values to try.
        local: faults that one layer may have by itself, tried where those of all layers fail.
        tolerance: the residual up to which a row is explained.
        rows: rows that all hypotheses must explain.
        kept: how many of the best are simulated on all rows.
        beam: how many of the best single faults are tried together with everything.
        paired: how many of the best pairs, by first order, are simulated.
    """

    experiment: Experiment
    variants: list[Variant]
    tolerance: float
    rows: list[int]
    kept: int = 16
    beam: int = 3
    paired: int = 30
    report: Callable[[str], None] = lambda _: None
    local: Sequence[Variant] = ()
    _seen: dict[tuple, Candidate] = field(default_factory=dict)
    _short: list[Candidate] = field(default_factory=list)
    _local: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = [len(self.experiment.rows[n]) for n in self.rows]
        alone = [n for n, k in zip(self.rows, lengths, strict=True) if k <= 6]
        first: dict[bytes, int] = {}
        for n in alone:
            first.setdefault(self.experiment.rows[n].tobytes(), n)
        self.short_rows = list(first.values())[:4] or self.rows[:4]
        if not self.company_matters():
            self.variants = [v for v in self.variants if not v.fault.company or _pads_alone(v)]

    def company_matters(self) -> bool:
        """Whether the suspect answers the same row differently in another call."""
        places: dict[bytes, list[int]] = {}
        for n in self.rows:
            places.setdefault(self.experiment.rows[n].tobytes(), []).append(n)
        answers = self.experiment.answers
        gaps = [
            relative(answers[same[:1]], answers[[other]])[0]
            for same in places.values()
            for other in same[1:]
        ]
        return bool(np.any(np.array(gaps) > self.tolerance))

    # -- one hypothesis ------------------------------------------------------------------------

    def evaluate(self, hypothesis: Sequence[Variant]) -> Candidate:
        """A hypothesis on all rows."""
        ordered = in_order(hypothesis)
        key = tuple(v.key for v in ordered)
        if key not in self._seen:
            residuals = self.experiment.residuals(ordered, self.rows)
            self._seen[key] = Candidate(ordered, residuals, score(residuals, self.tolerance))
        return self._seen[key]

    def evaluate_short(self, hypothesis: Sequence[Variant]) -> Candidate:
        """A hypothesis on the short rows alone."""
        ordered = in_order(hypothesis)
        residuals = self.experiment.residuals(ordered, self.short_rows)
        return Candidate(ordered, residuals, score(residuals, self.tolerance))

    def explains(self, candidate: Candidate) -> bool:
        """Whether every row is within the tolerance."""
        return bool(candidate.largest <= self.tolerance)

    @property
    def candidates(self) -> list[Candidate]:
        """All hypotheses that were tried on all rows, the best first."""
        return sorted(self._seen.values(), key=lambda c: (c.score, len(c.hypothesis)))

    @property
    def explanations(self) -> list[Candidate]:
        """Those that explain every row, the simplest first."""
        good = [c for c in self._seen.values() if self.explains(c)]
        if not good:
            return []
        fewest = min(len(c.hypothesis) for c in good)
        floor = min(c.largest for c in good if len(c.hypothesis) == fewest)
        # of two that do the same: changed rows last, else as the catalogue lists them
        places = {v.key: k for k, v in enumerate(self.variants)}

        def order(candidate: Candidate) -> tuple:
            worse = candidate.largest > EQUAL * floor
            liked = sorted((changes_rows(v), places.get(v.key, -1)) for v in candidate.hypothesis)
            return len(candidate.hypothesis), worse, liked, candidate.score

        return sorted(good, key=order)

    def equals(self, best: Candidate) -> list[Candidate]:
        """Explanations with as few faults as the best that leave no more over."""
        return [
            c
            for c in self.explanations
            if len(c.hypothesis) == len(best.hypothesis)
            and c.largest <= EQUAL * best.largest
            and {v.fault.name for v in c.hypothesis} != {v.fault.name for v in best.hypothesis}
        ]

    # -- one fault -----------------------------------------------------------------------------

    def try_singles(self) -> None:
        """All single faults; those of the readout first, which cost nothing."""
        reference = self.evaluate(())
        self.report("single faults")
        self._short = self._screen(sorted(self.variants, key=lambda v: v.fault.group != "readout"))
        for single in self._families(self._short):
            if not self._explained:
                self.evaluate(self.refine(single.hypothesis))
        if not self._explained:
            self.multiply([reference, *self.candidates[: self.kept]])

    def try_local(self) -> None:
        """Faults that one layer has by itself."""
        self.report("faults of one layer")
        self._local = self._screen(self.local)
        best = [c for c in self.candidates if [v.layer is not None for v in c.hypothesis] == [True]]
        aligned = sorted(self._local, key=lambda c: -self.align(c.hypothesis))
        families = [list(self._families(ranked))[: self.kept // 4] for ranked in (best, aligned)]
        for single in (*families[0], *families[1]):
            if not self._explained:
                self.evaluate(self.refine(single.hypothesis))

    def align(self, hypothesis: Hypothesis) -> float:
        """The cosine, without its sign, between what faults change and what is to be explained:
        large for a fault of the right kind, whatever its value."""
        base = self.experiment.simulate((), self.short_rows)
        rest = self.experiment.answers[self.short_rows] - base
        move = self.experiment.simulate(hypothesis, self.short_rows) - base
        size = float(np.linalg.norm(rest) * np.linalg.norm(move))
        cosine = abs(float(np.sum(rest * move))) / size if size > 0 else 0.0
        return cosine if np.isfinite(cosine) else 0.0

    @property
    def local_directions(self) -> list[Variant]:
        """The faults of single layers that were tried, each family at its best value."""
        fixed = [c for c in self._local if not c.hypothesis[0].fault.refine]
        return [c.hypothesis[0] for c in (*fixed, *self._families(self._local))]

    def _screen(self, variants: Iterable[Variant]) -> list[Candidate]:
        """Tries faults on the short rows and the best on all rows; those of the short rows in the
        order of their scores."""
        short = self.evaluate_short(())
        screened: list[Candidate] = []
        for variant in variants:
            if variant.fault.company or variant.fault.group == "readout":
                self.evaluate((variant,))
            else:
                screened.append(self.evaluate_short((variant,)))
                explains = screened[-1].largest <= self.tolerance < short.largest
                if explains and not variant.fault.refine:
                    self.evaluate((variant,))
            if self._explained:  # the rest could do no better
                return screened
        if short.score <= SEEN:
            for single in screened:  # what the short rows cannot show
                if np.allclose(single.residuals, short.residuals, atol=self.tolerance, rtol=0):
                    self.evaluate(single.hypothesis)
        screened.sort(key=lambda c: c.score)
        for single in screened[: self.kept]:
            self.evaluate(single.hypothesis)
        return screened

    @property
    def _explained(self) -> bool:
        """Whether some faults explain every row."""
        return any(c.hypothesis and self.explains(c) for c in self._seen.values())

    def _families(self, screened: list[Candidate]) -> Iterable[Candidate]:
        """The best value of each fault with a free parameter, in each place."""
        best: dict[tuple[str, int | None], Candidate] = {}
        for single in screened:
            (variant,) = single.hypothesis
            if variant.fault.refine:
                best.setdefault((variant.fault.name, variant.layer), single)
        return best.values()

    def multiply(self, candidates: Iterable[Candidate]) -> None:
        """The same hypotheses with answers multiplied by the factor that fits best."""
        for candidate in list(candidates):
            if any(v.fault is MULTIPLIED for v in candidate.hypothesis):
                continue
            answers = self.experiment.answers[self.rows]
            simulated = self.experiment.simulate(candidate.hypothesis, self.rows)
            size = np.sum(simulated**2)
            if not np.isfinite(size) or size == 0:
                continue
            factor = float(np.sum(answers * simulated) / size)
            if abs(factor - 1) > self.tolerance and factor != 0:
                self.evaluate((*candidate.hypothesis, Variant(MULTIPLIED, factor)))

    def refine(
        self, hypothesis: Hypothesis, rows: list[int] | None = None, steps: int = 12
    ) -> Hypothesis:
        """Gauss-Newton on the logarithms of the free parameters, or a walk over whole numbers."""
        if rows is None:
            company = any(v.fault.company for v in hypothesis)
            rows = self.rows if company else self.short_rows
        for k, v in enumerate(hypothesis):
            if v.fault.refine == "whole":
                hypothesis = self._walk(hypothesis, k)
        free = [k for k, v in enumerate(hypothesis) if v.fault.refine == "log"]
        return self._descend(hypothesis, free, rows, steps) if free else hypothesis

    def _descend(
        self, hypothesis: Hypothesis, free: list[int], rows: list[int], steps: int
    ) -> Hypothesis:
        """Gauss-Newton steps in the logarithms of the free parameters."""
        answers = self.experiment.answers[rows]
        best, current, moves = hypothesis, np.inf, np.zeros(len(free))
        trust = np.log(10.0)
        for _ in range(steps):
            simulated = self.experiment.simulate(hypothesis, rows)
            size = float(np.linalg.norm(relative(answers, simulated)))
            if not np.isfinite(size) or size >= current:  # too far: a part of the same step
                moves = moves / 3
                if np.max(np.abs(moves)) < self.tolerance:
                    break
                hypothesis = _moved_by(best, free, moves)
                continue
            best, current = hypothesis, size
            if size < 0.05 * self.tolerance:
                break
            slopes = [self._slope(hypothesis, k, simulated, rows) for k in free]
            slope = np.stack(slopes, axis=1)
            if not np.all(np.isfinite(slope)) or not np.any(slope):
                break
            moves = np.linalg.lstsq(slope, (answers - simulated).ravel(), rcond=None)[0]
            moves = np.clip(moves, -trust, trust)
            hypothesis = _moved_by(best, free, moves)
        return self._rounded(best, free, rows)

    def _slope(
        self, hypothesis: Hypothesis, place: int, simulated: Array, rows: list[int]
    ) -> Array:
        """How answers move with the logarithm of a free parameter, by the first step that moves
        them well beyond rounding."""
        for step in STEPS:
            moved = self.experiment.simulate(_moved_by(hypothesis, [place], [step]), rows)
            if np.max(relative(simulated, moved)) > STEEP * self.tolerance:
                break
        return ((moved - simulated) / step).ravel()

    def _rounded(self, hypothesis: Hypothesis, free: list[int], rows: list[int]) -> Hypothesis:
        """The same with round numbers, where these do as well."""
        size = float(np.max(self.experiment.residuals(hypothesis, rows)))
        for digits in (1, 2, 3):
            rounded = list(hypothesis)
            for k in free:
                value = float(f"{hypothesis[k].value:.{digits - 1}e}")
                rounded[k] = replace(hypothesis[k], value=value)
            if np.max(self.experiment.residuals(tuple(rounded), rows)) <= max(
                1.2 * size, 0.2 * self.tolerance
            ):
                return tuple(rounded)
        return hypothesis

    def _walk(self, hypothesis: Hypothesis, place: int) -> Hypothesis:
        """The neighbours of a whole number, as long as they are better."""
        best = self.evaluate(hypothesis)
        for direction in (1, -1):
            while True:
                variant = best.hypothesis[place]
                value = variant.value + direction
                if value < 1:
                    break
                changed = list(best.hypothesis)
                changed[place] = replace(variant, value=value)
                tried = self.evaluate(changed)
                if tried.score >= best.score:
                    break
                best = tried
        return best.hypothesis

    # -- two faults ----------------------------------------------------------------------------

    def try_pairs(self) -> None:
        """Pairs, the cheapest first, until one explains everything."""
        for stage in (
            self._pairs_with_company,
            self._pairs_by_first_order,
            self._pairs_with_readout,
            self._pairs_of_the_best,
        ):
            stage()
            if self.explanations:
                return
            for candidate in [c for c in self.candidates if len(c.hypothesis) == 2][: self.beam]:
                if any(v.fault.refine for v in candidate.hypothesis):
                    self.evaluate(self.refine(candidate.hypothesis))
            if self.explanations:
                return

    def _readouts(self) -> list[Variant]:
        return [v for v in self.variants if v.fault.group == "readout"]

    def _pairs_with_readout(self) -> None:
        """A fault of the model and one of the readout: states are there already."""
        self.report("pairs with a readout")
        pairs = [
            self.evaluate_short((single.hypothesis[0], readout))
            for single in self._short
            for readout in self._readouts()
            if not readout.fault.company
        ]
        pairs.sort(key=lambda c: c.score)
        for pair in pairs[: self.kept]:
            self.evaluate(pair.hypothesis)
        readouts = self._readouts()
        company = [v for v in self.variants if v.fault.company and v.fault.group != "readout"]
        for k, readout in enumerate(readouts):
            for other in (*readouts[k + 1 :], *company):
                if other.fault.name != readout.fault.name:
                    self.evaluate((readout, other))
        self.multiply([c for c in self.candidates if len(c.hypothesis) <= 2][: self.kept])

    def _pairs_with_company(self) -> None:
        """A fault of batches, with the best others."""
        self.report("pairs with a fault of batches")
        company = [v for v in self.variants if v.fault.company]
        singles = [c for c in self.candidates if len(c.hypothesis) == 1
                   and not c.hypothesis[0].fault.company]  # fmt: skip
        for single in singles[: self.beam + 1]:
            for variant in company:
                if self.may_complete(single, variant) and self.helps_alone(single, variant):
                    self.evaluate((*single.hypothesis, variant))

    def may_complete(self, single: Candidate, variant: Variant) -> bool:
        """Whether a second fault is silent on all rows that the first explains, and loud on one
        that it does not."""
        base = self.experiment.simulate((), self.rows)
        moved = relative(base, self.experiment.simulate((variant,), self.rows)) > self.tolerance
        explained = single.residuals <= self.tolerance
        return not np.any(moved & explained) and bool(np.any(moved & ~explained))

    def helps_alone(self, single: Candidate, variant: Variant) -> bool:
        """Whether a second fault leaves less over of the first row, which was asked alone, or
        nothing: one pass in place of one for every call."""
        row = self.short_rows[0]
        left = self.experiment.residuals((*single.hypothesis, variant), [row])[0]
        return bool(left <= self.tolerance or left < single.residuals[self.rows.index(row)])

    def _pairs_by_first_order(self) -> None:
        """All pairs of faults of the model, by the sum of what each alone does."""
        self.report("pairs by first order")
        singles = [c.hypothesis[0] for c in self._short]
        refined = [c.hypothesis[0] for c in self.candidates if len(c.hypothesis) == 1
                   and not c.hypothesis[0].fault.company]  # fmt: skip
        known = {v.key for v in singles}
        singles += [v for v in refined if v.key not in known and v.fault.group != "readout"]
        base = self.experiment.simulate((), self.short_rows)
        answers = self.experiment.answers[self.short_rows]
        moves = np.stack([self.experiment.simulate((v,), self.short_rows) - base for v in singles])
        finite = np.all(np.isfinite(moves), axis=(1, 2))
        singles = [v for v, good in zip(singles, finite, strict=True) if good]
        for first, second in best_pairs(answers - base, answers, moves[finite], self.tolerance):
            a, b = singles[first], singles[second]
            if a.fault.name != b.fault.name:
                self._remember_pair((a, b))
                if len(self._pair_queue) >= self.paired:
                    break
        self._evaluate_queue()

    def _pairs_of_the_best(self) -> None:
        """The best single faults together with every other."""
        self.report("pairs of the best")
        limit = self.evaluate(()).score - GAIN
        singles = [c for c in self.candidates if len(c.hypothesis) == 1 and c.score < limit]
        for single in singles[: self.beam]:
            for variant in self.variants:
                if variant.fault.name != single.hypothesis[0].fault.name:
                    self._remember_pair((*single.hypothesis, variant))
        self._evaluate_queue()

    _pair_queue: list[tuple[Variant, ...]] = field(default_factory=list)

    def _remember_pair(self, pair: tuple[Variant, ...]) -> None:
        self._pair_queue.append(pair)

    def _evaluate_queue(self) -> None:
        tried = [self.evaluate_short(pair) for pair in self._pair_queue]
        self._pair_queue.clear()
        tried.sort(key=lambda c: c.score)
        for pair in tried[: self.kept // 2]:
            self.evaluate(pair.hypothesis)

    def try_equals(self, candidate: Candidate) -> None:
        """The same with one fault replaced by one of the readout, which costs nothing: some do the
        same, as a sum over tokens does before normalisation."""
        for variant in candidate.hypothesis:
            rest = tuple(v for v in candidate.hypothesis if v is not variant)
            for readout in self._readouts():
                if readout not in rest and not readout.fault.company:
                    self.evaluate((*rest, readout))

    def prune(self, candidate: Candidate) -> Candidate:
        """The same without faults that are not needed."""
        for variant in candidate.hypothesis:
            without = tuple(v for v in candidate.hypothesis if v is not variant)
            tried = self.evaluate(without)
            if self.explains(tried):
                return self.prune(tried)
        return candidate


def _pads_alone(variant: Variant) -> bool:
    """Whether padding reaches the same length for all short rows: company does not show it."""
    return variant.fault.parameter == "multiple" and variant.value > 8


def _moved_by(hypothesis: Hypothesis, places: Sequence[int], steps: Any) -> Hypothesis:
    """Free parameters multiplied by the exponentials of steps."""
    moved = list(hypothesis)
    for k, step in zip(places, steps, strict=True):
        value = float(hypothesis[k].value * np.exp(step))
        moved[k] = replace(hypothesis[k], value=value)
    return tuple(moved)


def best_pairs(
    rest: Array, answers: Array, moves: Array, tolerance: float
) -> list[tuple[int, int]]:
    """All pairs of single faults, ordered by how much of the rest their sum leaves.

    Args:
        rest: suspect minus reference, (rows, outputs).
        answers: the suspect's, for the unit.
        moves: what each single fault changes, (faults, rows, outputs).
        tolerance: the residual up to which a row is explained.
    """
    size = np.sum(answers**2, axis=1)
    total = np.zeros((len(moves), len(moves)))
    for row in range(len(rest)):
        d = moves[:, row, :]
        gram = d @ d.T
        towards = d @ rest[row]
        alone = np.diag(gram) - 2 * towards
        left = rest[row] @ rest[row] + alone[:, None] + alone[None, :] + 2 * gram
        ratio = np.sqrt(np.maximum(left, 0) / size[row])
        total += np.log10(np.maximum(ratio, tolerance))
    upper = np.triu_indices(len(moves), 1)
    order = np.argsort(total[upper], kind="stable")
    return [(int(upper[0][k]), int(upper[1][k])) for k in order]
