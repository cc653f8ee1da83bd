"""Several heads where tokens are bounded or given: random queries, learned from as examples."""

from typing import Any

import numpy as np
import pytest

import keyhole
from keyhole.learners.base import Inconclusive, Refuted
from keyhole.learners.multi_head.random_queries import (
    RandomQueries,
    check_mirror_images,
    choose_size,
    count_random_queries,
    draw_tokens,
    fit_examples,
    has_bias,
)
from keyhole.models.random import attention
from keyhole.oracles.base import Domain
from keyhole.oracles.noise import NoiseModel
from keyhole.results import Outcome
from multi_head_boxes import asker

WORDS = np.random.default_rng(5).standard_normal((60, 5))


@pytest.mark.parametrize(
    ("d", "heads", "bias", "domain", "most"),
    [
        (4, 2, False, {"max_norm": 2.0}, 220),
        (6, 2, False, {"max_norm": 1.0}, 330),
        (8, 3, False, {"max_norm": 2.0}, 900),
        (8, 2, True, {"low": -1.0, "high": 1.0}, 480),
        (6, 2, False, {"low": 0.5, "high": 2.0}, 320),
        (6, 2, False, {"max_norm": 1e4}, 460),
        (5, 2, False, {"vocabulary": WORDS}, 260),
    ],
)
@pytest.mark.parametrize("learner", [keyhole.MultiHead(), None], ids=["MultiHead", "Auto"])
def test_scalar_layers_in_bounded_domains(
    d: int, heads: int, bias: bool, domain: dict[str, Any], most: int, learner: Any
) -> None:
    secret = attention(np.random.default_rng([d, heads]), d, heads=heads, bias=bias)
    spent = []  # a search that starts badly asks more: most do not
    for seed in range(3):
        found = keyhole.recover(keyhole.open_oracle(secret, **domain), learner, seed=seed)
        assert len(found.model.heads) == heads
        assert keyhole.distance(found.model, secret) <= 1e-10
        assert found.ledger.floor == heads * (d * d + d + bias * d) + bias
        spent.append(found.ledger.learning)
    assert np.median(spent) <= most


def test_vector_answers_that_the_eigenvalues_cannot_sort_out() -> None:
    for heads, outputs in ((2, 4), (5, 6)):  # fewer outputs than tokens are wide; overcomplete
        secret = attention(np.random.default_rng(4), 6, heads=heads, outputs=outputs)
        found = keyhole.recover(keyhole.open_oracle(secret, max_norm=2.0), keyhole.MultiHead())
        assert keyhole.distance(found.model, secret) <= 1e-9


