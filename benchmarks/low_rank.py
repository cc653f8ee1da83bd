"""The figures of docs/methods/low_rank.md, measured in one run.

    python benchmarks/low_rank.py [--quick] [--only methods,growth,grid,high,convex]
    python benchmarks/low_rank.py --scale [--width 4096] [--rank 128]       one head of an LLM
    python benchmarks/low_rank.py --journal [--width 4096] [--rank 128]     and its journal

Queries are counted by the box itself, verification included. The limit is the promise: the
floor 2rd − r² + d, plus 4r + 20, plus the queries of the verification.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import keyhole
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from timed_box import Box, Tally

ROW = "{:<34} {:>15} {:>5} {:>9} {:>9} {:>8} {:>7} {:>7} {:>4}"
ADAM_STEPS, LBFGS_STEPS = 4000, 600
DECADES = 4.0  # over which singular values are spread
GIGA = 2.0**30


def spread_out(rng: np.random.Generator, width: int, rank: int, decades: float) -> Attention:
    """A head whose singular values fall evenly over so many decades."""
    left, right = (np.linalg.qr(rng.standard_normal((width, rank)))[0] for _ in range(2))
    singular = 10.0 ** -np.linspace(0.0, decades, rank) if rank > 1 else np.ones(1)
    score = (left * singular * np.sqrt(width), right.T)
    return Attention([Head(score, None, rng.standard_normal(width))])


def header(title: str) -> None:
    print(f"\n{title}")
    names = ("outcome", "rank", "error", "queries", "limit", "/floor", "seconds", "met")
    print(ROW.format("", *names))


def row(
    tally: Tally,
    name: str,
    model: Attention,
    rank: int,
    learner: Any,
    promise: float,
    single: bool = False,
    seed: int = 0,
    may_fail: bool = False,
) -> None:
    box, start = Box(model, single), time.perf_counter()
    recovery = keyhole.recover(box, learner, seed=seed, throw=False)
    seconds = time.perf_counter() - start
    error = np.nan
    if recovery.model is not None:
        error = keyhole.distance(recovery.model, box.truth)
    width = box.width
    floor = 2 * rank * width - rank * rank + width
    limit = floor + 4 * rank + 20 + recovery.ledger.by_purpose.get("verification", 0)
    if learner.method == "convex":
        limit = learner.measurements + width + 40
    found = recovery.details.get("rank", 0)
    met = (
        recovery.outcome is keyhole.Outcome.RECOVERED
        and error <= promise
        and found == rank
        and box.seen <= limit
        and recovery.ledger.paid == box.seen
    )
    if may_fail and recovery.outcome is keyhole.Outcome.ILL_CONDITIONED:
        met = recovery.model is None  # said so, and returned nothing
    tally.rows, tally.met = tally.rows + 1, tally.met + met
    cells = (recovery.outcome.name, found, f"{error:.1e}", box.seen, limit)
    print(
        ROW.format(
            name, *cells, f"{box.seen / floor:.3f}", f"{seconds:.1f}", "yes" if met else "NO"
        ),
        flush=True,
    )


def grid(tally: Tally, quick: bool) -> None:
    """The promise: every width and rank, spread singular values, float32."""
    header("adaptive, rank not given")
    for width in (32, 64) if quick else (32, 64, 256, 512, 1024):
        for rank in (1, 2, 8) if quick else (1, 2, 8, 32):
            if rank > width // 2:
                continue
            for seed in range(1 if quick or width > 256 else 3):
                rng = np.random.default_rng([width, rank, seed])
                learner = keyhole.LowRank()
                name = f"d={width} r={rank} seed {seed}"
                plain = attention(rng, width, rank=rank)
                even = spread_out(rng, width, rank, 0.0)
                wide = spread_out(rng, width, rank, DECADES)
                row(tally, f"{name} Gaussian factors", plain, rank, learner, 1e-12, seed=seed)
                row(tally, f"{name} 4 decades", wide, rank, learner, 1e-12, seed=seed)
                row(tally, f"{name} float32", even, rank, learner, 1e-5, True, seed)


def high(tally: Tally, quick: bool) -> None:
    """Ranks for which there is little or nothing to gain."""
    header("adaptive, rank not given: half, and full")
    for width in (32, 64) if quick else (64, 256, 512):
        for rank in (width // 2, width):
            rng = np.random.default_rng([width, rank])
            model = attention(rng, width, rank=rank if rank < width else None)
            row(tally, f"d={width} r={rank}", model, rank, keyhole.LowRank(), 1e-12)


def convex(tally: Tally, quick: bool) -> None:
    """A fixed set of queries: enough of them, and fewer and fewer."""
    header("convex, d = 24, r = 2, by measurements over r·d")
    for seed in range(1 if quick else 5):
        model = attention(np.random.default_rng([24, seed]), 24, rank=2)
        for share in (6.0, 4.0, 3.0, 2.5, 2.0, 1.5):
            learner = keyhole.LowRank("convex", measurements=int(share * 48))
            name, few = f"seed {seed}, {share:g}", share < 6.0
            row(tally, name, model, 2, learner, 1e-6, seed=seed, may_fail=few)


def methods(tally: Tally, quick: bool) -> None:
    """Same boxes, one run: adaptive, convex, and gradient descent on the factors."""
    for width, rank in ((16, 1), (24, 2)) if quick else ((24, 2), (32, 4), (64, 2), (64, 8)):
        header(f"d = {width}, r = {rank}: gradient descent is told the rank")
        model = attention(np.random.default_rng([width, rank]), width, rank=rank)
        row(tally, "adaptive", model, rank, keyhole.LowRank(), 1e-12)
        count = 6 * rank * width
        row(tally, "convex, 6rd", model, rank, keyhole.LowRank("convex", measurements=count), 1e-6)
        floor = 2 * rank * width - rank * rank + width
        for factor in (1, 4):
            for name in ("Adam", "L-BFGS"):
                error, seconds = descend(model, rank, factor * floor, name, quick)
                cells = ("-", rank, f"{error:.1e}", factor * floor, "-", f"{factor:.3f}")
                print(ROW.format(f"{name}, {factor} × floor", *cells, f"{seconds:.1f}", "-"))


def descend(model: Attention, rank: int, count: int, name: str, quick: bool) -> tuple[float, float]:
    """Error of the score, and seconds, of a model fitted to random queries in PyTorch."""
    import torch  # an extra, for this comparison only

    rng, width = np.random.default_rng(0), model.width
    tokens = rng.standard_normal((count, 2, width)) * model.natural_length() / np.sqrt(width)
    tokens[:width, 0] = tokens[:width, 1]  # as many queries as unknowns for the value
    asked, answers = torch.tensor(tokens), torch.tensor(model(tokens))
    torch.manual_seed(0)
    left = torch.randn(width, rank, dtype=torch.float64) / rank**0.5
    right = torch.randn(rank, width, dtype=torch.float64) / width**0.5
    value = torch.zeros(width, dtype=torch.float64)
    parameters = [part.requires_grad_() for part in (left, right, value)]

    def loss() -> Any:
        scores = torch.einsum("nld,dr,rn->nl", asked, left, right @ asked[:, -1].T)
        return ((torch.softmax(scores, 1) * (asked @ value)).sum(1) - answers).square().mean()

    start = time.perf_counter()
    if name == "Adam":
        steps = ADAM_STEPS // (10 if quick else 1)
        optimiser: Any = torch.optim.Adam(parameters, lr=0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            optimiser.zero_grad()
            loss().backward()
            optimiser.step()
            schedule.step()
    else:
        steps = LBFGS_STEPS // (10 if quick else 1)
        optimiser = torch.optim.LBFGS(
            parameters,
            max_iter=steps,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            history_size=50,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Any:
            optimiser.zero_grad()
            value_of_loss = loss()
            value_of_loss.backward()
            return value_of_loss

        optimiser.step(closure)
    found = (left @ right).detach().numpy()
    truth = model.heads[0].score
    error = float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
    return error, time.perf_counter() - start


def growth(tally: Tally, quick: bool) -> None:
    header("adaptive: growth in d and r")
    for width in (64, 128) if quick else (64, 128, 256, 512, 1024, 2048):
        for rank in (2, 8) if quick else (2, 8, 32):
            model = attention(np.random.default_rng([width, rank]), width, rank=rank)
            row(tally, f"d={width} r={rank}", model, rank, keyhole.LowRank(), 1e-12)
    header("convex: growth in d and r, 6rd measurements")
    for width, rank in (
        ((16, 1), (40, 1)) if quick else ((16, 1), (32, 1), (64, 2), (128, 4), (256, 4))
    ):
        learner = keyhole.LowRank("convex", measurements=6 * rank * width)
        model = attention(np.random.default_rng([width, rank]), width, rank=rank)
        row(tally, f"d={width} r={rank}", model, rank, learner, 1e-6)


def scale(width: int, rank: int, journal: bool) -> None:
    """One head of a large language model, in float64 and float32."""
    floor = 2 * rank * width - rank * rank + width
    for single in (False, True):
        box = Box(attention(np.random.default_rng(0), width, rank=rank), single)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.journal" if journal else None
            recovery, seconds = timed(box, path)
            report(box, recovery, seconds, floor, "float32" if single else "float64")
            if path is not None:
                again = Box(attention(np.random.default_rng(0), width, rank=rank), single)
                replayed, seconds = timed(again, path)
                same = all(
                    np.array_equal(a, b)
                    for a, b in zip(
                        recovery.model.to_arrays().values(),
                        replayed.model.to_arrays().values(),
                        strict=True,
                    )
                )
                size = path.stat().st_size / 2**20
                print(
                    f"  resumed: {replayed.ledger.replayed} answers, a journal of {size:.1f} MB, "
                    f"{again.seen} asked, {seconds:.1f} s, same model to the last bit: {same}",
                    flush=True,
                )


def timed(box: Box, journal: Path | None) -> tuple[keyhole.Recovery, float]:
    start = time.perf_counter()
    oracle = keyhole.open_oracle(box)
    recovery = keyhole.recover(oracle, keyhole.LowRank(), journal=journal, throw=False)
    return recovery, time.perf_counter() - start


def report(box: Box, recovery: keyhole.Recovery, seconds: float, floor: int, kind: str) -> None:
    error = keyhole.distance(recovery.model, box.truth)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIGA
    print(
        f"{kind}: {recovery.outcome.name}, rank {recovery.details['rank']}, error {error:.1e}, "
        f"{box.seen} queries = floor + {box.seen - floor}, {seconds:.0f} s of which "
        f"{box.seconds:.0f} s inside the box (ratio {seconds / box.seconds:.2f}), "
        f"peak memory {memory:.2f} GB",
        flush=True,
    )


def main() -> None:
    parts = {"methods": methods, "growth": growth, "grid": grid, "high": high, "convex": convex}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, about a minute")
    parser.add_argument("--only", default=",".join(parts), help="parts, separated by commas")
    parser.add_argument("--scale", action="store_true", help="one head of an LLM instead")
    parser.add_argument("--journal", action="store_true", help="the same with a journal, resumed")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=128)
    options = parser.parse_args()
    if options.scale or options.journal:
        width, rank = (2048, 8) if options.quick else (options.width, options.rank)
        scale(width, rank, options.journal)
        return
    tally = Tally()
    for part in options.only.split(","):
        parts[part](tally, options.quick)
    print(f"\n{tally.met} of {tally.rows} rows as promised")


if __name__ == "__main__":
    main()
