"""How exact the answers of a box are: the noise model that every threshold is derived from."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF, real_number

REPEATABLE = 64.0  # roundoffs that two answers to one query in different batches may be apart
DEVIATIONS = 8.0  # standard deviations of noise that they may be apart


@dataclass(frozen=True)
class NoiseModel:
    """How exact the answers are: |answer - f| is about relative * |scale| + additive + step / 2."""

    relative: float = UNIT_ROUNDOFF  # unit roundoff of the box's arithmetic
    additive: float = 0.0  # standard deviation of noise that differs from call to call
    step: float = 0.0  # answers are rounded to multiples of this
    tolerance: float = 0.0  # answers may be off by up to this, in the worst possible way

    @property
    def floor(self) -> float:
        """Standard deviation of the errors that do not scale with the answer."""
        spread = (self.additive, self.step / np.sqrt(12.0), self.tolerance / np.sqrt(3.0))
        return float(np.linalg.norm(spread))

    def apart(self, scale: float) -> float:
        """How far two answers to one query may lie apart, if one box gave both and the terms
        of which they are sums are of this size."""
        noise = DEVIATIONS * self.additive + self.step + 2.0 * self.tolerance
        return REPEATABLE * self.relative * scale + noise

    def __post_init__(self) -> None:
        # float64 answers are exact to UNIT_ROUNDOFF at best
        real_number(f"relative (at best {UNIT_ROUNDOFF:.1e})", self.relative, 0.0)
        for name in ("additive", "step", "tolerance"):
            real_number(name, getattr(self, name), 0.0, with_low=True)
