"""Chains: reproducible, kept heads are kept, hops help."""

import time
from dataclasses import replace

import numpy as np

from example_layers import boolean, layer
from keyhole.fitting.attention_rows import Rows
from keyhole.fitting.levenberg_marquardt import DescentOptions
from keyhole.learners.examples.data import build_examples
from keyhole.learners.examples.restarts import ChainRunner, RestartEffort, draw_led_start, run_chain
from keyhole.models.attention import every_position

EFFORT = RestartEffort(hops=3, solved=1e-18, descent=DescentOptions())


def labelled(heads: int, scale: float = 1.0, count: int = 40) -> tuple[Rows, np.ndarray]:
    rng = np.random.default_rng(heads)
    truth, X = layer(rng, 6, heads, scale), boolean(rng, count, 4, 6)
    rows = build_examples(X, every_position(truth, X)).rows
    return rows, np.stack([h.score.T for h in truth.heads], axis=1)


def test_a_chain_ends_at_the_truth_and_is_repeatable() -> None:
    rows, _ = labelled(2)
    first, second = (run_chain(rows, 2, 7, EFFORT) for _ in range(2))
    assert first.relative <= 1e-18
    np.testing.assert_array_equal(first.theta, second.theta)
    assert first.work > 0


def test_hops_leave_local_minima() -> None:
    rows, _ = labelled(3, scale=3.0, count=18)
    alone = [run_chain(rows, 3, seed, replace(EFFORT, hops=0)).relative for seed in range(6)]
    hopping = [run_chain(rows, 3, seed, EFFORT).relative for seed in range(6)]
    assert sum(r <= 1e-18 for r in hopping) > sum(r <= 1e-18 for r in alone)


def test_known_heads_are_where_a_chain_starts() -> None:
    rows, theta = labelled(2)
    stay = replace(EFFORT, hops=0, known=theta, descent=DescentOptions(iterations=0))
    np.testing.assert_array_equal(run_chain(rows, 3, 0, stay).theta[:, :2], theta)


def test_the_deadline_ends_a_chain() -> None:
    rows, _ = labelled(2)
    late = replace(EFFORT, descent=DescentOptions(deadline=time.monotonic() - 1))
    assert run_chain(rows, 2, 0, late).work == 0


def test_a_lone_head_is_led_by_its_labels() -> None:
    rows, theta = labelled(1)
    led = draw_led_start(rows, 1, np.random.default_rng(0))
    alike = float((led * theta).sum() / (np.linalg.norm(led) * np.linalg.norm(theta)))
    assert alike > 0.5  # of random matrices with 36 entries: 0.17 by chance


def test_the_runner_keeps_the_order_of_its_seeds() -> None:
    rows, _ = labelled(2)
    with ChainRunner(rows, 1) as runner:
        chains = list(runner.map(2, [3, 4], EFFORT))
    for seed, chain in zip((3, 4), chains, strict=True):
        np.testing.assert_array_equal(chain.theta, run_chain(rows, 2, seed, EFFORT).theta)
