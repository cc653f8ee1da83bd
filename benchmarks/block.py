"""Sublayers of Transformer blocks: error, queries over the floor, outcomes.

python benchmarks/block.py [--quick] [--seeds N]
"""

import argparse
import time

import numpy as np

import keyhole
from keyhole.models.random import block

CASES = (  # name, widths, options
    ("norm(x + attention)", ((8, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 8)), "post"),
    ("x + attention(norm)", ((8, 2), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8)), "pre"),
)
NETWORKS = ((8, 8, "gelu"), (16, 32, "gelu"), (16, 16, "silu"), (32, 64, "gelu"))


def run(name: str, size: str, seeds: int, first: int, **options: object) -> None:
    errors, ratios, good, start = [], [], 0, time.perf_counter()
    for seed in range(first, first + seeds):
        secret = block(np.random.default_rng(seed), **options)  # type: ignore[arg-type]
        found = keyhole.recover(secret, keyhole.BlockLearner(), seed=seed, throw=False)
        good += found.outcome is keyhole.Outcome.RECOVERED
        if found.model is not None:
            errors.append(keyhole.distance(found.model, secret))
            ratios.append(found.ledger.paid / found.ledger.floor)
    if errors:
        took = (time.perf_counter() - start) / seeds
        print(
            f"{name:20} {size:>12} {good:3} of {seeds:2} {np.median(errors):9.1e} "
            f"{max(errors):9.1e} {np.median(ratios):6.2f} {max(ratios):6.2f} {took:7.1f} s"
        )
    else:
        print(f"{name:20} {size:>12} {good:3} of {seeds:2}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one box per case")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=5000, help="the first seed")
    options = parser.parse_args()
    seeds = 1 if options.quick else options.seeds
    print(f"{'':20} {'size':>12} recovered    median     worst  asked/floor, worst   each")
    for name, sizes, norm in CASES:
        for width, heads in sizes:
            size = f"d{width} H{heads}"
            run(name, size, seeds, options.first, width=width, heads=heads, norm=norm)
    for width, neurons, activation in NETWORKS:
        size = f"d{width} m{neurons} {activation}"
        run(
            "x + mlp(norm)",
            size,
            seeds,
            options.first,
            width=width,
            neurons=neurons,
            activation=activation,
            norm="pre",
        )


if __name__ == "__main__":
    main()
