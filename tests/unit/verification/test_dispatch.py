"""Every kind of reference finds its comparison."""

import numpy as np
import pytest

import keyhole
from keyhole.errors import KeyholeError
from keyhole.models.random import attention
from keyhole.verification.dispatch import read_reference, verify_target

MODEL = attention(np.random.default_rng(0), 4)


def test_saved_models_and_names_are_read(tmp_path):
    path = keyhole.export(MODEL, tmp_path / "model.safetensors")
    assert keyhole.distance(read_reference(str(path)), MODEL) == 0.0
    assert keyhole.distance(read_reference(path), MODEL) == 0.0
    assert read_reference(f"{__name__}:MODEL") is MODEL
    assert read_reference("http://host") == "http://host"
    with pytest.raises(KeyholeError):
        read_reference("no such file")


def test_models_are_left_to_verify_and_boxes_compared():
    assert verify_target(MODEL, MODEL, None, 0) is None
    assert verify_target(lambda tokens: MODEL(tokens), keyhole.open_oracle(MODEL), 20, 0).agrees
    other = attention(np.random.default_rng(1), 4)
    assert not keyhole.verify(other, keyhole.open_oracle(MODEL)).agrees
