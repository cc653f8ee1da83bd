"""Stacks of pre-norm blocks through recover(), nothing given: outcome, errors, queries.

python benchmarks/stack.py [--width 8 --heads 2 --neurons 8 --layers 2] [--kind layer]
                           [--activation gelu] [--gated] [--final] [--seeds 5] [--first 9000]
python benchmarks/stack.py --impostors [--final]
python benchmarks/stack.py --gpt2 [--inner 64]    a two-block GPT-2 of transformers, random weights
python benchmarks/stack.py --limits    errors and queries against depth, width, heads, number format
"""

import argparse
import re
import time

import numpy as np

import keyhole
from keyhole.models.norm import Norm
from keyhole.models.random import block, stack


def compare(name, secret, seed, dtype="float64"):
    """One line per box, and the run."""
    begin = time.process_time()
    box = secret.astype(np.dtype(dtype))
    run = keyhole.recover(box, keyhole.StackLearner(), seed=seed, throw=False)
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
    return run


def with_final_norm(secret, kind, seed):
    rng = np.random.default_rng(seed + 500)
    width = secret.width
    bias = 0.3 * rng.standard_normal(width) if kind == "layer" else None
    norm = Norm(1.0 + 0.2 * rng.standard_normal(width), bias, 1e-5, kind)
    return keyhole.Stack(secret.blocks, norm, causal=secret.causal)


def compare_impostors(seed, final):
    """Boxes that are no such stack, or one with a turn; `final`: behind a norm at the end."""
    rng = np.random.default_rng(seed)
    one, two, three = (block(rng, 6, heads=1, neurons=4, norm="pre") for _ in range(3))
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
        "one block, three times": keyhole.Stack([one, one, one], causal=True),
        "A B A": keyhole.Stack([one, two, one], causal=True),
        "three blocks": keyhole.Stack([one, two, three], causal=True),
        "post-norm": keyhole.Stack([block(rng, 6, heads=1, neurons=4) for _ in range(2)]),
    }  # fmt: skip
    if final:
        boxes = {name: with_final_norm(box, "layer", seed) for name, box in boxes.items()}
    for name, secret in boxes.items():
        compare(name, secret, seed)
    swapped, deeper = boxes["swapped"], boxes["three blocks"]
    for name, box in (("swapped", swapped), ("one block deeper", deeper)):
        verdict = keyhole.verify(box, boxes["in order"], seed=seed)
        print(f"claimed to be in order, {name}: agrees {verdict.agrees}")
    run = keyhole.recover(deeper, keyhole.StackLearner(layers=2), seed=seed, throw=False)
    print(f"three blocks, promised to be two: {run.outcome.name} {run.reason}", flush=True)


def measure_limits(seeds):
    """Depth, width, heads and number format, one after the other; then how all figures grow."""
    usual = (8, 2, 2, "float64")
    cells = [(8, 2, layers, "float64") for layers in (1, 2, 3, 4, 6)]
    cells += [(width, 2, 2, "float64") for width in (6, 12, 16)]
    cells += [(8, heads, 2, "float64") for heads in (1, 4)] + [(8, 2, 2, "float32")]
    rows = []
    for width, heads, layers, dtype in cells:
        for seed in seeds:
            secret = stack(
                np.random.default_rng(seed), width, layers=layers, heads=heads, neurons=8
            )
            name = f"d {width} H {heads} m 8 L {layers} {dtype}"
            run = compare(name, secret, seed, dtype)
            rows.append(((width, heads, layers, dtype), run, secret))
    figures = {
        "queries": lambda run, secret: run.ledger.paid,
        "certificate": lambda run, secret: certificate_of(run),
        "distance": lambda run, secret: keyhole.distance(run.model, secret),
    }
    found = [row for row in rows if row[1].model is not None]
    for name, figure in figures.items():
        for place, axis in ((2, "L"), (0, "d"), (1, "H")):
            # other sizes as usual, and depth from two on: one block has nothing to be put in order
            own = [
                (cell[place], figure(run, secret)) for cell, run, secret in found
                if all(cell[i] == usual[i] for i in range(4) if i != place) and cell[2] > 1
            ]  # fmt: skip
            exponent, error, constant = fit_power(*zip(*own, strict=True))
            print(f"{name} ~ {constant:.2g} {axis}^{exponent:.2f} (± {error:.2f})")
    told = [(cell, certificate_of(run)) for cell, run, _ in rows if cell[:3] == usual[:3]]
    points = [(np.finfo(cell[3]).eps / 2, value) for cell, value in told if value is not None]
    slope, error, constant = fit_power(*zip(*points, strict=True))
    print(f"certificate ~ {constant:.2g} unit^{slope:.2f} (± {error:.2f})")
    deep = [
        (cell[2], certificate_of(run)) for cell, run, _ in found
        if cell[:2] == usual[:2] and cell[2] > 1
    ]  # fmt: skip
    growth, _, here = fit_power(*zip(*deep, strict=True))
    for layers in (2, 6, 12, 24):
        unit = 2.0**-53 * (0.1 / (here * layers**growth)) ** (1.0 / slope)
        print(f"L = {layers}: certificate 0.1 at unit {unit:.1e}, {-np.log2(unit):.0f} bits")


