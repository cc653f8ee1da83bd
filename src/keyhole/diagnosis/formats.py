"""Which number format a suspect computes in, and which faults that format still lets one see.

Statement: every engine that computes in bfloat16 or float16 shares the rounded weights, whatever
the order of its sums. What rounding the weights does to the reference's answers is a fingerprint:
it is found in the suspect's residual, with a correlation of 0.3 to 0.6, and in no fault's.
Algebra: fingerprint = mean over rows of corr(s - p, p[rounded weights] - p), with its standard
error over rows. Noise: what computing in the format does on top of rounded weights, simulated once.
A fault that is smaller than the noise is found by a matched filter: its amplitude
a = <s - p, p_h - p> / |p_h - p|^2, rows weighted by their noise, is 1 where it is there and 0 where
it is not; the standard error is that of a jackknife over rows, and of what simulated noise gives.
When it fails: a fault whose amplitude has a standard error above a sixth cannot be seen in the
format; it is listed, not called absent.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array
from keyhole.diagnosis.catalogue import Fault, Variant
from keyhole.diagnosis.experiment import Experiment
from keyhole.diagnosis.simulate import Bench, Hypothesis

FORMATS = ("bfloat16", "float16")
SIGNIFICANT = 5.0  # standard errors: one wrong decision in a million
FINGERPRINT = 0.15  # below the weakest of honest engines (0.31), above any fault's (0.1)
SPREAD = 3.0  # an engine that rounds more often than the simulation has up to so much more noise


def _round_all(bench: Bench, name: str) -> None:
    import torch

    kind = getattr(torch, name)
    for parameter in bench.model.parameters():
        data = bench.edit(parameter)
        data.copy_(data.to(kind).to(data.dtype))


ROUNDED = Fault(
    "weights are rounded to {}", "number format", _round_all, "any row", "", parameter="format"
)


@dataclass(frozen=True, eq=False)
class Format:
    """A number format, and the noise that computing in it makes."""

    name: str
    noise: Array  # (rows,): relative to the answer

    @property
    def tolerance(self) -> float:
        """The residual up to which a row is explained in this format."""
        return float(SPREAD * np.max(self.noise))


def measure_fingerprint(
    experiment: Experiment, hypothesis: Hypothesis, name: str, rows: Sequence[int]
) -> tuple[float, float]:
    """Correlation of the residual with what rounded weights do, and its standard error."""
    answers = experiment.answers[list(rows)]
    plain = experiment.simulate(hypothesis, rows)
    rounded = experiment.simulate((*hypothesis, Variant(ROUNDED, name)), rows)
    rest, mark = answers - plain, rounded - plain
    size = np.linalg.norm(rest, axis=1) * np.linalg.norm(mark, axis=1)
    if not np.all(np.isfinite(size)) or not np.all(size > 0):
        return 0.0, 1.0
    each = np.sum(rest * mark, axis=1) / size
    return float(np.mean(each)), float(np.std(each) / np.sqrt(len(each)))


def find_format(experiment: Experiment, hypothesis: Hypothesis, rows: Sequence[int]) -> str | None:
    """The format whose fingerprint the residual under a hypothesis carries, at a size that
    computing in it explains; None where there is none."""
    plain = experiment.simulate(hypothesis, rows)
    rest = np.linalg.norm(experiment.answers[list(rows)] - plain, axis=1)
    found: dict[str, float] = {}
    for name in FORMATS:
        correlation, error = measure_fingerprint(experiment, hypothesis, name, rows)
        if correlation < max(FINGERPRINT, SIGNIFICANT * error / 2):
            continue
        rounded = experiment.simulate((*hypothesis, Variant(ROUNDED, name)), rows)
        ratio = rest / np.linalg.norm(rounded - plain, axis=1)
        # rounded weights are at least a part of it; rounding in between is the rest
        if 0.5 < np.median(ratio) < 8 and np.max(ratio) < 30:
            found[name] = correlation
    return max(found, key=lambda name: found[name]) if found else None


@contextlib.contextmanager
def computing_in(bench: Bench, name: str, compute: bool) -> Iterator[None]:
    """While this lasts, the model has weights of a format, and where `compute` says so, computes in
    it; otherwise it computes in float32."""
    import torch

    kind = getattr(torch, name)
    tensors = [t for t in (*bench.model.parameters(), *_buffers(bench)) if t.is_floating_point()]
    kept = [t.data for t in tensors]
    before = bench.exact, bench.format
    try:
        for tensor in tensors:
            rounded = tensor.data.to(kind)
            tensor.data = rounded if compute else rounded.to(torch.float32)
        if not compute:
            bench.exact, bench.format = dict(zip(map(id, tensors), kept, strict=True)), name
        yield
    finally:
        bench.exact, bench.format = before
        for tensor, data in zip(tensors, kept, strict=True):
            tensor.data = data


def _buffers(bench: Bench) -> list:
    """Tables that a format rounds; frequencies of rotary positions stay in float32."""
    return [b for n, b in bench.model.named_buffers() if "inv_freq" not in n]


def measure_noise(
    experiment: Experiment, name: str, rows: Sequence[int], hypothesis: Hypothesis = ()
) -> tuple[Format, Array]:
    """What computing in a format adds to rounded weights, on rows of the experiment, where the
    model has the faults of a hypothesis.

    Returns:
        The format, and the noise itself (rows, outputs) of one simulated engine.
    """
    wanted = list(rows)
    with computing_in(experiment.bench, name, compute=False):
        rounded = _again(experiment).simulate(hypothesis, wanted)
    with computing_in(experiment.bench, name, compute=True):
        computed = _again(experiment).simulate(hypothesis, wanted)
    noise = computed - rounded
    level = np.linalg.norm(noise, axis=1) / np.linalg.norm(rounded, axis=1)
    return Format(name, level), noise


def _again(experiment: Experiment) -> Experiment:
    """The same calls and answers, nothing simulated yet."""
    fresh = Experiment(experiment.bench)
    first = 0
    for call in experiment.calls:
        fresh.add(call, experiment.answers[first : first + len(call.rows)])
        first += len(call.rows)
    return fresh


@dataclass(frozen=True)
class Amplitude:
    """How much of a difference is in the answers: 1 where it is there, 0 where it is not."""

    value: float
    error: float

    @property
    def present(self) -> bool:
        """Whether it is there, in its full size."""
        wide = 2 * self.error
        return self.value > SIGNIFICANT * self.error and 0.6 - wide < self.value < 1.6 + wide

    @property
    def suspected(self) -> bool:
        """Whether it is more likely there than not: worth asking more, enough between rivals."""
        return self.value > 3 * self.error and 0.4 < self.value < 1.6 + 2 * self.error

    @property
    def visible(self) -> bool:
        """Whether it would be seen if it were there."""
        return self.error * SIGNIFICANT < 1


def measure_amplitude(rest: Array, move: Array, noise: Array, level: Array) -> Amplitude:
    """The matched filter.

    Args:
        rest: suspect minus base, (rows, outputs).
        move: what the fault changes, (rows, outputs).
        noise: of a simulated engine, (rows, outputs).
        level: the noise of each row, its unit of weight.
    """
    weight = 1 / np.maximum(level, 1e-12) ** 2
    power = weight * np.sum(move**2, axis=1)
    cross = weight * np.sum(rest * move, axis=1)
    total = float(np.sum(power))
    if not np.isfinite(total) or total <= 0:
        return Amplitude(0.0, np.inf)
    value = float(np.sum(cross)) / total
    n = len(power)
    left_out = (np.sum(cross) - cross) / np.maximum(total - power, 1e-300)
    jackknife = float(np.sqrt((n - 1) / n * np.sum((left_out - value) ** 2)))
    by_noise = abs(float(np.sum(weight * np.sum(noise * move, axis=1)))) / total
    # the noise of one engine along the move, as if it were as large in every direction
    spread = float(np.sqrt(np.sum(weight**2 * np.sum(noise**2, axis=1) * np.sum(move**2, axis=1)
                                  / move.shape[1]))) / total  # fmt: skip
    return Amplitude(value, float(np.hypot(np.hypot(jackknife, by_noise), spread)))
