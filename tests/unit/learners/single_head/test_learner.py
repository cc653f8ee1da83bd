"""Single heads to the last digits at the floor; the box keeps its own count."""

from typing import Any

import numpy as np
import pytest

import keyhole
from boxes import CountingBox, in_float32
from keyhole.learners.single_head import SingleHead
from keyhole.measurement.noise import SHORTER
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.base import Spec

FLOAT64, FLOAT32 = 1e-13, 3e-6  # relative Frobenius error of the score
SPARE = 8  # queries beyond 1.01 × the floor: calibration


def recovered(
    model: Attention, function: Any = None, **options: Any
) -> tuple[keyhole.Recovery, int]:
    box = CountingBox(function or model, model.width)
    recovery = keyhole.recover(box, SingleHead(), **options)
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.ledger.paid == box.seen
    return recovery, box.seen - recovery.ledger.by_purpose["verification"]  # what learning took


def score_error(recovery: keyhole.Recovery, model: Attention) -> float:
    found, truth = recovery.model.heads[0].score, model.heads[0].score
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def unknowns(model: Attention, bias: bool) -> int:
    return model.width**2 + model.width + (model.width + 1 if bias else 0)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("width", [8, 32])
def test_float64_to_the_last_digits_at_the_floor(width: int, scale: float, bias: bool) -> None:
    model = attention(np.random.default_rng(width), width, scale=scale, bias=bias)
    recovery, asked = recovered(model)
    assert keyhole.distance(recovery.model, model) <= FLOAT64
    assert recovery.ledger.floor == unknowns(model, bias)
    assert asked <= 1.01 * unknowns(model, bias) + SPARE


@pytest.mark.parametrize("scale", [1e2, 1e3])
@pytest.mark.parametrize("width", [8, 32])
def test_strong_scores_lose_nothing(width: int, scale: float) -> None:
    model = attention(np.random.default_rng(width), width, scale=scale)
    recovery, asked = recovered(model)
    assert keyhole.distance(recovery.model, model) <= FLOAT64
    assert asked <= 1.01 * unknowns(model, False) + SPARE


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("width", [8, 32])
def test_float32_to_its_own_last_digits(width: int, scale: float) -> None:
    model = attention(np.random.default_rng(width), width, scale=scale)
    recovery, asked = recovered(model, in_float32(model))
    assert score_error(recovery, model) <= FLOAT32
    assert recovery.details["precision"] == "float32"
    assert asked <= 1.01 * unknowns(model, False) + SPARE


def test_float32_answers_handed_over_as_float64_are_told() -> None:
    model = attention(np.random.default_rng(3), 8)
    single = in_float32(model)
    recovery, _ = recovered(model, lambda tokens: single(tokens).astype(np.float64))
    assert recovery.details["precision"] == "float32"
    assert score_error(recovery, model) <= FLOAT32


def lopsided_values(width: int) -> dict[str, np.ndarray]:
    plain = np.random.default_rng(width).standard_normal(width)
    half, tiny, one = plain.copy(), plain.copy(), np.zeros(width)
    half[::2], tiny[1::2], one[3] = 0.0, 1e-9, 1.0
    both = half.copy()
    both[1] = 1e-9
    return {"zeros": half, "tiny": tiny, "one entry": one, "zeros and tiny": both,
            "all tiny": 1e-9 * plain, "all equal": np.ones(width)}  # fmt: skip


