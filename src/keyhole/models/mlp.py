"""A network with one hidden layer, as Transformers have them: one table of activations, one model.

    plain   f(x) = linear x + offset + outer φ(inner x + inner_bias)
    gated   f(x) = linear x + offset + outer (φ(gate x + gate_bias) * (inner x + inner_bias))

φ is one of the activations below. A plain network has linear zero, one inside a residual stream
the identity. The functions at the end change the parameters and not the network: φ(-a) = sign φ(a)
+ slope a + constant, so a neuron of a plain network may be turned around if linear and offset take
the difference, that of a gated one only where slope is zero; the ungated factor of a gated neuron,
and a ReLU's row, have no scale of their own; sigmoid and tanh are one class, and so are quick GELU
and SiLU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import erf, expit

from keyhole.arrays import Array, Float, finite_array, frozen
from keyhole.errors import InvalidArgument
from keyhole.models.base import Shown, answer_in_parts, check_shapes, last_points

ROOT_HALF = np.sqrt(0.5)
DENSITY = 1.0 / np.sqrt(2.0 * np.pi)  # of the normal distribution at zero
TANH_SLOPE, TANH_CUBIC = np.sqrt(2.0 / np.pi), 0.044715  # of the tanh in GELU's approximation
QUICK = 1.702  # slope of the sigmoid in quick GELU
TAG = "activation."  # of the empty array whose name tells the activation


@dataclass(frozen=True)
class Activation:
    """φ with two derivatives, and what turning its argument around does:
    φ(-a) = sign φ(a) + slope a + constant. `alias` (representative, k, r, s): φ(a) is
    r representative(k a) + s, so that the two are one class of networks."""

    name: str
    value: Callable[[Array], Array]
    first: Callable[[Array], Array]
    second: Callable[[Array], Array]
    sign: float
    slope: float
    constant: float
    alias: tuple[str, float, float, float] | None = None

    @property
    def title(self) -> str:
        """The name as papers write it; a class of two has both."""
        names = {
            "relu": "ReLU",
            "gelu": "GELU",
            "gelu_tanh": "GELU (its tanh approximation)",
            "silu": "SiLU (or quick GELU, which is the same class)",
            "tanh": "tanh (or sigmoid, which is the same class)",
        }
        return names.get(self.name, self.name)

    @property
    def bends(self) -> bool:
        """Whether the line that φ approaches on one side differs from that on the other."""
        return self.slope != 0.0


def _relu(a: Array) -> Array:
    return np.maximum(a, 0)


def _step(a: Array) -> Array:
    return np.asarray((a > 0).astype(a.dtype))


def _gelu(a: Array) -> Array:
    return np.asarray(0.5 * a * (1 + erf(a * a.dtype.type(ROOT_HALF))))


def _gelu_first(a: Array) -> Array:
    return np.asarray(0.5 * (1 + erf(a * ROOT_HALF)) + a * DENSITY * np.exp(-0.5 * a * a))


def _gelu_second(a: Array) -> Array:
    return np.asarray((2 - a * a) * DENSITY * np.exp(-0.5 * a * a))


def _inner_tanh(a: Array) -> Array:
    return np.tanh(a.dtype.type(TANH_SLOPE) * (a + a.dtype.type(TANH_CUBIC) * a * a * a))


def _gelu_tanh(a: Array) -> Array:
    return np.asarray(0.5 * a * (1 + _inner_tanh(a)))


def _gelu_tanh_first(a: Array) -> Array:
    t, rate = _inner_tanh(a), TANH_SLOPE * (1 + 3 * TANH_CUBIC * a * a)
    return np.asarray(0.5 * (1 + t) + 0.5 * a * (1 - t * t) * rate)


def _gelu_tanh_second(a: Array) -> Array:
    t, rate = _inner_tanh(a), TANH_SLOPE * (1 + 3 * TANH_CUBIC * a * a)
    bend = (1 - t * t) * (6 * TANH_SLOPE * TANH_CUBIC * a - 2 * t * rate * rate)
    return np.asarray((1 - t * t) * rate + 0.5 * a * bend)


def _silu(a: Array) -> Array:
    return np.asarray(a * expit(a))


def _silu_first(a: Array) -> Array:
    s = expit(a)
    return np.asarray(s + a * s * (1 - s))


def _silu_second(a: Array) -> Array:
    s = expit(a)
    return np.asarray(s * (1 - s) * (2 + a * (1 - 2 * s)))


def _quick(a: Array) -> Array:
    return np.asarray(a * expit(a.dtype.type(QUICK) * a))


def _quick_first(a: Array) -> Array:
    return _silu_first(QUICK * a)


def _quick_second(a: Array) -> Array:
    return QUICK * _silu_second(QUICK * a)


def _tanh_first(a: Array) -> Array:
    return np.asarray(1 - np.tanh(a) ** 2)


def _tanh_second(a: Array) -> Array:
    t = np.tanh(a)
    return np.asarray(-2 * t * (1 - t * t))


def _sigmoid_first(a: Array) -> Array:
    s = expit(a)
    return np.asarray(s * (1 - s))


def _sigmoid_second(a: Array) -> Array:
    s = expit(a)
    return np.asarray(s * (1 - s) * (1 - 2 * s))


def _none(a: Array) -> Array:
    return np.zeros_like(a)


ACTIVATIONS = {
    one.name: one
    for one in (
        Activation("relu", _relu, _step, _none, 1.0, -1.0, 0.0),
        Activation("gelu", _gelu, _gelu_first, _gelu_second, 1.0, -1.0, 0.0),
        Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_first, _gelu_tanh_second, 1.0, -1.0, 0.0),
        Activation("silu", _silu, _silu_first, _silu_second, 1.0, -1.0, 0.0),
        Activation(
            "quick_gelu", _quick, _quick_first, _quick_second, 1.0, -1.0, 0.0,
            ("silu", QUICK, 1 / QUICK, 0.0),
        ),
        Activation("tanh", np.tanh, _tanh_first, _tanh_second, -1.0, 0.0, 0.0),
        Activation(
            "sigmoid", expit, _sigmoid_first, _sigmoid_second, -1.0, 0.0, 1.0,
            ("tanh", 0.5, 0.5, 0.5),
        ),
    )
}  # fmt: skip


def activation_named(name: Any) -> Activation:
    if name not in ACTIVATIONS:
        raise InvalidArgument(
            f"activation must be one of {', '.join(sorted(ACTIVATIONS))}, got {name!r}"
        )
    return ACTIVATIONS[name]


class Mlp(Shown):
    """A network with one hidden layer, gated or not. Callable on points (batch, width) and on
    sequences (batch, length, width), of which it reads the last position. Where the answer is a
    number, axis D is absent.

    Args:
        inner: (m, d), a row per neuron.
        inner_bias: (m,); None for zeros.
        outer: (D, m).
        activation: By its name, one of `ACTIVATIONS`.
        linear: (D, d), what passes the neurons by; None for nothing.
        offset: (D,).
        gate: (m, d), of a gated network: the activation acts on it, and `inner` multiplies.
        gate_bias: (m,).

    Example:
        >>> import numpy as np
        >>> network = Mlp([[1.0, -1.0]], [0.0], [2.0], activation="relu", offset=1.0)
        >>> network(np.array([[3.0, 1.0], [1.0, 3.0]]))
        array([5., 1.])
    """

    inner: Array
    inner_bias: Array
    outer: Array
    linear: Array
    offset: Array
    gate: Array | None
    gate_bias: Array | None
    activation: str

    def __init__(
        self,
        inner: Any,
        inner_bias: Any,
        outer: Any,
        *,
        activation: str = "gelu",
        linear: Any = None,
        offset: Any = 0.0,
        gate: Any = None,
        gate_bias: Any = None,
    ) -> None:
        self.activation = activation_named(activation).name
        self.inner = frozen(finite_array("inner", inner, ndim=2))
        neurons, width = self.inner.shape
        zeros = np.zeros(neurons, self.inner.dtype)
        self.inner_bias = frozen(
            finite_array("inner_bias", zeros if inner_bias is None else inner_bias, ndim=1)
        )
        self.outer = frozen(finite_array("outer", outer, ndim=(1, 2)))
        answer = self.outer.shape[:-1]
        if linear is None:
            linear = np.zeros((*answer, width), self.inner.dtype)
        self.linear = frozen(finite_array("linear", linear, ndim=(1, 2)))
        constant = finite_array("offset", offset, ndim=(0, 1)).astype(self.outer.dtype)
        self.gate = self.gate_bias = None
        checks = [
            ("inner_bias", self.inner_bias, (neurons,)),
            ("outer", self.outer, (*answer, neurons)),
            ("linear", self.linear, (*answer, width)),
        ]
        if gate is not None:
            self.gate = frozen(finite_array("gate", gate, ndim=2))
            self.gate_bias = frozen(
                finite_array("gate_bias", zeros if gate_bias is None else gate_bias, ndim=1)
            )
            checks.append(("gate", self.gate, (neurons, width)))
            checks.append(("gate_bias", self.gate_bias, (neurons,)))
        elif gate_bias is not None:
            raise InvalidArgument("gate_bias was given without a gate; give both or none")
        check_shapes(checks)
        if constant.shape not in ((), answer):
            raise InvalidArgument(f"offset must have shape {answer}, got {constant.shape}")
        self.offset = frozen(np.broadcast_to(constant, answer))

    @property
    def width(self) -> int:
        return int(self.inner.shape[1])

    @property
    def neurons(self) -> int:
        return int(self.inner.shape[0])

    @property
    def outputs(self) -> int | None:
        """None for a scalar answer, else the length of the answer's vector."""
        return None if self.outer.ndim == 1 else int(self.outer.shape[0])

    @property
    def gated(self) -> bool:
        return self.gate is not None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.result_type(self.inner.dtype, self.outer.dtype)

    def natural_length(self) -> float:
        """Length of inputs at which the arguments of φ are of order one."""
        rows = np.linalg.norm(self.inner if self.gate is None else self.gate, axis=1)
        rows = rows[rows > 0]
        return float(np.sqrt(self.width) / (np.median(rows) if len(rows) else 1.0))

    def astype(self, dtype: Any) -> "Mlp":
        """The same network that computes in another precision."""
        parts = self.to_arrays()
        return Mlp.from_arrays({name: part.astype(dtype) for name, part in parts.items()})

    def to_arrays(self) -> dict[str, Array]:
        """Every parameter by name; an empty array's name tells the activation. `from_arrays` is
        the inverse."""
        parts = {
            "linear": self.linear,
            "offset": self.offset,
            "inner": self.inner,
            "inner_bias": self.inner_bias,
            "outer": self.outer,
            TAG + self.activation: np.zeros(0, self.inner.dtype),
        }
        if self.gate is not None and self.gate_bias is not None:
            parts.update(gate=self.gate, gate_bias=self.gate_bias)
        return parts

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "Mlp":
        tags = [name.removeprefix(TAG) for name in arrays if name.startswith(TAG)]
        if len(tags) != 1:
            raise InvalidArgument(f"exactly one activation is needed, got {tags}")
        try:
            return cls(
                arrays["inner"],
                arrays["inner_bias"],
                arrays["outer"],
                activation=tags[0],
                linear=arrays["linear"],
                offset=arrays["offset"],
                gate=arrays.get("gate"),
                gate_bias=arrays.get("gate_bias"),
            )
        except KeyError as missing:
            raise InvalidArgument(f"parameter {missing} is missing") from missing

    def __call__(self, points: Float[Array, "*any width"]) -> Float[Array, "batch *out"]:
        points = last_points(points, self.width, self.dtype)
        return answer_in_parts(self._answer, points, self.neurons)

    def hidden(self, points: Float[Array, "n d"]) -> Float[Array, "n m"]:
        """What the outer weights see."""
        phi = ACTIVATIONS[self.activation].value
        inner = points @ self.inner.T + self.inner_bias
        if self.gate is None or self.gate_bias is None:
            return phi(inner)
        return np.asarray(phi(points @ self.gate.T + self.gate_bias) * inner)

    def _answer(self, points: Array) -> Array:
        return np.asarray(self.hidden(points) @ self.outer.T + points @ self.linear.T + self.offset)

    def __repr__(self) -> str:
        linear = ", with linear part" if self.linear.any() else ""
        outputs = "scalar" if self.outputs is None else self.outputs
        gate = "gated " if self.gated else ""
        return (
            f"Mlp(width={self.width}, neurons={self.neurons}, outputs={outputs}, "
            f"{gate}{self.activation}{linear})"
        )


