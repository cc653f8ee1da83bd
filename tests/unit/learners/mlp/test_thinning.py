"""Neurons that leave, and those that stay."""

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF
from keyhole.learners.mlp.refinement import refine
from keyhole.learners.mlp.thinning import first_of_each, without_unseen
from keyhole.network.weights import Weights, chosen
from networks import weights_and_points


def test_neurons_that_explain_rounding_alone_leave():
    weights, points, rng = weights_and_points(1)
    answers = weights(points).astype(np.float32).astype(float)
    one_more = Weights(
        np.vstack([weights.inner, rng.standard_normal((1, 7))]),
        np.column_stack([weights.outer, 1e-9 * rng.standard_normal(5)]),
        weights.affine,
        "gelu",
    )
    refined = refine(one_more, points, answers, SINGLE_ROUNDOFF, rng=rng)
    assert refined.weights.neurons == 9
    found = without_unseen(refined, points, answers, SINGLE_ROUNDOFF, rng)
    assert found.weights.neurons == 8
    assert np.abs(found.weights.inner - weights.inner).max() < 1e-4
    assert found.residual < 2e-7 * np.abs(answers).max()


def test_a_weak_neuron_stays():
    weights, points, rng = weights_and_points(2)
    outer = weights.outer * np.append(np.ones(7), 1e-3)
    weak = Weights(weights.inner, outer, weights.affine, "gelu")
    answers = weak(points).astype(np.float32).astype(float)
    refined = refine(weak, points, answers, SINGLE_ROUNDOFF, rng=rng)
    found = without_unseen(refined, points, answers, SINGLE_ROUNDOFF, rng)
    assert found.weights.neurons == 8


def test_a_neuron_that_is_there_twice_counts_once():
    weights, _, _ = weights_and_points(3)
    twice = chosen(weights, np.array([0, 1, 0, 2]))
    assert first_of_each(twice).tolist() == [True, True, False, True]
