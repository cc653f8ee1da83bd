"""Starts of largest entropy: descents from them end at the bottom where random ones seldom do."""

from collections.abc import Callable

import numpy as np
import pytest

from keyhole.arrays import Array
from keyhole.fitting.attention_rows import MASKED, Rows, average_tokens, compute_patterns
from keyhole.fitting.initial_guess import draw_start, maximize_entropy
from keyhole.fitting.levenberg_marquardt import descend

SLACK = 0.1
SOLVED = 1e-18  # squared residual, relative to the labels, that only an exact fit reaches
STRONG = 5.0  # standard deviation of a score


def strong_head(seed: int, *, bias: bool = False, padded: bool = False, outputs: int = 8) -> Rows:
    """Eight examples of eight Boolean tokens, labelled by one head of strong attention."""
    rng = np.random.default_rng(seed)
    n, length, d = 8, 8, 8
    tokens = rng.choice([-1.0, 1.0], (n, length, d))
    weights, padding = np.ones((n, length)), None
    if padded:
        padding = np.zeros((n, 1, length))
        padding[::2, 0, -2:] = MASKED
        tokens[::2, -2:] = 0.0
        weights[::2, -2:] = 0.0
    anchors = np.concatenate([tokens, np.ones((n, length, 1))], axis=2) if bias else tokens
    theta = STRONG / d * rng.standard_normal((anchors.shape[2], 1, d))
    rows = Rows(anchors, tokens, padding, weights, np.zeros((n, length, outputs)), offset=bias)
    values = rng.standard_normal((d, outputs))
    labels = average_tokens(
        rows, compute_patterns(rows, theta)
    ) @ values + bias * rng.standard_normal(outputs)
    return Rows(anchors, tokens, padding, weights, labels.reshape(n, length, -1), offset=bias)


def solved(rows: Rows, theta: Array) -> bool:
    return descend(rows, theta).relative <= SOLVED


def starts(kind: dict[str, bool], start: Callable[[Rows, Array], Array]) -> int:
    count = 0
    for seed in range(10):
        rows = strong_head(seed, **kind)
        count += solved(rows, start(rows, draw_start(rows, 1, np.random.default_rng(seed))))
    return count


@pytest.mark.parametrize(("kind", "least"), [({}, 7), ({"bias": True}, 4), ({"padded": True}, 7)])
def test_strong_attention_on_few_examples(kind: dict[str, bool], least: int) -> None:
    led = starts(kind, lambda rows, theta: maximize_entropy(rows, 0 * theta, SLACK))
    assert led >= least
    assert led > starts(kind, lambda rows, theta: theta)


def test_more_outputs_than_dimensions_do_no_harm() -> None:
    rows = strong_head(0, outputs=12)
    theta = draw_start(rows, 1, np.random.default_rng(0))
    assert solved(rows, maximize_entropy(rows, theta, SLACK))


def test_labels_that_lost_a_dimension_leave_the_start_alone() -> None:
    rows = strong_head(0, outputs=7)
    theta = draw_start(rows, 1, np.random.default_rng(0))
    assert maximize_entropy(rows, theta, SLACK) is theta


def test_scale_of_tokens_and_labels_does_not_matter() -> None:
    rows = strong_head(1)
    large = Rows(1e3 * rows.anchors, 1e3 * rows.tokens, None, rows.weights, 1e-5 * rows.targets)
    theta = np.zeros((8, 1, 8))
    np.testing.assert_allclose(
        1e6 * maximize_entropy(large, theta, SLACK), maximize_entropy(rows, theta, SLACK), rtol=1e-6
    )
