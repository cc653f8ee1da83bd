import numpy as np
import pytest

from boxes import CountingBox
from keyhole.learners.single_head.key_bias import KeyBias, measure_key_bias
from keyhole.linalg.bases import equal_overlap
from keyhole.measurement.linear_response import measure_values
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.open import open_oracle

WIDTH = 16


def measured(model: Attention) -> tuple[KeyBias, int]:
    box = CountingBox(model, WIDTH)
    oracle = open_oracle(box)
    linear = measure_values(oracle, np.random.default_rng(0))
    group = 1 if model.outputs is None else min(model.outputs, WIDTH)
    left = np.linalg.svd(linear.value, full_matrices=False)[0][:, :group]
    basis = equal_overlap(np.random.default_rng(0), left)
    box.seen = 0
    return measure_key_bias(oracle, linear, basis, group), box.seen


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("outputs", [None, 4])
def test_no_key_bias_costs_one_query(outputs: int | None, offset: float) -> None:
    drawn = attention(np.random.default_rng(1), WIDTH, outputs=outputs, scale=1e3)
    found, asked = measured(Attention(drawn.heads, offset))
    assert asked == 1
    assert not found.vector.any()


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("outputs", [None, 4])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_key_bias_is_found_near_the_floor(
    size: float, outputs: int | None, offset: float
) -> None:
    rng = np.random.default_rng(2)
    (head,) = attention(rng, WIDTH, outputs=outputs).heads
    bias = size * rng.standard_normal(WIDTH)
    found, asked = measured(Attention([Head(head.score, bias, head.value)], offset))
    floor = WIDTH if outputs is None else WIDTH // outputs
    assert asked <= floor + 8
    error = np.abs(found.vector - bias)
    # a strong bias against an offset shortens the probes, and the offset's rounding shows
    assert np.linalg.norm(error) < 1e-13 * max(1.0, size) * np.linalg.norm(bias)
    assert np.linalg.norm(error) < 4 * np.linalg.norm(found.error)


def test_a_sparse_key_bias() -> None:
    (head,) = attention(np.random.default_rng(3), WIDTH).heads
    bias = np.zeros(WIDTH)
    bias[5] = 2.0
    found, _ = measured(Attention([Head(head.score, bias, head.value)]))
    np.testing.assert_allclose(found.vector, bias, atol=1e-14)
