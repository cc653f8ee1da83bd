"""Several heads where tokens are bounded or given: random queries, learned from as examples."""

from typing import Any

import numpy as np
import pytest

import keyhole
from keyhole.models.random import attention
from keyhole.oracles.noise import NoiseModel
from keyhole.results import Outcome

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
    found = keyhole.recover(keyhole.open_oracle(secret, **domain), learner)
    assert len(found.model.heads) == heads
    assert keyhole.distance(found.model, secret) <= 1e-10
    assert found.ledger.paid <= most
    assert found.ledger.floor == heads * (d * d + d + bias * d) + bias


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
        found = keyhole.recover(box)
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
