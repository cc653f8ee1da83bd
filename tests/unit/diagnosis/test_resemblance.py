"""Near which layer a difference arises that no entry explains."""

import numpy as np
import pytest

import keyhole
from keyhole.diagnosis.resemblance import predict_left_out
from suspects import add_low_rank, serve_llama, small_llama

MODEL = small_llama(2)


@pytest.mark.parametrize(
    ("faults", "layer"), [({"activation": {2: "elu"}}, 2), ({"clip": {3: 0.02}}, 3)]
)
def test_a_fault_of_no_catalogue_is_placed_near_its_layer(faults, layer) -> None:
    diagnosis = keyhole.doctor(MODEL, serve_llama(MODEL, **faults))
    assert not diagnosis.same
    assert not diagnosis.causes
    assert diagnosis.layer == layer
    assert f"near layer {layer}" in str(diagnosis)
    assert diagnosis.queries <= 20


def test_a_random_update_resembles_nothing() -> None:
    edit = add_low_rank("layers.1.self_attn.v_proj.weight", 4, 1e-1)
    diagnosis = keyhole.doctor(MODEL, serve_llama(MODEL, edits=[edit]))
    assert not diagnosis.causes
    assert "resemble" not in diagnosis.suspicion


def test_a_sum_of_moves_is_predicted_on_rows_left_out() -> None:
    rng = np.random.default_rng(0)
    moves = rng.standard_normal((4, 6, 30))
    rest = np.tensordot([1.0, -2.0, 0.0, 0.5], moves, 1)
    assert np.allclose(predict_left_out(moves, rest), 1)
    assert np.all(predict_left_out(moves, rng.standard_normal((6, 30))) < 1)
    assert np.array_equal(predict_left_out(moves[:0], rest), np.zeros(6))
