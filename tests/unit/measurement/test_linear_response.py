import numpy as np
import pytest

from boxes import CountingBox, in_float32
from keyhole.errors import WrongFamily
from keyhole.measurement.linear_response import answer_noise, measure_values
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.open import open_oracle


@pytest.mark.parametrize("outputs", [None, 1, 4])
@pytest.mark.parametrize("offset", [0.0, 1e-9, 1.0, 1e6])
def test_value_and_offset_to_the_last_digits(outputs: int | None, offset: float) -> None:
    rng = np.random.default_rng(0)
    drawn = attention(rng, 7, outputs=outputs)
    model = Attention(drawn.heads, offset)
    box = CountingBox(model, 7)
    found = measure_values(open_oracle(box), np.random.default_rng(0))
    assert box.seen == 10
    assert found.scalar == (outputs is None)
    value = model.heads[0].value.reshape(7, -1)
    assert np.array_equal(found.offset, model.offset.reshape(-1))
    np.testing.assert_allclose(found.value, value, rtol=1e-14)
    assert (np.abs(found.value - value) <= 3 * found.value_error + 1e-300).all()


def test_zeros_stay_zero_and_tiny_entries_keep_their_digits() -> None:
    value = np.array([0.0, 1e-9, -1.0, 0.0, 1e-300])
    found = measure_values(
        open_oracle(Attention([Head(np.eye(5), None, value)])), np.random.default_rng(0)
    )
    assert np.array_equal(found.value[:, 0], value)


def test_float32_boxes_are_told_by_their_answers() -> None:
    model = attention(np.random.default_rng(1), 6, bias=True)
    found = measure_values(open_oracle(in_float32(model), width=6), np.random.default_rng(0))
    assert found.noise.name == "float32"
    np.testing.assert_allclose(found.value[:, 0], model.heads[0].value, rtol=1e-6)


def test_queries_stay_within_the_norm() -> None:
    model = attention(np.random.default_rng(2), 6, bias=True)
    largest = []

    def watched(tokens: np.ndarray) -> np.ndarray:
        largest.append(np.linalg.norm(tokens, axis=2).max())
        return model(tokens)

    found = measure_values(open_oracle(watched, width=6, max_norm=0.5), np.random.default_rng(0))
    assert max(largest) <= 0.5
    np.testing.assert_allclose(found.value[:, 0], model.heads[0].value, rtol=1e-13)


def test_a_box_that_is_not_linear_in_one_token_is_refused_with_the_token() -> None:
    rng = np.random.default_rng(3)
    linear = open_oracle(attention(rng, 5, bias=True))
    measure_values(linear, np.random.default_rng(0))  # passes
    bent = open_oracle(lambda tokens: np.tanh(tokens[:, -1] @ np.ones(5)), width=5)
    with pytest.raises(WrongFamily) as caught:
        measure_values(bent, np.random.default_rng(0))
    example = caught.value.counterexample
    assert example is not None
    assert np.shape(example.input) == (1, 5)
    assert abs(example.box_answer - example.model_answer) > 1e-3


def test_noise_grows_slowly_with_the_width() -> None:
    rng = np.random.default_rng(0)
    kind = measure_values(open_oracle(attention(rng, 3)), rng).noise
    levels = [answer_noise(kind, width) for width in (1, 64, 4096)]
    assert levels[0] < levels[1] < levels[2] < 4 * levels[0]
