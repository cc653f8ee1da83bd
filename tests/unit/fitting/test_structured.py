"""A fit by products, on a network that is one matrix and one vector."""

from dataclasses import dataclass

import numpy as np
import pytest

from keyhole.fitting.forward.block import Batch
from keyhole.fitting.gauss_newton import Blocks
from keyhole.fitting.structured import FEW, Network, find_doubts, fit_structured, invert


@dataclass
class Tanh:
    """tanh(matrix x) + vector."""

    parts: dict
    x: np.ndarray

    @property
    def answers(self):
        return np.tanh(self.x @ self.parts["matrix"].T) + self.parts["vector"]

    @property
    def reads(self):
        return {"matrix": self.x}

    def astype(self, dtype):
        return Tanh({name: part.astype(dtype) for name, part in self.parts.items()},
                    self.x.astype(dtype))  # fmt: skip

    @property
    def bend(self):
        return 1.0 - np.tanh(self.x @ self.parts["matrix"].T) ** 2

    def push(self, moves):
        return self.bend * (self.x @ moves["matrix"].T) + moves["vector"]

    def pull(self, vector):
        return {"matrix": vector * self.bend, "vector": vector}


def network_of(width, noise, rng, loud=1.0):
    truth = {"matrix": rng.standard_normal((width, width)) / np.sqrt(width),
             "vector": rng.standard_normal(width)}  # fmt: skip
    batches, weights = [], []
    for size in (1.0, loud):
        tokens = rng.standard_normal((3 * width, 1, width))
        sigma = np.full(3 * width, noise * size)
        clean = Tanh(truth, tokens[:, 0]).answers
        noisy = clean + sigma[:, None] * rng.standard_normal(clean.shape)
        batches.append(Batch(tokens, None, noisy))
        weights.append(1.0 / sigma)
    blocks = Blocks.of(truth)
    network = Network(
        lambda parts, one: Tanh(parts, one.tokens[:, 0]),
        lambda parts, moves: {name: part + moves[name] for name, part in parts.items()},
        batches,
        weights,
        blocks,
        float(blocks.size),
    )
    start = {name: part + 0.05 * rng.standard_normal(part.shape) for name, part in truth.items()}
    return network, truth, start


@pytest.mark.parametrize("width", [5, 32])
@pytest.mark.parametrize("loud", [1.0, 100.0])
def test_the_fit_ends_at_the_noise_with_standard_errors(width, loud):
    rng = np.random.default_rng(0)
    network, truth, start = network_of(width, 1e-6, rng, loud)
    assert network.few == (width == 5) == (network.blocks.size <= FEW)
    found = fit_structured(network, start, rng)
    assert 0.8 < found.level < 1.2
    doubts = find_doubts(network, found, rng, 4)
    for name, part in truth.items():
        error = np.sqrt(np.mean([step[name] ** 2 for step in doubts]))
        off = np.sqrt(np.mean((found.parts[name] - part) ** 2))
        assert 0.4 < off / error < 2.0


def test_the_jacobian_is_that_of_the_products():
    rng = np.random.default_rng(1)
    network, truth, _ = network_of(4, 0.1, rng)
    jacobian = network.jacobian(truth)
    step = rng.standard_normal(network.blocks.size)
    moves = {name: part.astype(np.float32) for name, part in network.blocks.split(step).items()}
    assert np.allclose(jacobian @ step, network.linearize(truth).push(moves), rtol=1e-3, atol=1e-3)


def test_directions_that_do_not_show_stay():
    jacobian = np.array([[1.0, 1.0], [2.0, 2.0], [0.5, 0.5]])
    assert np.allclose(invert(jacobian) @ jacobian @ [1.0, 0.0], [0.5, 0.5])
