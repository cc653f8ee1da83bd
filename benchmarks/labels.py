"""Recovery from labels alone: error and queries against the floor, side by side.

    python benchmarks/labels.py [--quick] [--width 16] [--bits 20] [--seeds 20] [--json FILE]

error      largest error of an entry of the score / largest entry, in units of 2^-bits
value      largest error of a component of the value's direction, in the same unit
queries  asked by the learner / (bits · (d² + d − 1))
within 2   share of the score's entries within two standard errors
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from keyhole.learners.label_only import LabelOnly
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.models.sign_attention import Coding
from keyhole.oracles.base import Oracle
from keyhole.oracles.open import open_oracle
from keyhole.oracles.wrappers.count import QueryCounter
from keyhole.oracles.wrappers.degrade import BITS, Labels

Draw = Callable[[np.random.Generator, int], Attention]


def scaled(scale: float) -> Draw:
    return lambda rng, width: attention(rng, width, scale=scale)


def sparse_value(rng: np.random.Generator, width: int) -> Attention:
    """Three of four components of the value are zero."""
    head = attention(rng, width).heads[0]
    return Attention([Head(head.score, None, np.where(np.arange(width) % 4, 0.0, head.value))])


def one_component(rng: np.random.Generator, width: int) -> Attention:
    """The value is a multiple of a unit vector."""
    head = attention(rng, width).heads[0]
    return Attention([Head(head.score, None, 3.0 * np.eye(width)[width // 2])])


def rank_one(rng: np.random.Generator, width: int) -> Attention:
    return attention(rng, width, rank=1)


def identity(rng: np.random.Generator, width: int) -> Attention:
    return Attention([Head(np.eye(width), None, rng.standard_normal(width))])


BOXES: dict[str, Draw] = {
    "entries N(0, 1/d)": scaled(1.0),
    "times 1e-2": scaled(1e-2),
    "times 1e+2": scaled(1e2),
    "value: 3/4 zeros": sparse_value,
    "value: one entry": one_component,
    "score of rank one": rank_one,
    "score = identity": identity,
}


def opened(model: Attention, setting: str) -> Oracle:
    """The box in one of the settings of the table."""
    if setting == "float32":
        single = model.astype(np.float32)
        return Labels(open_oracle(lambda x: single(x.astype(np.float32)), width=model.width))
    if setting == "unit ball":
        return Labels(open_oracle(model, max_norm=1.0))
    return Labels(open_oracle(model), BITS if setting == "0/1" else Coding())


def measure(draw: Draw, setting: str, width: int, bits: int, seed: int) -> dict[str, float]:
    model = draw(np.random.default_rng([seed, width]), width)
    box = QueryCounter(opened(model, setting))
    learned = LabelOnly(bits).learn(box, np.random.default_rng([seed, 7]))
    truth, found, errors = (m.heads[0] for m in (model, learned.model, learned.errors))
    gap = np.abs(found.score - truth.score)
    value = np.abs(found.value - truth.value / np.linalg.norm(truth.value)).max()
    return {
        "error": float(gap.max() / np.abs(truth.score).max() * 2.0**bits),
        "value": float(value * 2.0**bits),
        "queries": box.paid / (bits * (width * width + width - 1)),
        "within 2": float(np.mean(gap <= 2.0 * errors.score)),
    }


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    cells = [(name, "-1/0/1", args.width, args.bits) for name in BOXES]
    plain = next(iter(BOXES))
    cells += [
        (plain, setting, args.width, args.bits) for setting in ("0/1", "float32", "unit ball")
    ]
    cells += [(plain, "-1/0/1", args.width, bits) for bits in (10, 30, 40)]
    cells += [
        (plain, "-1/0/1", width, args.bits) for width in ((4,) if args.quick else (4, 32, 64))
    ]
    table = []
    for name, setting, width, bits in cells:
        seeds = args.seeds if width <= args.width else max(1, args.seeds // 10)
        runs = [measure(BOXES[name], setting, width, bits, seed) for seed in range(seeds)]
        column = {key: np.array([run[key] for run in runs]) for key in runs[0]}
        table.append(
            {
                "box": name,
                "labels": setting,
                "width": width,
                "bits": bits,
                "boxes": seeds,
                "median error": float(np.median(column["error"])),
                "largest error": float(column["error"].max()),
                "value": float(column["value"].max()),
                "queries": float(np.median(column["queries"])),
                "most queries": float(column["queries"].max()),
                "within 2": float(column["within 2"].mean()),
            }
        )
        print(line(table[-1]), flush=True)
    return table


def line(row: dict[str, Any]) -> str:
    return (
        f"| {row['box']} | {row['labels']} | {row['width']} | {row['bits']} | {row['boxes']} "
        f"| {row['median error']:.2f} | {row['largest error']:.2f} | {row['value']:.3f} "
        f"| {row['queries']:.3f} | {row['most queries']:.3f} | {row['within 2']:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="two boxes per row, small widths")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--bits", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", help="also write the table to this file")
    args = parser.parse_args()
    if args.quick:
        args.seeds = 2
    print(
        "| box | labels | d | bits | boxes | median error | largest error | value "
        "| queries | most queries | within 2 |\n|" + "---|" * 11
    )
    table = rows(args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(table, file, indent=2)


if __name__ == "__main__":
    main()
