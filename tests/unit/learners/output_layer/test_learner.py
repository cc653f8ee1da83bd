import numpy as np
import pytest

import keyhole
from keyhole import Outcome, OutputLayerLearner
from keyhole.learners.output_layer.learner import (
    drop_repeated,
    embed,
    estimate_spread,
    find_blur,
    is_saturated,
    make_affine_space,
    read_width,
)
from keyhole.learners.output_layer.space import make_space
from keyhole.oracles.language_model.interface import Interface
from keyhole.oracles.language_model.restricted import read_logprobs
from keyhole.oracles.language_model.simulated import Simulated
from token_models import LanguageModel, bad_interfaces

MODELS = {
    "RMS": {},
    "RMS, bias of the norm, log-probabilities": {"bias": "norm", "logprobs": True},
    "RMS, output bias, 2 decimals": {"bias": "output", "format": "2 decimals"},
    "LayerNorm, float32": {"norm": "layer", "format": "float32"},
    "LayerNorm, bias, bfloat16": {"norm": "layer", "bias": "norm", "format": "bfloat16"},
    "LayerNorm, output bias, log-probabilities, float16": {
        "norm": "layer",
        "bias": "output",
        "logprobs": True,
        "format": "float16",
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_the_width_is_exact_and_the_space_within_its_error_bars(name):
    model = LanguageModel(len(name), **MODELS[name])
    found = keyhole.recover(model.box(), OutputLayerLearner())
    assert found.outcome is Outcome.RECOVERED
    assert found.model.width == 24
    assert found.model.matrix.shape == (200, 24)
    assert found.ledger.by_purpose["output space"] <= 1.35 * 24
    error = keyhole.distance(found.model, model.truth)
    bar = np.linalg.norm(found.errors.matrix) / np.linalg.norm(found.model.matrix)
    if MODELS[name].get("format", "float64") != "float64":
        assert 0.8 < bar / error < 1.4
    else:
        assert error < 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_the_matrix_is_known_up_to_a_rotation(name):
    model = LanguageModel(len(name) + 1, width=12, tokens=100, **MODELS[name])
    found = keyhole.recover(model.box(), OutputLayerLearner(level="gram"), throw=False)
    assert found.outcome is Outcome.RECOVERED
    assert found.model.width == 12
    truth, bars = model.truth, found.errors
    turned = [keyhole.OutputLayer(one.matrix, level="gram") for one in (found.model, truth)]
    error = keyhole.distance(*turned) * np.linalg.norm(truth.matrix)
    assert error < 2.0 * np.linalg.norm(bars.matrix) + 1e-11
    error = np.linalg.norm(found.model.offset - truth.offset)
    assert error < 3.0 * np.linalg.norm(bars.offset) + 1e-11


def test_both_readings_are_returned():
    assert [str(r) for r in read_width(48, affine=False)] == [
        "RMSNorm of width 48",
        "LayerNorm of width 49",
    ]
    assert [r.width for r in read_width(47, affine=False)] == [48, 47]
    assert [r.norm for r in read_width(49, affine=True)] == ["rms", "layer"]


def test_embedded_rows_sum_to_zero():
    basis = embed(7)
    assert np.allclose(basis.T @ basis, np.eye(6))
    assert np.allclose(basis.sum(axis=0), 0.0)


def test_a_budget_below_the_floor_refuses_the_geometry_with_the_reason():
    model = LanguageModel(1, width=12, tokens=60)
    box = model.box()
    found = keyhole.recover(box, OutputLayerLearner(level="gram"), budget=60, throw=False)
    assert found.outcome is Outcome.BUDGET_EXHAUSTED
    assert "interpolated" in found.reason
    assert found.ledger.paid < 60


def test_a_vocabulary_below_the_width_is_not_identifiable():
    model = LanguageModel(2, width=40, tokens=30)
    found = keyhole.recover(model.box(), OutputLayerLearner(), throw=False)
    assert found.outcome is Outcome.NOT_IDENTIFIABLE


WORDS = {  # of what the run says about a bad interface
    "another model from the 25th answer on": "changed while it was asked",
    "all but the last token dropped": "tokens are dropped",
    "probabilities that do not sum": "do not sum to one",
    "a temperature per answer": "asked again, the box answers differently",
    "a watermark": "something is added to them",
    "noise": "asked again, the box answers differently",
    "a cache by first token": "a cache answers",
    "clipped answers": "the answers fill all",
}


@pytest.mark.parametrize("name", bad_interfaces(LanguageModel(0, width=24)))
def test_a_bad_interface_gets_a_clear_word_and_never_a_wrong_width(name):
    model = LanguageModel(0, width=24)
    box = keyhole.open_language_model(bad_interfaces(model)[name], max_length=32)
    found = keyhole.recover(box, OutputLayerLearner(), throw=False)
    assert WORDS[name] in " ".join([found.reason, *found.notes])
    assert found.model is None or found.model.width == 24
    assert found.ledger.paid < 300


def test_a_box_of_vectors_is_refused_with_advice():
    box = keyhole.open_oracle(lambda tokens: tokens[:, -1], width=3)
    with pytest.raises(keyhole.InvalidArgument, match="open_language_model"):
        keyhole.recover(box, OutputLayerLearner())


def test_options_that_interpolate_are_refused():
    with pytest.raises(keyhole.InvalidArgument, match="interpolated"):
        OutputLayerLearner(surplus=1.0)
    with pytest.raises(keyhole.InvalidArgument, match="level"):
        OutputLayerLearner(level="all")


def test_epsilon_is_told_and_held_by_the_error_bars():
    model = LanguageModel(3, width=10, tokens=80, epsilon=1e-2)
    found = keyhole.recover(model.box(), OutputLayerLearner(level="gram"), throw=False)
    error = keyhole.distance(found.model, model.truth)
    bar = np.linalg.norm(found.errors.matrix) / np.linalg.norm(found.model.matrix)
    assert any("epsilon" in note for note in found.notes)
    assert 1e-8 < error < 10.0 * bar


def test_an_offset_below_the_noise_is_added_to_the_space_or_warned_of():
    rng = np.random.default_rng(0)
    columns, off = rng.standard_normal((2, 200, 20))
    states = rng.standard_normal((60, 12)) @ columns[:, :12].T
    noise = 0.1 * rng.standard_normal(states.shape)
    for size, rank in ((0.3, 13), (0.05, 12), (0.0, 12)):
        space, left = make_affine_space(states + noise + size * off[:, 0], 12)
        assert space.rank == rank
        assert bool(left.strength) == (size == 0.05)
    assert 0.01 < left.smallest < 0.05


def test_more_is_left_than_rounding_explains_where_directions_are_hidden():
    rng = np.random.default_rng(1)
    answers = rng.standard_normal((40, 12)) @ rng.standard_normal((12, 200))
    weak = 0.002 * rng.standard_normal((40, 4)) @ rng.standard_normal((4, 200))
    noise = keyhole.NoiseModel(step=0.01)
    for table, hidden in ((answers, False), (answers + weak, True)):
        rounded = np.round(table, 2)
        space = make_space(rounded, 12)
        blur = find_blur(noise, space, estimate_spread(noise, rounded))
        assert ("rounding once explains" in blur) == hidden


def test_a_width_that_is_no_multiple_of_eight_is_doubted_where_rounding_is_coarse():
    rng = np.random.default_rng(2)
    for rank, doubted in ((8, False), (10, True)):
        answers = rng.standard_normal((30, rank)) @ rng.standard_normal((rank, 100))
        for noise, coarse in ((keyhole.NoiseModel(step=0.5), True), (keyhole.NoiseModel(), False)):
            rounded = np.round(2.0 * answers) / 2.0 if coarse else answers
            spread = estimate_spread(noise, rounded)
            blur = find_blur(noise, make_space(rounded, rank), spread)
            assert ("multiples of eight" in blur) == (doubted and coarse)


def test_a_rank_that_grows_with_the_answers_is_no_width():
    rng = np.random.default_rng(0)
    columns, added = rng.standard_normal((2, 200, 200))
    answers = rng.standard_normal((60, 24)) @ columns[:24]
    assert is_saturated(answers, 24)
    marked = answers + added[rng.integers(200, size=60)]
    assert not is_saturated(marked, int(np.linalg.matrix_rank(marked)))


def test_answers_that_differ_by_rounding_are_one():
    answers = np.random.default_rng(1).standard_normal((5, 50))
    again = answers * (1.0 + 4e-16)
    table = np.concatenate([answers, again])
    assert len(drop_repeated(table, keyhole.NoiseModel(), np.random.default_rng(0))) == 5


def test_top_20_with_bias_takes_at_most_1_4_floors_with_verification():
    model = LanguageModel(5, tokens=300, width=24)
    interface = Interface(300, 20, "reported")
    box = read_logprobs(Simulated(model, interface, max_length=32), interface)
    found = keyhole.recover(box, OutputLayerLearner())
    assert (found.outcome, found.model.width) == (Outcome.RECOVERED, 24)
    assert found.ledger.by_purpose["verification"] == 12
    assert found.ledger.paid <= 1.4 * 24 * (300 - 24) / 19