def test_noise_stated_or_not_and_single_precision() -> None:
    secret = attention(np.random.default_rng(3), 6, heads=2)
    short, rng = secret.astype(np.float32), np.random.default_rng(9)

    def noisy(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(secret(tokens) + 1e-6 * rng.standard_normal(len(tokens)))

    boxes = (
        keyhole.open_oracle(noisy, width=6, max_norm=2.0),
        keyhole.open_oracle(noisy, width=6, max_norm=2.0, precision=NoiseModel(additive=1e-6)),
        keyhole.open_oracle(lambda x: short(x.astype(np.float32)), width=6, max_norm=2.0),
    )
    for box in boxes:
        found = keyhole.recover(box, seed=2)
        assert keyhole.distance(found.model, secret) <= 1e-3
        scores = [np.stack([h.score for h in part.heads]) for part in (secret, found.model)]
        gap = min(np.linalg.norm(scores[0] - scores[1][order]) for order in ([0, 1], [1, 0]))
        assert gap <= 4 * np.linalg.norm([h.score for h in found.errors.heads])


def test_other_boxes_are_refused() -> None:
    secret = attention(np.random.default_rng(3), 6, heads=2)
    box = keyhole.open_oracle(lambda x: np.tanh(secret(x)), width=6, max_norm=2.0)
    bent = keyhole.recover(box, keyhole.MultiHead(), throw=False)
    assert bent.outcome is Outcome.REJECTED
    assert "linear" in bent.reason

    def squared(tokens: np.ndarray) -> np.ndarray:  # each token weighted by its own square
        weights = (tokens @ np.arange(1.0, 7.0)) ** 2 + 1.0
        return np.asarray(np.einsum("nl,nl->n", weights, tokens @ np.ones(6)) / weights.sum(1))

    box = keyhole.open_oracle(squared, width=6, max_norm=2.0)
    other = keyhole.recover(box, keyhole.MultiHead(), throw=False)
    assert other.outcome in (Outcome.REJECTED, Outcome.ILL_CONDITIONED)


def test_fewer_heads_than_claimed_are_told() -> None:
    secret = attention(np.random.default_rng(3), 4, heads=2)
    found = keyhole.recover(keyhole.open_oracle(secret, max_norm=2.0), keyhole.MultiHead(heads=3))
    assert any("2 can be told apart" in note for note in found.notes)


class Prior:
    heads, rank, bias, attempts = None, None, None, 2


def test_queries_grow_with_the_unknowns() -> None:
    assert count_random_queries(4, 2, 1) == int(np.ceil(2.2 * (2 * 4 * 6 + 1)))
    assert count_random_queries(4, 4, 1) > count_random_queries(4, 2, 1)
    # many outputs share the answers, but weights need their own
    assert count_random_queries(4, 1, 100) == int(np.ceil(2.2 * 20 / 3))


def test_tokens_are_drawn_inside_the_domain() -> None:
    ask = asker(attention(np.random.default_rng(0), 3), 3, domain=Domain(low=1.0, high=2.0))
    tokens = draw_tokens(ask, np.random.default_rng(1), 20, 4)
    assert tokens.shape == (20, 4, 3)
    assert tokens.min() >= 1.0
    assert tokens.max() <= 2.0


@pytest.mark.parametrize("bias", [True, False])
def test_size_and_bias_of_a_layer(bias: bool) -> None:
    domain, rng = Domain(max_norm=1e3), np.random.default_rng(2)
    ask = asker(attention(rng, 5, heads=2, bias=bias), 5, domain=domain)
    size = choose_size(ask, rng)
    assert isinstance(size, float)
    assert size < 0.05  # at the domain's own length attention would be hard
    assert has_bias(ask, size, rng) is bias
    bent = asker(lambda tokens: np.tanh(tokens.sum(axis=(1, 2))), 5, domain=domain)
    assert isinstance(choose_size(bent, rng), Refuted)


def test_a_fit_says_how_it_ended() -> None:
    rng, domain = np.random.default_rng(3), Domain(max_norm=2.0)
    model = attention(rng, 3, heads=1)
    ask = asker(model, 3, domain=domain)
    ask(np.zeros((1, 1, 3)), "values")
    empty = RandomQueries(ask, 1.0, 4, True, np.zeros((0, 4, 3)), np.zeros((0, 1)))
    examples = empty.extend(40, rng)
    assert examples.extend(30, rng) is examples
    found = fit_examples(examples, 1, False, Prior(), rng)
    assert keyhole.distance(found.model, model) < 1e-9
    assert found.floor == 3 * 3 + 3
    other = asker(lambda tokens: np.sin(5 * tokens).sum(axis=(1, 2)), 3, domain=domain)
    other(np.zeros((1, 1, 3)), "values")
    strange = RandomQueries(other, 1.0, 4, True, np.zeros((0, 4, 3)), np.zeros((0, 1))).extend(
        40, rng
    )
    assert isinstance(fit_examples(strange, 1, False, Prior(), rng), Refuted | Inconclusive)
    noted = check_mirror_images(found, 2)
    assert len(noted.notes) == len(found.notes) + 1
    assert check_mirror_images(found, 4) is found
