"""A few fixed boxes, measured again with every version: queries, error and time over time.

    python benchmarks/history.py [--dry]

adds one entry to docs/results/data/history.json (commit, date, and for each box the queries to
learn over the floor, the relative error of the parameters, the seconds of the processor) and
writes the page history.md and the plot history.svg from all entries. An entry of the same
commit is replaced. `--dry` prints and writes nothing. The boxes use public names alone, so that the
script runs beside older versions too:

    PYTHONPATH=/older/clone/src python benchmarks/history.py --root /older/clone
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import keyhole
from keyhole.models.mlp import Mlp
from keyhole.models.random import attention, block, stack

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "results" / "data" / "history.json"
SEEDS = 3


def in_single(model: Any) -> Callable[[np.ndarray], np.ndarray]:
    """The model as a box that computes and answers in float32."""
    single = model.astype(np.float32)
    return lambda tokens: single(tokens.astype(np.float32))


def draw_network(rng: np.random.Generator) -> Mlp:
    return Mlp(rng.standard_normal((16, 8)), np.ones(16), rng.standard_normal((8, 16)) / 4)


BOXES: dict[str, tuple[Callable[[np.random.Generator], Any], bool, Any]] = {
    # name: how it is drawn, whether it answers in float32, the learner
    "one head, d = 16": (lambda r: attention(r, 16), False, keyhole.SingleHead()),
    "rank 2, d = 16": (lambda r: attention(r, 16, rank=2), False, keyhole.LowRank()),
    "2 heads, d = 16, vectors": (
        lambda r: attention(r, 16, heads=2, rank=8, outputs=16),
        False,
        keyhole.MultiHead(),
    ),
    "2 heads, d = 16, float32": (
        lambda r: attention(r, 16, heads=2, rank=8, outputs=16),
        True,
        keyhole.MultiHead(),
    ),
    "GELU network, d = 8": (draw_network, False, keyhole.MlpLearner()),
    "attention sublayer, d = 8": (lambda r: block(r, 8, heads=2), False, keyhole.BlockLearner()),
    "two blocks, d = 8": (
        lambda r: stack(r, 8, layers=2, heads=2, neurons=8),
        False,
        keyhole.StackLearner(),
    ),
}


def measure(name: str) -> dict[str, Any]:
    """Medians over the seeds, and how many were recovered."""
    draw, single, learner = BOXES[name]
    ratios, errors, seconds, good = [], [], [], 0
    for seed in range(SEEDS):
        secret = draw(np.random.default_rng([seed, 20]))
        box = keyhole.open_oracle(in_single(secret) if single else secret, width=secret.width)
        start = time.process_time()
        found = keyhole.recover(box, learner, throw=False)
        seconds.append(time.process_time() - start)
        good += found.outcome is keyhole.Outcome.RECOVERED
        if found.model is not None and found.ledger.floor:
            spent = found.ledger.paid - found.ledger.by_purpose.get("verification", 0)
            ratios.append(spent / found.ledger.floor)
            errors.append(keyhole.distance(found.model, secret))
    row = {
        "recovered": good,
        "of": SEEDS,
        "ratio": round(float(np.median(ratios)), 3) if ratios else None,
        "error": float(f"{np.median(errors):.1e}") if errors else None,
        "seconds": round(float(np.median(seconds)), 2),
    }
    print(f"{name:28s} {row}", flush=True)
    return row


def describe(root: Path) -> dict[str, str]:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return {
        "version": keyhole.__version__,
        "commit": git("rev-parse", "--short", "HEAD"),
        "date": git("log", "-1", "--format=%cs"),
    }


def add(entries: list[dict[str, Any]], entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries with this one last, or in the place of that of the same commit."""
    if any(old["commit"] == entry["commit"] for old in entries):
        return [entry if old["commit"] == entry["commit"] else old for old in entries]
    return [*entries, entry]


def write_page(entries: list[dict[str, Any]], folder: Path) -> None:
    lines = [
        "# Over time",
        "",
        "A few fixed boxes, measured with every version by `python benchmarks/history.py`; the "
        "figures are those of [history.json](data/history.json). Each cell: queries to learn over "
        "the floor, relative error of the parameters, seconds of the processor; medians over "
        f"{SEEDS} seeds. All seeds were recovered unless it says otherwise.",
        "",
        "| box | "
        + " | ".join(f"{e['version']} ({e['commit']}, {e['date']})" for e in entries)
        + " |",
        "|---|" + "--:|" * len(entries),
    ]
    for name in BOXES:
        cells = [show(entry["boxes"].get(name)) for entry in entries]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "![Queries over the floor, and error, version by version](history.svg)", ""]
    (folder / "history.md").write_text("\n".join(lines))


def show(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["ratio"] is None:
        return f"none of {row['of']}"
    short = "" if row["recovered"] == row["of"] else f", {row['recovered']} of {row['of']}"
    return f"{row['ratio']:.2f}, {row['error']:.0e}, {row['seconds']:.1f} s{short}"


def draw(entries: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "history", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(1, 2)
        names = [entry["commit"] for entry in entries]
        for name in BOXES:
            rows = [entry["boxes"].get(name) or {} for entry in entries]
            for panel, what in zip(panels, ("ratio", "error"), strict=True):
                panel.plot(names, [row.get(what) for row in rows], marker="o", ms=4, label=name)
        panels[0].set(ylabel="queries over the floor", yscale="log")
        panels[1].set(ylabel="error of the parameters", yscale="log")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT, help="clone of the version under test")
    options = parser.parse_args()
    entry = {**describe(options.root), "boxes": {name: measure(name) for name in BOXES}}
    if options.dry:
        return
    entries = add(json.loads(DATA.read_text()) if DATA.exists() else [], entry)
    DATA.write_text(json.dumps(entries, indent=1) + "\n")
    write_page(entries, DATA.parents[1])
    draw(entries, DATA.parents[1] / "history.svg")


if __name__ == "__main__":
    main()
