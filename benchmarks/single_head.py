"""The figures of docs/methods/single_head.md, measured in one run.

    python benchmarks/single_head.py [--quick] [--only grid,lopsided,vector,seeds,time,memory]

Queries are counted by the box itself. "met" compares with the promise: a relative Frobenius
error of the score of 1e-13 (float64), 3e-6 (float32; 3e-5 from scale 100 on), 1e-12 (vector), and
at most 1.01 times the floor plus 12 queries.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

import keyhole
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.wrappers.batch import CHUNK_BYTES, CHUNK_QUERIES
from timed_box import Box, Tally

SCALES = (1e-4, 1e-2, 1.0, 1e2, 1e3)
STRONG = 100.0  # scale from which float32 loses digits of the scores itself
ROW = "{:<34} {:>10} {:>10} {:>9} {:>8} {:>8} {:>5}"


def header(title: str) -> None:
    print(f"\n{title}")
    names = ("outcome", "error W", "queries", "limit", "/floor", "met")
    print(ROW.format("", *names))


def error_of_score(recovery: keyhole.Recovery, model: Attention) -> float:
    if recovery.model is None:
        return float("nan")
    found, truth = recovery.model.heads[0].score, model.heads[0].score
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def row(
    tally: Tally, name: str, model: Attention, promise: float, single: bool = False, seed: int = 0
) -> None:
    box = Box(model, single)
    recovery = keyhole.recover(box, keyhole.SingleHead(), seed=seed, throw=False)
    error, floor = error_of_score(recovery, model), recovery.ledger.floor or float("nan")
    limit = 1.01 * floor + 12
    met = (
        recovery.outcome is keyhole.Outcome.RECOVERED
        and error <= promise
        and box.seen <= limit
        and recovery.ledger.paid == box.seen
    )
    tally.rows, tally.met = tally.rows + 1, tally.met + met
    cells = (recovery.outcome.name[:10], f"{error:.1e}", box.seen, f"{limit:.0f}")
    print(ROW.format(name, *cells, f"{box.seen / floor:.4f}", "yes" if met else "NO"), flush=True)


def promise(single: bool, scale: float = 1.0) -> float:
    if not single:
        return 1e-13
    return 3e-5 if scale >= STRONG else 3e-6


def grid(tally: Tally, quick: bool) -> None:
    for bias in (False, True):
        header("with key bias and offset" if bias else "score and value alone")
        for width in (8, 32) if quick else (8, 32, 128, 256):
            for scale in SCALES:
                for single in (False, True):
                    model = attention(np.random.default_rng(width), width, scale=scale, bias=bias)
                    name = f"d={width} scale {scale:g} {'float32' if single else 'float64'}"
                    row(tally, name, model, promise(single, scale), single)


def lopsided(tally: Tally, quick: bool) -> None:
    header("values with zeros and entries of 1e-9, sparse and rank-deficient scores")
    for width in (8, 32) if quick else (8, 32, 128, 256):
        rng = np.random.default_rng(width)
        dense, plain = rng.standard_normal((width, width)), rng.standard_normal(width)
        value = plain.copy()
        value[::2], value[1] = 0.0, 1e-9
        sparse = dense * (rng.random((width, width)) < 0.05)
        sparse[0, 1] = 1.0
        cases = {
            "v zeros, 1e-9": (dense / np.sqrt(width), value),
            "v all 1e-9": (dense / np.sqrt(width), 1e-9 * plain),
            "v one entry": (dense / np.sqrt(width), np.eye(width)[0]),
            "W sparse": (sparse, value),
            "W one entry": (np.outer(np.eye(width)[1], np.eye(width)[2]), plain),
            "W rank 1": (np.outer(dense[0], dense[1]) / width, value),
            "W rank d/4": (dense[:, : width // 4] @ dense[: width // 4] / width, plain),
        }
        for name, (score, vector) in cases.items():
            for single in (False, True):
                kind = "float32" if single else "float64"
                model = Attention([Head(score, None, vector)])
                row(tally, f"d={width} {name} {kind}", model, promise(single), single)


def vector(tally: Tally, quick: bool) -> None:
    header("vector answers, D = d")
    for width in (8, 32) if quick else (8, 32, 128, 256):
        for bias in (False, True):
            for single in (False, True):
                name = f"d={width}{' bias' if bias else ''} {'float32' if single else 'float64'}"
                model = attention(np.random.default_rng(width), width, outputs=width, bias=bias)
                row(tally, name, model, 3e-5 if single else 1e-12, single)


def seeds(tally: Tally, quick: bool) -> None:
    count = 30 if quick else 150
    print(f"\n{count} seeds at d=8: worst error, most queries, and how many keep the promise")
    for bias in (False, True):
        for single in (False, True):
            errors, asked, kept = [], [], 0
            for seed in range(count):
                model = attention(np.random.default_rng(seed), 8, bias=bias)
                box = Box(model, single)
                recovery = keyhole.recover(box, keyhole.SingleHead(), seed=seed, throw=False)
                limit = 1.01 * (72 + (9 if bias else 0)) + 12
                errors.append(error_of_score(recovery, model))
                asked.append(box.seen)
                kept += errors[-1] <= promise(single) and box.seen <= limit
            name = f"{'bias' if bias else 'plain'} {'float32' if single else 'float64'}"
            print(
                f"{name:<16} median {np.nanmedian(errors):.1e}  worst {np.nanmax(errors):.1e}  "
                f"queries ≤ {max(asked)} (limit {limit:.0f})  {kept} of {count}",
                flush=True,
            )


LEARNERS = {
    "SingleHead()": keyhole.SingleHead(),
    "LowRank()": keyhole.LowRank(),
    "Auto": None,
}


def warm_up() -> None:
    """What is imported at the first recovery is part of none."""
    for learner in LEARNERS.values():
        keyhole.recover(attention(np.random.default_rng(0), 4), learner)


REPEATS = 5  # of a run that is timed; the fastest counts, since other work only adds


def timed(width: int, learner: Any) -> tuple[float, float]:
    """Seconds in all, and inside the box."""
    box = Box(attention(np.random.default_rng(width), width))
    start = time.perf_counter()
    keyhole.recover(box, learner)
    return time.perf_counter() - start, box.seconds


def times(tally: Tally, quick: bool) -> None:
    print("\ntime outside the box / inside a NumPy box (promise: 0.40 at 256, 0.25 at 512)")
    warm_up()
    for width in (128, 256) if quick else (256, 512):
        for name, learner in LEARNERS.items():
            total, inside = min(timed(width, learner) for _ in range(REPEATS))
            ratio = (total - inside) / inside
            print(
                f"d={width} {name}: {inside:.2f} s inside, {total:.2f} s in all, ratio {ratio:.2f}",
                flush=True,
            )


def memory(tally: Tally, quick: bool) -> None:
    print("\npeak memory less one chunk, in units of the score matrix (promise: 10)")
    warm_up()
    for width in (128, 256) if quick else (256, 512):
        score, chunk = 8.0 * width**2, min(CHUNK_BYTES, CHUNK_QUERIES * 2 * width * 8)
        for name, learner in LEARNERS.items():
            model = attention(np.random.default_rng(width), width)
            tracemalloc.start()
            keyhole.recover(model, learner)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            print(
                f"d={width} {name}: peak {peak / 2**20:.1f} MiB, one chunk {chunk / 2**20:.1f} "
                f"MiB, score {score / 2**20:.1f} MiB: {(peak - chunk) / score:.1f}",
                flush=True,
            )


PARTS: dict[str, Callable[[Tally, bool], Any]] = {
    "grid": grid,
    "lopsided": lopsided,
    "vector": vector,
    "seeds": seeds,
    "time": times,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small widths only")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    arguments = parser.parse_args()
    unknown = set(arguments.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    tally = Tally()
    for name in arguments.only.split(","):
        PARTS[name](tally, arguments.quick)
    if tally.rows:
        print(f"\n{tally.met} of {tally.rows} rows keep the promise")


if __name__ == "__main__":
    main()
