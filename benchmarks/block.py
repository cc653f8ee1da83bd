"""Transformer blocks and their sublayers: error, queries over the floor, outcomes.

python benchmarks/block.py [--quick] [--seeds N] [--first SEED] [--only NAME] [--width D ...]
                           [--heads H ...] [--share M/D ...] [--activation NAME ...]

`encoder` rows are torch.nn.TransformerEncoderLayer with its own initialisation, biases of norms and
attention drawn at random; their error is that of fresh answers.
"""

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np

import keyhole
from keyhole.models.block import Block
from keyhole.models.random import block

Box = Callable[[np.ndarray], np.ndarray]

CASES = (  # name, widths, options
    ("norm(x + attention)", ((8, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 8)), "post"),
    ("x + attention(norm)", ((8, 2), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8)), "pre"),
)
NETWORKS = ((8, 8, "gelu"), (16, 32, "gelu"), (16, 16, "silu"), (32, 64, "gelu"))
BEHIND = ((8, 8, "relu"), (8, 32, "relu"), (16, 16, "relu"), (16, 32, "relu"), (8, 8, "gelu"),
          (8, 32, "gelu"), (16, 32, "gelu"))  # fmt: skip


def report(
    name: str, size: str, seeds: int, rows: list[tuple[str, float, float]], took: float
) -> None:
    """One line: outcomes, errors and queries over the floor of the boxes of one case."""
    good = sum(outcome == "RECOVERED" for outcome, _, _ in rows)
    errors = [error for _, error, _ in rows if np.isfinite(error)] or [np.nan]
    ratios = [ratio for _, _, ratio in rows if np.isfinite(ratio)] or [np.nan]
    others = sorted({outcome for outcome, _, _ in rows} - {"RECOVERED"})
    print(
        f"{name:20} {size:>12} {good:3} of {seeds:2} {np.median(errors):9.1e} {max(errors):9.1e} "
        f"{np.median(ratios):6.2f} {max(ratios):6.2f} {took / seeds:7.1f} s  {' '.join(others)}",
        flush=True,
    )


def run(name: str, size: str, seeds: int, first: int, **options: object) -> None:
    rows, start = [], time.process_time()
    for seed in range(first, first + seeds):
        secret = block(np.random.default_rng(seed), **options)  # type: ignore[arg-type]
        found = keyhole.recover(secret, keyhole.BlockLearner(), seed=seed, throw=False)
        error = ratio = np.nan
        if found.model is not None:
            error = keyhole.distance(found.model, secret)
            ratio = found.ledger.paid / found.ledger.floor
        rows.append((found.outcome.name, error, ratio))
    report(name, size, seeds, rows, time.process_time() - start)


def run_encoder(
    width: int, heads: int, neurons: int, seeds: int, first: int, activation: str, pre: bool
) -> None:
    """Encoder layers of torch."""
    import torch

    bend = {"silu": torch.nn.functional.silu}.get(activation, activation)
    rows, start = [], time.process_time()
    for seed in range(first, first + seeds):
        torch.manual_seed(seed)
        module = torch.nn.TransformerEncoderLayer(
            width, heads, neurons, activation=bend, norm_first=pre, batch_first=True
        )
        for part in (module.norm1, module.norm2):
            torch.nn.init.normal_(part.weight, 1.0, 0.2)
            torch.nn.init.normal_(part.bias, 0.0, 0.3)
        torch.nn.init.normal_(module.self_attn.in_proj_bias, 0.0, 0.3)
        torch.nn.init.normal_(module.self_attn.out_proj.bias, 0.0, 0.3)
        module = module.double().eval()
        box = keyhole.open_oracle(module, width=width)
        found = keyhole.recover(box, keyhole.BlockLearner(), seed=seed, throw=False)
        error = ratio = np.nan
        if found.model is not None:
            fresh = np.random.default_rng(seed + 1).standard_normal((200, 6, width))
            with torch.no_grad():
                answers = module(torch.tensor(fresh))[:, -1].numpy()
            error = float(np.abs(found.model(fresh) - answers).max())
            ratio = found.ledger.paid / found.ledger.floor
        rows.append((found.outcome.name, error, ratio))
    size = f"d{width} H{heads} m{neurons}"
    report(
        f"encoder, {'pre' if pre else 'post'}, {activation}",
        size,
        seeds,
        rows,
        time.process_time() - start,
    )


def noisy(model: Block) -> Box:
    """Dropout left on."""
    rng = np.random.default_rng(0)
    return lambda x: model(x) * (1.0 + 1e-3 * rng.standard_normal((len(x), model.width)))


