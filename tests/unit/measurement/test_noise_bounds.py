"""An honest box must not be wronged, whatever its noise; queries for that are not many."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

from boxes import CountingBox
from keyhole.measurement.noise import LOOKS, NOISY_REPEATS, bound_noise, upper_level
from keyhole.models.random import attention
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.degrade import Noisy, Rounded
from keyhole.verification.challenge_queries import Designer
from keyhole.verification.verify import verify

MODEL = attention(np.random.default_rng(0), 6, bias=True)


def precision_of(function: Any, seed: int = 0, **noise: float) -> tuple[NoiseModel, int]:
    """What is found out about a box with this noise, and the queries for it."""
    box = CountingBox(function, 6)
    oracle = Noisy(open_oracle(box), seed=seed, **noise)
    fresh = Designer(oracle.spec, 2.0, np.random.default_rng(seed)).stream()
    tokens = min((query.tokens for ((query, _), *_) in islice(fresh, 6)), key=len)
    answers = [oracle.ask(QueryBatch.of(tokens[None], "verification"))]
    return bound_noise(oracle, tokens, answers, "verification"), box.seen - 1


def test_an_exact_box_costs_three_repeats() -> None:
    assert precision_of(MODEL) == (NoiseModel(2.0**-53), LOOKS)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_never_taken_too_low_nor_much_too_high(seed: int) -> None:
    found, spent = precision_of(MODEL, seed, additive=1e-3)
    assert spent == LOOKS + 2 * NOISY_REPEATS
    assert 1e-3 < found.additive < 1e-2
    assert found.relative == 2.0**-53


@pytest.mark.parametrize("seed", range(5))
def test_noise_that_grows_with_the_answer_is_told(seed: int) -> None:
    found, _ = precision_of(MODEL, seed, relative=1e-4)
    assert 5e-5 < found.relative < 1e-3


def test_where_answers_cannot_grow_both_are_believed() -> None:
    words = np.random.default_rng(1).standard_normal((9, 6))
    oracle = Noisy(open_oracle(MODEL, vocabulary=words), 1e-3)
    answers = [oracle.ask(QueryBatch.of(words[None, :3], "verification"))]
    found = bound_noise(oracle, words[:3], answers, "verification")
    assert found.additive > 1e-3
    assert found.relative > 1e-4


def test_upper_level_covers_the_truth() -> None:
    rng = np.random.default_rng(2)
    levels = [upper_level(rng.standard_normal((8, 1))) for _ in range(2000)]
    assert min(levels) > 1.0


@pytest.mark.parametrize("queries", [4, 10, 60])
@pytest.mark.parametrize("seed", range(4))
def test_honest_boxes_agree(queries: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = attention(rng, int(rng.integers(3, 10)), bias=bool(seed % 2), scale=10.0 ** (seed - 2))
    box = CountingBox(model, model.width)
    for honest in (
        open_oracle(box),
        Rounded(open_oracle(model), decimals=3),
        Noisy(open_oracle(model), 1e-3, seed=seed),
        Noisy(open_oracle(model), relative=1e-3, seed=seed),
    ):
        verdict = verify(honest, model, queries=queries, seed=seed)
        assert verdict.agrees, verdict.bound
        assert verdict.queries == queries
    assert box.seen == queries + LOOKS
