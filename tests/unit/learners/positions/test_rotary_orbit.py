"""Rotary positions from near tokens alone."""

import numpy as np
import pytest

import keyhole
from keyhole.learners.positions.rotary_orbit import (
    STEPS,
    balance,
    choose_basis,
    fit_law,
    learn_orbits,
    rotate,
)
from keyhole.learners.positions.soft import Reader
from keyhole.learners.positions.value_fit import fit_values
from keyhole.learners.positions.values import ValueMaps, measure_value_maps
from keyhole.measurement.asker import Asker
from placed_layers import placed_layer


def test_the_law_of_frequencies_is_named_with_a_base_of_few_digits() -> None:
    rng = np.random.default_rng(0)
    for base in (1e4, 5e5, 1e6):
        law = base ** (-np.arange(8) / 8)
        seen = np.abs(law + 2e-4 * rng.standard_normal((4, 8)))
        found = fit_law(seen, 8)
        assert found is not None
        assert np.allclose(found, law, rtol=1e-12)
    free = np.array([0.9, 0.5, 0.4, 0.1])
    found = fit_law(free + 1e-6 * rng.standard_normal((4, 4)), 4)
    assert found is not None
    assert np.allclose(found, free, rtol=1e-4)
    assert fit_law(np.zeros((4, 8)), 8) is None


def test_pairs_are_the_planes_that_turn() -> None:
    rng, frequencies = np.random.default_rng(1), np.array([1.0, 0.2, 0.05])
    basis = rng.standard_normal((6, 6))
    turn = basis @ rotate(frequencies, STEPS) @ np.linalg.inv(basis)
    found = choose_basis(turn, frequencies)
    again = found @ rotate(frequencies, STEPS) @ np.linalg.inv(found)
    assert np.allclose(again, turn)


def test_balanced_parts_keep_their_products() -> None:
    rng = np.random.default_rng(2)
    keys, queries = rng.standard_normal((4, 5)), 100.0 * rng.standard_normal((4, 5))
    one, other = balance(keys, queries)
    plain = other.copy()
    plain[1::2] *= -1.0
    assert np.allclose(one.T @ plain, keys.T @ queries)


def test_scores_are_found_from_near_tokens() -> None:
    truth = placed_layer("rotary", 16, 2, 3)
    ask, rng = Asker(keyhole.open_oracle(truth)), np.random.default_rng(4)
    values = measure_value_maps(ask, rng, None)
    assert isinstance(values, ValueMaps)
    found = learn_orbits(Reader(ask, values), rng)
    assert isinstance(found, tuple)
    rotary, _ = found
    assert np.allclose(rotary.frequencies, truth.position.frequencies, rtol=1e-9)
    for h, value in enumerate(values.maps):
        (number,) = (n for n, head in enumerate(truth.heads) if np.allclose(head.value, value))
        for distance in (1, 5, 40):
            keys, queries = (
                part[h, ::2] + 1j * part[h, 1::2] for part in (rotary.keys, rotary.queries)
            )
            turned = np.exp(1j * rotary.frequencies * distance)
            own = (keys[:, :-1].T * turned @ queries).real
            true = truth.score_at(number, distance)[:-1]
            assert np.linalg.norm(own - true) < 1e-4 * np.linalg.norm(true)


@pytest.mark.parametrize("seed", [0, 4])
def test_a_start_in_float32_is_near_in_every_head(seed: int) -> None:
    truth = placed_layer("rotary", 32, 4, seed)
    ask = Asker(keyhole.open_oracle(truth.astype(np.float32)), rounding=True)
    rng = np.random.default_rng(4)
    values = measure_value_maps(ask, rng, None)
    assert isinstance(values, ValueMaps)
    values = fit_values(values, rng)
    found = learn_orbits(Reader(ask, values), rng)
    assert isinstance(found, tuple)
    rotary, _ = found
    assert np.allclose(rotary.frequencies, truth.position.frequencies, rtol=1e-9)
    for h, value in enumerate(values.maps):
        number = int(np.argmin([np.linalg.norm(value - head.value) for head in truth.heads]))
        keys, queries = (
            part[h, ::2] + 1j * part[h, 1::2] for part in (rotary.keys, rotary.queries)
        )
        own = (keys[:, :-1].T * np.exp(1j * rotary.frequencies) @ queries).real
        true = truth.score_at(number, 1)[:-1]
        assert np.linalg.norm(own - true) < 0.02 * np.linalg.norm(true)