def twice(model: Block) -> Box:
    """A second block behind the first."""
    return lambda x: model(np.concatenate([x[:, :-1], model(x)[:, None]], axis=1))


def other_norm(model: Block) -> Box:
    """Divided by the mean absolute value at the end."""
    return lambda x: model(x) / np.abs(model(x)).mean(axis=1, keepdims=True)


def other_epsilon(model: Block) -> Box:
    """A small part behind a norm whose epsilon stands outside of the root."""

    def box(x: np.ndarray) -> np.ndarray:
        mean_free = x[:, -1] - x[:, -1].mean(axis=1, keepdims=True)
        size = np.sqrt((mean_free**2).mean(axis=1, keepdims=True))
        return model(x) + 1e-3 * mean_free / (size + 1e-3)

    return box


def clipped(model: Block) -> Box:
    return lambda x: model(np.clip(x, -30.0, 30.0))


def adapter(model: Block) -> Box:
    """A small bounded map of rank one beside the block."""
    rng = np.random.default_rng(5)
    read, write = 0.3 * rng.standard_normal((2, model.width))

    def box(x: np.ndarray) -> np.ndarray:
        size = 1.0 + np.linalg.norm(x[:, -1], axis=1)
        return model(x) + 1e-2 * np.tanh(x[:, -1] @ read / size)[:, None] * write

    return box


IMPOSTORS = (noisy, twice, other_norm, other_epsilon, clipped, adapter)


def run_impostors(seeds: int, first: int) -> None:
    """Boxes that are almost blocks: how many end RECOVERED with a model that answers otherwise."""
    for name, options in (
        ("norm(x + mlp)", {"neurons": 8, "activation": "relu", "norm": "post"}),
        ("whole, pre", {"heads": 2, "neurons": 8, "norm": "pre"}),
        ("whole, post, relu", {"heads": 2, "neurons": 8, "norm": "post", "activation": "relu"}),
        ("whole, post, gelu", {"heads": 2, "neurons": 8, "norm": "post", "activation": "gelu"}),
    ):
        for make in IMPOSTORS:
            outcomes, wrong, start = [], 0, time.process_time()
            for seed in range(first, first + seeds):
                box = make(block(np.random.default_rng(seed), 8, **options))  # type: ignore[arg-type]
                oracle = keyhole.open_oracle(box, width=8)
                found = keyhole.recover(oracle, keyhole.BlockLearner(), seed=seed, throw=False)
                outcomes.append(found.outcome.name)
                if found.outcome is keyhole.Outcome.RECOVERED and found.model is not None:
                    fresh = np.random.default_rng(seed + 1).standard_normal((100, 4, 8))
                    wrong += bool(np.abs(found.model(fresh) - box(fresh)).max() > 1e-8)
            told = ", ".join(f"{outcomes.count(one)} {one}" for one in sorted(set(outcomes)))
            print(f"{name:20} {make.__name__:>14}  {told}; recovered wrong: {wrong}; "
                  f"{(time.process_time() - start) / seeds:.1f} s each", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one box per case")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=5000, help="the first seed")
    parser.add_argument("--only", default="", help="part of the names of the cases to be run")
    parser.add_argument("--width", type=int, nargs="+", default=[8, 16], help="of encoder layers")
    parser.add_argument("--heads", type=int, nargs="+", default=[2, 4], help="of encoder layers")
    parser.add_argument("--share", type=int, nargs="+", default=[1, 2, 4], help="neurons per width")
    parser.add_argument("--activation", nargs="+", default=["relu", "gelu"])
    options = parser.parse_args()
    seeds = 1 if options.quick else options.seeds
    print(f"{'':20} {'size':>12} recovered    median     worst  asked/floor, worst   each")
    for name, sizes, norm in CASES:
        for width, heads in sizes if options.only in name else ():
            size = f"d{width} H{heads}"
            run(name, size, seeds, options.first, width=width, heads=heads, norm=norm)
    for name, networks, norm in (
        ("x + mlp(norm)", NETWORKS, "pre"),
        ("norm(x + mlp)", BEHIND, "post"),
    ):
        for width, neurons, activation in networks if options.only in name else ():
            run(
                name,
                f"d{width} m{neurons} {activation}",
                seeds,
                options.first,
                width=width,
                neurons=neurons,
                activation=activation,
                norm=norm,
            )
    for pre, activation in itertools.product((True, False), options.activation):
        if options.only not in f"encoder, {'pre' if pre else 'post'}, {activation}":
            continue
        for width, heads, share in itertools.product(options.width, options.heads, options.share):
            run_encoder(width, heads, share * width, seeds, options.first, activation, pre)
    if options.only in "impostors":
        run_impostors(seeds, options.first)


if __name__ == "__main__":
    main()
