"""keyhole.doctor: what differs between a reference with known weights and a suspect.

Statement: the same, within the number format? If not, which faults of the catalogue explain every
answer, on fresh queries as well? If none does, where is the change?
Queries: thirteen rows that every visit begins with, one or two long rows, three fresh rows to
confirm what was named; more where lengths are bisected, formats hide faults or weights moved.
Algebra: see search (named faults), formats (number formats), localise (changes of weights).
When it fails: a fault that is in no catalogue and is no change of weights is placed near a layer,
and the sentence says so.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.diagnosis.catalogue import (
    CUT,
    CUT_INSIDE,
    CUT_LEFT,
    LONG_WINDOW,
    Variant,
    attends,
    is_chaotic,
    local_variants,
    variants,
)
from keyhole.diagnosis.experiment import Experiment, double_floor, measure_chaos
from keyhole.diagnosis.formats import SPREAD, computing_in, find_format, measure_noise
from keyhole.diagnosis.localise import Change, locate
from keyhole.diagnosis.low_precision import LowPrecision
from keyhole.diagnosis.low_rank_update import contenders, with_rank
from keyhole.diagnosis.probes import Call, RowMaker, first_calls, fresh_calls, long_lengths
from keyhole.diagnosis.reference import Reference, open_reference
from keyhole.diagnosis.resemblance import Resemblance, find_resemblance
from keyhole.diagnosis.result import Cause, Diagnosis, ProbeEvidence, Ranked
from keyhole.diagnosis.scores import FLOORS, Tolerance, read_digits
from keyhole.diagnosis.search import Candidate, Search
from keyhole.diagnosis.simulate import Bench, Hypothesis, read_states
from keyhole.diagnosis.suspects import Counted, open_suspect

FINGERPRINTED = 5  # hypotheses whose residuals are looked at for a number format
UNSEEN = 6  # faults that are listed as hidden by a format
LOCATING = 24  # rows that a change of weights is located by
SOLVING = 36  # rows more for the rank and the numbers of an update, at first
ENOUGH = 120  # rows, after which an update that says nothing about rows left out is none
DIRECTIONS = 12  # of the answers, along which gradients are taken
MIDDLE = 15  # tokens: shorter rows are cheap, and there are enough of them to place a difference
RESERVE = 8  # rows kept for long ones and for confirming
EXACT = 3  # rows that a chaotic hypothesis must explain down to rounding; a wrong one explains none
REPEATS = 6  # of a row that is answered differently each time
DROPOUT_RATIO = 2.5  # between the spread seen and that of the simulated dropout, at most


@dataclass(frozen=True)
class Step:
    """What a progress callback is given: the stage, and rows asked so far."""

    stage: str
    asked: int
    expected: int | None = None
    at_most: int | None = None
    seconds: float = 0.0
    under_way: int = 0
    note: str = ""


Progress = Callable[[Step], None]


def doctor(
    reference: Any,
    suspect: Any,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    budget: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> Diagnosis:
    """Says what is wrong with a suspect that should answer as a reference does.

    Args:
        reference: `hf:FOLDER` (pooling and normalisation are read from modules.json where there is
            one) or a torch module.
        suspect: whatever can be asked: a callable (tokens, attention_mask=None) -> (rows, outputs)
            on integer arrays padded at the end, a module, the URL of an embedding endpoint; for
            modules on vectors, whatever `keyhole.open_oracle` opens.
        pooling: "mean", "cls", "last", "max", "sqrt" or "pooler", where the folder does not state
            it.
        normalize: whether answers have length one, where the folder does not state it.
        budget: rows that may be asked.
        seed: the same seed asks the same rows.
        progress: called with a `Step`: the stage and the number of rows asked so far.

    Returns:
        The diagnosis; `str()` of it is one sentence.

    Raises:
        InvalidArgument: reference or suspect is nothing that can be compared.
        OracleError: the suspect failed.
        BudgetExhausted: the budget is too small for a first look.

    Example:
        >>> diagnosis = keyhole.doctor("hf:model", "http://host/embed")  # doctest: +SKIP
        >>> print(diagnosis)  # doctest: +SKIP
        The suspect differs: the attention mask is ignored; this explains all of 18 queries …
    """
    known = open_reference(reference, pooling, normalize)
    opened = open_suspect(suspect, known)
    try:
        return Visit(known, Counted(opened, budget), seed, progress).examine()
    finally:
        if isinstance(suspect, str) and hasattr(opened, "close"):  # what was opened here
            opened.close()


@dataclass(frozen=True)
class Finding:
    """What the search came to: a hypothesis, and whether it explains everything."""

    candidate: Candidate
    whole: bool


class Visit:
    """One visit: the rows asked so far, and the stages in their order."""

    def __init__(
        self, reference: Reference, suspect: Counted, seed: int, progress: Progress | None
    ) -> None:
        self.reference = reference
        self.suspect = suspect
        self.progress = progress
        self.bench = Bench(reference)
        texts = getattr(suspect.suspect, "words", None)
        self.maker = RowMaker(reference, np.random.default_rng([seed, 15]), texts)
        self.experiment = Experiment(self.bench)
        self.notes: list[str] = []
        self.started = time.monotonic()
        self.low: LowPrecision | None = None
        self.change: Change | None = None
        self.resemblance: Resemblance | None = None

    def report(self, stage: str) -> None:
        """Says what is being done."""
        if self.progress is not None:
            seconds = time.monotonic() - self.started
            self.progress(Step(stage, self.suspect.asked, None, self.suspect.budget, seconds))

    def ask(self, call: Call) -> list[int]:
        """Asks a call and records it; the numbers of its rows."""
        answers = self.suspect.ask(call.rows)
        return self.experiment.add(call, answers)

    # -- the stages ----------------------------------------------------------------------------

    def examine(self) -> Diagnosis:
        """All stages."""
        self.report("asking")
        rows = [n for call in first_calls(self.maker) for n in self.ask(call)]
        self.tolerance = self.measure_tolerance(rows)
        search = Search(
            self.experiment,
            variants(self.reference),
            self.tolerance.value,
            rows,
            report=self.report,
            local=local_variants(self.reference),
        )
        reference = search.evaluate(())
        if search.explains(reference):
            long = self.ask_long()
            if self.explained((), long):
                return self.conclude(search, reference, True)
            cut = self.look_at_long_rows(search, Finding(reference, True))
            return self.conclude(search, cut.candidate, cut.whole)
        if self.is_unsteady(rows):
            return self.conclude_unsteady(search, rows)
        finding, kind = self.find(search)
        if kind is not None:
            return self.examine_in_format(kind)
        if not finding.whole and self.reference.tokens:
            self.resemblance = self.find_resemblance(search)
            self.change = None if self.resemblance else self.locate_change()
        finding = self.look_at_long_rows(search, finding)
        return self.conclude(search, finding.candidate, finding.whole)

    def find_resemblance(self, search: Search) -> Resemblance | None:
        """The layer whose faults the difference resembles, by the rows of the first calls."""
        self.report("placing the difference")
        first: dict[bytes, int] = {}
        for n in search.rows:
            if len(self.experiment.rows[n]) < MIDDLE:
                first.setdefault(self.experiment.rows[n].tobytes(), n)
        rows = list(first.values())
        return find_resemblance(
            self.experiment, search.local_directions, rows, self.tolerance.value
        )

    def locate_change(self) -> Change | None:
        """Where weights moved, from rows of a few tokens each, alone."""
        if not any(True for _ in self.reference.anatomy.projections):
            return None
        count = min(LOCATING, self.suspect.budget - self.suspect.asked - RESERVE)
        if count < LOCATING // 2:
            self.notes.append("The budget is too small to look for the place of the change.")
            return None
        self.report("locating the change")
        rows = self.ask_alone(count, "locating")
        rng = np.random.default_rng(0)
        floor = self.tolerance.floor
        change: Change = locate(self.experiment, rows, floor, DIRECTIONS, rng)
        promising = bool(contenders(self.experiment, change))
        while promising and (left := self.suspect.budget - self.suspect.asked - RESERVE) > 0:
            rows += self.ask_alone(min(left, max(SOLVING, len(rows))), "solving")
            self.report("solving for the change")
            solved = with_rank(self.experiment, rows, change, floor, rng)
            if solved.determined:
                return solved.change
            promising = solved.promising or len(rows) < ENOUGH
        return change

    def ask_alone(self, count: int, purpose: str) -> list[int]:
        """Rows of a few tokens each, alone."""
        return [n for k in range(count)
                for n in self.ask(Call((self.maker.make(4 + k % 9),), purpose))]  # fmt: skip

    def measure_tolerance(self, rows: list[int]) -> Tolerance:
        """From the reference's own rounding and the digits that were sent."""
        kind, digits = read_digits(self.experiment.answers)
        short = [n for n in rows if len(self.experiment.rows[n]) <= 20]
        return Tolerance(double_floor(self.experiment, (), short), digits, kind)

    def find(self, search: Search) -> tuple[Finding, str | None]:
        """Named faults: one, then two, then one of a single layer; or the number format under which
        to look again."""
        for stage in (search.try_singles, search.try_pairs, search.try_local):
            stage()
            if not search.explanations:
                if (chaotic := self.accept_chaotic(search)) is not None:
                    return Finding(chaotic, True), None
                self.accept_with_own_floor(search)
            if search.explanations:
                search.try_equals(search.prune(search.explanations[0]))
                best = search.prune(search.explanations[0])
                equal = [str(c) for c in search.equals(best)][:UNSEEN]
                if equal:
                    self.notes.append(f"No row asked tells this from: {'; or '.join(equal)}.")
                return Finding(best, True), None
            hypotheses = [c.hypothesis for c in search.candidates[:FINGERPRINTED]]
            for hypothesis in ((), *(h for h in hypotheses if not is_chaotic(h))):
                name = find_format(self.experiment, hypothesis, search.rows)
                if name is not None:
                    return Finding(search.candidates[0], False), name
        return Finding(search.candidates[0], False), None

    def examine_in_format(self, name: str) -> Diagnosis:
        """The rest of a visit to a suspect that computes in a format of sixteen bits."""
        self.report(f"looking again in {name}")
        with computing_in(self.bench, name, compute=False):
            self.experiment.forget()
            low = LowPrecision(
                self.experiment,
                [v for v in variants(self.reference) if not v.fault.chaotic],
                name,
                self.ask_more,
                self.report,
            )
            candidate, whole, unseen = low.find()
            self.low, search = low, low.search
            self.tolerance = Tolerance(low.format.tolerance / FLOORS, self.tolerance.digits, name)
            if unseen and not candidate.hypothesis:
                shown = "; ".join(unseen[:UNSEEN]) + (" …" if len(unseen) > UNSEEN else "")
                self.notes.append(f"Too small to see in {name}: {shown}.")
            if whole and low.equals:
                self.notes.append(f"Not told apart in {name}: {'; '.join(low.equals)}.")
            finding = Finding(candidate, whole)
            if whole:
                finding = self.look_at_long_rows(search, finding)
            diagnosis = self.conclude(search, finding.candidate, finding.whole)
            self.experiment.forget()
        return diagnosis

    def ask_more(self) -> bool:
        """A round of rows for what noise hides; False where the budget forbids it."""
        calls = [*first_calls(self.maker)[2:], *fresh_calls(self.maker)]
        if self.suspect.asked + sum(len(c.rows) for c in calls) + RESERVE > self.suspect.budget:
            return False
        self.report("asking more")
        for call in calls:
            self.ask(call)
        return True

    def is_unsteady(self, rows: list[int]) -> bool:
        """Whether the same row, asked twice, was answered differently."""
        first, second = self.experiment.answers[rows[0]], self.experiment.answers[rows[1]]
        gap = np.linalg.norm(first - second) / np.linalg.norm(first)
        return bool(gap > self.tolerance.value)

    def conclude_unsteady(self, search: Search, rows: list[int]) -> Diagnosis:
        """A suspect that changes its mind: dropout where the spread is that of dropout."""
        row = self.experiment.rows[rows[0]]
        again = [n for _ in range(REPEATS) for n in self.ask(Call((row,), "the same row again"))]
        answers = self.experiment.answers[[rows[0], rows[1], *again]]
        size = float(np.linalg.norm(answers.mean(0)))
        spread = float(np.linalg.norm(answers.std(0, ddof=1))) / size
        simulated = self.simulate_dropout(row, len(answers))
        named: tuple[Cause, ...] = ()
        if simulated is not None:
            expected = float(np.linalg.norm(simulated.std(0, ddof=1))) / size
            center = np.linalg.norm(answers.mean(0) - simulated.mean(0)) / size
            near = expected / DROPOUT_RATIO < spread < expected * DROPOUT_RATIO
            if near and center < 2 * expected:
                decades = float(np.log10(spread / self.tolerance.value))
                advice = "put the model into evaluation mode: model.eval()"
                name = "dropout is active"
                named = (Cause(name, None, "input", spread, decades, "a part", advice),)
        everything = list(range(len(self.experiment.rows)))
        without = self.experiment.residuals((), everything)
        return Diagnosis(
            same=False,
            causes=named,
            evidence=self.evidence((), without, without),
            ranking=self.ranking(search),
            tolerance=self.tolerance.value,
            queries=self.suspect.asked,
            format=self.tolerance.format,
            difference=float(np.max(without)),
            left_over=float(np.max(without)),
            suspicion=f"the same row is answered differently each time, by {spread:.0e}",
            notes=tuple(self.notes),
        )

    def simulate_dropout(self, row: Any, count: int) -> Array | None:
        """Answers of the reference in training mode; None where it has no dropout."""
        import torch

        config = self.reference.anatomy.config
        names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout",
                 "resid_pdrop", "embd_pdrop")  # fmt: skip
        if not any(getattr(config, name, 0) for name in names):
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.bench.model.train()
            try:
                simulated = [read_states(self.bench.run([row]), self.bench.readout)[0]
                             for _ in range(count)]  # fmt: skip
            finally:
                self.bench.model.eval()
        return np.stack(simulated)

    def accept_with_own_floor(self, search: Search) -> None:
        """A broken model amplifies rounding: the best hypothesis is judged by its own floor."""
        for best in search.candidates[:2]:
            if not best.hypothesis or best.largest > 100 * self.tolerance.value:
                continue
            floor = double_floor(self.experiment, best.hypothesis, search.rows)
            wider = self.tolerance.with_floor(floor)
            if best.largest <= wider.value:
                self.tolerance = wider
                search.tolerance = wider.value
                return

    def accept_chaotic(self, search: Search) -> Candidate | None:
        """A hypothesis under which some rows agree down to rounding, as they do under no other, and
        the rest moves no further than the last digit of the weights moves it."""
        for best in search.candidates[:2]:
            exact = best.residuals <= self.tolerance.value
            agreeing = [self.experiment.rows[n] for n in np.array(search.rows)[exact]]
            different = {row.tobytes() for row in agreeing}
            if not is_chaotic(best.hypothesis) or len(different) < EXACT:
                continue
            chaos = measure_chaos(self.experiment, best.hypothesis, search.rows)
            if best.largest <= SPREAD * chaos:
                self.tolerance = replace(self.tolerance, floor=SPREAD * chaos / FLOORS)
                search.tolerance = self.tolerance.value
                self.notes.append(
                    f"{np.sum(exact)} of {len(exact)} rows agree down to rounding. The others do "
                    f"not, as is to be expected: a change of the last digit of the weights moves "
                    f"answers of such a suspect by {chaos:.0e}."
                )
                return best
        return None

    def ask_long(self) -> list[int]:
        """Long rows, each alone."""
        self.report("long rows")
        return [
            n
            for length in long_lengths(self.reference)
            for n in self.ask(Call((self.maker.make(length),), f"{length} tokens"))
        ]

    def explained(self, hypothesis: Hypothesis, rows: list[int]) -> bool:
        """Whether rows are within the tolerance, with a floor of their own for long ones."""
        if not rows:
            return True
        residuals = self.experiment.residuals(hypothesis, rows)
        if np.all(residuals <= self.tolerance.value):
            return True
        if is_chaotic(hypothesis):
            chaos = measure_chaos(self.experiment, hypothesis, rows)
            return bool(np.all(residuals <= SPREAD * chaos))
        if np.any(residuals > 100 * self.tolerance.value):
            return False
        if self.low is not None:
            wider, _ = measure_noise(self.experiment, self.low.name, rows, hypothesis)
            return bool(np.all(residuals <= max(wider.tolerance, self.tolerance.value)))
        floor = double_floor(self.experiment, hypothesis, rows)
        return bool(np.all(residuals <= self.tolerance.with_floor(floor).value))

    def look_at_long_rows(self, search: Search, finding: Finding) -> Finding:
        """Long rows under what was found; where they disagree, the length is bisected."""
        if not finding.whole:
            return finding
        hypothesis = finding.candidate.hypothesis
        long = [n for n in range(len(self.experiment.rows)) if n not in search.rows]
        long = long or self.ask_long()
        if self.explained(hypothesis, long):
            return Finding(search.evaluate(hypothesis), True)
        if any(v.fault.refine for v in hypothesis):  # long rows see a parameter more exactly
            short = [n for n in range(len(self.experiment.rows)) if n not in long]
            again = search.refine(hypothesis, [*short[-3:], *long])
            if self.explained(again, long):
                return Finding(search.evaluate(again), True)
        length = self.bisect(hypothesis, long)
        faults = [CUT, CUT_INSIDE, CUT_LEFT, *([LONG_WINDOW] if attends(self.reference) else [])]
        everything = list(range(len(self.experiment.rows)))
        search.rows = everything
        search._seen.clear()
        for fault in faults:
            for value in (length, length - 1, length + 1):
                tried = search.evaluate((*hypothesis, Variant(fault, value)))
                if self.explained(tried.hypothesis, everything):
                    return Finding(tried, True)
        return Finding(search.evaluate(hypothesis), False)

    def bisect(self, hypothesis: Hypothesis, long: list[int]) -> int:
        """The longest length at which rows are still explained."""
        self.report("bisecting the length")
        bad = [n for n in long if not self.explained(hypothesis, [n])]
        high = min(len(self.experiment.rows[n]) for n in bad)
        good = [len(row) for n, row in enumerate(self.experiment.rows)
                if n not in bad and len(row) < high]  # fmt: skip
        low = max(good, default=1)
        while high - low > 1:
            middle = (low + high) // 2
            rows = self.ask(Call((self.maker.make(middle),), f"{middle} tokens"))
            if self.explained(hypothesis, rows):
                low = middle
            else:
                high = middle
        return low

    # -- the end -------------------------------------------------------------------------------

    def conclude(self, search: Search, candidate: Candidate, whole: bool) -> Diagnosis:
        """Confirms on fresh rows and says what was found."""
        hypothesis = candidate.hypothesis
        if hypothesis and whole:
            self.report("confirming")
            fresh = [n for call in fresh_calls(self.maker) for n in self.ask(call)]
            whole = self.explained(hypothesis, fresh)
        everything = list(range(len(self.experiment.rows)))
        without = self.experiment.residuals((), everything)
        left = self.experiment.residuals(hypothesis, everything)
        same = whole and not hypothesis
        named = hypothesis if whole else ()
        place = self.resemblance or self.change
        return Diagnosis(
            same=same,
            causes=tuple(self.cause(v, named, left) for v in named),
            evidence=() if same else self.evidence(hypothesis, without, left),
            ranking=self.ranking(search),
            tolerance=self.tolerance.value,
            queries=self.suspect.asked,
            format=self.tolerance.format,
            difference=float(np.max(without)),
            left_over=float(np.max(left)),
            suspicion="" if whole or place is None else place.describe(),
            notes=tuple(self.notes),
            change=None if whole else self.change,
            layer=None if whole or place is None else place.layer,
        )

    def cause(self, variant: Variant, named: Hypothesis, left: Array) -> Cause:
        """A variant as it is told: its size alone, and how much worse it is without it."""
        rest = tuple(v for v in named if v is not variant)
        without = self.experiment.residuals(rest)
        floor = np.maximum(left, 1e-12)
        certainty = float(np.max(np.log10(np.maximum(without, floor) / floor)))
        alone = self.experiment.simulate((variant,))
        base = self.experiment.simulate(())
        size = np.linalg.norm(alone - base, axis=1) / np.linalg.norm(base, axis=1)
        fault = variant.fault
        place = fault.place(self.reference, variant.value) or fault.group
        if variant.layer is not None:
            place = self.reference.anatomy.layers[variant.layer].name
        return Cause(
            str(variant),
            variant.value,
            place,
            float(np.nanmax(size)),
            certainty,
            "everything",
            fault.advice,
        )

    def evidence(
        self, hypothesis: Hypothesis, without: Array, left: Array
    ) -> tuple[ProbeEvidence, ...]:
        """The three calls on which suspect and reference differ most."""
        base = self.experiment.simulate(())
        chosen: list[int] = []
        for n in np.argsort(-without, kind="stable"):
            if self.experiment.call_of[n] not in [self.experiment.call_of[m] for m in chosen]:
                chosen.append(int(n))
        return tuple(
            ProbeEvidence(
                call.purpose,
                call.rows,
                n - self.experiment.call_of.index(self.experiment.call_of[n]),
                base[n],
                self.experiment.answers[n],
                float(without[n]),
                float(left[n]),
            )
            for n in chosen[:3]
            for call in [self.experiment.calls[self.experiment.call_of[n]]]
        )

    def ranking(self, search: Search) -> tuple[Ranked, ...]:
        """The best hypotheses and the reference itself."""
        best = search.candidates[:8]
        if all(c.hypothesis for c in best):
            best.append(search.evaluate(()))
        return tuple(Ranked(tuple(str(v) for v in c.hypothesis), c.largest, c.score) for c in best)