def lopsided_scores(width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100 + width)
    dense = rng.standard_normal((width, width))
    return {
        "sparse": dense * (rng.random((width, width)) < 0.1),
        "one entry": np.outer(np.eye(width)[1], np.eye(width)[4]),
        "rank 1": np.outer(dense[0], dense[1]),
        "rank 2": dense[:, :2] @ dense[:2],
        "identity": np.eye(width),
        "decades": dense * np.logspace(-6, 0, width),
        "skew": dense - dense.T,
    }


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("name", lopsided_values(8))
def test_any_value_vector(name: str, width: int) -> None:
    score = np.random.default_rng(7).standard_normal((width, width)) / np.sqrt(width)
    model = Attention([Head(score, None, lopsided_values(width)[name])])
    recovery, asked = recovered(model)
    assert keyhole.distance(recovery.model, model) <= FLOAT64
    assert asked <= 1.01 * unknowns(model, False) + SPARE


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("name", lopsided_scores(8))
def test_any_score_matrix(name: str, width: int) -> None:
    value = np.random.default_rng(8).standard_normal(width)
    model = Attention([Head(lopsided_scores(width)[name], None, value)])
    recovery, asked = recovered(model)
    assert keyhole.distance(recovery.model, model) <= FLOAT64
    assert asked <= 1.01 * unknowns(model, False) + SPARE


@pytest.mark.parametrize("width", [4, 16])
def test_round_answers_are_not_mistaken_for_few_bits(width: int) -> None:
    """value = e_1 and probes of a round length gave answers that passed for bfloat16."""
    score = np.random.default_rng(9).standard_normal((width, width))
    recovery, asked = recovered(Attention([Head(score, None, np.eye(width)[0])]))
    assert recovery.details["precision"] == "float64"
    assert asked <= 1.01 * (width**2 + width) + SPARE


@pytest.mark.parametrize(
    ("seed", "bias"), [(57, False), (77, False), (84, False), (57, True), (60, True), (77, True)]
)
def test_an_unlucky_first_look_costs_neither_digits_nor_queries(seed: int, bias: bool) -> None:
    """Seeds whose first measurement of the scale is small by chance."""
    model = attention(np.random.default_rng(seed), 8, bias=bias)
    recovery, asked = recovered(model, seed=seed)
    assert score_error(recovery, model) <= FLOAT64
    assert asked <= 1.01 * unknowns(model, bias) + SPARE + 3


