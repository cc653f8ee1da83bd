from collections.abc import Callable

import numpy as np
import pytest

from boxes import CountingBox, in_float32
from keyhole.arrays import UNIT_ROUNDOFF
from keyhole.measurement.noise import (
    DECIMAL,
    decimal_step,
    decimals,
    estimate_noise,
    examine,
    measure_noise,
    noise_of_type,
    recognise_format,
    significant_bits,
)
from keyhole.models.random import attention
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.open import open_oracle
from keyhole.oracles.wrappers.degrade import Noisy, Rounded, round_bits
from keyhole.recovery import recover
from keyhole.results import Outcome
from keyhole.verification.verify import verify

MODEL = attention(np.random.default_rng(0), 6, bias=True)


def measured(box: Oracle) -> tuple[str, bool, NoiseModel]:
    found = measure_noise(box, np.random.default_rng(1))
    return found.format, found.repeatable, found


def test_the_stated_precision_comes_first_then_the_type() -> None:
    assert noise_of_type(NoiseModel(relative=1e-3), np.zeros(1)).relative == 1e-3
    for dtype, bits in ((np.float16, 11), (np.float32, 24), (np.float64, 53)):
        assert noise_of_type(None, np.zeros(1, dtype)).relative == 2.0**-bits


def test_bits_in_use_are_counted() -> None:
    numbers = np.array([0.0, 1.0, 3.0, -0.75, 1.0 + 2.0**-23, 1.0 + 2.0**-52, 1e-300, 0.1])
    assert list(significant_bits(numbers))[:6] == [0, 1, 2, 2, 24, 53]
    assert significant_bits(numbers)[-1] > 50


@pytest.mark.parametrize(("name", "bits"), [("bfloat16", 8), ("float16", 11), ("float32", 24)])
def test_a_shorter_format_shows_in_the_digits(name: str, bits: int) -> None:
    full = NoiseModel(UNIT_ROUNDOFF, format="float64")
    numbers = np.random.default_rng(2).standard_normal(9)
    found = recognise_format(full, round_bits(numbers, bits))
    assert (found.relative, found.format) == (2.0**-bits, name)
    assert recognise_format(full, numbers) == full
    for known in (NoiseModel(1e-3), NoiseModel(1e-3, format="float64", repeatable=False)):
        # what the user or the scatter says stands
        assert recognise_format(known, round_bits(numbers, bits)) == known


def test_boxes_are_told_apart() -> None:
    box = open_oracle(MODEL)
    assert measured(box) == ("float64", True, NoiseModel())
    name, deterministic, precision = measured(open_oracle(in_float32(MODEL), width=6))
    assert (name, deterministic, precision.relative) == ("float32", True, 2.0**-24)
    _, deterministic, precision = measured(Rounded(box, decimals=3))
    assert (deterministic, precision.step) == (True, pytest.approx(1e-3))
    _, deterministic, precision = measured(Noisy(box, additive=0.01))
    assert not deterministic
    assert 0.002 < precision.additive < 0.05


def test_decimal_steps() -> None:
    assert decimal_step(np.array([1.5, 2.25, -3.0])) == pytest.approx(0.01)
    assert decimal_step(np.array([7.0, 12.0])) == 1.0
    assert decimal_step(np.array([np.pi])) == 0.0
    large = 1e6 * np.random.default_rng(0).standard_normal(20)
    assert decimal_step(large) == 0.0  # nine decimals are all that double precision has there
    assert decimal_step(np.round(large, 3)) == pytest.approx(1e-3)
    assert decimal_step(np.array([3e-16, -2e-150])) == 0.0  # small numbers, not rounded ones


def test_examining_a_box_costs_few_queries_and_says_what_it_can_do() -> None:
    box = CountingBox(MODEL, 6)
    found = examine(open_oracle(box))
    assert box.seen <= 20
    assert found["width"] == 6
    assert found["outputs"] == "one number"
    assert found["number_format"] == "float64"
    assert found["deterministic"] is True
    assert found["accepts_lengths_up_to"] == 1024
    assert found["accepts_norms_up_to"] == 1e6
    limited = examine(open_oracle(MODEL, max_length=64))
    assert limited["accepts_lengths_up_to"] == 64


def test_examining_finds_where_a_box_gives_up() -> None:
    def small(tokens: np.ndarray) -> np.ndarray:
        if tokens.shape[1] > 20 or np.abs(tokens).max() > 2000.0:
            raise ValueError("too much")
        return MODEL(tokens)

    found = examine(open_oracle(small, width=6))
    assert found["accepts_lengths_up_to"] == 16
    assert found["accepts_norms_up_to"] == 1e3


def test_examining_stays_inside_the_domain() -> None:
    words = np.random.default_rng(0).standard_normal((4, 6))
    asked: list[np.ndarray] = []

    def watched(tokens: np.ndarray) -> np.ndarray:
        asked.append(tokens.copy())
        return MODEL(tokens)

    for limits in ({"vocabulary": words, "max_length": 5}, {"max_norm": 0.5}, {"low": 0.0}):
        asked.clear()
        box = open_oracle(watched, width=6, **limits)  # type: ignore[arg-type]
        examine(box)
        for tokens in asked:
            box.spec.domain.check(tokens)


def digits(count: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda answers: np.array([float(f"{x:.{count - 1}e}") for x in answers])


ROUNDINGS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], NoiseModel]] = {
    "two decimals": (lambda x: np.round(x, 2), NoiseModel(step=0.01)),
    "whole numbers": (lambda x: np.round(300 * x), NoiseModel(step=1.0)),
    "tens": (lambda x: np.round(3000 * x, -1), NoiseModel(step=10.0)),
    "three digits": (digits(3), NoiseModel(1.34e-3)),
    "six digits": (digits(6), NoiseModel(1.34e-6)),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ROUNDINGS)
def test_decimals_behind_the_point_are_told_from_digits_in_all(name: str, seed: int) -> None:
    rounding, expected = ROUNDINGS[name]
    model = attention(np.random.default_rng(seed), 6)
    box = CountingBox(lambda tokens: rounding(model(tokens)), 6)
    found, _, _ = estimate_noise(open_oracle(box), np.random.default_rng(seed))
    assert (found.format, found.repeatable) == (DECIMAL, True)
    assert found.relative == pytest.approx(expected.relative)
    assert found.step == pytest.approx(expected.step)
    assert box.seen == 2 + 5


def test_short_binary_formats_and_labels_are_not_decimal() -> None:
    rng = np.random.default_rng(0)
    for bits in (8, 11, 24, 53):
        for size in (1e-3, 1.0, 1e3, 1e6):
            numbers = round_bits(size * rng.standard_normal((200, 6)), bits)
            assert not any(decimals(row) for row in numbers)
    assert decimals(np.array([1.0, -1.0, 0.0])) is None
    assert decimals(np.array([0.25, 0.37], dtype=np.float32)) is None


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_box_that_answers_in_decimals_is_recovered_and_verified(name: str) -> None:
    rounding, precision = ROUNDINGS[name]
    model = attention(np.random.default_rng(2), 6)
    box = open_oracle(lambda tokens: rounding(model(tokens)), width=6)
    found = recover(box)
    assert found.outcome is Outcome.RECOVERED
    score, true = found.model.heads[0].score, model.heads[0].score
    assert np.linalg.norm(score - true) < 20 * max(precision.relative, 1e-9) * np.linalg.norm(true)
    assert verify(box, found.model, queries=40).agrees
