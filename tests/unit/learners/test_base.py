from dataclasses import dataclass

import numpy as np
import pytest

from keyhole.errors import Counterexample, IllConditioned, WrongFamily
from keyhole.learners.base import (
    Diagnostics,
    Hypothesis,
    Inconclusive,
    Refuted,
    Result,
    run_strategies,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Found(Diagnostics):
    rank: int
    reason: str | None = None


def test_the_first_hypothesis_wins_and_says_what_was_tried() -> None:
    asked: list[str] = []

    def inconclusive() -> Result:
        asked.append("first")
        return Inconclusive("too few digits")

    def settled() -> Result:
        asked.append("second")
        return Hypothesis("model", None, 3.0, ("A note.",))

    def never() -> Result:
        raise AssertionError("a strategy after the one that succeeded was run")

    found = run_strategies([("vectors", inconclusive), ("scalars", settled), ("rest", never)])
    assert (found.model, asked) == ("model", ["first", "second"])
    assert [(each.strategy, each.ending) for each in found.tried] == [("vectors", "too few digits")]
    assert found.report_notes() == ("A note.", "Tried before: vectors (too few digits).")


def test_a_refutation_outweighs_what_is_inconclusive() -> None:
    example = Counterexample(np.zeros((1, 2)), 1.0, 0.0, "zero")
    with pytest.raises(WrongFamily, match="no head answers so") as caught:
        run_strategies(
            [
                ("one", lambda: Refuted("no head answers so", example)),
                ("two", lambda: Inconclusive("saturated")),
            ]
        )
    assert caught.value.counterexample is example


def test_a_hypothesis_that_fails_refutes_the_family_only_where_every_strategy_ends_so() -> None:
    failed = Refuted("a fit leaves something", conclusive=False)
    with pytest.raises(IllConditioned, match="saturated"):
        run_strategies([("one", lambda: failed), ("two", lambda: Inconclusive("saturated"))])
    with pytest.raises(WrongFamily, match="leaves something"):
        run_strategies([("one", lambda: failed), ("two", lambda: failed)])


def test_nothing_found_is_ill_conditioned_with_every_reason() -> None:
    strategies = [("one", lambda: Inconclusive("a")), ("two", lambda: Inconclusive("b"))]
    with pytest.raises(IllConditioned, match="one: a; two: b"):
        run_strategies(strategies)


def test_diagnostics_are_told_by_name() -> None:
    found = Hypothesis(None, None, 1.0, diagnostics=Found(rank=2), details={"own": 1})
    assert found.report_details() == {"rank": 2, "own": 1}
