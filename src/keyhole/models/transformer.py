"""One Transformer layer read at the last position: attention, then a network of ReLUs.

    z = sum_i softmax_i( x_i . (score x_N + key_bias) ) x_i          f(X) = network(z)

The value map of the head and the first layer of the network are seen only as their product, which
is what `network.weight` holds. With a residual connection the query x_N enters the network beside
the mean z, and the two are weighed differently:

    f(X) = skip . x_N + mixed_skip . (z - x_N)
           + sum_j output_j relu(weight_j . x_N + mixed_weight_j . (z - x_N) + bias_j) + offset

Without residual, mixed_weight = weight and mixed_skip = skip.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float, finite_array, frozen, sequences
from keyhole.errors import InvalidArgument
from keyhole.linalg.softmax import softmax
from keyhole.models.base import Shown
from keyhole.models.relu_network import ReluNetwork

NETWORK = "network."  # prefix of the network's parameters by name


class TransformerModel(Shown):
    """One head whose mixture of the tokens a network of ReLUs reads.

    Args:
        score: (d, d).
        key_bias: (d,); None for zeros.
        network: What it reads is the mixture of the tokens.
        mixed_weight: (m, d), where the network's neurons read the last token, too: what they read
            of the mixture. None without a residual.
        mixed_skip: The same of the network's linear part.

    Example:
        >>> import numpy as np
        >>> network = ReluNetwork(np.eye(2), [0.0, 0.0], [1.0, 1.0])
        >>> TransformerModel(np.zeros((2, 2)), None, network)(np.array([[[2.0, 0.0], [0.0, 4.0]]]))
        array([3.])
    """

    score: Array
    key_bias: Array
    network: ReluNetwork
    mixed_weight: Array | None
    mixed_skip: Array | None

    def __init__(
        self,
        score: Any,
        key_bias: Any,
        network: ReluNetwork,
        mixed_weight: Any = None,
        mixed_skip: Any = None,
    ) -> None:
        width = network.width
        self.network = network
        self.score = frozen(finite_array("score", score, ndim=2))
        if key_bias is None:
            key_bias = np.zeros(width, network.dtype)
        self.key_bias = frozen(finite_array("key_bias", key_bias, ndim=1))
        self.mixed_weight = self.mixed_skip = None
        shapes = [("score", self.score, (width, width)), ("key_bias", self.key_bias, (width,))]
        if mixed_weight is not None:
            self.mixed_weight = frozen(finite_array("mixed_weight", mixed_weight, ndim=2))
            shapes.append(("mixed_weight", self.mixed_weight, network.weight.shape))
            if mixed_skip is None:
                mixed_skip = network.skip
            self.mixed_skip = frozen(finite_array("mixed_skip", mixed_skip, ndim=(1, 2)))
            shapes.append(("mixed_skip", self.mixed_skip, network.skip.shape))
        for name, array, shape in shapes:
            if array.shape != shape:
                raise InvalidArgument(f"{name} must have shape {shape}, got {array.shape}")

    @property
    def width(self) -> int:
        return self.network.width

    @property
    def outputs(self) -> int | None:
        return self.network.outputs

    @property
    def residual(self) -> bool:
        """Whether the query enters the network beside the mean of the tokens."""
        return self.mixed_weight is not None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.result_type(self.score.dtype, self.network.dtype)

    def astype(self, dtype: Any) -> "TransformerModel":
        """The same layer that computes in another precision."""
        return TransformerModel(
            self.score.astype(dtype),
            self.key_bias.astype(dtype),
            self.network.astype(dtype),
            None if self.mixed_weight is None else self.mixed_weight.astype(dtype),
            None if self.mixed_skip is None else self.mixed_skip.astype(dtype),
        )

    def to_arrays(self) -> dict[str, Array]:
        """Every parameter by name; `from_arrays` is the inverse."""
        arrays = {"score": self.score, "key_bias": self.key_bias}
        if self.mixed_weight is not None and self.mixed_skip is not None:
            arrays |= {"mixed_weight": self.mixed_weight, "mixed_skip": self.mixed_skip}
        return arrays | {NETWORK + name: part for name, part in self.network.to_arrays().items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "TransformerModel":
        inner = {
            name.removeprefix(NETWORK): part
            for name, part in arrays.items()
            if name.startswith(NETWORK)
        }
        try:
            network = ReluNetwork.from_arrays(inner)
            mixed = arrays.get("mixed_weight"), arrays.get("mixed_skip")
            return cls(arrays["score"], arrays["key_bias"], network, *mixed)
        except KeyError as missing:
            raise InvalidArgument(f"parameter {missing} is missing") from missing

    def attended(self, tokens: Float[Array, "batch length width"]) -> Float[Array, "batch width"]:
        """The mean of the tokens, weighed by attention from the last one."""
        query = tokens[:, -1, :]
        keys = query @ self.score.T + self.key_bias
        scores = (tokens @ keys[:, :, None])[:, :, 0]
        weights = softmax(scores)
        return np.asarray((weights[:, None, :] @ tokens)[:, 0, :])

    def __call__(self, tokens: Float[Array, "batch length width"]) -> Float[Array, "batch *out"]:
        tokens = sequences(tokens, self.width, self.dtype)
        mean = self.attended(tokens)
        if self.mixed_weight is None or self.mixed_skip is None:
            return self.network(mean)
        net, query = self.network, tokens[:, -1, :]
        moved = mean - query
        hidden = query @ net.weight.T + moved @ self.mixed_weight.T + net.bias
        answer = np.maximum(hidden, 0) @ net.output + query @ net.skip
        return np.asarray(answer + moved @ self.mixed_skip + net.offset)

    def __repr__(self) -> str:
        residual = ", residual" if self.residual else ""
        return f"TransformerModel(width={self.width}, {self.network}{residual})"
