"""Faults of a suspect that computes in bfloat16 or float16.

Statement: as the search in float32, on the reference with rounded weights, with the noise of the
format for a tolerance. Several hypotheses may then explain every row: the one with the smallest
residual is named only if the answers hold the whole difference between it and the reference, and
between it and each rival (an amplitude of one, many standard errors from zero).
Queries: those of the visit; more rows, in rounds, as long as rivals cannot be told apart.
When it fails: what is too small to be seen in the format is listed, not called absent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array
from keyhole.diagnosis.catalogue import Variant
from keyhole.diagnosis.experiment import Experiment
from keyhole.diagnosis.formats import Amplitude, measure_amplitude, measure_noise
from keyhole.diagnosis.search import Candidate, Search
from keyhole.diagnosis.simulate import Hypothesis

RIVALS = 6  # hypotheses next to the best that it must be told apart from
ROUNDS = 3  # times that more rows are asked for


@dataclass
class LowPrecision:
    """The search of a suspect in a format; the bench has the format's weights meanwhile.

    Attributes:
        experiment: rows and answers, simulated with rounded weights.
        variants: faults to try.
        name: of the format.
        ask_more: asks a round of rows; False where the budget forbids it.
        report: says what is being done.
    """

    experiment: Experiment
    variants: list[Variant]
    name: str
    ask_more: Callable[[], bool]
    report: Callable[[str], None]
    equals: list[str] = field(default_factory=list)  # values that the format does not tell apart

    def measure(self) -> None:
        """Noise and tolerance of all rows asked so far."""
        rows = list(range(len(self.experiment.rows)))
        self.format, self.noise = measure_noise(self.experiment, self.name, rows)
        self.search = Search(
            self.experiment, self.variants, self.format.tolerance, rows, report=self.report
        )

    def find(self) -> tuple[Candidate, bool, tuple[str, ...]]:
        """The hypothesis, whether it explains everything, and what cannot be seen."""
        self.measure()
        self.search.try_singles()
        for variant in self.variants:  # the matched filter wants all rows of all faults
            self.search.evaluate((variant,))
        for _ in range(ROUNDS):
            best, clear = self.choose()
            if clear or not self.ask_more():
                break
            self.extend()
        else:
            best, clear = self.choose()
        if clear:
            return best, self.explains(best), self.unseen()
        reference = self.search.evaluate(())
        if self.explains(reference) and not self.amplitude(best.hypothesis, ()).present:
            return reference, True, self.unseen()
        return best, False, ()

    def choose(self) -> tuple[Candidate, bool]:
        """The hypothesis with the smallest residual, and whether answers tell it from others."""
        best = self.ordered(1)[0]
        self.widen(best)
        if not self.explains(best):
            self.search.try_pairs()
            pairs = [c for c in self.ordered(2) if self.explains(c)]
            best = pairs[0] if pairs else best
        if not self.explains(best):
            return best, False
        reference = self.search.evaluate(())
        if not best.hypothesis:  # no fault is even half there
            return best, True
        if self.explains(reference) and not self.amplitude(best.hypothesis, ()).suspected:
            return reference, True
        return best, self.told_apart(best)

    def ordered(self, most: int) -> list[Candidate]:
        """Hypotheses of at most so many faults by weighted residual, the simplest among equals."""
        level = np.maximum(self.format.noise, 1e-12)
        kept = [c for c in self.search.candidates if len(c.hypothesis) <= most]
        return sorted(kept, key=lambda c: float(np.mean(np.minimum(c.residuals / level, 1e6) ** 2)))

    def explains(self, candidate: Candidate) -> bool:
        """Whether every row is within the format's noise."""
        return self.search.explains(candidate)

    def widen(self, candidate: Candidate) -> None:
        """A broken model amplifies noise: the best hypothesis is judged by its own, where that
        explains every row."""
        if self.explains(candidate) or not candidate.hypothesis:
            return
        rows = list(range(len(self.experiment.rows)))
        own, noise = measure_noise(self.experiment, self.name, rows, candidate.hypothesis)
        if candidate.largest <= own.tolerance:
            self.format, self.noise = own, noise
            self.search.tolerance = own.tolerance

    def amplitude(self, hypothesis: Hypothesis, base: Hypothesis) -> Amplitude:
        """How much of the difference between two hypotheses is in the answers."""
        rows = list(range(len(self.experiment.rows)))
        start = self.experiment.simulate(base, rows)
        move = self.experiment.simulate(hypothesis, rows) - start
        rest: Array = self.experiment.answers - start
        scale = np.linalg.norm(start, axis=1)
        return measure_amplitude(rest, move, self.noise, self.format.noise * scale)

    def told_apart(self, best: Candidate) -> bool:
        """Whether every member of a hypothesis is needed, and no rival does as well."""
        for variant in best.hypothesis:
            without = tuple(v for v in best.hypothesis if v is not variant)
            if not self.amplitude(best.hypothesis, without).present:
                return False
        names = {str(v.fault) for v in best.hypothesis}
        self.equals = []
        for rival in self.ordered(len(best.hypothesis))[: 2 * RIVALS]:
            if rival is best or not rival.hypothesis:
                continue
            amplitude = self.amplitude(best.hypothesis, rival.hypothesis)
            same_fault = {str(v.fault) for v in rival.hypothesis} == names
            if same_fault and (_free(rival.hypothesis) or not amplitude.visible):
                if not _free(rival.hypothesis) and self.explains(rival):
                    self.equals.append(str(rival))
            elif not amplitude.suspected:
                return False
        return True

    def extend(self) -> None:
        """Takes new rows into account: the best hypotheses are tried on them."""
        best = [c.hypothesis for c in self.ordered(2)[: 3 * RIVALS]]
        self.measure()
        for hypothesis in ((), *best):
            refined = self.search.refine(hypothesis) if _free(hypothesis) else hypothesis
            self.search.evaluate(hypothesis)
            self.search.evaluate(refined)

    def unseen(self) -> tuple[str, ...]:
        """Faults that the format would hide if they were there."""
        hidden = []
        for variant in self.variants:
            rows = list(range(len(self.experiment.rows)))
            known = [c for c in self.search.candidates if c.hypothesis == (variant,)]
            if known and len(known[0].residuals) == len(rows):
                amplitude = self.amplitude((variant,), ())
                if np.isfinite(amplitude.error) and not amplitude.visible:
                    hidden.append(str(variant))
        return tuple(hidden)


def _free(hypothesis: Hypothesis) -> bool:
    return any(v.fault.refine for v in hypothesis)
