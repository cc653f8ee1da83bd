"""The fit of a layer with positions to all answers."""

import numpy as np
import pytest

import keyhole
from keyhole.learners.positions.forward import (
    Answered,
    PlacedLayer,
    compute,
    find_pairs,
    multiply_values,
    to_layer,
    turn_pairs,
)
from keyhole.learners.positions.refinement import (
    Directions,
    Doubts,
    draw_queries,
    find_natural_size,
    refine,
    scatter,
)
from keyhole.measurement.asker import Asker
from placed_layers import placed_layer


def make_truth() -> PlacedLayer:
    """Two heads that share out eight dimensions, two pairs each."""
    truth = placed_layer("rotary", 8, 2, 3)
    factors = [np.linalg.svd(head.value) for head in truth.heads]
    ins = [u[:, :4] * s[:4] for u, s, _ in factors]
    return to_layer(truth, ins, [vt[:4] for _, _, vt in factors])


def ask(truth: PlacedLayer, count: int, noise: float, rng: np.random.Generator) -> Answered:
    tokens, distances = rng.standard_normal((count, 5, 8)), np.arange(5)[::-1].copy()
    errors, lasts = np.full(count, noise), np.full(count, 4)
    plain = Answered(tokens, distances, np.zeros((count, 8)), errors, lasts)
    answers = compute(truth, plain).answers
    return Answered(
        tokens, distances, answers + noise * rng.standard_normal(answers.shape), errors, lasts
    )


def disturb(truth: PlacedLayer, size: float, rng: np.random.Generator) -> PlacedLayer:
    """The layer with all unknowns off by this much, relatively."""
    masks = {**{name: np.ones_like(part) for name, part in truth.parts.items()}, **truth.masks}
    return truth.with_parts(
        {
            name: part * (1.0 + size * masks[name] * rng.standard_normal(part.shape))
            for name, part in truth.parts.items()
        }
    )


def test_a_start_near_the_truth_is_led_to_the_noise() -> None:
    rng, noise = np.random.default_rng(3), 1e-6
    truth = make_truth()
    group = ask(truth, 120, noise, rng)
    found, _ = refine(disturb(truth, 0.01, rng), [group], rng)
    assert 0.5 < found.level < 1.6
    layer, rates = find_pairs(found.layer)
    assert np.abs(rates - 1j * np.array([1.0, 0.01])).max() < 1e-4
    held, settling = refine(turn_pairs(layer, np.array([1.0, 0.01])), [group], rng)
    off = multiply_values(held.layer) - multiply_values(truth)
    errors = Doubts.of(held, settling).spread(multiply_values)
    assert np.mean(np.abs(off) < 3.0 * errors) > 0.9
    fresh = ask(truth, 20, noise, rng)
    assert np.abs(compute(held.layer, fresh).answers - fresh.answers).max() < 1e-4


def test_slow_pairs_that_are_mixed_are_told_apart() -> None:
    rng, noise = np.random.default_rng(4), 1e-7
    truth = make_truth()
    slow = turn_pairs(truth, np.array([0.02, 0.005]))
    slow = PlacedLayer(slow.parts)
    group = ask(slow, 150, noise, rng)
    mixed = slow.with_parts({name: part.copy() for name, part in slow.parts.items()})
    mix = np.eye(4) + 0.3 * rng.standard_normal((4, 4))
    mixed.parts["keys"][:, :4] = mix.T @ slow.parts["keys"][:, :4]
    mixed.parts["queries"][:, :4] = np.linalg.solve(mix, slow.parts["queries"][:, :4])
    found, _ = refine(mixed, [group], rng)
    _, rates = find_pairs(found.layer)
    assert np.abs(rates.imag - np.array([0.02, 0.005])).max() < 1e-4


def test_the_natural_size_spreads_scores_by_one() -> None:
    truth = make_truth()
    size = find_natural_size(truth, np.random.default_rng(1))
    larger = truth.with_parts({"keys": 9.0 * truth.parts["keys"]})
    assert find_natural_size(larger, np.random.default_rng(1)) < size


def test_random_queries_have_their_lengths() -> None:
    box = Asker(keyhole.open_oracle(placed_layer("rotary", 8, 2, 0)))
    groups = draw_queries(box, np.random.default_rng(0), 10, 1.0, {5: 0.8, 9: 0.2}, "test")
    assert [group.tokens.shape for group in groups] == [(8, 5, 8), (2, 9, 8)]
    assert all((group.lasts == group.tokens.shape[1] - 1).all() for group in groups)


def test_units_of_vectors_are_those_of_their_squares() -> None:
    rng = np.random.default_rng(0)
    reached = rng.standard_normal((40, 3, 4)).astype(np.float32)
    places = np.array([rng.permutation(6)[:3] for _ in range(40)])
    units = Directions.of([(reached, places)], 6)
    (matrices,) = scatter([(reached, places)], 6)
    step, z = rng.standard_normal((2, 6, 4))
    assert np.isclose((units.apply(z) * step).sum(), (z * units.adjoint(step)).sum())
    shown = np.einsum("npd,pd->n", matrices, units.apply(np.eye(6, 4)))
    assert 0.0 < (shown**2).sum() < 40.0


def test_a_layer_with_vectors_in_float32_is_recovered() -> None:
    truth = placed_layer("position vectors", 16, 4, 3)
    box = keyhole.open_oracle(truth.astype(np.float32), max_length=24)
    found = keyhole.recover(box, seed=1)
    assert found.outcome is keyhole.Outcome.RECOVERED
    tokens = np.random.default_rng(0).standard_normal((20, 24, 16))
    exact = truth(tokens)
    assert np.abs(found.model(tokens) - exact).max() < 1e-4 * exact.std()
    assert found.ledger.paid < 6 * found.ledger.floor


@pytest.mark.parametrize(
    ("kind", "width"), [("linear bias", 16), ("bias by distance", 16), ("rotary", 32)]
)
def test_a_layer_in_float32_is_recovered(kind: str, width: int) -> None:
    truth = placed_layer(kind, width, 4, 3).astype(np.float32)
    found = keyhole.recover(truth, seed=1)
    assert found.outcome is keyhole.Outcome.RECOVERED
    tokens = np.random.default_rng(0).standard_normal((20, 12, width))
    exact = placed_layer(kind, width, 4, 3)(tokens)
    assert np.abs(found.model(tokens) - exact).max() < 1e-4 * exact.std()
    assert found.ledger.paid < 6 * found.ledger.floor
