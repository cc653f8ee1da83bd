"""Copies of a model with other parameters."""

from itertools import islice

import numpy as np
import pytest

from keyhole.models.attention import Attention, Head
from keyhole.models.base import Model, multiply_out_scores, perturb_model, replace_parameters
from keyhole.models.random import attention, block

MODEL = attention(np.random.default_rng(0), 6, bias=True)


def test_an_attention_layer_is_a_model() -> None:
    assert isinstance(MODEL, Model)
    assert not isinstance(np.sin, Model)


def test_one_array_is_replaced_and_the_others_stay() -> None:
    other = replace_parameters(MODEL, {"offset": np.array(7.0)})
    assert float(other.offset) == 7.0
    np.testing.assert_array_equal(other.heads[0].score, MODEL.heads[0].score)


def test_a_copy_differs_by_its_rounding_alone() -> None:
    other = next(perturb_model(MODEL, None, 1e-6, np.random.default_rng(5)))
    for name, array in MODEL.to_arrays().items():
        gap = np.abs(other.to_arrays()[name] - array)
        assert (gap <= 6e-6 * np.abs(array)).all()
        assert gap.any()


def test_copies_scatter_by_their_standard_errors() -> None:
    errors = Attention([Head(np.full((6, 6), 0.1), np.zeros(6), np.full(6, 2.0))], np.array(0.0))
    copies = list(islice(perturb_model(MODEL, errors, 0.0, np.random.default_rng(6)), 200))
    scores = np.stack([copy.heads[0].score for copy in copies])
    assert scores.std() > 0
    assert (scores - MODEL.heads[0].score).std() == pytest.approx(0.1, rel=0.1)
    assert all((copy.heads[0].key_bias == MODEL.heads[0].key_bias).all() for copy in copies)


def test_factored_errors_perturb_the_product() -> None:
    rng = np.random.default_rng(7)
    model = attention(rng, 6, rank=2)
    left, right = np.full((6, 1), 0.1), np.full((1, 6), 0.2)
    errors = Attention([Head((left, right), None, np.zeros(6))])
    copies = list(islice(perturb_model(model, errors, 0.0, rng), 300))
    gaps = np.stack([copy.heads[0].score - model.heads[0].score for copy in copies])
    assert np.sqrt(np.mean(gaps**2)) == pytest.approx(0.02, rel=0.15)
    entrywise = multiply_out_scores(model.to_arrays(), {"heads.0.score": np.zeros((6, 6))})
    np.testing.assert_allclose(entrywise["heads.0.score"], model.heads[0].score)


def test_a_function_without_parameters_stays_as_it_is() -> None:
    assert next(perturb_model(np.sin, None, 1.0, np.random.default_rng(0))) is np.sin


def test_an_epsilon_that_may_be_zero_stays_at_least_zero() -> None:
    drawn = block(np.random.default_rng(0), 4, heads=1, norm="post")
    model = replace_parameters(drawn, {"epsilons": np.zeros(1)})
    errors = replace_parameters(drawn, {"epsilons": np.full(1, 1e-20)})
    copies = list(islice(perturb_model(model, errors, 0.0, np.random.default_rng(1)), 20))
    assert all(copy.epsilons[0] > 0 for copy in copies)
