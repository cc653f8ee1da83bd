"""A network with one hidden layer of ReLUs and a linear skip: the normal form of its family.

    f(x) = offset + skip . x + sum_j output_j relu(weight_j . x + bias_j)

relu(-h) = relu(h) - h, so any neuron may be turned around if the skip takes the difference. A
plain network has skip zero; a leaky or parametric ReLU with slope a below zero is the same as
output (1 - a) and a skip of a times the linear part. One form holds them all.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float, finite_array, frozen
from keyhole.errors import InvalidArgument
from keyhole.models.base import Shown, answer_in_parts, check_shapes, last_points


class ReluNetwork(Shown):
    """A network with one hidden layer of ReLUs. Callable on points (batch, width) and on sequences
    (batch, length, width), of which it reads the last position.

    Args:
        weight: (m, d), a row per neuron.
        bias: (m,); None for zeros.
        output: (m,) or (m, k).
        skip: (d,) or (d, k), what passes the neurons by; None for nothing.
        offset: A number or (k,).

    Example:
        >>> import numpy as np
        >>> network = ReluNetwork([[1.0, -1.0]], [0.0], [2.0], offset=1.0)
        >>> network(np.array([[3.0, 1.0], [1.0, 3.0]]))
        array([5., 1.])
    """

    weight: Array
    bias: Array
    output: Array
    skip: Array
    offset: Array

    def __init__(
        self, weight: Any, bias: Any, output: Any, skip: Any = None, offset: Any = 0.0
    ) -> None:
        self.weight = frozen(finite_array("weight", weight, ndim=2))
        neurons, width = self.weight.shape
        if bias is None:
            bias = np.zeros(neurons, self.weight.dtype)
        self.bias = frozen(finite_array("bias", bias, ndim=1))
        self.output = frozen(finite_array("output", output, ndim=(1, 2)))
        answer = self.output.shape[1:]
        if skip is None:
            skip = np.zeros((width, *answer), self.weight.dtype)
        self.skip = frozen(finite_array("skip", skip, ndim=(1, 2)))
        constant = finite_array("offset", offset, ndim=(0, 1)).astype(self.output.dtype)
        check_shapes(
            (
                ("bias", self.bias, (neurons,)),
                ("output", self.output, (neurons, *answer)),
                ("skip", self.skip, (width, *answer)),
            )
        )
        if constant.shape not in ((), answer):
            raise InvalidArgument(f"offset must have shape {answer}, got {constant.shape}")
        self.offset = frozen(np.broadcast_to(constant, answer))

    @property
    def width(self) -> int:
        return int(self.weight.shape[1])

    @property
    def neurons(self) -> int:
        return int(self.weight.shape[0])

    @property
    def outputs(self) -> int | None:
        """None for a scalar answer, else the length of the answer's vector."""
        return None if self.output.ndim == 1 else int(self.output.shape[1])

    @property
    def output_table(self) -> Float[Array, "m k"]:
        """`output` as a table also where the answer is a number."""
        return self.output if self.output.ndim == 2 else self.output[:, None]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.result_type(self.weight.dtype, self.output.dtype)

    def astype(self, dtype: Any) -> "ReluNetwork":
        """The same network that computes in another precision."""
        parts = self.to_arrays()
        return ReluNetwork.from_arrays({name: part.astype(dtype) for name, part in parts.items()})

    def to_arrays(self) -> dict[str, Array]:
        """Every parameter by name; `from_arrays` is the inverse."""
        names = ("weight", "bias", "output", "skip", "offset")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "ReluNetwork":
        try:
            return cls(*(arrays[name] for name in ("weight", "bias", "output", "skip", "offset")))
        except KeyError as missing:
            raise InvalidArgument(f"parameter {missing} is missing") from missing

    def __call__(self, points: Float[Array, "*any width"]) -> Float[Array, "batch *out"]:
        points = last_points(points, self.width, self.dtype)
        return answer_in_parts(self._answer, points, self.neurons)

    def _answer(self, points: Array) -> Array:
        hidden = np.maximum(points @ self.weight.T + self.bias, 0)
        return np.asarray(hidden @ self.output + points @ self.skip + self.offset)

    def __repr__(self) -> str:
        skip = ", with skip" if self.skip.any() else ""
        outputs = "scalar" if self.outputs is None else self.outputs
        return f"ReluNetwork(width={self.width}, neurons={self.neurons}, outputs={outputs}{skip})"
