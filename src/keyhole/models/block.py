"""A Transformer block read at the last position: attention and network, residuals and norms.

    post    a = norm_1(x_N + attention(X))        y = norm_2(a + mlp(a))
    pre     a = x_N + attention(norm_1(X))        y = a + mlp(norm_2(a))
    none    a = x_N + attention(X)                y = a + mlp(a)

A parallel block adds both to x_N: y = x_N + attention(norm_1(X)) + mlp(norm_2(x_N)), pre or none.
Either part may be missing, and then its norm is too: the block is one sublayer.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float, finite_array, sequences
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention
from keyhole.models.base import Shown
from keyhole.models.mlp import Mlp
from keyhole.models.norm import KINDS, Norm

ORDERS = ("pre", "post", "none")
ATTENTION, MLP = "attention.", "mlp."  # prefixes of the parts' parameters by name
TAGS = {f"norm.{order}.{kind}{how}": (order, kind, bool(how))
        for order in ORDERS for kind in KINDS for how in ("", ".parallel")}  # fmt: skip


Through = Callable[[Array], Array]


def unchanged(stream: Array) -> Array:
    return stream


class Block(Shown):
    """A Transformer block, or one sublayer of it, read at the last position.

    Args:
        attention: Its heads; None where there are none.
        mlp: Its network; None where there is none.
        norm: "pre", "post" or "none".
        kind: "layer" for LayerNorm, "rms" for RMSNorm.
        epsilons: One per norm, or one for all n of them.
        gain: (n, d); None for ones.
        bias: (n, d); None for zeros.
        parallel: Whether attention and network read the same normalised token.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.attention import Head
        >>> layer = Attention([Head(np.zeros((2, 2)), None, np.eye(2))], [0.0, 0.0])
        >>> Block(layer, None, norm="none")(np.array([[[1.0, 0.0], [3.0, 0.0]]]))
        array([[5., 0.]])
    """

    attention: Attention | None
    mlp: Mlp | None
    norm: str
    kind: str
    norms: tuple[Norm, ...]
    parallel: bool

    def __init__(
        self,
        attention: Attention | None,
        mlp: Mlp | None,
        *,
        norm: str,
        kind: str = "layer",
        epsilons: Any = 1e-5,
        gain: Any = None,
        bias: Any = None,
        parallel: bool = False,
    ) -> None:
        self.attention, self.mlp, self.norm, self.kind = attention, mlp, norm, kind
        self.parallel = parallel
        self._check_parts()
        parts, width = self.parts, self.parts[0].width
        count = 0 if norm == "none" else len(parts)
        dtype = np.result_type(*(part.dtype for part in parts))
        gains = np.ones((count, width), dtype) if gain is None else gain
        biases = np.zeros((count, width), dtype) if bias is None else bias
        gains, biases = (
            np.reshape(finite_array(name, part, ndim=(1, 2)), (-1, width))
            for name, part in (("gain", gains), ("bias", biases))
        )
        sizes = np.broadcast_to(finite_array("epsilons", epsilons, ndim=(0, 1)), (count,))
        if len(gains) != count or len(biases) != count:
            raise InvalidArgument(
                f"this block has {count} norms, got {len(gains)} gains and {len(biases)} biases"
            )
        self.norms = tuple(
            Norm(*one, kind=kind) for one in zip(gains, biases, sizes.tolist(), strict=True)
        )

    def _check_parts(self) -> None:
        parts, norm = self.parts, self.norm
        if not parts:
            raise InvalidArgument("Block needs attention, an mlp, or both")
        if norm not in ORDERS:
            raise InvalidArgument(f"norm must be one of {', '.join(ORDERS)}, got {norm!r}")
        if self.parallel and (norm == "post" or len(parts) < 2):
            raise InvalidArgument(
                "a parallel block has attention and an mlp, and its norm is not 'post'"
            )
        width = parts[0].width
        for part in parts:
            if (part.width, part.outputs) != (width, width):
                raise InvalidArgument(
                    f"the parts of a block of width {width} must answer with vectors of that "
                    f"length, got {part}"
                )

    @property
    def parts(self) -> list[Any]:
        """Attention and network, or the one there is."""
        return [part for part in (self.attention, self.mlp) if part is not None]

    @property
    def sublayers(self) -> list[tuple[Any, Through, Through]]:
        """Every part, what its input goes through, and what the stream does after it."""
        if not self.norms:
            return [(part, unchanged, unchanged) for part in self.parts]
        pairs = zip(self.parts, self.norms, strict=True)
        if self.norm == "pre":
            return [(part, norm, unchanged) for part, norm in pairs]
        return [(part, unchanged, norm) for part, norm in pairs]

    @property
    def width(self) -> int:
        return int(self.parts[0].width)

    @property
    def outputs(self) -> int:
        return self.width

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.result_type(*(part.dtype for part in self.parts))

    @property
    def gain(self) -> Float[Array, "n d"]:
        return np.reshape([norm.gain for norm in self.norms], (-1, self.width))

    @property
    def bias(self) -> Float[Array, "n d"]:
        return np.reshape([norm.bias for norm in self.norms], (-1, self.width))

    @property
    def epsilons(self) -> Float[Array, " n"]:
        return np.array([norm.epsilon for norm in self.norms])

    def natural_length(self) -> float:
        """Length of random tokens at which the scores are of order one. Behind a norm tokens of
        any length are alike; they are then as long as the norm makes them."""
        if self.norm == "pre" or self.attention is None:
            return float(self.width) ** 0.5
        return self.attention.natural_length()

    def __call__(self, tokens: Float[Array, "batch length width"]) -> Float[Array, "batch out"]:
        tokens = sequences(tokens, self.width, self.dtype)
        stream = anchor = tokens[:, -1, :]
        for part, read, write in self.sublayers:
            if isinstance(part, Attention):
                added = part(read(tokens))
            else:
                added = part(read(anchor if self.parallel else stream))
            stream = write(stream + added)
        return np.asarray(stream)

    def astype(self, dtype: Any) -> "Block":
        """The same block that computes in another precision."""
        return Block(
            None if self.attention is None else self.attention.astype(dtype),
            None if self.mlp is None else self.mlp.astype(dtype),
            norm=self.norm,
            kind=self.kind,
            epsilons=self.epsilons,
            gain=self.gain.astype(dtype),
            bias=self.bias.astype(dtype),
            parallel=self.parallel,
        )

    def to_arrays(self) -> dict[str, Array]:
        """Every parameter by name; an empty array's name tells the order and kind of the norms.
        `from_arrays` is the inverse."""
        how = ".parallel" if self.parallel else ""
        arrays = {f"norm.{self.norm}.{self.kind}{how}": np.zeros(0, self.dtype)}
        for prefix, part in ((ATTENTION, self.attention), (MLP, self.mlp)):
            if part is not None:
                arrays |= {prefix + name: array for name, array in part.to_arrays().items()}
        if self.norms:
            arrays |= {"gain": self.gain, "bias": self.bias, "epsilons": self.epsilons}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "Block":
        tags = [name for name in arrays if name in TAGS]
        if len(tags) != 1:
            raise InvalidArgument(f"the order and kind of the norms are needed once, got {tags}")
        order, kind, parallel = TAGS[tags[0]]
        inner = {
            prefix: {
                name.removeprefix(prefix): array
                for name, array in arrays.items()
                if name.startswith(prefix)
            }
            for prefix in (ATTENTION, MLP)
        }
        return cls(
            Attention.from_arrays(inner[ATTENTION]) if inner[ATTENTION] else None,
            Mlp.from_arrays(inner[MLP]) if inner[MLP] else None,
            norm=order,
            kind=kind,
            epsilons=arrays.get("epsilons", 1e-5),
            gain=arrays.get("gain"),
            bias=arrays.get("bias"),
            parallel=parallel,
        )

    def __repr__(self) -> str:
        parts = []
        if self.attention is not None:
            parts.append(f"{len(self.attention.heads)} heads")
        if self.mlp is not None:
            gated = "gated " if self.mlp.gated else ""
            parts.append(f"{self.mlp.neurons} {gated}{self.mlp.activation} neurons")
        norm = "no norm" if self.norm == "none" else f"{self.norm}-norm ({self.kind})"
        how = ", parallel" if self.parallel else ""
        return f"Block(width={self.width}, {', '.join(parts)}, {norm}{how})"
