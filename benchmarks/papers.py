"""The papers' own algorithms beside Keyhole's: queries against d and r, error against tolerance.

    python benchmarks/papers.py [--quick] [--folder docs/results]

writes data/papers.json and the pictures papers_width.svg, papers_rank.svg, papers_tolerance.svg
(needs matplotlib). Same boxes for both sides, medians over the seeds. Of each algorithm the
queries that it asked to learn are counted, none that verify. Heads: entries of the score of
standard deviation 1/√d, the value drawn from a Gaussian; for the tolerance, a score of spectral
norm one, values of size 1/2 to 3/2, and answers off by at most τ, drawn uniformly.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import keyhole
from keyhole.learners.base import Learner
from keyhole.learners.single_head import fewest_queries
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention

Figures = list[dict[str, Any]]


def run(box: Any, secret: Attention, learner: Learner) -> tuple[int, float, str]:
    """Queries to learn, relative error of the score, how it ended."""
    found = keyhole.recover(box, learner, verify=False, throw=False)
    if found.model is None:
        return found.ledger.paid, float("nan"), found.outcome.name
    truth = secret.heads[0].score
    off = np.linalg.norm(found.model.heads[0].score - truth) / np.linalg.norm(truth)
    return found.ledger.paid, float(off), found.outcome.name


def summarise(name: str, size: float, runs: list[tuple[int, float, str]]) -> dict[str, Any]:
    errors = [error for _, error, _ in runs if np.isfinite(error)]
    row = {
        "algorithm": name,
        "at": size,
        "queries": median(paid for paid, _, _ in runs),
        "error": median(errors) if errors else None,
        "found": f"{len(errors)} of {len(runs)}",
    }
    print(row, flush=True)
    return row


def measure_width(widths: tuple[int, ...], seeds: int) -> Figures:
    """Theorem 4.1: d² + d queries."""
    rows = []
    for width in widths:
        for name, learner in (
            ("Theorem 4.1", keyhole.SingleHead(method="theorem-4.1")),
            ("Keyhole", keyhole.SingleHead()),
        ):
            runs = []
            for seed in range(seeds):
                secret = attention(np.random.default_rng([seed, width]), width)
                runs.append(run(secret, secret, learner))
            rows.append(summarise(name, width, runs))
    return rows


def measure_rank(width: int, ranks: tuple[int, ...], seeds: int) -> Figures:
    """Theorem 5.1: O(rd) queries, fixed in advance. (The rank is given to the published one.)"""
    rows = []
    for rank in ranks:
        for name, learner in (
            ("Theorem 5.1", keyhole.LowRank("convex", rank=rank)),
            ("Keyhole", keyhole.LowRank()),
        ):
            runs = []
            for seed in range(seeds):
                secret = attention(np.random.default_rng([seed, rank]), width, rank=rank)
                runs.append(run(secret, secret, learner))
            rows.append(summarise(name, rank, runs))
    return rows


def draw_bounded(seed: int, width: int) -> Attention:
    rng = np.random.default_rng([seed, width, 6])
    score = rng.standard_normal((width, width))
    value = rng.uniform(0.5, 1.5, width) * rng.choice([-1.0, 1.0], width)
    return Attention([Head(score / np.linalg.norm(score, 2), None, value)])


def disturb(secret: Attention, tolerance: float, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    rng = np.random.default_rng([seed, 7])
    return lambda tokens: secret(tokens) + tolerance * rng.uniform(-1, 1, len(tokens))


def measure_tolerance(width: int, tolerances: tuple[float, ...], seeds: int) -> Figures:
    """Theorem 6.1: an error proportional to τ. Tokens of norm at most two for both."""
    rows = []
    for tolerance in tolerances:
        unknowns = width * width + width
        for name, learner, budget in (
            ("Theorem 6.1", keyhole.SingleHead(method="paper"), None),
            ("Keyhole, as many queries", keyhole.SingleHead(), fewest_queries(width)),
            ("Keyhole, four times as many", keyhole.SingleHead(), 4 * unknowns),
        ):
            runs = []
            for seed in range(seeds):
                secret = draw_bounded(seed, width)
                box = keyhole.open_oracle(
                    disturb(secret, tolerance, seed),
                    width=width,
                    max_norm=2.0,
                    precision=keyhole.NoiseModel(additive=tolerance / np.sqrt(3.0)),
                )
                found = keyhole.recover(box, learner, budget=budget, verify=False, throw=False)
                truth = secret.heads[0].score
                off = np.nan
                if found.model is not None:
                    gap = found.model.heads[0].score - truth
                    off = float(np.linalg.norm(gap) / np.linalg.norm(truth))
                runs.append((found.ledger.paid, off, found.outcome.name))
            rows.append(summarise(name, tolerance, runs))
    return rows


def draw(rows: Figures, path: Path, across: str, up: str, along: str, log: bool) -> None:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    axis = figure.subplots()
    for number, name in enumerate(dict.fromkeys(row["algorithm"] for row in rows)):
        points = [(row["at"], row[along]) for row in rows if row["algorithm"] == name]
        points = [(x, y) for x, y in points if y]
        axis.plot(*zip(*points, strict=True), marker="os^"[number], label=name, markersize=4)
    axis.set(xlabel=across, ylabel=up, yscale="log", xscale="log" if log else "linear")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    seeds = 1 if options.quick else 5
    widths = (4, 8) if options.quick else (4, 8, 16, 32, 64)
    ranks = (1,) if options.quick else (1, 2, 4)
    tolerances = (1e-4,) if options.quick else tuple(10.0**k for k in range(-9, -2))
    record = {
        "version": keyhole.__version__,
        "seeds": seeds,
        "width": measure_width(widths, seeds),
        "rank": measure_rank(8 if options.quick else 16, ranks, min(seeds, 3)),
        "tolerance": measure_tolerance(8, tolerances, seeds),
    }
    if options.quick:
        return
    (options.folder / "data" / "papers.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(record["width"], options.folder / "papers_width.svg", "d", "queries", "queries", True)
    draw(
        record["rank"],
        options.folder / "papers_rank.svg",
        "r (d = 16)",
        "queries",
        "queries",
        False,
    )
    place = options.folder / "papers_tolerance.svg"
    draw(record["tolerance"], place, "tolerance τ (d = 8)", "relative error", "error", True)


if __name__ == "__main__":
    main()
