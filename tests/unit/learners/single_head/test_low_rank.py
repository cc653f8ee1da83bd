"""Low rank at the floor, rank unknown; the box keeps its own count."""

from typing import Any

import numpy as np
import pytest
from jaxtyping import TypeCheckError

import keyhole
from boxes import CountingBox, impostors, in_float32
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention

FLOAT64, FLOAT32 = 1e-12, 1e-5  # relative Frobenius error
SEEDS = range(3)


def spread_out(seed: int, width: int, rank: int, decades: float, **parts: Any) -> Attention:
    """A head whose singular values fall evenly over so many decades."""
    rng = np.random.default_rng([seed, width, rank])
    left, right = (np.linalg.qr(rng.standard_normal((width, rank)))[0] for _ in range(2))
    singular = 10.0 ** -np.linspace(0.0, decades, rank) if rank > 1 else np.ones(1)
    value = rng.standard_normal(width)
    score = (left * singular * np.sqrt(width), right.T)
    return Attention([Head(score, parts.get("key_bias"), parts.get("value", value))])


def limit(width: int, rank: int, bias: bool = False) -> int:
    floor = 2 * rank * width - rank * rank + width
    return floor + 4 * rank + 20 + (width + 1 if bias else 0)


def recovered(
    model: Attention, learner: Any = None, function: Any = None, seed: int = 0
) -> tuple[keyhole.Recovery, int]:
    """The recovery, and the queries asked but for the verification, as the box counted them."""
    box = CountingBox(function or model, model.width)
    recovery = keyhole.recover(box, learner or keyhole.LowRank(), seed=seed, throw=False)
    assert recovery.outcome is keyhole.Outcome.RECOVERED, recovery.reason
    assert recovery.ledger.paid == box.seen
    return recovery, box.seen - recovery.ledger.by_purpose["verification"]


@pytest.mark.parametrize("kind", ["gaussian", "even", "spread"])
@pytest.mark.parametrize("rank", [1, 2, 8])
@pytest.mark.parametrize("width", [32, 64])
def test_rank_error_and_count(width: int, rank: int, kind: str) -> None:
    for seed in SEEDS:
        model = spread_out(seed, width, rank, 4.0 if kind == "spread" else 0.0)
        if kind == "gaussian":
            model = attention(np.random.default_rng([seed, width]), width, rank=rank)
        recovery, asked = recovered(model, seed=seed)
        assert recovery.details["rank"] == rank
        assert keyhole.distance(recovery.model, model) <= FLOAT64
        assert asked <= limit(width, rank)
        assert recovery.ledger.floor == 2 * rank * width - rank * rank + width
        assert recovery.model.heads[0].score_factors.left.shape == (width, rank)


@pytest.mark.parametrize("rank", [1, 2, 8])
@pytest.mark.parametrize("width", [32, 64])
def test_float32(width: int, rank: int) -> None:
    for seed in SEEDS:
        model = spread_out(seed, width, rank, 0.0).astype(np.float32).astype(np.float64)
        recovery, asked = recovered(model, function=in_float32(model), seed=seed)
        assert recovery.details["rank"] == rank
        assert keyhole.distance(recovery.model, model) <= FLOAT32
        assert asked <= limit(width, rank)


