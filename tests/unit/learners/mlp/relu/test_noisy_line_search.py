import numpy as np
import pytest

from keyhole.learners.mlp.relu.line_search import NotPiecewiseAffine
from keyhole.learners.mlp.relu.noisy_line_search import search_noisy_line

SINGLE = 2.0**-24


def bent(breakpoints, jumps):
    """Answers in single precision with given breakpoints, and how many were asked."""
    asked = []

    def ask(times):
        asked.extend(times)
        steps = np.maximum(times[:, None] - np.array(breakpoints), 0) @ np.array(jumps)
        return (0.3 - 0.2 * times + steps).astype(np.float32).astype(float)[:, None]

    return ask, asked


def test_breakpoints_of_a_random_line():
    rng = np.random.default_rng(0)
    breakpoints = np.sort(rng.standard_cauchy(40))
    jumps = rng.standard_normal(40) / (6 * (1 + np.abs(breakpoints)))
    ask, asked = bent(breakpoints, jumps)
    line = search_noisy_line(ask, SINGLE, 0.0)
    times = rng.standard_cauchy(2000)
    pieces = np.searchsorted(line.breakpoints, times)
    off = np.abs(line.at(pieces, times) - ask(times))[:, 0] / (1 + np.abs(times))
    assert 38 <= len(line.breakpoints) <= 40  # of two that nearly coincide one may be missing
    assert off.max() < 3e-6
    assert len(asked) - len(times) <= 16 * 40


def test_a_close_pair_is_told_apart_or_passes_for_one():
    for gap, seen in ((1e-3, 3), (1e-7, 2)):
        ask, _ = bent([-0.5, 0.7, 0.7 + gap], [0.4, 0.3, -0.2])
        line = search_noisy_line(ask, SINGLE, 0.0)
        assert len(line.breakpoints) == seen
        assert line.jumps[1:, 0].sum() == pytest.approx(0.1, abs=1e-4)


def test_no_breakpoint():
    ask, asked = bent([], [])
    line = search_noisy_line(ask, SINGLE, 0.0)
    assert len(line.breakpoints) == 0
    assert line.slopes[0, 0] == pytest.approx(-0.2, abs=1e-6)
    assert len(asked) <= 60


def test_answers_that_bend_everywhere_are_refused():
    smooth = lambda t: np.sin(3 * np.arctan(t))[:, None] * (1 + np.abs(t))[:, None]  # noqa: E731
    with pytest.raises(NotPiecewiseAffine, match="bend at more than"):
        search_noisy_line(lambda t: smooth(t).astype(np.float32).astype(float), SINGLE, 0.0)
