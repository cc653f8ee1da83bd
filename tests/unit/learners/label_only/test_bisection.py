"""Bisections in lockstep: brackets hold the truth, cost one bit per query, and never hang."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import InvalidArgument
from keyhole.learners.label_only.bisection import Brackets, bisect, find_magnitude


class Hidden:
    """Answers threshold queries about numbers, and counts queries and batches."""

    def __init__(self, numbers: np.ndarray, ties: bool = False) -> None:
        self.numbers, self.ties, self.asked, self.batches = np.asarray(numbers), ties, 0, 0

    def above(self, index: np.ndarray, at: np.ndarray) -> np.ndarray:
        self.asked += len(index)
        self.batches += 1
        signs = np.sign(self.numbers[index] - at)
        return signs if self.ties else np.where(signs > 0, 1.0, -1.0)


def holds(brackets: Brackets, numbers: np.ndarray) -> bool:
    return bool(((brackets.low <= numbers) & (numbers <= brackets.high)).all())


def test_a_good_prediction_costs_its_entropy() -> None:
    numbers = np.random.default_rng(0).standard_normal(4000)
    box, width = Hidden(numbers), 2.0**-16
    found = bisect(box.above, Brackets.unknown(len(numbers), 0.8), width)
    assert holds(found, numbers)
    assert (found.width <= width).all()
    # entropy of a normal number to a grid of `width`, 0.1 for the heavier tails of the
    # prediction, and up to one for brackets that end narrower than asked
    entropy = np.log2(np.sqrt(2.0 * np.pi * np.e) / width)
    assert box.asked / len(numbers) < entropy + 1.0
    assert box.batches < 32


@pytest.mark.parametrize("factor", [1e-6, 1e-2, 1e2, 1e6, 1e12])
def test_a_wrong_prediction_costs_a_few_queries(factor: float) -> None:
    numbers = factor * np.random.default_rng(1).standard_normal(200)
    box = Hidden(numbers)
    found = bisect(box.above, Brackets.unknown(200, 1.0), factor * 2.0**-10)
    assert holds(found, numbers)
    assert box.asked / 200 < 14 + 2.5 * abs(np.log2(factor))


def test_each_bracket_has_its_own_prediction_and_width() -> None:
    numbers = np.array([1000.0, -3.0, 0.0])
    brackets = Brackets(
        np.full(3, -np.inf), np.full(3, np.inf), np.array([999.5, -3.0, 5.0]), np.array([1.0, 1, 1])
    )
    box = Hidden(numbers)
    found = bisect(box.above, brackets, np.array([2.0**-4, 2.0**-8, 2.0**-12]))
    assert holds(found, numbers)
    assert (found.width <= [2.0**-4, 2.0**-8, 2.0**-12]).all()
    assert box.asked < 45


def test_a_tie_closes_the_bracket() -> None:
    box = Hidden(np.zeros(1), ties=True)
    found = bisect(box.above, Brackets.unknown(1, 1.0), 1e-12)
    assert found.low[0] == found.high[0] == 0.0
    assert box.asked == 1


def test_only_the_chosen_are_asked() -> None:
    box = Hidden(np.array([0.3, 0.4]))
    found = bisect(box.above, Brackets.unknown(2, 1.0), 1e-3, np.array([1]))
    assert np.isinf(found.width[0])
    assert found.width[1] <= 1e-3


def test_it_stops_where_float64_has_no_number_left() -> None:
    box = Hidden(np.array([1.0 / 3.0, 1e200]))
    found = bisect(box.above, Brackets.unknown(2, 1.0), 0.0)
    assert holds(found, box.numbers)
    assert box.batches < 1500


def test_a_contradicting_answer_keeps_the_bracket_in_order() -> None:
    known = Brackets(np.zeros(1), np.ones(1), np.zeros(1), np.ones(1))
    found = known.narrow(np.array([0]), np.array([2.0]), np.array([1.0]))
    assert found.low[0] == found.high[0] == 1.0


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20),
    st.floats(1e-3, 1e3),
    st.integers(1, 30),
)
def test_brackets_hold_the_truth(numbers: list[float], spread: float, bits: int) -> None:
    box = Hidden(np.array(numbers))
    found = bisect(box.above, Brackets.unknown(len(numbers), spread), spread * 2.0**-bits)
    assert holds(found, box.numbers)


@given(st.floats(1e-8, 1e8), st.booleans())
def test_the_search_finds_the_magnitude(size: float, negative: bool) -> None:
    numbers = np.array([0.1, -0.7, 1.0, 0.0]) * size * (-1 if negative else 1)
    box = Hidden(numbers)
    known, level, seen = find_magnitude(
        box.above, Brackets.unknown(4, 1.0), np.arange(4), 1.0, factor=8.0, most=16
    )
    assert seen
    assert level < size * (1 + 1e-12)
    assert size <= 8.0 * level * (1 + 1e-12)
    assert holds(known, numbers)


def test_the_search_says_where_it_saw_nothing() -> None:
    zero = Hidden(np.zeros(3))
    known = Brackets.unknown(3, 1.0)
    _, level, seen = find_magnitude(zero.above, known, np.arange(3), 1.0, factor=8.0, most=5)
    assert not seen
    assert level == 8.0**-5
    _, level, seen = find_magnitude(
        zero.above, known, np.arange(3), 1.0, factor=8.0, most=5, least=1.0 / 64.0
    )
    assert not seen
    assert level == 1.0 / 64.0


def test_bad_brackets_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="upside down"):
        Brackets(np.ones(1), np.zeros(1), np.zeros(1), np.ones(1))
    with pytest.raises(InvalidArgument, match="positive"):
        Brackets.unknown(1, 0.0)