@pytest.mark.parametrize("outputs", [2, 8, 12])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_vector_answers_cost_the_unknowns_over_their_numbers(outputs: int, bias: bool) -> None:
    width = 8
    model = attention(np.random.default_rng(outputs), width, outputs=outputs, bias=bias)
    recovery, asked = recovered(model)
    assert keyhole.distance(recovery.model, model) <= 1e-12
    useful = min(outputs, width)  # more numbers than the width tell nothing new
    groups = -(-width // useful)
    assert asked <= width * groups + width + (2 * groups if bias else 0) + 2 * SPARE


@pytest.mark.parametrize(
    ("width", "outputs", "seed"), [(5, 6, 10), (5, 6, 19), (5, 6, 53), (8, 8, 21)]
)
def test_a_true_model_of_a_vector_box_is_not_refused(width: int, outputs: int, seed: int) -> None:
    model = attention(np.random.default_rng([seed, outputs]), width, outputs=outputs)
    recovery, _ = recovered(model, seed=seed)
    assert keyhole.distance(recovery.model, model) <= 1e-12


def test_a_value_map_of_rank_one_reads_one_probe_at_a_time() -> None:
    rng = np.random.default_rng(10)
    value = np.outer(rng.standard_normal(6), rng.standard_normal(4))
    model = Attention([Head(rng.standard_normal((6, 6)), None, value)], np.zeros(4))
    recovery, asked = recovered(model)
    assert keyhole.distance(recovery.model, model) <= 1e-12
    assert asked <= 36 + 6 + SPARE + 1


def test_the_offset_alone() -> None:
    for offset in (1e-6, 1.0, 1e4):
        drawn = attention(np.random.default_rng(11), 8)
        model = Attention(drawn.heads, offset)
        recovery, _ = recovered(model)
        assert keyhole.distance(recovery.model, model) <= FLOAT64
        assert recovery.ledger.floor == 8 * 8 + 8 + 1
        assert not recovery.details["key_bias"]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_smallest_heads(width: int) -> None:
    model = attention(np.random.default_rng(width), width, bias=True)
    recovery, _ = recovered(model)
    assert keyhole.distance(recovery.model, model) <= FLOAT64


def test_short_sequences_suffice() -> None:
    model = attention(np.random.default_rng(12), 6, outputs=6)
    longest: list[int] = []

    def watched(tokens: np.ndarray) -> np.ndarray:
        longest.append(tokens.shape[1])
        return model(tokens)

    box = keyhole.open_oracle(watched, width=6, max_length=3)
    recovery = keyhole.recover(box, SingleHead())
    assert keyhole.distance(recovery.model, model) <= 1e-12
    assert max(longest) == 3


def test_standard_errors_cover_the_truth() -> None:
    """True errors in units of the stated ones: a root mean square of about one or less."""
    for function in (lambda m: m, in_float32):
        model = attention(np.random.default_rng(13), 24)
        recovery, _ = recovered(model, function(model))
        for name, array in model.to_arrays().items():
            error = recovery.errors.to_arrays()[name]
            if error.any():
                gap = np.abs(recovery.model.to_arrays()[name] - array)
                ratio = float(np.sqrt(np.mean((gap[error > 0] / error[error > 0]) ** 2)))
                assert ratio < 2.0, name
        size = np.linalg.norm(recovery.errors.heads[0].score)
        assert size < 30 * np.linalg.norm(recovery.model.heads[0].score - model.heads[0].score)


def test_value_zero_is_not_identifiable_and_says_why() -> None:
    for offset in (0.0, 2.0):
        box = Attention([Head(np.eye(5), None, np.zeros(5))], offset)
        with pytest.raises(keyhole.NotIdentifiable, match="value map is zero") as caught:
            keyhole.recover(box, SingleHead())
        assert caught.value.recovery.outcome is keyhole.Outcome.NOT_IDENTIFIABLE
        ledger = caught.value.recovery.ledger
        rounded = len(SHORTER) if offset else 0  # two: might that be a rounded number?
        assert ledger.paid - ledger.by_purpose["recall"] == 8 + rounded


def test_single_tokens_are_not_enough() -> None:
    box = keyhole.open_oracle(attention(np.random.default_rng(0), 4), max_length=1)
    with pytest.raises(keyhole.NotIdentifiable, match="one token"):
        keyhole.recover(box, SingleHead())


def test_uniform_attention_is_a_head_with_score_zero() -> None:
    model = Attention([Head(np.zeros((8, 8)), None, np.random.default_rng(1).random(8))])
    recovery, asked = recovered(model)
    assert keyhole.distance(recovery.model, model) <= FLOAT64
    assert "uniform" in recovery.notes[0]
    assert asked < 30


def test_the_forecast_is_near_the_cost() -> None:
    for width, outputs in ((8, None), (32, None), (8, 8), (9, 4)):
        model = attention(np.random.default_rng(width), width, outputs=outputs)
        forecast = SingleHead().expected_queries(Spec(width, outputs))
        _, asked = recovered(model)
        assert forecast is not None
        assert forecast <= asked <= 1.3 * forecast + SPARE


def test_a_nonsense_rank_is_refused() -> None:
    with pytest.raises(keyhole.InvalidArgument, match="rank"):
        SingleHead(rank=0)


@pytest.mark.parametrize(("seed", "width", "outputs"), [(10, 5, 5), (1233, 3, 4), (5011, 8, 9)])
def test_vector_heads_with_as_many_outputs_as_the_width_have_honest_errors(
    seed: int, width: int, outputs: int
) -> None:
    """The inverse of the probes' values is exact to the last digit: stated errors are true."""
    model = attention(np.random.default_rng(seed), width, outputs=outputs)
    for learner in (keyhole.SingleHead(), keyhole.Auto()):
        recovery = keyhole.recover(model, learner)  # anything but RECOVERED raises
        off = recovery.model.heads[0].score - model.heads[0].score
        assert np.sqrt(np.mean((off / recovery.errors.heads[0].score) ** 2)) < 3.0
