"""What an owner can do to the answers before they leave, and what it costs honest users."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF, Array
from keyhole.errors import InvalidArgument
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import FORMATS, NoiseModel
from keyhole.oracles.wrappers.degrade import Labels, Noisy, Rounded

DEFAULT = (
    "float64",
    "float32",
    "bfloat16",
    "decimals:6",
    "decimals:4",
    "decimals:3",
    "decimals:2",
    "noise:1e-6",
    "noise:1e-4",
    "noise:1e-2",
    "noise:1e-1",
    "label",
)
EXAMPLES = "float64, float32, float16, bfloat16, decimals:4, noise:1e-3, label"


@dataclass(frozen=True)
class Protection:
    """One treatment of the answers: a number format, decimals, noise relative to the root mean
    square of the answers, or the label alone."""

    kind: Literal["bits", "decimals", "noise", "label"]
    level: float
    name: str

    @classmethod
    def parse(cls, text: str) -> "Protection":
        """A protection from its text.

        >>> Protection.parse("decimals:4").level
        4.0
        """
        head, _, tail = text.strip().partition(":")
        try:
            significands = dict(FORMATS)
            if head in significands and not tail:
                return cls("bits", significands[head], head)
            if head == "label" and not tail:
                return cls("label", 0.0, "label")
            if head == "decimals" and 0 <= int(tail) <= 15:
                return cls("decimals", float(int(tail)), text.strip())
            if head == "noise" and 0 < float(tail) < np.inf:
                return cls("noise", float(tail), text.strip())
        except ValueError:
            pass
        raise InvalidArgument(f"unknown protection {text!r}; expected one of: {EXAMPLES}")

    @property
    def title(self) -> str:
        if self.kind == "decimals":
            return f"{self.level:.0f} decimals"
        return f"noise {self.level:.0e}" if self.kind == "noise" else self.name

    def wrap(self, oracle: Oracle, scale: float, seed: int) -> Oracle:
        """The box behind this protection; `scale` is the root mean square of its answers."""
        if self.kind == "bits":
            return oracle if self.level == 53 else Rounded(oracle, bits=int(self.level))
        if self.kind == "decimals":
            return Rounded(oracle, decimals=int(self.level))
        if self.kind == "noise":
            return Noisy(oracle, additive=self.level * scale, seed=seed)
        return Labels(oracle)

    def precision(self, scale: float) -> NoiseModel | None:
        """What an attacker would measure in a dozen queries."""
        if self.kind == "bits":
            return NoiseModel(relative=max(2.0**-self.level, UNIT_ROUNDOFF))
        if self.kind == "decimals":
            return NoiseModel(step=10.0**-self.level)
        return NoiseModel(additive=self.level * scale) if self.kind == "noise" else None


def change(honest: Array, treated: Array) -> float:
    """How much of the answers' root mean square a protection takes from honest users.

    For labels: what is left unexplained by the best straight line through them.
    """
    size = float(np.sqrt(np.mean(honest**2)))
    if size == 0.0:
        return 0.0
    if len(np.unique(treated)) == 2 and honest.ndim == 1 and len(np.unique(honest)) > 2:
        line = np.stack([treated, np.ones_like(treated)], axis=1)
        treated = line @ np.linalg.lstsq(line, honest, rcond=None)[0]
    return float(np.sqrt(np.mean((treated - honest) ** 2))) / size
