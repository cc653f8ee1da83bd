"""Whole models recovered from a template: how many of fresh boxes, at which price.

    python benchmarks/templates.py --row softmax --boxes 10
    python benchmarks/templates.py --row post-norm --boxes 20 --seconds 600 --seed 5000

One line per box: outcome, worst difference on 500 fresh inputs (lengths 1 to 20, sizes 0.3 to 3)
over the spread of the answers, queries to learn, queries times outputs per weight, seconds. Set
OMP_NUM_THREADS=1 for one core.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import keyhole

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.templates import AttentionHeads, Encoder, randomise

ROWS: dict[str, Callable[[], Any]] = {
    "softmax": lambda: AttentionHeads(kind="softmax"),
    "sigmoid": lambda: AttentionHeads(kind="sigmoid"),
    "linear": lambda: AttentionHeads(kind="linear"),
    "sink": lambda: AttentionHeads(kind="sink"),
    "post-norm": lambda: Encoder(6, 6, 2, 8, 6),
    "post-norm mean": lambda: Encoder(6, 6, 2, 8, 6, pooling="mean"),
    "post-norm 8": lambda: Encoder(8, 8, 2, 16, 8),
    "post-norm scalar": lambda: Encoder(4, 6, 2, 8, 1),
    "post-norm scalar 8": lambda: Encoder(4, 8, 2, 16, 1),
    "pre-norm": lambda: Encoder(6, 6, 2, 8, 6, norm_first=True),
    "relu": lambda: Encoder(6, 6, 2, 8, 6, activation="relu"),
}


def measure_error(box: Any, model: Any, width: int, rng: np.random.Generator) -> float:
    """Worst difference on fresh inputs over the spread of the answers."""
    truth, given = [], []
    for length in range(1, 21):
        sizes = np.exp(rng.uniform(np.log(0.3), np.log(3.0), (25, 1, 1)))
        tokens = sizes * rng.standard_normal((25, length, width))
        with torch.no_grad():
            truth.append(box(torch.as_tensor(tokens)).numpy())
        given.append(model(tokens))
    answers = np.concatenate(truth)
    return float(np.abs(np.concatenate(given) - answers).max() / answers.std())


def measure_row(row: str, boxes: int, seconds: float, first: int) -> None:
    """Prints a line per box of a row, and how many were recovered."""
    recovered = 0
    for seed in range(first, first + boxes):
        box, start = randomise(ROWS[row](), seed), time.monotonic()
        width = next(part.shape[1] for part in box.parameters() if part.ndim == 2)
        learner = keyhole.FromTemplate(ROWS[row](), seconds=seconds)
        found = keyhole.recover(box, learner, seed=seed, throw=False)
        taken = time.monotonic() - start
        error = measure_error(box, found.model, width, np.random.default_rng(seed))
        ratio = found.ledger.learning * (found.model.outputs or 1) / found.details["weights"]
        recovered += found.outcome is keyhole.Outcome.RECOVERED
        print(
            f"{row} {seed} {found.outcome.name} error {error:.0e} queries "
            f"{found.ledger.learning} ratio {ratio:.1f} seconds {taken:.1f}",
            flush=True,
        )
    print(f"{row}: {recovered} of {boxes} recovered", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", choices=list(ROWS), nargs="*", default=list(ROWS))
    parser.add_argument("--boxes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=2000)
    given = parser.parse_args()
    for row in given.row:
        measure_row(row, given.boxes, given.seconds, given.seed)


if __name__ == "__main__":
    main()
