"""A trained encoder layer that nobody here made: the PyPI package `sceptr` (torch's default
post-norm layers with ReLU, d = 64, 8 heads, m = 256), its weights run in double precision.

pip install sceptr --no-deps --target /tmp/trained
python benchmarks/trained_block.py /tmp/trained/sceptr [--layer 0] [--model SCEPTR] [--only network]

network: norm(x + mlp(x)), with free input; attention: norm(x + attention(X)); block: both, the
whole layer as torch runs it.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import keyhole
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp

HEADS = 8


def read_weights(folder: str, model: str, layer: int) -> dict[str, np.ndarray]:
    """Weights of one encoder layer, by torch's names."""
    path = Path(folder) / "_model_saves" / model / "state_dict.pt"
    state = torch.load(path, map_location="cpu", weights_only=True)
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


def block_of(parts: dict[str, np.ndarray]) -> Block:
    return Block(
        attention_of(parts).attention,
        network_of(parts).mlp,
        norm="post",
        epsilons=[1e-5, 1e-5],
        gain=np.array([parts["norm1.weight"], parts["norm2.weight"]]),
        bias=np.array([parts["norm1.bias"], parts["norm2.bias"]]),
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


def measure(name: str, secret: Block, length: int, seed: int) -> None:
    """One line: outcome, heads and neurons, error of fresh answers, queries and seconds."""
    start = time.process_time()
    result = keyhole.recover(secret, keyhole.BlockLearner(), seed=seed, throw=False)
    told = [f"{name}: {result.outcome.name}"]
    if result.model is not None:
        fresh = np.random.default_rng(seed + 1).standard_normal((500, length, secret.width))
        model = result.model
        if secret.attention is not None:
            told.append(f"{len(model.attention.heads)} of {len(secret.attention.heads)} heads")
        if secret.mlp is not None:
            told.append(f"{model.mlp.neurons} of {secret.mlp.neurons} neurons")
        if secret.attention is None:
            errors = neuron_errors(model.mlp, secret.mlp, secret.norms[0].plane)
            told.append(f"neurons {np.median(errors):.1e}, worst {errors.max():.1e}")
            told.append(f"{(errors < 1e-9).sum()} within 1e-9")
        if secret.mlp is None:
            told.append(f"distance {keyhole.distance(model, secret):.1e}")
        told.append(f"fresh answers {np.abs(model(fresh) - secret(fresh)).max():.1e}")
        told.append(f"{result.ledger.paid} queries = "
                    f"{result.ledger.paid / result.ledger.floor:.1f} floors")  # fmt: skip
    else:
        told.append(f"{result.ledger.paid} queries, {result.reason}")
    told.append(f"{time.process_time() - start:.0f} CPU s")
    print(", ".join(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="of the installed package")
    parser.add_argument("--model", default="SCEPTR")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="network, attention or block")
    options = parser.parse_args()
    if options.folder is None:
        print("Not measured: give the folder of sceptr (pip install --no-deps --target).")
        return
    parts = read_weights(options.folder, options.model, options.layer)
    for name, secret, length in (
        ("network", network_of(parts), 1),
        ("attention", attention_of(parts), 6),
        ("block", block_of(parts), 6),
    ):
        if options.only in name:
            measure(name, secret, length, options.seed)


if __name__ == "__main__":
    main()
