"""Labelled models: coding, round trip, distance after removing the free factor."""

import numpy as np
import pytest

import keyhole
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.models.sign_attention import Coding, LabelledAttention

BITS = Coding(0.0, 0.0, 1.0)


def with_value(model: Attention, value: np.ndarray) -> Attention:
    return Attention([Head(model.heads[0].score, None, value)])


def test_labelled_model_round_trip_and_distance() -> None:
    secret = attention(np.random.default_rng(1), 4)
    model = LabelledAttention(secret, BITS)
    again = LabelledAttention.from_arrays(model.to_arrays())
    assert again.coding == BITS
    assert keyhole.distance(again, secret) == 0.0
    double = with_value(secret, 2.0 * secret.heads[0].value)
    assert keyhole.distance(model, double) < 1e-15
    assert keyhole.distance(double, model) < 1e-15
    opposite = with_value(secret, -secret.heads[0].value)
    assert keyhole.distance(model, LabelledAttention(opposite, BITS)) == pytest.approx(2.0)
    with pytest.raises(keyhole.InvalidArgument, match="labels"):
        LabelledAttention.from_arrays(secret.to_arrays())


def test_a_coding_is_ordered() -> None:
    for labels in ((1.0, 0.0, -1.0), (0.0, 2.0, 1.0), (1.0, 1.0, 1.0)):
        with pytest.raises(keyhole.InvalidArgument, match="ordered"):
            Coding(*labels)


def test_signs_invert_the_coding() -> None:
    numbers = np.array([-2.0, 0.0, 3.0])
    assert Coding().signs(Coding().encode(numbers)).tolist() == [-1.0, 0.0, 1.0]
    assert BITS.signs(BITS.encode(numbers)).tolist() == [-1.0, -1.0, 1.0]
    assert np.isnan(BITS.signs(np.array([0.5]))).all()


def test_vectors_have_no_label() -> None:
    with pytest.raises(keyhole.InvalidArgument, match="one number"):
        LabelledAttention(attention(np.random.default_rng(0), 3, outputs=2), BITS)