@pytest.mark.parametrize("rank", [1, 2, 8])
@pytest.mark.parametrize("decades", [0.0, 4.0])
def test_key_bias_and_offset(decades: float, rank: int) -> None:
    errors = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        model = spread_out(seed, 64, rank, decades, key_bias=rng.standard_normal(64))
        model = Attention(model.heads, rng.standard_normal())
        recovery, asked = recovered(model, seed=seed)
        assert recovery.details["rank"] == rank
        assert asked <= limit(64, rank, bias=True)
        errors.append(keyhole.distance(recovery.model, model))
    assert np.median(errors) <= FLOAT64  # the last bits are those of the machine's sums
    assert max(errors) <= 10 * FLOAT64


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("rank", "outputs"), [(1, 2), (2, 8), (8, 3), (2, 48)])
def test_vector_answers(rank: int, outputs: int, bias: bool) -> None:
    for seed in SEEDS:
        rng = np.random.default_rng([seed, rank])
        model = attention(rng, 48, rank=rank, outputs=outputs, bias=bias)
        recovery, asked = recovered(model, seed=seed)
        assert recovery.details["rank"] == rank
        # a square value map is ill conditioned, which is what reading weights off it costs
        assert keyhole.distance(recovery.model, model) <= (1e-10 if outputs == 48 else 1e-11)
        # groups of probes share a query; the last group of each column and row may be smaller
        group = min(outputs, 48)
        score = rank * -(-48 // group) + 48 * -(-rank // group)
        assert asked <= score + 48 + (-(-48 // group) * 2 + 8 if bias else 0) + 4 * rank + 28


@pytest.mark.parametrize(
    ("score", "rank"),
    [("value", 1), ("key bias", 1), ("one entry", 1), ("value on both sides", 1)],
)
def test_unlucky_directions(score: str, rank: int) -> None:
    """Scores that lie along the value map or the key bias, where probes see least."""
    rng = np.random.default_rng(1)
    value, bias, other = rng.standard_normal((3, 24))
    matrix = {
        "value": np.outer(value, other),
        "key bias": np.outer(other, bias),
        "one entry": np.outer(np.eye(24)[2], np.eye(24)[5]),
        "value on both sides": np.outer(value, value),
    }[score]
    for key_bias in (None, bias):
        model = Attention([Head(matrix, key_bias, value)])
        recovery, _ = recovered(model)
        assert recovery.details["rank"] == rank
        assert keyhole.distance(recovery.model, model) <= FLOAT64


def test_a_score_of_zero() -> None:
    rng = np.random.default_rng(2)
    for key_bias in (None, rng.standard_normal(16)):
        model = Attention([Head(np.zeros((16, 16)), key_bias, rng.standard_normal(16))])
        recovery, asked = recovered(model)
        assert not recovery.model.heads[0].score.any()
        assert asked <= 16 + (17 + 16 if key_bias is not None else 0) + 20


def decaying(seed: int, base: float, outputs: int | None = None) -> Attention:
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((48, 48)))[0] for _ in range(2))
    score = (left * base ** -np.arange(48.0)) @ right.T * np.sqrt(48)
    shape = (48,) if outputs is None else (48, outputs)
    return Attention([Head(score, None, rng.standard_normal(shape))])


def stated(recovery: keyhole.Recovery) -> float:
    """Frobenius norm of the standard errors of the score."""
    head = recovery.errors.heads[0]
    if head.score_factors is None:  # a score of full rank
        return float(np.linalg.norm(head.score))
    left, right = head.score_factors
    return float(np.linalg.norm(np.sqrt(left**2 @ right**2)))


@pytest.mark.parametrize("outputs", [None, 4])
@pytest.mark.parametrize(
    "learner", [keyhole.LowRank(tolerance=1e-3), keyhole.LowRank(rank=5)], ids=["tolerance", "rank"]
)
def test_truncation_is_inside_the_error_bars(learner: Any, outputs: int | None) -> None:
    for seed in SEEDS:
        model = decaying(seed, 4.0, outputs)
        recovery = keyhole.recover(model, learner, seed=seed, throw=False)
        gap = np.linalg.norm(recovery.model.heads[0].score - model.heads[0].score)
        assert gap <= 4.0 * stated(recovery)
        assert recovery.details["truncation"] > 0
        assert recovery.details["rank"] < 20
        if learner.rank is not None:
            assert recovery.details["rank"] == learner.rank


@pytest.mark.parametrize("base", [1.3, 3.0, 10.0, 30.0])
def test_spectra_that_decay_are_followed_to_the_box_precision(base: float) -> None:
    for seed in range(6, 11):
        model = decaying(seed, base)
        recovery, _ = recovered(model, seed=seed)
        gap = np.linalg.norm(recovery.model.heads[0].score - model.heads[0].score)
        assert gap <= 4.0 * stated(recovery)
        assert gap <= 1e-11 * np.linalg.norm(model.heads[0].score)
        found = recovery.details["singular_values"]
        truth = np.sqrt(48) * base ** -np.arange(float(len(found)))
        np.testing.assert_allclose(found[:4], truth[:4], rtol=1e-10, atol=3e-14 * truth[0])
        assert "rank" in recovery.details["rank_reason"]


def test_a_prescribed_rank_that_is_too_low_is_not_a_recovery() -> None:
    model = attention(np.random.default_rng(0), 32)
    recovery = keyhole.recover(model, keyhole.LowRank(rank=4), throw=False)
    assert recovery.outcome is not keyhole.Outcome.RECOVERED


@pytest.mark.parametrize("rank", [1, 4, None])
def test_single_head_of_unknown_rank(rank: int | None) -> None:
    model = attention(np.random.default_rng(3), 40, rank=rank)
    recovery, asked = recovered(model, keyhole.SingleHead(rank="unknown"))
    assert recovery.details["rank"] == (rank or 40)
    assert keyhole.distance(recovery.model, model) <= FLOAT64
    assert asked <= (40 * 40 + 40 + 2 * 40 if rank is None else limit(40, rank))


@pytest.mark.parametrize(("learner", "rounds"), [(None, 10), (keyhole.LowRank(), 16)])
def test_full_rank_takes_few_rounds_and_few_queries(learner: Any, rounds: int) -> None:
    """One cross after the other would be three batches for each of 96."""
    model = attention(np.random.default_rng(6), 96)
    batches = []

    def box(tokens: np.ndarray) -> np.ndarray:
        batches.append(len(tokens))
        return model(tokens)

    recovery = keyhole.recover(keyhole.open_oracle(box, width=96), learner)
    assert recovery.details["rank"] == 96
    assert keyhole.distance(recovery.model, model) <= FLOAT64
    assert recovery.model.heads[0].score_factors is None  # nothing to gain from factors
    assert sum(batches) <= 96 * 96 + 96 + 2 * 96
    chunks = 96 * 96 // 512
    assert len([size for size in batches if size > 1]) <= chunks + 6 * rounds


@pytest.mark.parametrize("rank", [20, 47, 60, 63])
def test_high_rank_is_found_inside_a_block(rank: int) -> None:
    model = attention(np.random.default_rng(rank), 64, rank=rank)
    for learner, more in ((keyhole.LowRank(), 0), (None, 0.08 * (limit(64, rank)) + 40)):
        box = CountingBox(model, 64)
        recovery = keyhole.recover(box, learner)
        assert recovery.details["rank"] == rank
        assert keyhole.distance(recovery.model, model) <= FLOAT64
        assert box.seen == recovery.ledger.paid
        assert recovery.ledger.learning <= limit(64, rank) + more


def test_large_widths_form_nothing_of_size_d_squared() -> None:
    model = attention(np.random.default_rng(4), 2048, rank=2)
    recovery, asked = recovered(model)
    assert recovery.details["rank"] == 2
    assert keyhole.distance(recovery.model, model) <= 10 * FLOAT64
    assert asked <= limit(2048, 2)


@pytest.mark.parametrize("name", list(impostors(8)))
def test_impostors_are_rejected(name: str) -> None:
    box = keyhole.open_oracle(impostors(12, seed=1)[name], width=12)
    recovery = keyhole.recover(box, keyhole.LowRank(), throw=False)
    assert recovery.outcome is keyhole.Outcome.REJECTED, recovery.reason
    assert recovery.verdict is not None
    assert recovery.verdict.counterexample is not None


def test_same_seed_same_queries() -> None:
    model = attention(np.random.default_rng(5), 24, rank=2)
    heard: list[list[bytes]] = []
    for _ in range(2):
        heard.append([])

        def box(tokens: np.ndarray) -> np.ndarray:
            heard[-1].append(tokens.tobytes())
            return model(tokens)

        keyhole.recover(keyhole.open_oracle(box, width=24), keyhole.LowRank(), seed=7)
    assert heard[0] == heard[1]


@pytest.mark.parametrize(
    "options",
    [{"method": "magic"}, {"rank": 0}, {"tolerance": 1.0}, {"measurements": 10}],
)
def test_bad_configuration(options: dict[str, Any]) -> None:
    with pytest.raises((keyhole.InvalidArgument, TypeCheckError)):  # the checker may be first
        keyhole.LowRank(**options)
