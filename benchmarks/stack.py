"""Stacks of pre-norm blocks through recover(), nothing given: outcome, errors, queries.

python benchmarks/stack.py [--width 8 --heads 2 --neurons 8 --layers 2] [--kind layer]
                           [--activation gelu] [--gated] [--seeds 5] [--first 9000]
python benchmarks/stack.py --impostors
"""

import argparse
import time

import numpy as np

import keyhole
from keyhole.models.random import block, stack


def compare(name, secret, seed):
    """One line per box."""
    begin = time.process_time()
    run = keyhole.recover(secret, keyhole.StackLearner(), seed=seed, throw=False)
    spent = time.process_time() - begin
    line = f"{name:34} seed {seed} {run.outcome.name:16}"
    if run.model is not None:
        tokens = 3.0 * np.random.default_rng(seed + 1).standard_normal((50, 4, secret.width))
        error = float(np.abs(run.model(tokens) - secret(tokens)).max())
        apart = keyhole.distance(run.model, secret)
        paid = run.ledger.paid
        line += f" fresh {error:.1e} distance {apart:.1e} queries {paid}"
        line += f" ({paid / run.ledger.floor:.1f} x) blocks {len(run.model.blocks)}"
    print(f"{line} CPU {spent:.0f} s {run.reason}", flush=True)


def compare_impostors(seed):
    """Boxes that are no such stack, or one with a turn."""
    rng = np.random.default_rng(seed)
    one, two = (block(rng, 6, heads=1, neurons=4, norm="pre") for _ in range(2))
    boxes = {
        "in order": keyhole.Stack([one, two], causal=True),
        "swapped": keyhole.Stack([two, one], causal=True),
        "one block, shared weights": keyhole.Stack([one, one], causal=True),
        "bidirectional": keyhole.Stack([one, two]),
        "one block": keyhole.Stack([one]),
        "shared attention": keyhole.Stack(
            [one, keyhole.Block(one.attention, two.mlp, norm="pre", epsilons=two.epsilons,
                                gain=[one.gain[0], two.gain[1]], bias=[one.bias[0], two.bias[1]])],
            causal=True,
        ),
        "post-norm": keyhole.Stack([block(rng, 6, heads=1, neurons=4) for _ in range(2)]),
    }  # fmt: skip
    for name, secret in boxes.items():
        compare(name, secret, seed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("width", 8), ("heads", 2), ("neurons", 8), ("layers", 2), ("seeds", 5),
                        ("first", 9000)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--kind", default="layer")
    parser.add_argument("--activation", default="gelu")
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--impostors", action="store_true")
    chosen = parser.parse_args()
    if chosen.impostors:
        for seed in range(chosen.first, chosen.first + min(chosen.seeds, 2)):
            compare_impostors(seed)
        return
    name = f"d {chosen.width} H {chosen.heads} m {chosen.neurons} L {chosen.layers}"
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        secret = stack(
            np.random.default_rng(seed), chosen.width, layers=chosen.layers, heads=chosen.heads,
            neurons=chosen.neurons, kind=chosen.kind, activation=chosen.activation,
            gated=chosen.gated,
        )  # fmt: skip
        compare(name, secret, seed)


if __name__ == "__main__":
    main()
