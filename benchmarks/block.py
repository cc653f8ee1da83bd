"""Transformer blocks and their sublayers: error, queries over the floor, outcomes.

python benchmarks/block.py [--quick] [--seeds N] [--first SEED] [--only NAME] [--width D ...]
                           [--heads H ...] [--share M/D ...] [--activation NAME ...]
                           [--limit SECONDS] [--single]

`encoder` rows are torch.nn.TransformerEncoderLayer with its own initialisation, biases of norms and
attention drawn at random; their error is that of fresh answers. Boxes that were not recovered, or
took more processor time than the limit (LATE), are named below their row.
"""

import argparse
import itertools
import signal
import time
from collections.abc import Callable, Iterable

import numpy as np

import keyhole
from keyhole.models.block import Block
from keyhole.models.random import block

Box = Callable[[np.ndarray], np.ndarray]
Error = Callable[[Block], float]

CASES = (  # name, norm
    ("norm(x + attention)", "post"),
    ("x + attention(norm)", "pre"),
)
NETWORKS = ((8, 8, "gelu"), (16, 32, "gelu"), (16, 16, "silu"), (32, 64, "gelu"))
BEHIND = ((8, 8, "relu"), (8, 32, "relu"), (16, 16, "relu"), (16, 32, "relu"), (8, 8, "gelu"),
          (8, 32, "gelu"), (16, 32, "gelu"))  # fmt: skip


class Late(BaseException):
    """A box took more processor time than it was given."""


def stop(_: int, __: object) -> None:
    raise Late


def recover_within(limit: float, box: object, seed: int) -> tuple[str, keyhole.Recovery | None]:
    """The outcome and what was found; LATE and None where the processor time was not enough."""
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        found = keyhole.recover(box, keyhole.BlockLearner(), seed=seed, throw=False)
    except Late:
        return "LATE", None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return found.outcome.name, found


def measure(name: str, size: str, boxes: Iterable[tuple[int, object, Error]], limit: float) -> None:
    """One line: outcomes, errors and queries over the floor of the boxes of one case."""
    errors, ratios, good, others, missed, start = [], [], 0, set(), [], time.process_time()
    count = 0
    for seed, box, error in boxes:
        count += 1
        began = time.process_time()
        outcome, found = recover_within(limit, box, seed)
        reason = "" if found is None else found.reason
        if found is not None and found.model is not None:
            errors.append(error(found.model))
            ratios.append(found.ledger.paid / found.ledger.floor)
        good += outcome == "RECOVERED"
        if outcome != "RECOVERED":
            others.add(outcome)
            took = time.process_time() - began
            missed.append(f"seed {seed}: {outcome} after {took:.0f} s: {reason}")
    errors, ratios = errors or [np.nan], ratios or [np.nan]
    took = (time.process_time() - start) / count
    print(
        f"{name:20} {size:>12} {good:3} of {count:2} {np.median(errors):9.1e} {max(errors):9.1e} "
        f"{np.median(ratios):6.2f} {max(ratios):6.2f} {took:7.1f} s  {' '.join(sorted(others))}",
        *missed,
        sep="\n    ",
        flush=True,
    )


def draw_blocks(
    seeds: Iterable[int], single: bool, **options: object
) -> Iterable[tuple[int, object, Error]]:
    """Blocks of this project's own, compared by their parameters; in single precision by fresh
    answers, relative to their spread."""
    for seed in seeds:
        secret = block(np.random.default_rng(seed), **options)  # type: ignore[arg-type]
        if not single:
            yield seed, secret, lambda model, secret=secret: keyhole.distance(model, secret)
            continue
        fresh = np.random.default_rng(seed + 1).standard_normal((200, 6, secret.width))
        box = secret.astype(np.float32)

        def error(model: Block, box: Block = box, fresh: np.ndarray = fresh) -> float:
            answers = box(fresh.astype(np.float32))
            return float(np.abs(model(fresh) - answers).max() / answers.std())

        yield seed, box, error


def draw_encoders(
    seeds: Iterable[int], width: int, heads: int, neurons: int, activation: str, pre: bool,
    single: bool,
) -> Iterable[tuple[int, object, Error]]:  # fmt: skip
    """Encoder layers of torch, compared by fresh answers."""
    import torch

    bend = {"silu": torch.nn.functional.silu}.get(activation, activation)
    for seed in seeds:
        torch.manual_seed(seed)
        module = torch.nn.TransformerEncoderLayer(
            width, heads, neurons, activation=bend, norm_first=pre, batch_first=True
        )
        for part in (module.norm1, module.norm2):
            torch.nn.init.normal_(part.weight, 1.0, 0.2)
            torch.nn.init.normal_(part.bias, 0.0, 0.3)
        torch.nn.init.normal_(module.self_attn.in_proj_bias, 0.0, 0.3)
        torch.nn.init.normal_(module.self_attn.out_proj.bias, 0.0, 0.3)
        module = module.eval() if single else module.double().eval()
        fresh = np.random.default_rng(seed + 1).standard_normal((200, 6, width))
        with torch.no_grad():
            tokens = torch.tensor(fresh, dtype=torch.float32 if single else torch.float64)
            answers = module(tokens)[:, -1].double().numpy()

        def error(model: Block, fresh: np.ndarray = fresh, answers: np.ndarray = answers) -> float:
            return float(np.abs(model(fresh) - answers).max())

        yield seed, keyhole.open_oracle(module, width=width), error


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


WHOLE = (
    ("whole, pre", {"heads": 2, "neurons": 8, "norm": "pre"}),
    ("whole, post, relu", {"heads": 2, "neurons": 8, "norm": "post", "activation": "relu"}),
    ("whole, post, gelu", {"heads": 2, "neurons": 8, "norm": "post", "activation": "gelu"}),
)


