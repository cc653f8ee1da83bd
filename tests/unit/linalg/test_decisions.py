"""Decisions are counted where somebody listens, and the closest one is kept."""

import numpy as np
import pytest

from keyhole.linalg.decisions import margin_of, note_decision, record_decisions


def test_the_closest_decision_is_kept() -> None:
    with record_decisions() as tally:
        for margin in (9.0, 1.2, 4.0):
            note_decision("heads", 2, margin)
    assert tally.count == 3
    assert tally.closest is not None
    assert tally.closest.margin == 1.2


def test_decisions_outside_are_not_counted() -> None:
    note_decision("heads", 2, 1.0)
    with record_decisions() as tally:
        pass
    note_decision("heads", 2, 1.0)
    assert (tally.count, tally.closest) == (0, None)


def test_margins_are_ratios_on_either_side() -> None:
    assert margin_of(np.array([8.0, 0.5]), 2.0) == pytest.approx(4.0)
    assert margin_of(np.array([1.0]), 4.0) == pytest.approx(4.0)
    assert np.isfinite(margin_of(np.zeros(2), 1.0))
    assert margin_of(np.zeros(0), 1.0) > 1e300
