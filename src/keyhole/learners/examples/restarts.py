"""One chain of the search for heads: a descent from a random start and its hops, here or elsewhere.

A chain is one descent from a small random start, followed by hops: one head is replaced by a small
random one and the descent repeated, kept when it helps. For one head the random start is led to
what the labels allow first (fitting/maximum_entropy). Chains are the unit of work, each with a
seed of its own, run one after another or in parallel processes.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
from threadpoolctl import threadpool_limits

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.attention_rows import Rows
from keyhole.fitting.levenberg_marquardt import Limits, descend
from keyhole.fitting.maximum_entropy import tilted

START = 0.3  # standard deviation of a score at the start: attention begins nearly uniform
SLACK = -2.0, 0.0  # powers of ten, each best for some strength of attention
GAIN = 0.02  # relative decrease that makes a hop worth keeping


@dataclass(frozen=True, eq=False)
class Effort:
    """Where one chain starts, and how much it may do."""

    hops: int
    solved: float  # relative squared residual of an exact fit
    limits: Limits
    known: Array | None = None  # scores of heads to keep; the chain adds one


@dataclass(frozen=True, eq=False)
class Chain:
    """What one chain found."""

    theta: Float[Array, "p m d"]
    relative: float
    work: float  # iterations, weighted by what one costs


def run_chain(rows: Rows, heads: int, seed: int, effort: Effort) -> Chain:
    """One random start and its hops."""
    rng = np.random.default_rng(seed)
    limits = effort.limits
    theta = led_start(rows, heads, rng)
    if effort.known is not None:
        theta[:, : effort.known.shape[1]] = effort.known
    best = descend(rows, theta, limits)
    iterations, failures = best.iterations, 0
    while best.relative > effort.solved and failures < effort.hops:
        if time.monotonic() > limits.deadline:
            break
        theta = led_start(rows, heads, rng)
        if heads > 1:
            keep = np.arange(heads) != rng.integers(heads)
            theta[:, keep] = best.at.theta[:, keep]
        trial = descend(rows, theta, limits)
        iterations += trial.iterations
        failures = 0 if trial.relative < (1 - GAIN) * best.relative else failures + 1
        best = trial if trial.relative < best.relative else best
    return Chain(best.at.theta, best.relative, float(iterations * heads**2))


def led_start(rows: Rows, heads: int, rng: np.random.Generator) -> Float[Array, "p m d"]:
    """A random start; for one head, led to weights that the labels allow."""
    theta = random_start(rows, heads, rng)
    if heads > 1:
        return theta
    return tilted(rows, rng.uniform() * theta, 10 ** rng.uniform(*SLACK))


def random_start(rows: Rows, heads: int, rng: np.random.Generator) -> Float[Array, "p m d"]:
    """Small scores of equal size whatever the scale of the tokens."""
    shape = (rows.anchors.shape[2], heads, rows.width)
    power = np.sqrt(_power(rows.anchors) * _power(rows.tokens))
    return np.asarray(START / power * rng.standard_normal(shape))


def _power(vectors: Array) -> float:
    """Mean squared norm of the vectors that are not padding."""
    squares = np.einsum("nld,nld->nl", vectors, vectors)
    return max(float(squares[squares > 0].mean()) if (squares > 0).any() else 1.0, TINY)


class Chains:
    """Chains in order, in this process or in several."""

    def __init__(self, rows: Rows, workers: int) -> None:
        self.rows, self.workers = rows, workers
        self.executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Chains":
        if self.workers > 1:
            self.executor = ProcessPoolExecutor(
                self.workers, get_context("spawn"), _remember, (self.rows,)
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.executor is not None:
            self.executor.shutdown(wait=True, cancel_futures=True)

    def map(self, heads: int, seeds: list[int], effort: Effort) -> Iterator[Chain]:
        if self.executor is None:
            for seed in seeds:
                yield run_chain(self.rows, heads, seed, effort)
            return
        futures = [self.executor.submit(_remembered_chain, heads, s, effort) for s in seeds]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


_ROWS: list[Rows] = []  # in a worker process: the data, sent once


def _remember(rows: Rows) -> None:
    _ROWS[:] = [rows]
    threadpool_limits(1, "blas")


def _remembered_chain(heads: int, seed: int, effort: Effort) -> Chain:
    return run_chain(_ROWS[0], heads, seed, effort)
