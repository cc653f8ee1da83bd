"""The forecast of a run beside what it then asked, for boxes of every family.

    python benchmarks/forecast.py [--only WORD] [--zoo] [--first SEED] [--seeds N]

From the family on (the queries that name it are over), every number of queries that the progress
bar tells is divided by the number in the end: the least and the largest of these ratios, and the
share of the queries after which there was a forecast at all. --zoo adds the boxes of tests/zoo.py.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import keyhole
from keyhole.models.random import block, stack, token_attention
from keyhole.recovery import Progress

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from placed_layers import placed_layer
from token_models import LanguageModel
from zoo import everything

Case = tuple[str, Any, Callable[[int], Any]]  # name, learner, box of a seed


def blocks() -> Iterator[Case]:
    auto = keyhole.Auto()
    for width, heads, neurons in ((8, 2, 0), (16, 4, 0), (8, 2, 16), (16, 4, 32), (8, 0, 16)):
        for norm in ("post", "pre"):
            name = f"block, {norm}, d={width} H={heads} m={neurons}"
            options: dict[str, Any] = {"heads": heads, "neurons": neurons, "norm": norm}

            def make(seed: int, width: int = width, options: Any = options) -> Any:
                return block(np.random.default_rng(seed), width, **options)

            yield name, auto, make


def networks() -> Iterator[Case]:
    for activation in ("gelu", "tanh", "silu"):

        def make(seed: int, activation: str = activation) -> Any:
            rng = np.random.default_rng(seed)
            inner, outer = rng.standard_normal((12, 6)), rng.standard_normal((3, 12))
            return keyhole.Mlp(inner, rng.standard_normal(12), outer, activation=activation)

        yield f"network, {activation}, d=6 m=12", keyhole.Auto(), make


def placed() -> Iterator[Case]:
    for kind in ("rotary", "linear bias", "bias by distance", "position vectors"):
        for width, heads in ((8, 2), (16, 4)):

            def make(seed: int, kind: str = kind, size: Any = (width, heads)) -> Any:
                return keyhole.open_oracle(placed_layer(kind, *size, seed), max_length=24)

            yield f"positions, {kind}, d={width}", keyhole.Auto(), make


def language_models() -> Iterator[Case]:
    for level in ("space", "gram"):
        for width in (12, 24, 48):

            def make_layer(seed: int, width: int = width) -> Any:
                return LanguageModel(seed, width=width, tokens=200).box()

            learner = keyhole.OutputLayerLearner(level=level)
            yield f"output layer, {level}, h={width}", learner, make_layer
    for tokens, heads, tied in ((100, 2, False), (400, 4, False), (400, 2, True)):

        def make(seed: int, tokens: int = tokens, heads: int = heads, tied: bool = tied) -> Any:
            rng = np.random.default_rng(seed)
            secret = token_attention(rng, tokens, 16, heads, 16 // heads, tied=tied)
            return keyhole.open_language_model(secret, max_length=64)

        name = f"token attention, V={tokens} H={heads}{' tied' if tied else ''}"
        yield name, keyhole.TokenAttentionLearner(), make


def stacks() -> Iterator[Case]:
    for layers in (1, 2):

        def make(seed: int, layers: int = layers) -> Any:
            rng = np.random.default_rng(seed)
            return stack(rng, 8, layers=layers, heads=2, neurons=8)

        yield f"stack of {layers}, d=8 H=2 m=8", keyhole.StackLearner(), make


def layers() -> Iterator[Case]:
    for width, heads in ((12, 1), (12, 3), (24, 4)):

        def make(seed: int, width: int = width, heads: int = heads) -> Any:
            return block(np.random.default_rng(seed), width, heads=heads, norm="none").attention

        yield f"attention, d={width} H={heads}", keyhole.Auto(), make


def zoo() -> Iterator[Case]:
    for specimen in everything():
        if specimen.family is not None:
            name = f"{specimen.family}, {specimen.name}"
            yield name, keyhole.Auto(), lambda _, specimen=specimen: specimen.build()
            yield f"{name}, alone", specimen.learner, lambda _, specimen=specimen: specimen.build()


def measure(learner: Any, box: Any, seed: int) -> tuple[str, int, list[float], float]:
    """Outcome, queries paid, forecast over paid from the family on, and the share of queries that
    were asked when the first forecast was told."""
    told: list[Progress] = []
    found = keyhole.recover(box, learner, seed=seed, progress=told.append, throw=False)
    paid = found.ledger.paid
    events = [event for event in told if event.stage not in ("precision", "family")]
    stated = [event for event in events if event.expected is not None]
    start = (stated[0].asked if stated else paid) / paid
    return found.outcome.name, paid, [(event.expected or 0) / paid for event in stated], start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0)
    told = parser.parse_args()
    kinds = [layers, blocks, networks, placed, language_models, stacks]
    cases = [case for kind in ([zoo] if told.zoo else kinds) for case in kind()]
    outside = total = 0
    print("case                                     outcome      paid  forecast / paid   from")
    for name, learner, make in cases:
        if told.only not in name:
            continue
        for seed in range(told.first, told.first + (1 if told.zoo else told.seeds)):
            outcome, paid, ratios, start = measure(learner, make(seed), seed)
            off = not ratios or max(abs(ratio - 1.0) for ratio in ratios) > 0.25
            total, outside = total + 1, outside + off
            span = f"{min(ratios):.2f} ... {max(ratios):.2f}" if ratios else "none"
            print(f"{name:40} {outcome:12} {paid:5}  {span:14} {start:6.0%}"
                  f"{'  OFF' if off else ''}", flush=True)  # fmt: skip
    print(f"{total - outside} of {total} runs within 25% whenever a number was told")


if __name__ == "__main__":
    main()