def run_impostors(seeds: range, limit: float) -> None:
    """Boxes that are almost blocks: how many end RECOVERED with a model that answers otherwise."""
    for name, options in (
        ("norm(x + mlp)", {"neurons": 8, "activation": "relu", "norm": "post"}),
        *WHOLE,
    ):
        for make in IMPOSTORS:
            outcomes, wrong, start = [], 0, time.process_time()
            for seed in seeds:
                box = make(block(np.random.default_rng(seed), 8, **options))  # type: ignore[arg-type]
                oracle = keyhole.open_oracle(box, width=8)
                outcome, found = recover_within(limit, oracle, seed)
                outcomes.append(outcome)
                if outcome == "RECOVERED" and found is not None and found.model is not None:
                    fresh = np.random.default_rng(seed + 1).standard_normal((100, 4, 8))
                    wrong += bool(np.abs(found.model(fresh) - box(fresh)).max() > 1e-8)
            told = ", ".join(f"{outcomes.count(one)} {one}" for one in sorted(set(outcomes)))
            took = (time.process_time() - start) / len(seeds)
            print(f"{name:20} {make.__name__:>14}  {told}; recovered wrong: {wrong}; "
                  f"{took:.1f} s each", flush=True)  # fmt: skip


def change_part(model: Block, name: str, rng: np.random.Generator) -> Block:
    """The block without one of its biases, with an adapter (a hundredth, of rank one) on one of
    its maps, with ten times an epsilon, or with the other norm."""
    parts = model.to_arrays()
    if name.startswith("norm."):
        parts[name.replace("layer", "rms")] = parts.pop(name)
        return Block.from_arrays(parts)
    part = parts[name]
    if name == "epsilons":
        part = 10.0 * part
    elif name.endswith(("bias", "offset")):
        part = np.zeros_like(part)
    else:
        write, read = rng.standard_normal(part.shape[:1]), rng.standard_normal(part.shape[1:])
        adapter = np.outer(write, read)
        part = part + 0.01 * np.linalg.norm(part) / np.linalg.norm(adapter) * adapter
    return Block.from_arrays({**parts, name: part})


def run_changes(seeds: range) -> None:
    """Boxes that are a known block but for one part: how many `verify` tells from it."""
    for name, options in WHOLE:
        told: dict[str, list[bool]] = {}
        start = time.process_time()
        for seed in seeds:
            model = block(np.random.default_rng(seed), 8, **options)  # type: ignore[arg-type]
            for part, values in model.to_arrays().items():
                if values.any() or part.startswith("norm."):
                    rng = np.random.default_rng(seed + 1)
                    box = keyhole.open_oracle(change_part(model, part, rng), width=8)
                    differs = not keyhole.verify(box, model, seed=seed).agrees
                    told.setdefault(part, []).append(differs)
            agrees = keyhole.verify(keyhole.open_oracle(model, width=8), model, seed=seed).agrees
            told.setdefault("(nothing)", []).append(not agrees)
        every = [one for part, found in told.items() if part != "(nothing)" for one in found]
        missed = ", ".join(
            f"{part} {found.count(False)}"
            for part, found in told.items()
            if part != "(nothing)" and not all(found)
        )
        print(f"{name:20} one part changed: {sum(every)} of {len(every)} told, missed: "
              f"{missed or 'none'}; unchanged: {sum(told['(nothing)'])} of {len(seeds)} told; "
              f"{time.process_time() - start:.0f} s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one box per case")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=5000, help="the first seed")
    parser.add_argument("--only", default="", help="part of the names of the cases to be run")
    parser.add_argument("--width", type=int, nargs="+", default=[8, 16], help="of attention")
    parser.add_argument("--heads", type=int, nargs="+", default=[2, 4], help="of attention")
    parser.add_argument("--share", type=int, nargs="+", default=[1, 2, 4], help="neurons per width")
    parser.add_argument("--activation", nargs="+", default=["relu", "gelu"])
    parser.add_argument("--limit", type=float, default=600.0, help="CPU seconds for one box")
    parser.add_argument("--single", action="store_true", help="boxes in single precision")
    options = parser.parse_args()
    signal.signal(signal.SIGPROF, stop)
    limit = options.limit
    seeds = range(options.first, options.first + (1 if options.quick else options.seeds))
    print(f"{'':20} {'size':>12} recovered    median     worst  asked/floor, worst   each")
    for name, norm in CASES:
        sizes = itertools.product(options.width, options.heads) if options.only in name else ()
        for width, heads in sizes:
            boxes = draw_blocks(seeds, options.single, width=width, heads=heads, norm=norm)
            measure(name, f"d{width} H{heads}", boxes, limit)
    for name, networks, norm in (
        ("x + mlp(norm)", NETWORKS, "pre"),
        ("norm(x + mlp)", BEHIND, "post"),
    ):
        for width, neurons, bend in networks if options.only in name else ():
            sizes = {"width": width, "neurons": neurons, "activation": bend, "norm": norm}
            boxes = draw_blocks(seeds, options.single, **sizes)
            measure(name, f"d{width} m{neurons} {bend}", boxes, limit)
    for pre, bend in itertools.product((True, False), options.activation):
        name = f"encoder, {'pre' if pre else 'post'}, {bend}"
        if options.only not in name:
            continue
        for width, heads, share in itertools.product(options.width, options.heads, options.share):
            boxes = draw_encoders(seeds, width, heads, share * width, bend, pre, options.single)
            measure(name, f"d{width} H{heads} m{share * width}", boxes, limit)
    if options.only in "impostors":
        run_impostors(seeds, limit)
    if options.only in "changes":
        run_changes(seeds)


if __name__ == "__main__":
    main()
