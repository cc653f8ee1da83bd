"""Dots on axes, in percent of a plot's area: the page stretches them without stretching text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.report.blocks import ParameterBlock
from keyhole.results import Trace

EQUAL = 1e-18  # deviations below are drawn at the foot: equal to the last bit


@dataclass(frozen=True)
class Tick:
    at: float  # percent
    label: str


@dataclass(frozen=True)
class Series:
    name: str
    path: str  # zero-length strokes at the dots: round whatever the aspect of the plot
    kind: str  # colour in the style sheet


@dataclass(frozen=True)
class Level:
    """A horizontal line with a meaning."""

    at: float
    name: str


@dataclass(frozen=True)
class Chart:
    title: str
    summary: str  # says in words what the dots show
    x_name: str
    y_name: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    series: tuple[Series, ...]
    levels: tuple[Level, ...]
    rows: tuple[tuple[str, str], ...] = ()  # the numbers themselves, some of them


@dataclass(frozen=True)
class Logarithmic:
    """Decades from below the smallest to above the largest; zero is drawn at the foot."""

    low: int
    high: int

    @classmethod
    def around(cls, numbers: Sequence[float]) -> "Logarithmic":
        positive = [x for x in numbers if x > EQUAL and math.isfinite(x)]
        if not positive:
            return cls(-1, 1)
        low = math.floor(math.log10(min(positive)) - 0.1)
        return cls(low, max(low + 1, math.ceil(math.log10(max(positive)) + 0.1)))

    def height(self, number: float) -> float:
        """Percent from the top."""
        if number <= EQUAL:
            return 100.0
        level = (math.log10(number) - self.low) / (self.high - self.low)
        return 100.0 * (1.0 - min(1.0, max(0.0, level)))

    def ticks(self) -> tuple[Tick, ...]:
        ticks = 6  # along an axis, at most
        step = max(1, -(-(self.high - self.low) // ticks))
        return tuple(
            Tick(self.height(10.0**power), decade(power))
            for power in range(self.low, self.high + 1, step)
        )


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def decade(power: int) -> str:
    return {0: "1", 1: "10", -1: "0.1"}.get(power, "10" + str(power).translate(SUPERSCRIPTS))


def dots(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"M{x:.2f} {y:.2f}h0" for x, y in points)


def whole_ticks(last: int) -> tuple[Tick, ...]:
    """Round numbers from the first to the last of 1 … last."""
    if last <= 1:
        return (Tick(50.0, "1"),)
    rough = last / 4
    step = 10 ** math.floor(math.log10(rough)) if rough >= 1 else 1
    step = int(next(step * k for k in (1, 2, 5, 10) if step * k >= rough))
    numbers = [1, *range(step, last + 1, step)] if step > 1 else list(range(1, last + 1))
    return tuple(Tick(100.0 * (n - 1) / (last - 1), f"{n:,}") for n in numbers)


def spectrum_chart(block: ParameterBlock) -> Chart | None:
    """Singular values of a score on a logarithmic axis, with the size of its errors."""
    values, complete = block.values.singular_values()
    if not len(values) or values[0] <= 0:
        return None
    doubt = None if block.errors is None else block.errors.norm()
    levels = [] if not doubt else [doubt]
    zero = 1e-17  # singular values below, relative to the largest, are rounding of zero
    seen = [float(x) for x in values if x > zero * values[0]]
    axis = Logarithmic.around([*seen, *levels])
    last = len(values)
    most_dots = 400  # of one series
    chosen = np.unique(np.linspace(0, last - 1, min(last, most_dots)).astype(int))
    points = [
        (100.0 * i / (last - 1) if last > 1 else 50.0, axis.height(float(values[i])))
        for i in chosen
    ]
    summary = f"{last:,} singular values, from {values[0]:.4g} down to {values[-1]:.4g}."
    if not complete:
        summary = f"The {last} largest singular values (by a randomised method), "
        summary += f"from {values[0]:.4g} down to {values[-1]:.4g}."
    if doubt:
        summary += f" No value is off by much more than {doubt:.1e}, the norm of all errors."
    return Chart(
        "Singular values of the score",
        summary,
        "number",
        "singular value",
        whole_ticks(last),
        axis.ticks(),
        (Series("singular value", dots(points), "main"),),
        tuple(Level(axis.height(level), "norm of the standard errors") for level in levels),
        tuple((str(i + 1), f"{values[i]:.6g}") for i in range(min(last, 12))),
    )


def trace_chart(trace: Trace, run: Mapping[str, Any]) -> Chart | None:
    """How far the model is from each answer, in the order of asking."""
    if not trace.asked:
        return None
    precision = run.get("precision")
    relative = precision.get("relative") if isinstance(precision, Mapping) else None
    level = relative if isinstance(relative, float) else 0.0
    axis = Logarithmic.around([*trace.deviation, level])
    last = max(trace.total, 1)
    learning: list[tuple[float, float]] = []
    fresh: list[tuple[float, float]] = []
    for number, purpose, deviation in zip(trace.asked, trace.purpose, trace.deviation, strict=True):
        spot = (100.0 * (number - 1) / max(1, last - 1), axis.height(deviation))
        (fresh if purpose == "verification" else learning).append(spot)
    equal = sum(deviation <= EQUAL for deviation in trace.deviation)
    summary = (
        f"{len(trace.asked):,} of {trace.total:,} queries, spread over the run: the finished "
        f"model is off by {float(np.median(trace.deviation)):.1e} of the answers' size at the "
        f"median and by {max(trace.deviation):.1e} at most."
    )
    if equal:
        summary += f" {equal:,} agree to the last bit (drawn at the foot)."
    series = [Series("asked while learning", dots(learning), "main")]
    if fresh:
        series.append(Series("fresh, for verification", dots(fresh), "fresh"))
    return Chart(
        "Error against queries asked",
        summary,
        "query",
        "relative deviation",
        whole_ticks(last),
        axis.ticks(),
        tuple(series),
        (Level(axis.height(level), "rounding of the box"),) if level > 0 else (),
    )
