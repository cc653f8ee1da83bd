"""Random networks and Transformer layers for the tests: they hold the truth."""

from collections.abc import Callable

import numpy as np
from scipy.special import erf

from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel
from keyhole.network.weights import Weights
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.queries import QueryBatch


class CountingOracle(Oracle):
    """Counts queries and batches for itself."""

    def __init__(self, function: Callable[[np.ndarray], np.ndarray], width: int, **spec) -> None:
        self.function, self.spec = function, Spec(width=width, **spec)
        self.queries, self.batches, self.by_purpose = 0, 0, {}

    def ask(self, queries: QueryBatch) -> np.ndarray:
        self.queries += len(queries)
        self.batches += 1
        seen = self.by_purpose.get(queries.purpose, 0)
        self.by_purpose[queries.purpose] = seen + len(queries)
        tokens = queries.tokens()
        self.spec.domain.check(tokens)
        return np.asarray(self.function(tokens))


def network(
    seed: int, width: int, neurons: int, outputs: int | None = None, *, bias: bool = True
) -> ReluNetwork:
    rng = np.random.default_rng([seed, width, neurons])
    shape = (neurons,) if outputs is None else (neurons, outputs)
    return ReluNetwork(
        rng.standard_normal((neurons, width)) / np.sqrt(width),
        0.5 * rng.standard_normal(neurons) if bias else None,
        rng.standard_normal(shape) / np.sqrt(neurons),
    )


def layer(
    seed: int, width: int, neurons: int, *, bias: bool = True, key_bias: bool = False, **more
) -> TransformerModel:
    rng = np.random.default_rng([seed, 7])
    score = rng.standard_normal((width, width)) / np.sqrt(width)
    lean = rng.standard_normal(width) / 2 if key_bias else None
    return TransformerModel(score, lean, network(seed, width, neurons, bias=bias, **more))


def function_error(model, truth, width: int, points: int = 4000) -> float:
    """Largest difference at normal points, relative to the spread of the answers."""
    x = np.random.default_rng(99).standard_normal((points, 1, width))
    answers = truth(x)
    return float(np.abs(model(x) - answers).max() / (answers.std() or 1.0))


def hidden(activation: Callable[[np.ndarray], np.ndarray], seed: int = 0, width: int = 8):
    """A box with one hidden layer of another activation."""
    secret = network(seed, width, 12)
    return lambda x: activation(x[:, 0] @ secret.weight.T + secret.bias) @ secret.output


def gelu(h: np.ndarray) -> np.ndarray:
    return h * 0.5 * (1 + erf(h / np.sqrt(2)))


def two_hidden_layers(seed: int = 0, width: int = 8):
    first, second = network(seed, width, 12), network(seed + 1, 12, 8)
    return lambda x: second(np.maximum(x[:, 0] @ first.weight.T + first.bias, 0))


def residual_layer(
    seed: int, width: int, neurons: int, where: str, outputs: int | None = None
) -> TransformerModel:
    """A layer whose query is added before the network (and the value map is there to be seen), or
    to its answer."""
    plain = layer(seed, width, neurons, key_bias=seed % 2 == 1, outputs=outputs)
    net, rng = plain.network, np.random.default_rng([seed, 8])
    if where == "before":
        seen = net.weight @ rng.standard_normal((width, width)) / np.sqrt(width)
        both = ReluNetwork(net.weight + seen, net.bias, net.output)
        return TransformerModel(plain.score, plain.key_bias, both, seen)
    around = rng.standard_normal(net.skip.shape)
    both = ReluNetwork(net.weight, net.bias, net.output, around)
    return TransformerModel(plain.score, plain.key_bias, both, net.weight, np.zeros_like(net.skip))


def weights_and_points(seed, width=6, neurons=8, outputs=5):
    rng = np.random.default_rng(seed)
    inner = rng.standard_normal((neurons, width + 1))
    outer = rng.standard_normal((outputs, neurons))
    weights = Weights(inner, outer, np.zeros((outputs, width + 1)), "gelu")
    return weights, rng.standard_normal((200, width)), rng