def outer_table(network: Mlp) -> Float[Array, "k m"]:
    """`outer` as a table also where the answer is a number."""
    return np.atleast_2d(network.outer)


def with_parts(network: Mlp, **parts: Any) -> Mlp:
    """The network with some parameters (and perhaps the activation) replaced. Tables (1, .) stand
    for vectors where the answer is a number."""
    answer = network.outer.shape[:-1]
    known: dict[str, Any] = {
        "inner": network.inner,
        "inner_bias": network.inner_bias,
        "outer": outer_table(network),
        "activation": network.activation,
        "linear": network.linear,
        "offset": network.offset,
        "gate": network.gate,
        "gate_bias": network.gate_bias,
        **parts,
    }
    known["outer"] = np.reshape(known["outer"], (*answer, -1))
    known["linear"] = np.reshape(known["linear"], (*answer, -1))
    known["offset"] = np.reshape(known["offset"], answer)
    return Mlp(**known)


def representative(network: Mlp) -> Mlp:
    """The same function with the activation that stands for its class."""
    alias = ACTIVATIONS[network.activation].alias
    if alias is None:
        return network
    name, inside, outside, added = alias
    outer = outer_table(network)
    if network.gate is None or network.gate_bias is None:
        offset = np.atleast_1d(network.offset) + added * outer.sum(axis=1)
        return with_parts(
            network,
            activation=name,
            inner=inside * network.inner,
            inner_bias=inside * network.inner_bias,
            outer=outside * outer,
            offset=offset,
        )
    return with_parts(
        network,
        activation=name,
        gate=inside * network.gate,
        gate_bias=inside * network.gate_bias,
        outer=outside * outer,
        linear=np.atleast_2d(network.linear) + added * outer @ network.inner,
        offset=np.atleast_1d(network.offset) + added * outer @ network.inner_bias,
    )


