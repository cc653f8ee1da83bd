"""Products of a network with steps, against differences of its answers."""

import numpy as np
import pytest

from keyhole.fitting.forward.block import Batch
from keyhole.fitting.forward.network import run_network


@pytest.mark.parametrize("direction", [False, True])
def test_products_are_derivatives_and_transposes(direction):
    rng = np.random.default_rng(0)
    shapes = {"affine": (5, 4), "outer": (5, 6), "rows": (6, 4)}
    parts = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    moves = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    batch = Batch(rng.standard_normal((7, 1, 3)), None, np.zeros((7, 5)))
    step = 1e-6
    ends = [
        run_network({name: parts[name] + way * moves[name] for name in parts}, "gelu", batch,
                    direction).answers
        for way in (step, -step)
    ]  # fmt: skip
    here = run_network(parts, "gelu", batch, direction)
    pushed = here.push(moves)
    assert np.allclose(pushed, (ends[0] - ends[1]) / (2 * step), atol=1e-7)
    vector = rng.standard_normal((7, 5))
    pulled = here.pull(vector)
    total = sum(np.sum((g.T @ here.reads[name]) * moves[name]) for name, g in pulled.items())
    assert np.isclose(total, np.sum(vector * pushed))
    assert here.astype(np.float32).push(moves).shape == (7, 5)
    assert np.allclose(np.linalg.norm(here.answers, axis=1), 1.0) == direction
