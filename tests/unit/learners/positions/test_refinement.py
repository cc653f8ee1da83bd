"""The fit of a layer with positions to all answers."""

import numpy as np
import pytest
from scipy.linalg import block_diag

import keyhole
from keyhole.learners.positions.forward import Answered, PlacedLayer, compute, multiply_values
from keyhole.learners.positions.refinement import draw_queries, find_natural_size, refine
from keyhole.measurement.asker import Asker
from placed_layers import placed_layer


def make_truth(rng: np.random.Generator) -> PlacedLayer:
    """Two heads that share out eight dimensions, two pairs each."""
    parts = {
        "keys": 0.5 * rng.standard_normal((2, 4, 9)),
        "queries": 0.5 * rng.standard_normal((2, 4, 9)),
        "ins": rng.standard_normal((2, 8, 4)),
        "outs": rng.standard_normal((2, 4, 8)),
        "offset": rng.standard_normal(8),
    }
    own = block_diag(*([[0.0, f], [-f, 0.0]] for f in (1.0, 0.1)))
    return PlacedLayer({**parts, "turns": np.repeat(own[None], 2, axis=0)})


def ask(truth: PlacedLayer, count: int, noise: float, rng: np.random.Generator) -> Answered:
    tokens, distances = rng.standard_normal((count, 5, 8)), np.arange(5)[::-1].copy()
    errors = np.full(count, noise)
    plain = Answered(tokens, distances, np.zeros((count, 8)), errors, 4)
    answers = compute(truth, plain).answers
    return Answered(
        tokens, distances, answers + noise * rng.standard_normal(answers.shape), errors, 4
    )


def test_a_start_near_the_truth_is_led_to_the_noise() -> None:
    rng, noise = np.random.default_rng(3), 1e-6
    truth = make_truth(rng)
    group = ask(truth, 120, noise, rng)
    start = truth.with_parts(
        {
            name: part * (1.0 + 0.01 * rng.standard_normal(part.shape))
            for name, part in truth.parts.items()
        }
    )
    found = refine(start, [group], rng)
    assert found.begin > 1e3
    assert 0.5 < found.fit.level < 1.6
    off = multiply_values(found.layer) - multiply_values(truth)
    errors = found.spread(multiply_values)
    assert np.mean(np.abs(off) < 3.0 * errors) > 0.9
    fresh = ask(truth, 20, noise, rng)
    assert np.abs(compute(found.layer, fresh).answers - fresh.answers).max() < 1e-4


def test_the_natural_size_spreads_scores_by_one() -> None:
    truth = make_truth(np.random.default_rng(0))
    size = find_natural_size(truth, np.random.default_rng(1))
    larger = truth.with_parts({"keys": 9.0 * truth.parts["keys"]})
    assert find_natural_size(larger, np.random.default_rng(1)) < size


def test_random_queries_have_their_lengths() -> None:
    box = Asker(keyhole.open_oracle(placed_layer("rotary", 8, 2, 0)))
    groups = draw_queries(box, np.random.default_rng(0), 10, 1.0, {5: 0.8, 9: 0.2}, "test")
    assert [group.tokens.shape for group in groups] == [(8, 5, 8), (2, 9, 8)]
    assert all(group.last == group.tokens.shape[1] - 1 for group in groups)


@pytest.mark.parametrize("kind", ["linear bias", "bias by distance"])
def test_a_layer_in_float32_is_recovered(kind: str) -> None:
    truth = placed_layer(kind, 16, 4, 3).astype(np.float32)
    found = keyhole.recover(truth, seed=1)
    assert found.outcome is keyhole.Outcome.RECOVERED
    tokens = np.random.default_rng(0).standard_normal((20, 12, 16))
    exact = placed_layer(kind, 16, 4, 3)(tokens)
    assert np.abs(found.model(tokens) - exact).max() < 1e-4 * exact.std()
    assert found.ledger.paid < 6 * found.ledger.floor
