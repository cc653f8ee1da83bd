"""LayerNorm and RMSNorm: a vector divided by its own size, then stretched and moved.

    layer   gain * (x - mean x) / sqrt(var x + epsilon) + bias
    rms     gain * x / sqrt(mean x^2 + epsilon) + bias

LayerNorm forgets the mean of its input; `plane` is an orthonormal basis of what it keeps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import helmert

from keyhole.arrays import Array, Float, finite_array, frozen, real_number
from keyhole.errors import ImpossibleModel, InvalidArgument

KINDS = ("layer", "rms")


@dataclass(frozen=True, eq=False)
class Norm:
    """`gain` (d,), `bias` (d,), `epsilon` and the kind, "layer" or "rms".

    >>> import numpy as np
    >>> Norm([1.0, 1.0], [0.0, 1.0], 0.0)(np.array([3.0, 5.0]))
    array([-1.,  2.])
    """

    gain: Any
    bias: Any = None
    epsilon: float = 1e-5
    kind: str = "layer"

    def __post_init__(self) -> None:
        gain = frozen(finite_array("gain", self.gain, ndim=1))
        bias = np.zeros(len(gain)) if self.bias is None else self.bias
        object.__setattr__(self, "gain", gain)
        object.__setattr__(self, "bias", frozen(finite_array("bias", bias, ndim=1)))
        try:
            epsilon = real_number("epsilon", float(self.epsilon), 0.0, with_low=True)
        except InvalidArgument as wrong:
            raise ImpossibleModel(str(wrong)) from None
        object.__setattr__(self, "epsilon", epsilon)
        if self.kind not in KINDS:
            raise InvalidArgument(f'kind must be "layer" or "rms", got {self.kind!r}')
        if self.bias.shape != self.gain.shape:
            raise InvalidArgument(
                f"gain and bias must have one shape, got {self.gain.shape} and {self.bias.shape}"
            )

    @property
    def width(self) -> int:
        return len(self.gain)

    @property
    def plane(self) -> Float[Array, "d p"]:
        """Orthonormal basis of what the norm keeps of its input."""
        return kept_plane(self.width, self.kind)

    def direction(self, x: Float[Array, "*any d"]) -> Float[Array, "*any d"]:
        """The normalised input, before gain and bias."""
        if self.kind == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        square = np.mean(x * x, axis=-1, keepdims=True)
        # an input of size zero has no direction; with epsilon it stays zero
        return np.asarray(x / np.sqrt(np.maximum(square + x.dtype.type(self.epsilon), 1e-300)))

    def __call__(self, x: Float[Array, "*any d"]) -> Float[Array, "*any d"]:
        return np.asarray(self.gain * self.direction(x) + self.bias)

    def astype(self, dtype: Any) -> "Norm":
        return Norm(self.gain.astype(dtype), self.bias.astype(dtype), self.epsilon, self.kind)


def kept_plane(width: int, kind: str) -> Float[Array, "d p"]:
    """Orthonormal basis of mean-free vectors for "layer", of all for "rms"."""
    return np.asarray(helmert(width).T) if kind == "layer" else np.eye(width)
