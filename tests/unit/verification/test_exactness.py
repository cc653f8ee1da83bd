"""An honest box must not be wronged, whatever its noise; questions for that are not many."""

import numpy as np
import pytest

from boxes import CountingBox
from keyhole.models.draw import attention
from keyhole.oracles.base import Oracle
from keyhole.oracles.open import open_oracle
from keyhole.oracles.wrappers.noise import Noisy
from keyhole.oracles.wrappers.rounding import Rounded
from keyhole.verification.exactness import NOISY_MOST, REPEATS, Measuring, upper_level
from keyhole.verification.questions import Designer
from keyhole.verification.verify import verify

MODEL = attention(np.random.default_rng(0), 6, bias=True)


def measured(box: Oracle, count: int = 200, seed: int = 0) -> Measuring:
    fresh = list(Designer(box.spec, 2.0, np.random.default_rng(seed)).stream(count))
    return Measuring(box, fresh, count)


def test_an_exact_box_costs_three_repeats() -> None:
    found = measured(open_oracle(MODEL))
    assert (found.spent, found.additive, found.relative) == (REPEATS, 0.0, 0.0)
    assert found.precision(found.first).relative == 2.0**-53


def test_too_few_questions_measure_nothing() -> None:
    found = measured(open_oracle(MODEL), count=REPEATS)
    assert (found.spent, found.first) == (0, [])


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_never_taken_too_low_nor_much_too_high(seed: int) -> None:
    found = measured(Noisy(open_oracle(MODEL), 1e-3, seed=seed), seed=seed)
    assert found.spent <= REPEATS + NOISY_MOST
    assert 1e-3 < found.additive < 1e-2
    assert found.relative == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_noise_that_grows_with_the_answer_is_told(seed: int) -> None:
    found = measured(Noisy(open_oracle(MODEL), relative=1e-4, seed=seed), seed=seed)
    assert 5e-5 < found.relative < 1e-3


def test_where_answers_cannot_grow_both_are_believed() -> None:
    words = np.random.default_rng(1).standard_normal((9, 6))
    found = measured(Noisy(open_oracle(MODEL, vocabulary=words), 1e-3))
    assert found.additive > 1e-3
    assert found.relative > 0


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
    assert box.seen == queries