def certificate_of(run):
    """Distance of the order's entries from zero and one, told by a run or by why it failed."""
    if run.model is not None:
        return run.details["certificate"]
    told = re.search(r"certificate is (\S+) away", run.reason)
    return None if told is None else float(told.group(1))


def fit_power(sizes, values):
    """Exponent, its standard error, and constant of a power law through these values."""
    table = np.column_stack([np.log(sizes), np.ones(len(sizes))])
    right = np.log(values)
    solution, *_ = np.linalg.lstsq(table, right, rcond=None)
    left = right - table @ solution
    freedom = max(len(left) - 2, 1)
    error = np.sqrt(left @ left / freedom * np.linalg.inv(table.T @ table)[0, 0])
    return solution[0], error, np.exp(solution[1])


def make_gpt2(seed, inner, norm=True, positions=True):
    """Two blocks, 16 wide, so many neurons each: embeddings in, the last hidden state out."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=8, n_inner=inner
    )
    model = transformers.GPT2Model(config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "wpe" not in name:
                weight.normal_(0.0, 0.25)
            elif "ln" in name and "weight" in name:
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.add_(0.3 * torch.randn_like(weight))
        if not positions:
            model.wpe.weight.zero_()
    if not norm:
        model.ln_f = torch.nn.Identity()

    def answer(tokens):
        with torch.no_grad():
            states = model(inputs_embeds=torch.tensor(tokens)).last_hidden_state
        return states[:, -1].numpy()

    return answer


def try_gpt2(seed, inner, whole):
    """With positions and a norm at the end and, unless `whole`, without either."""
    for norm, positions in ((True, True), (True, False), (False, True))[: 1 if whole else 3]:
        answer = make_gpt2(seed, inner, norm, positions)
        box = keyhole.open_oracle(answer, width=16, max_length=32)
        begin = time.process_time()
        run = keyhole.recover(box, keyhole.StackLearner(), seed=seed, throw=False)
        name = f"GPT-2{'' if norm else ', no final norm'}{'' if positions else ', no positions'}"
        spent = time.process_time() - begin
        line = f"{name:36} seed {seed} {run.outcome.name} {run.reason} queries {run.ledger.paid}"
        if run.model is not None:
            tokens = np.random.default_rng(seed).standard_normal((20, 32, 16))
            error = float(np.abs(run.model(tokens) - answer(tokens)).max())
            line += f" ({run.ledger.paid / run.ledger.floor:.1f} x) fresh {error:.1e}"
        print(f"{line} CPU {spent:.0f} s {run.model or ''}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("width", 8), ("heads", 2), ("neurons", 8), ("layers", 2), ("seeds", 5),
                        ("first", 9000), ("inner", 64)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--kind", default="layer")
    parser.add_argument("--activation", default="gelu")
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--final", action="store_true", help="a norm at the end")
    parser.add_argument("--impostors", action="store_true")
    parser.add_argument("--gpt2", action="store_true")
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--dtype", default="float64")
    chosen = parser.parse_args()
    if chosen.gpt2:
        for seed in range(chosen.first, chosen.first + min(chosen.seeds, 2)):
            try_gpt2(seed, chosen.inner, chosen.final)
        return
    if chosen.impostors:
        for seed in range(chosen.first, chosen.first + min(chosen.seeds, 2)):
            compare_impostors(seed, chosen.final)
        return
    if chosen.limits:
        measure_limits(range(chosen.first, chosen.first + chosen.seeds))
        return
    name = f"d {chosen.width} H {chosen.heads} m {chosen.neurons} L {chosen.layers}"
    name += f" {chosen.kind}{', norm at the end' if chosen.final else ''}"
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        secret = stack(
            np.random.default_rng(seed), chosen.width, layers=chosen.layers, heads=chosen.heads,
            neurons=chosen.neurons, kind=chosen.kind, activation=chosen.activation,
            gated=chosen.gated,
        )  # fmt: skip
        if chosen.final:
            secret = with_final_norm(secret, chosen.kind, seed)
        compare(name, secret, seed, chosen.dtype)


if __name__ == "__main__":
    main()
