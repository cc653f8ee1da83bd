"""How exact the answers of a box are: the one noise model that thresholds are derived from.

An answer that is a sum of terms of size `scale` misses its true value by about `sigma(scale)`.
The levels say how much is needed until something is believed; no other file has its own. Learners
decide through `measurement.evidence`, which knows standard errors, too.
"""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, TINY, UNIT_ROUNDOFF, Array, real_number
from keyhole.linalg.decisions import margin_of, note_decision

FORMATS = (  # name, bits of the significand (with the hidden one)
    ("bfloat16", 8),
    ("float16", 11),
    ("float32", 24),
    ("float64", 53),
)
# Standard deviations from which a signal counts as seen: normal noise alone passes for one with a
# probability of 6e-7.
DETECTION = 5.0
# Standard deviations from which an answer contradicts a hypothesis (1e-15): a run compares many
# answers, and an honest box must not be rejected in any of a million runs.
REJECTION = 8.0
# Standard deviations that one of some dozens of fresh answers may be off in a verdict (2e-9 each):
# every one more makes a verdict of few answers say less.
VERDICT = 6.0
# Relative standard error of a parameter that is good enough: where answers allow it, nothing is
# asked again for more, and where they do not, more is asked.
ACCURACY = 1e-8
# Probability, per decision, that repetitions which may each fail by chance all failed.
FALSE_ALARM = 1e-6
ROUNDINGS = 64.0  # unit roundoffs by which two evaluations of one sum of terms may differ


@dataclass(frozen=True)
class NoiseModel:
    """How exact the answers are: |answer − f| is about relative·|scale| + additive + step / 2.

    Args:
        relative: Unit roundoff of the box's arithmetic, or noise that grows with the answer.
        additive: Standard deviation of noise that differs from call to call.
        step: Answers are rounded to multiples of this.
        tolerance: Answers may be off by up to this, in the worst possible way.
        format: Number format, where it was seen.
        repeatable: Whether the box, asked again, answers alike.
    """

    relative: float = UNIT_ROUNDOFF
    additive: float = 0.0
    step: float = 0.0
    tolerance: float = 0.0
    format: str = field(default="stated", compare=False)
    repeatable: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        # float64 answers are exact to UNIT_ROUNDOFF at best
        real_number(f"relative (at best {UNIT_ROUNDOFF:.1e})", self.relative, 0.0)
        for name in ("additive", "step", "tolerance"):
            real_number(name, getattr(self, name), 0.0, with_low=True)

    @property
    def name(self) -> str:
        """The number format, for readers; "noisy" where answers differ from call to call."""
        return self.format if self.repeatable else "noisy"

    @property
    def error_floor(self) -> float:
        """Standard deviation of the errors that do not scale with the answer."""
        parts = (self.additive, self.step / np.sqrt(12.0), self.tolerance / np.sqrt(3.0))
        return float(np.linalg.norm(parts))

    @property
    def half(self) -> bool:
        """Whether the box is known to compute in a format of 16 bits."""
        return self.format in ("float16", "bfloat16")

    @property
    def token_roundoff(self) -> float:
        """Unit roundoff of the numbers that the box takes: its own 16 bits, else single precision
        where its answers are no more exact than that allows."""
        if self.half:
            return self.relative
        return SINGLE_ROUNDOFF if self.relative >= SINGLE_ROUNDOFF else UNIT_ROUNDOFF

    @property
    def low_precision(self) -> bool:
        """Whether answers have fewer digits than single precision gives, or an error floor."""
        return self.relative > SINGLE_ROUNDOFF or self.error_floor > 0.0

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the arithmetic inside the box: noise that differs from call to call is
        on its answers, not on its parameters and tokens."""
        known = dict(FORMATS).get(self.format)
        return self.relative if self.repeatable or known is None else float(2.0**-known)

    @property
    def underflow(self) -> float:
        """Where the box's numbers end: a smaller weight may be zero in its arithmetic."""
        if self.format == "float16":  # its subnormal numbers are in use everywhere
            return float(np.finfo(np.float16).smallest_subnormal)
        single = self.relative >= SINGLE_ROUNDOFF  # bfloat16 has the exponents of float32
        return float(np.finfo(np.float32 if single else np.float64).smallest_normal)

    @property
    def bound(self) -> float:
        """How far an answer may be off, whatever its size: VERDICT standard deviations of the
        noise, half a rounding step, and the tolerance."""
        return VERDICT * self.additive + 0.5 * self.step + self.tolerance

    def sigma(self, scale: Array | float) -> Array:
        """Standard deviation of an answer whose terms are of this size."""
        return np.asarray(self.relative * np.abs(scale) + self.error_floor)

    def rounding(self, values: Array) -> Array:
        """Standard deviation of one rounding of these numbers to the format: the distance of
        neighbours in it over sqrt(12); noise is added, where there is some."""
        sizes = np.maximum(np.abs(values), np.finfo(float).tiny)
        apart = 2.0 * self.relative * np.exp2(np.floor(np.log2(sizes)))
        return np.asarray(np.hypot(apart / np.sqrt(12.0), self.error_floor))

    def detects(self, signal: Array | float, scale: Array | float) -> bool:
        """Whether any of these differences of answers of this size is a signal, not noise."""
        strongest = np.max(np.abs(signal) / np.maximum(self.sigma(scale), TINY), initial=0.0)
        seen = bool(strongest > DETECTION)
        note_decision("a signal is seen", seen, margin_of(strongest, DETECTION))
        return seen

    def rejects(self, residual: Array | float, scale: Array | float) -> bool:
        """Whether any residual is too large for a hypothesis that predicts answers of this size:
        beyond the roundings that two ways to evaluate one sum may differ by, and the noise."""
        allowed = ROUNDINGS * self.relative * np.abs(scale) + REJECTION * self.error_floor
        largest = np.max(np.abs(residual) / np.maximum(allowed, TINY), initial=0.0)
        refused = bool(largest > 1.0)
        note_decision("an answer contradicts", refused, margin_of(largest, 1.0))
        return refused

    def apart(self, scale: float) -> float:
        """How far two answers to one query may lie apart, if one box gave both and the terms
        of which they are sums are of this size."""
        noise = REJECTION * self.additive + self.step + 2.0 * self.tolerance
        return ROUNDINGS * self.relative * scale + noise
