"""Whole models recovered from a template: how many of fresh boxes, at which price.

    python benchmarks/templates.py --row softmax --boxes 10
    python benchmarks/templates.py --row post-norm --boxes 20 --seconds 600 --seed 5000
    python benchmarks/templates.py --row "relu for gelu" --boxes 3 --seconds 20

One line per box: outcome, worst difference on 500 fresh inputs (lengths 1 to 20, sizes 0.3 to 3)
over the spread of the answers, queries to learn, queries times outputs per weight, starts, to how
many roundings the answers are explained, CPU seconds.
Rows of the form "A for B" give template A to boxes B: none may be RECOVERED. Set OMP_NUM_THREADS=1
for one core.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import keyhole

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from audit_a_time_series_model import YEARS, Forecaster, train
from tests.templates import AttentionHeads, Encoder, KernelAttention, Mixture, StateSpace, randomise

TRAINED = {"forecaster": 60, "forecaster trained longer": 400}  # steps; one box each
ROWS: dict[str, Callable[[], Any]] = {
    "softmax": lambda: AttentionHeads(kind="softmax"),
    "sigmoid": lambda: AttentionHeads(kind="sigmoid"),
    "linear": lambda: AttentionHeads(kind="linear"),
    "sink": lambda: AttentionHeads(kind="sink"),
    "kernel": KernelAttention,
    "mixture": Mixture,
    "state space": StateSpace,
    "post-norm": lambda: Encoder(6, 6, 2, 8, 6),
    "post-norm mean": lambda: Encoder(6, 6, 2, 8, 6, pooling="mean"),
    "post-norm 8": lambda: Encoder(8, 8, 2, 16, 8),
    "post-norm 8 mean": lambda: Encoder(8, 8, 2, 16, 8, pooling="mean"),
    "post-norm scalar": lambda: Encoder(4, 6, 2, 8, 1),
    "post-norm scalar 8": lambda: Encoder(4, 8, 2, 16, 1),
    "pre-norm": lambda: Encoder(6, 6, 2, 8, 6, norm_first=True),
    "small": lambda: Encoder(4, 4, 2, 4, 4),
    "small scalar": lambda: Encoder(4, 4, 2, 4, 1),
    "post-norm 16": lambda: Encoder(16, 16, 4, 32, 16),
    "post-norm wide": lambda: Encoder(4, 16, 2, 32, 2),
    "two layers": lambda: Encoder(6, 6, 2, 8, 6, layers=2),
    "positions": lambda: Encoder(6, 6, 2, 8, 6, longest=8),
    "relu": lambda: Encoder(6, 6, 2, 8, 6, activation="relu"),
    **dict.fromkeys(TRAINED, Forecaster),
}


def find_longest(box: Any) -> int | None:
    """Tokens in a sequence that the box takes, at most; None for any number."""
    return YEARS if isinstance(box, Forecaster) else getattr(box, "longest", 0) or None


def make_secret(row: str, make_box: Callable[[], Any], seed: int) -> Any:
    """The box of a row: trained, or with random weights."""
    return train(TRAINED[row])[0] if row in TRAINED else randomise(make_box(), seed)


def measure_error(box: Any, model: Any, width: int, rng: np.random.Generator) -> float:
    """Worst difference on fresh inputs, of lengths that the box takes, over the spread of the
    answers."""
    truth, given = [], []
    for length in range(1, (find_longest(box) or 20) + 1):
        sizes = np.exp(rng.uniform(np.log(0.3), np.log(3.0), (25, 1, 1)))
        tokens = sizes * rng.standard_normal((25, length, width))
        with torch.no_grad():
            truth.append(box(torch.as_tensor(tokens)).numpy())
        given.append(model(tokens))
    answers = np.concatenate(truth)
    return float(np.abs(np.concatenate(given) - answers).max() / answers.std())


WRONG: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "sigmoid for linear": (ROWS["linear"], ROWS["sigmoid"]),
    "softmax for sink": (ROWS["sink"], ROWS["softmax"]),
    "one head for two": (ROWS["softmax"], lambda: AttentionHeads(heads=1)),
    "relu for gelu": (ROWS["small"], lambda: Encoder(4, 4, 2, 4, 4, activation="relu")),
    "three neurons for four": (ROWS["small"], lambda: Encoder(4, 4, 2, 3, 4)),
    "pre-norm for post-norm": (ROWS["small"], lambda: Encoder(4, 4, 2, 4, 4, norm_first=True)),
    "mean for last": (ROWS["small"], lambda: Encoder(4, 4, 2, 4, 4, pooling="mean")),
    "one head for two in an encoder": (ROWS["small"], lambda: Encoder(4, 4, 1, 4, 4)),
}


def measure_box(
    row: str, seed: int, box: Any, template: Any, seconds: float, single: bool
) -> dict[str, Any]:
    """What became of one box; its answers are rounded to float32 if `single`."""
    width = next(part.in_features for part in box.modules() if isinstance(part, torch.nn.Linear))
    start = time.process_time()
    learner = keyhole.FromTemplate(template, seconds=seconds)
    secret = box.float() if single else box
    opened = keyhole.open_oracle(secret, width=width, max_length=find_longest(box))
    found = keyhole.recover(opened, learner, seed=seed, throw=False)
    taken = time.process_time() - start
    error = measure_error(box.double(), found.model, width, np.random.default_rng(seed))
    ratio = found.ledger.learning * (found.model.outputs or 1) / found.details["weights"]
    line = {
        "row": row,
        "seed": seed,
        "outcome": found.outcome.name,
        "error": float(f"{error:.1e}"),
        "queries": found.ledger.learning,
        "numbers_per_weight": round(ratio, 1),
        "weights": found.details["weights"],
        "starts": found.details["starts"],
        "roundings": float(f"{found.details['level']:.1e}"),
        "cpu_seconds": round(taken, 1),
    }
    print(*(f"{key} {value}" for key, value in line.items()), flush=True)
    return line


def write_page(path: Path, lines: list[dict[str, Any]]) -> None:
    """A table of all rows that were measured, in the order above."""
    heads = ["row", "template", "recovered", "worst error of these", "worst error of the others"]
    heads += ["queries", "numbers per weight", "starts", "CPU seconds", "of them allowed"]
    table = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in [*ROWS, *(f"{row} float32" for row in ROWS), *WRONG]:
        boxes = [line for line in lines if line["row"] == row]
        if not boxes:
            continue
        good = [line for line in boxes if line["outcome"] == "RECOVERED"]
        rest = [line for line in boxes if line["outcome"] != "RECOVERED"]
        errors = [f"{max(x['error'] for x in part):.0e}" if part else "–" for part in (good, rest)]
        spans = []
        for key in ("queries", "numbers_per_weight", "starts", "cpu_seconds", "seconds"):
            values = sorted({line[key] for line in boxes})
            spans.append(f"{values[0]:g}" + (f" to {values[-1]:g}" if len(values) > 1 else ""))
        kind = "wrong" if boxes[0]["wrong"] else "right"
        count = f"{len(good)} of {len(boxes)}"
        table.append("| " + " | ".join([row, kind, count, *errors, *spans]) + " |")
    start, end = "<!-- table -->", "<!-- end of table -->"
    text = path.read_text()
    head, tail = text[: text.index(start)], text[text.index(end) :]
    path.write_text(head + "\n".join([start, "", *table, "", ""]) + tail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", choices=[*ROWS, *WRONG], nargs="*", default=list(ROWS))
    parser.add_argument("--boxes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=2000)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--json", type=Path, help="lines of a former run are kept")
    parser.add_argument("--page", type=Path, help="writes the table of --json there, no more")
    given = parser.parse_args()
    if given.page:
        write_page(given.page, json.loads(given.json.read_text()))
        return
    for row in given.row:
        make_box, make_template = WRONG.get(row) or (ROWS[row], ROWS[row])
        for seed in range(given.seed, given.seed + given.boxes):
            box = make_secret(row, make_box, seed)
            name = f"{row} float32" if given.float32 else row
            line = measure_box(name, seed, box, make_template(), given.seconds, given.float32)
            if given.json:
                lines = json.loads(given.json.read_text()) if given.json.exists() else []
                line |= {"seconds": given.seconds, "wrong": row in WRONG}
                given.json.write_text(json.dumps([*lines, line], indent=1) + "\n")


if __name__ == "__main__":
    main()