def turned(network: Mlp, back: Array) -> Mlp:
    """The same function with the chosen neurons' arguments of φ turned around."""
    kind = ACTIVATIONS[network.activation]
    way = np.where(back, -1.0, 1.0)
    outer, taken = outer_table(network), np.where(back, 1.0, 0.0)
    left = outer * np.where(back, kind.sign, 1.0)
    linear, offset = np.atleast_2d(network.linear), np.atleast_1d(network.offset)
    if network.gate is None or network.gate_bias is None:
        inner, bias = way[:, None] * network.inner, way * network.inner_bias
        linear = linear + kind.slope * (outer * taken) @ inner
        offset = offset + (outer * taken) @ (kind.slope * bias + kind.constant)
        return with_parts(
            network, inner=inner, inner_bias=bias, outer=left, linear=linear, offset=offset
        )
    if kind.slope and back.any():
        raise InvalidArgument(f"a {kind.name} gate cannot be turned around")
    linear = linear + kind.constant * (outer * taken) @ network.inner
    offset = offset + kind.constant * (outer * taken) @ network.inner_bias
    gate, bias = way[:, None] * network.gate, way * network.gate_bias
    return with_parts(network, gate=gate, gate_bias=bias, outer=left, linear=linear, offset=offset)


def scaled(network: Mlp, factor: Float[Array, " m"]) -> Mlp:
    """The same function: rows of `inner` times a factor, `outer` divided by it. For gated networks
    any factor but zero, for ReLU positive ones."""
    return with_parts(
        network,
        inner=factor[:, None] * network.inner,
        inner_bias=factor * network.inner_bias,
        outer=outer_table(network) / factor,
    )


def only(network: Mlp, chosen: Array) -> Mlp:
    """The network of the chosen neurons, affine part as it is."""
    parts: dict[str, Any] = {
        "inner": network.inner[chosen],
        "inner_bias": network.inner_bias[chosen],
        "outer": outer_table(network)[:, chosen],
    }
    if network.gate is not None and network.gate_bias is not None:
        parts.update(gate=network.gate[chosen], gate_bias=network.gate_bias[chosen])
    return with_parts(network, **parts)
