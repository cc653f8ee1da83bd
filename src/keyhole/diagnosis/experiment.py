"""What was asked, what the suspect answered, and what hypotheses would have answered.

The residual of a row under a hypothesis is |suspect - simulated| / |suspect|. Simulated answers do
not depend on the suspect: hidden states are kept for each set of faults and row, and every readout
is computed from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.diagnosis.catalogue import GROUPS, Variant
from keyhole.diagnosis.probes import Call
from keyhole.diagnosis.simulate import PACKED_TOKENS, Bench, Hypothesis, Row, States, read_states

Key = tuple[Any, ...]


@dataclass
class Experiment:
    """Calls with answers, beside a bench that simulates them."""

    bench: Bench
    calls: list[Call] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    call_of: list[int] = field(default_factory=list)
    _answers: list[Array] = field(default_factory=list)
    _states: dict[Key, list[tuple[list[int], States]]] = field(default_factory=dict)
    _layers: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)

    def add(self, call: Call, answers: Array) -> list[int]:
        """Records a call; the numbers of its rows."""
        first = len(self.rows)
        self.calls.append(call)
        self.rows += call.rows
        self.call_of += [len(self.calls) - 1] * len(call.rows)
        self._answers += list(answers)
        return list(range(first, len(self.rows)))

    @property
    def answers(self) -> Array:
        """All answers of the suspect, (rows, outputs)."""
        return np.stack(self._answers)

    def simulate(self, hypothesis: Hypothesis, rows: Sequence[int] | None = None) -> Array:
        """What a suspect with these faults would have answered to some rows (all by default); rows
        of NaN where it would have no answer."""
        wanted = list(range(len(self.rows)) if rows is None else rows)
        hypothesis = in_order(hypothesis)
        trunk = tuple(v for v in hypothesis if v.fault.group != "readout")
        company = any(v.fault.company for v in hypothesis)
        blocks = self._blocks(trunk, company, wanted)
        with self.bench.applied(tuple(v for v in hypothesis if v.fault.group == "readout")) as read:
            readout = read.readout
        outputs = self._answers[0].shape[0]
        simulated = np.full((len(self.rows), outputs), np.nan)
        need = set(wanted)
        for numbers, states in blocks:
            if need.intersection(numbers):
                answers = read_states(states, readout)
                if answers.shape[1] == outputs:
                    simulated[numbers] = answers
        return simulated[wanted]

    def _blocks(
        self, trunk: Hypothesis, company: bool, wanted: list[int]
    ) -> list[tuple[list[int], States]]:
        key = (company, *(v.key for v in trunk))
        blocks = self._states.setdefault(key, [])
        known = {n for numbers, _ in blocks for n in numbers}
        missing = [n for n in wanted if n not in known]
        if missing:
            passes = self._passes(missing, company)
            first = min((v.begins for v in trunk), default=0)
            kept = [self._answers_of_layers(numbers, first) for numbers in passes]
            with self.bench.applied(trunk):
                for numbers, before in zip(passes, kept, strict=True):
                    rows = [self.rows[n] for n in numbers]
                    try:
                        states = self.bench.run_from(first, before, rows)
                    except (IndexError, RuntimeError):  # tokens or lengths it has no place for
                        continue
                    blocks.append((numbers, states))
        return blocks

    def _answers_of_layers(self, numbers: list[int], first: int) -> list[Any]:
        """What the reference's layers answer to rows that run together; nothing where no layer
        before the first that differs needs it."""
        if first == 0:
            return []
        key = tuple(numbers)
        if key not in self._layers:
            _, kept = self.bench.run_and_keep([self.rows[n] for n in numbers])
            once = len(kept) == len(self.bench.anatomy.layers)  # ALBERT runs one many times
            self._layers[key] = kept if once else []
        return self._layers[key]

    def _passes(self, missing: list[int], company: bool) -> list[list[int]]:
        """Rows that are run together: those of a call, or as many as pack well."""
        if company or not self.bench.reference.tokens:
            calls = sorted({self.call_of[n] for n in missing})
            return [[n for n, c in enumerate(self.call_of) if c == call] for call in calls]
        packs: list[list[int]] = []
        for n in sorted(missing, key=lambda n: len(self.rows[n])):
            length = len(self.rows[n])
            if packs and (len(packs[-1]) + 1) * length <= PACKED_TOKENS:
                packs[-1].append(n)
            else:
                packs.append([n])
        return packs

    def residuals(self, hypothesis: Hypothesis, rows: Sequence[int] | None = None) -> Array:
        """|suspect - simulated| / |suspect| of each row; infinite where there is no answer."""
        wanted = list(range(len(self.rows)) if rows is None else rows)
        return relative(self.answers[wanted], self.simulate(hypothesis, wanted))

    def forget(self) -> None:
        """Drops all kept states."""
        self._states.clear()
        self._layers.clear()


def relative(answers: Array, simulated: Array) -> Array:
    """Row by row, the difference in units of the answer's size."""
    size = np.linalg.norm(answers, axis=1)
    gap = np.linalg.norm(answers - simulated, axis=1)
    size = np.where(size > 0, size, 1.0)
    return np.where(np.isfinite(gap), gap / size, np.inf)


def in_order(hypothesis: Sequence[Variant]) -> Hypothesis:
    """The variants in the order in which they are applied."""
    return tuple(sorted(hypothesis, key=lambda v: (GROUPS.index(v.fault.group), v.key)))


def double_floor(experiment: Experiment, hypothesis: Hypothesis, rows: Sequence[int]) -> float:
    """The rounding of float32 under a hypothesis: the largest difference of a row from float64."""
    from keyhole.diagnosis.scores import rounding_floor

    single = experiment.simulate(hypothesis, rows)
    model = experiment.bench.model
    exact = Experiment(experiment.bench)
    for call, start in _calls_of(experiment, rows):
        exact.add(call, experiment.answers[start : start + len(call.rows)])
    numbers = [n for call, start in _calls_of(experiment, rows)
               for n in range(start, start + len(call.rows))]  # fmt: skip
    model.double()
    try:
        double = exact.simulate(hypothesis)
    finally:
        model.float()
    chosen = [numbers.index(n) for n in rows]
    return rounding_floor(single, double[chosen])


def measure_chaos(
    experiment: Experiment, hypothesis: Hypothesis, rows: Sequence[int], repeats: int = 3
) -> float:
    """How far answers under a hypothesis move where the last digit of every weight does: the
    largest relative move of a row."""
    import torch

    calls = _calls_of(experiment, rows)
    numbers = [n for call, start in calls for n in range(start, start + len(call.rows))]
    plain = experiment.simulate(hypothesis, numbers)
    parameters = list(experiment.bench.model.parameters())
    kept = [p.data for p in parameters]
    generator = torch.Generator().manual_seed(0)
    moves = []
    for _ in range(repeats):
        again = Experiment(experiment.bench)
        for call, start in calls:
            again.add(call, experiment.answers[start : start + len(call.rows)])
        try:
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data = parameter.data * (1 + torch.finfo(torch.float32).eps * noise)
            moves.append(relative(plain, again.simulate(hypothesis)))
        finally:
            for parameter, data in zip(parameters, kept, strict=True):
                parameter.data = data
    return float(np.max(moves))


def _calls_of(experiment: Experiment, rows: Sequence[int]) -> list[tuple[Call, int]]:
    wanted = {experiment.call_of[n] for n in rows}
    return [(experiment.calls[c], experiment.call_of.index(c)) for c in sorted(wanted)]
