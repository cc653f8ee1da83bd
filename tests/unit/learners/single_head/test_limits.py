"""One head at the limits: short formats with a strong key bias, and the memory a run takes."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

import keyhole
from boxes import CountingBox, in_float32
from keyhole.learners.single_head import SingleHead
from keyhole.models.attention import Attention
from keyhole.models.random import attention
from keyhole.oracles.wrappers.batch import CHUNK_QUERIES
from keyhole.verification.challenge_queries import LONGEST

COVERED = 4.0  # Frobenius norm of an error in units of its standard errors
IN_SCORES = 10.0  # memory of a run beside one chunk, in units of the score matrix
BY_RANK = 14.0  # the same where the rank is looked for as well


def in_standard_errors(recovery: keyhole.Recovery, truth: Attention) -> list[float]:
    """Errors of score and key bias."""
    found, errors, head = recovery.model.heads[0], recovery.errors.heads[0], truth.heads[0]
    return [
        float(np.linalg.norm(getattr(found, name) - getattr(head, name)))
        / float(np.linalg.norm(getattr(errors, name)))
        for name in ("score", "key_bias")
    ]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0, 100.0, 1e3])
def test_a_float32_box_with_a_key_bias_is_recovered_within_its_error_bars(scale: float) -> None:
    for seed in range(30):
        model = attention(np.random.default_rng([8, seed]), 8, scale=scale, bias=True)
        truth = model.astype(np.float32).astype(np.float64)
        box = CountingBox(in_float32(model), 8)
        recovery = keyhole.recover(box, SingleHead(), seed=seed)
        assert max(in_standard_errors(recovery, truth)) <= COVERED
        assert keyhole.distance(recovery.model, truth) <= 0.05
        assert box.seen == recovery.ledger.paid
        assert recovery.ledger.learning <= 1.4 * recovery.ledger.floor


def test_a_strong_key_bias_at_a_large_width() -> None:
    model = attention(np.random.default_rng(256), 256, scale=100.0, bias=True)
    recovery = keyhole.recover(keyhole.open_oracle(in_float32(model), width=256), SingleHead())
    truth = model.astype(np.float32).astype(np.float64)
    assert max(in_standard_errors(recovery, truth)) <= COVERED
    assert keyhole.distance(recovery.model, truth) <= 1e-3


@pytest.mark.parametrize("radius", [None, 1.0])
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_a_bfloat16_box_with_a_key_bias_is_never_refused(
    scale: float, radius: float | None
) -> None:
    """Eight bits tell little of it: an honest box may end as ill-conditioned, no worse."""
    for seed in range(6):
        model = attention(np.random.default_rng([8, seed]), 8, scale=scale, bias=True)

        def box(tokens: np.ndarray, model: Attention = model) -> np.ndarray:
            return torch.tensor(model(tokens)).bfloat16().double().numpy()

        oracle = keyhole.open_oracle(box, width=8, max_norm=radius)
        recovery = keyhole.recover(oracle, SingleHead(), seed=seed, throw=False)
        assert recovery.outcome in (keyhole.Outcome.RECOVERED, keyhole.Outcome.ILL_CONDITIONED)
        if recovery.outcome is keyhole.Outcome.RECOVERED:
            assert max(in_standard_errors(recovery, model)) <= COVERED


@pytest.mark.parametrize(
    ("learner", "most"),
    [(SingleHead(), IN_SCORES), (keyhole.LowRank(), BY_RANK), (keyhole.Auto(), BY_RANK)],
    ids=str,
)
def test_memory_is_a_few_times_the_score_matrix(learner: Any, most: float) -> None:
    width = 256
    model = attention(np.random.default_rng(0), width)
    keyhole.recover(attention(np.random.default_rng(0), 4), learner)  # what is imported once
    tracemalloc.start()
    try:
        keyhole.recover(model, learner)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # beside one chunk, or one fresh query of the longest kind: drawn, sent and answered
    chunk = max(CHUNK_QUERIES * 2, 3 * LONGEST) * width * 8
    assert peak - chunk <= most * model.heads[0].score.nbytes
