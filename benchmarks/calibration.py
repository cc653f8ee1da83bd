"""Do the standard errors tell the errors? Families × number formats, share within two bars.

    python benchmarks/calibration.py [--seeds 8] [--only SUBSTRING] [--json table.json]

Every entry of every recovered parameter is compared with the truth, in units of its standard error.
Of errors that are what their bars say, 95 in 100 lie within two. Entries that both the run and the
truth have as zero are left out. A box that computes in float32 has float32 parameters: these are
the truth.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import keyhole
from keyhole.models.canonical import match_heads

DOUBLE, SINGLE = np.float64, np.float32


@dataclass(frozen=True)
class Box:
    """A family: how to draw the truth, which learner, and which options a run has."""

    name: str
    draw: Callable[[np.random.Generator], Any]
    learner: Callable[[], Any] = keyhole.Auto
    options: dict[str, Any] | None = None


def draw_layer(
    width: int, heads: int, score_rank: int, value_rank: int, outputs: int | None = None
) -> Callable[[np.random.Generator], Any]:
    """Attention with scores and values of these ranks; without outputs its answers are scalars."""

    def draw(rng: np.random.Generator) -> Any:
        def low_rank(rank: int, columns: int) -> np.ndarray:
            left, right = rng.standard_normal((width, rank)), rng.standard_normal((rank, columns))
            return np.asarray(left @ right / np.sqrt(width * rank))

        parts = []
        for _ in range(heads):
            score = low_rank(score_rank, width)
            value = rng.standard_normal(width) if outputs is None else low_rank(value_rank, outputs)
            parts.append(keyhole.Head(score, None, value))
        return keyhole.Attention(parts)

    return draw


def draw_network(width: int, neurons: int, activation: str) -> Callable[[np.random.Generator], Any]:
    def draw(rng: np.random.Generator) -> Any:
        return keyhole.Mlp(
            rng.standard_normal((neurons, width)) / np.sqrt(width),
            0.5 * rng.standard_normal(neurons),
            rng.standard_normal((width, neurons)) / np.sqrt(neurons),
            activation=activation,
        )

    return draw


BOXES = (
    Box("one head, scalar, d = 8", draw_layer(8, 1, 8, 1)),
    Box("one head, vector, d = 8", draw_layer(8, 1, 8, 8, 8)),
    Box("one head of rank 2, d = 16", draw_layer(16, 1, 2, 1), keyhole.LowRank),
    Box("two heads, scalar, d = 6", draw_layer(6, 2, 6, 1), keyhole.MultiHead),
    Box("layer of 2 heads, d = 16", draw_layer(16, 2, 8, 8, 16)),
    Box("layer of 4 heads, d = 16", draw_layer(16, 4, 4, 4, 16)),
    Box("layer, values of full rank, d = 6", draw_layer(6, 2, 3, 6, 6)),
    Box("layer, values of full rank, d = 8", draw_layer(8, 2, 3, 8, 8)),
    Box("layer, budget 4 x floor, d = 16", draw_layer(16, 2, 8, 8, 16), keyhole.MultiHead,
        {"budget": 300}),
    Box("GELU network, d = 6", draw_network(6, 8, "gelu")),
    Box("SiLU network, d = 6", draw_network(6, 8, "silu")),
    Box("Theorem 6.1, d = 16", draw_layer(16, 1, 16, 1),
        lambda: keyhole.SingleHead(method="paper", score_bound=4.0)),
)  # fmt: skip


def list_deviations(found: keyhole.Recovery, truth: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Name of each block and the errors of its entries in standard errors."""
    if isinstance(found.model, keyhole.Attention):
        bars = dict(zip(map(id, found.model.heads), found.errors.heads, strict=True))
        for one, true in match_heads(found.model.heads, truth.heads):
            bar = bars[id(one)]
            yield "score", compare(one.score, true.score, bar.score)
            yield "value", compare(one.value, true.value, bar.value)
    elif isinstance(found.model, keyhole.Mlp) and found.model.neurons == truth.neurons:
        model, errors = found.model, found.errors
        gaps = np.linalg.norm(model.inner[:, None] - truth.inner[None], axis=2)
        nearest = gaps.argmin(axis=1)
        if len(set(nearest)) == len(nearest) and not model.linear.any():
            yield "inner", compare(model.inner, truth.inner[nearest], errors.inner)
            bias = truth.inner_bias[nearest]
            yield "inner bias", compare(model.inner_bias, bias, errors.inner_bias)
            yield "outer", compare(model.outer, truth.outer[:, nearest], errors.outer)


def compare(found: Any, true: Any, bar: Any) -> np.ndarray:
    """Errors in units of their bars; entries that are zero in both are left out."""
    gap = np.abs(np.asarray(found, float) - np.asarray(true, float)).ravel()
    errors = np.broadcast_to(np.asarray(bar, float), np.shape(found)).ravel()
    told = (gap > 0) | (errors > 0)
    return np.asarray(gap[told] / np.maximum(errors[told], 1e-300))


def measure(box: Box, kind: type, seeds: int) -> dict[str, Any]:
    """One row: outcomes, and the share of entries within two standard errors, block by block."""
    outcomes: Counter[str] = Counter()
    blocks: dict[str, list[np.ndarray]] = {}
    for seed in range(seeds):
        truth = box.draw(np.random.default_rng([seed, 97])).astype(kind)
        box_of = keyhole.open_oracle(truth)
        found = keyhole.recover(
            box_of, box.learner(), seed=seed, throw=False, **(box.options or {})
        )
        outcomes[found.outcome.name] += 1
        if found.outcome is keyhole.Outcome.RECOVERED:
            for name, units in list_deviations(found, truth):
                blocks.setdefault(name, []).append(units)
    joined = {name: np.concatenate(parts) for name, parts in blocks.items()}
    return {
        "box": box.name,
        "format": np.dtype(kind).name,
        "outcomes": dict(outcomes),
        "within two": {name: float(np.mean(units <= 2.0)) for name, units in joined.items()},
        "worst": {name: float(units.max()) for name, units in joined.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--only", default="", help="boxes whose name holds this")
    parser.add_argument("--json", type=Path, help="write the table here as well")
    options = parser.parse_args()
    rows = []
    print(f"{'box':36s} {'format':8s} outcomes; share within two standard errors (worst)")
    for box in BOXES:
        if options.only not in box.name:
            continue
        for kind in (DOUBLE, SINGLE):
            row = measure(box, kind, options.seeds)
            rows.append(row)
            ended = ", ".join(f"{name} {count}" for name, count in row["outcomes"].items())
            shares = ", ".join(
                f"{name} {share:.0%} ({row['worst'][name]:.1f})"
                for name, share in row["within two"].items()
            )
            print(f"{box.name:36s} {row['format']:8s} {ended}; {shares or 'none'}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
