"""How well a hypothesis explains the answers, and from when on it explains them.

Statement: an honest engine of float32 differs from the reference by rounding, whose size is seen in
the reference itself: the floor is the largest difference of a row between float32 and float64.
Algebra: tolerance = FLOORS · floor + rounding of the answers' digits. The score of a hypothesis is
the mean over rows of log10(residual / tolerance), not below zero, plus a thousandth of the same cut
at a tenth of the tolerance, which orders those that explain everything. A sum of logarithms: a
fault that is explained on some rows only still earns its decades there.
When it fails: a broken model amplifies rounding; the floor of a hypothesis is then its own.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array

FLOORS = 8.0  # an honest engine sums in another order: its rounding is a few times the floor
TIE = 1e-3  # weight of what lies below the tolerance


@dataclass(frozen=True)
class Tolerance:
    """Up to which residual a row is explained."""

    floor: float  # rounding of float32
    digits: float  # rounding of the answers as they were sent
    format: str  # that the answers are sent in

    @property
    def value(self) -> float:
        """The largest residual of a row that is explained."""
        return FLOORS * self.floor + self.digits

    def with_floor(self, floor: float) -> "Tolerance":
        """The same for a hypothesis with a larger floor of its own."""
        return Tolerance(max(self.floor, floor), self.digits, self.format)


def score(residuals: Array, tolerance: float) -> float:
    """Mean decades above the tolerance; smaller is better, zero explains everything."""
    bounded = np.minimum(residuals, 1e6)
    above = np.log10(np.maximum(bounded, tolerance) / tolerance)
    tie = np.log10(np.maximum(bounded, 0.1 * tolerance) / tolerance)
    return float(np.mean(above) + TIE * np.mean(tie))


def read_digits(answers: Array) -> tuple[str, float]:
    """The format answers are sent in, and the relative rounding of a row that it causes.

    Returns:
        Its name ("float16", "bfloat16", "5 decimals", "float32") and the norm of the rounding over
        the norm of the answer, at most.
    """
    values = answers[np.isfinite(answers)]
    single = values.astype(np.float32)
    if not np.any(single.view(np.uint32) & 0xFFFF) and np.array_equal(single, values):
        return "bfloat16", 1.5 * 2.0**-9
    if np.array_equal(values.astype(np.float16).astype(np.float64), values):
        return "float16", 1.5 * 2.0**-12
    size = float(np.median(np.linalg.norm(answers, axis=1))) or 1.0
    for decimals in range(2, 8):
        scaled = values * 10.0**decimals
        if np.all(np.abs(scaled - np.round(scaled)) < 1e-3 * np.maximum(1, 1e-4 * abs(scaled))):
            step = 10.0**-decimals
            return f"{decimals} decimals", 1.3 * step * (answers.shape[1] / 12) ** 0.5 / size
    return "float32", 0.0


def rounding_floor(single: Any, double: Any) -> float:
    """The largest relative difference of a row between two precisions."""
    gap = np.linalg.norm(single - double, axis=1)
    size = np.linalg.norm(double, axis=1)
    ratio = gap / np.where(size > 0, size, 1.0)
    return float(np.nanmax(ratio, initial=0.0))
