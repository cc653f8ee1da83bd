"""One chain of the search for heads: a descent from a random start and its hops, here or elsewhere.

A chain is one descent from a small random start, followed by hops: one head is replaced by a small
random one and the descent repeated, kept when it helps. For one head the random start is led to
what the labels allow first (fitting/initial_guess). Chains are the unit of work, each with a seed
of its own, run one after another or in parallel processes.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
from threadpoolctl import threadpool_limits

from keyhole.arrays import Array, Float
from keyhole.fitting.attention_rows import Rows
from keyhole.fitting.initial_guess import draw_start, maximize_entropy
from keyhole.fitting.levenberg_marquardt import DescentOptions, descend
from keyhole.processes import end_with_parent


@dataclass(frozen=True, eq=False)
class RestartEffort:
    """Where one chain starts, and how much it may do."""

    hops: int  # without gain, after which the chain ends
    solved: float  # relative squared residual of an exact fit
    descent: DescentOptions
    known: Array | None = None  # scores of heads to keep; the chain adds one


@dataclass(frozen=True, eq=False)
class Chain:
    """What one chain found."""

    theta: Float[Array, "p m d"]
    relative: float
    work: float  # iterations, weighted by what one costs


def run_chain(rows: Rows, heads: int, seed: int, effort: RestartEffort) -> Chain:
    """One random start and its hops."""
    rng = np.random.default_rng(seed)
    theta = draw_led_start(rows, heads, rng)
    if effort.known is not None:
        theta[:, : effort.known.shape[1]] = effort.known
    best = descend(rows, theta, effort.descent)
    iterations, failures = best.iterations, 0
    while best.relative > effort.solved and failures < effort.hops:
        if time.monotonic() > effort.descent.deadline:
            break
        theta = draw_led_start(rows, heads, rng)
        if heads > 1:
            keep = np.arange(heads) != rng.integers(heads)
            theta[:, keep] = best.at.theta[:, keep]
        trial = descend(rows, theta, effort.descent)
        iterations += trial.iterations
        # a hop that gains less than two per cent has found no other valley
        failures = 0 if trial.relative < 0.98 * best.relative else failures + 1
        best = trial if trial.relative < best.relative else best
    return Chain(best.at.theta, best.relative, float(iterations * heads**2))


def draw_led_start(rows: Rows, heads: int, rng: np.random.Generator) -> Float[Array, "p m d"]:
    """A random start; for one head, led to weights that the labels allow."""
    theta = draw_start(rows, heads, rng)
    if heads > 1:
        return theta
    # a slack between 0.01 and 1: each is best for some strength of attention
    return maximize_entropy(rows, rng.uniform() * theta, 10 ** rng.uniform(-2.0, 0.0))


class ChainRunner:
    """Runs chains in order, in this process or in several."""

    def __init__(self, rows: Rows, workers: int) -> None:
        self.rows = rows
        self.executor: ProcessPoolExecutor | None = None
        if workers > 1:
            self.executor = ProcessPoolExecutor(workers, get_context("spawn"), _remember, (rows,))

    def __enter__(self) -> "ChainRunner":
        return self

    def __exit__(self, *_: object) -> None:
        if self.executor is not None:
            self.executor.shutdown(wait=True, cancel_futures=True)

    def map(self, heads: int, seeds: list[int], effort: RestartEffort) -> Iterator[Chain]:
        if self.executor is None:
            for seed in seeds:
                yield run_chain(self.rows, heads, seed, effort)
            return
        futures = [self.executor.submit(_run_remembered, heads, s, effort) for s in seeds]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


_ROWS: list[Rows] = []  # in a worker process: the data, sent once


def _remember(rows: Rows) -> None:
    end_with_parent()
    _ROWS[:] = [rows]
    threadpool_limits(1, "blas")


def _run_remembered(heads: int, seed: int, effort: RestartEffort) -> Chain:
    return run_chain(_ROWS[0], heads, seed, effort)
