"""Sublayers of a trained encoder that nobody here made: the PyPI package `sceptr` (torch's default
post-norm layers with ReLU, d = 64, 8 heads, m = 256), its weights run in double precision.

pip download sceptr --no-deps -d /tmp/models
python benchmarks/trained_block.py /tmp/models/sceptr-*.whl [--layer 0] [--model SCEPTR]
"""

import argparse
import io
import time
import zipfile
from typing import Any

import numpy as np
import torch

import keyhole
from keyhole.learners.block.box import Box
from keyhole.learners.block.post_norm_mlp import find_post_norm_mlp
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle

HEADS = 8


def read_weights(wheel: str, model: str, layer: int) -> dict[str, np.ndarray]:
    """Weights of one encoder layer, by torch's names."""
    with zipfile.ZipFile(wheel) as archive:
        raw = archive.read(f"sceptr/_model_saves/{model}/state_dict.pt")
    state = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    prefix = next(name for name in state if f"layers.{layer}.linear1.weight" in name)
    prefix = prefix.removesuffix("linear1.weight")
    return {
        name.removeprefix(prefix): part.double().numpy()
        for name, part in state.items()
        if name.startswith(prefix)
    }


def network_of(parts: dict[str, np.ndarray]) -> Block:
    mlp = Mlp(
        parts["linear1.weight"],
        parts["linear1.bias"],
        parts["linear2.weight"],
        activation="relu",
        offset=parts["linear2.bias"],
    )
    return Block(
        None, mlp, norm="post", gain=parts["norm2.weight"][None], bias=parts["norm2.bias"][None]
    )


def attention_of(parts: dict[str, np.ndarray]) -> Block:
    query, key, value = np.split(parts["self_attn.in_proj_weight"], 3)
    query_bias, _, value_bias = np.split(parts["self_attn.in_proj_bias"], 3)
    out = parts["self_attn.out_proj.weight"]
    width = len(out)
    rank = width // HEADS
    heads = []
    for h in range(HEADS):
        rows = slice(h * rank, (h + 1) * rank)
        root = np.sqrt(rank)
        heads.append(
            Head(
                (key[rows].T / root, query[rows]),
                key[rows].T @ query_bias[rows] / root,
                (out[:, rows] @ value[rows]).T,
            )
        )
    layer = Attention(heads, parts["self_attn.out_proj.bias"] + out @ value_bias)
    return Block(
        layer, None, norm="post", gain=parts["norm1.weight"][None], bias=parts["norm1.bias"][None]
    )


def neuron_errors(found: Mlp, truth: Mlp, plane: np.ndarray) -> np.ndarray:
    """Relative error of outer_j inner_j (with the bias), for every true neuron the best."""

    def products(network: Mlp) -> Any:
        rows = np.column_stack([network.inner, network.inner_bias])
        size = np.linalg.norm(network.inner, axis=1)
        return rows / size[:, None], (plane.T @ network.outer).T * size[:, None]

    rows, outer = products(truth)
    own_rows, own_outer = products(found)
    errors = []
    for row, out in zip(rows, outer, strict=True):
        j = np.argmin(np.linalg.norm(own_rows - row, axis=1))
        gap = np.linalg.norm(own_outer[j] - out) / np.linalg.norm(out)
        errors.append(max(np.linalg.norm(own_rows[j] - row), gap))
    return np.array(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", nargs="?", help="the downloaded package")
    parser.add_argument("--model", default="SCEPTR")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.wheel is None:
        print("Not measured: give the wheel of sceptr (pip download sceptr --no-deps).")
        return
    parts = read_weights(options.wheel, options.model, options.layer)

    secret = network_of(parts)
    width, neurons = secret.width, secret.mlp.neurons  # type: ignore[union-attr]
    floor = (neurons * (2 * width - 1) + 3 * width - 1) / (width - 1)
    start, asked = time.perf_counter(), []

    def count(tokens: np.ndarray) -> np.ndarray:
        asked.append(len(tokens))
        return secret(tokens)

    box = Box(FunctionOracle(count, Spec(width)))
    starts, _ = find_post_norm_mlp(box, np.random.default_rng(options.seed))
    found = starts[0]
    errors = neuron_errors(found.mlp, secret.mlp, secret.norms[0].plane)  # type: ignore[arg-type]
    fresh = np.random.default_rng(1).standard_normal((500, 1, width))
    print(
        f"norm(x + mlp(x)): {found.mlp.neurons} of {neurons} neurons, "  # type: ignore[union-attr]
        f"errors median {np.median(errors):.1e}, worst {errors.max():.1e}, "
        f"{(errors < 1e-9).sum()} within 1e-9; "
        f"fresh answers {np.abs(found(fresh) - secret(fresh)).max():.1e}; {sum(asked)} queries = "
        f"{sum(asked) / floor:.1f} floors, {time.perf_counter() - start:.0f} s",
        flush=True,
    )

    secret, start = attention_of(parts), time.perf_counter()
    result = keyhole.recover(secret, keyhole.BlockLearner(), seed=options.seed, throw=False)
    print(f"norm(x + attention(X)): {result.outcome.name}", end="")
    if result.model is not None:
        print(
            f", {len(result.model.attention.heads)} of {HEADS} heads, distance "
            f"{keyhole.distance(result.model, secret):.1e}, "
            f"{result.ledger.paid / result.ledger.floor:.2f} floors",
            end="",
        )
    print(f", {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
