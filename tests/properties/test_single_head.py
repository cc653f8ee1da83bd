"""Recovery does not care for scales, zeros or the place of small entries."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import keyhole
from boxes import CountingBox
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention

WIDTH = 5
SEEDS = st.integers(0, 2**32)
# an unlucky first look at the scale still costs a few digits and queries: see
# tests/unit/learners/test_single_head.py
ERROR, SPARE = 1e-5, 48

few = settings(max_examples=10)


def check(model: Attention) -> None:
    box = CountingBox(model, model.width)
    recovery = keyhole.recover(box)  # anything but RECOVERED raises
    assert recovery.ledger.paid == box.seen
    learning = recovery.ledger.learning
    assert learning <= 1.01 * recovery.ledger.floor + SPARE  # type: ignore[operator]
    assert keyhole.distance(recovery.model, model) <= ERROR


@few
@given(SEEDS, st.floats(-6, 6), st.floats(-9, 9), st.none() | st.floats(-6, 3))
def test_any_scale_of_score_value_and_offset(
    seed: int, score: float, value: float, offset: float | None
) -> None:
    (head,) = attention(np.random.default_rng(seed), WIDTH).heads
    scaled = Head(10.0**score * head.score, None, 10.0**value * head.value)
    # the offset in units of the value: beyond, it swamps the value in the box itself
    check(Attention([scaled], 0.0 if offset is None else 10.0 ** (value + offset)))


@few
@given(SEEDS, st.lists(st.sampled_from([0.0, 1e-9, 1.0]), min_size=WIDTH, max_size=WIDTH))
def test_any_pattern_of_small_values(seed: int, pattern: list[float]) -> None:
    rng = np.random.default_rng(seed)
    value = np.array(pattern) * rng.standard_normal(WIDTH)
    if value.any():
        check(Attention([Head(rng.standard_normal((WIDTH, WIDTH)), None, value)]))


@few
@given(SEEDS, st.floats(0.05, 1.0), st.integers(1, WIDTH))
def test_any_sparsity_and_rank(seed: int, density: float, rank: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((2, WIDTH, rank))
    score = (left @ right.T) * (rng.random((WIDTH, WIDTH)) < density)
    check(Attention([Head(score, None, rng.standard_normal(WIDTH))]))


@few
@given(SEEDS, st.integers(1, 6), st.booleans())
def test_any_number_of_outputs(seed: int, outputs: int, bias: bool) -> None:
    model = attention(np.random.default_rng(seed), WIDTH, outputs=outputs, bias=bias)
    check(model)
