"""The true model in the weights of a GGUF file, the format of llama.cpp: `from_gguf`.

Parts have the names of the file: `blk.0` is a block, `blk.0.attn` its attention, `blk.0.ffn` its
network; without a name, all blocks and the last norm. Blocks are those of Llama (RMSNorm before
attention and gated network, rotary positions, heads that share keys), with biases as in Qwen 2.
Quantised weights are read as the numbers that they stand for.

A pair of entries that turn together stands side by side in files of the architecture `llama`, and
half a head apart elsewhere.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import FileFormatError, InvalidArgument
from keyhole.extras import need
from keyhole.models.attention import Attention
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp
from keyhole.models.norm import Norm
from keyhole.models.projections import Linear, Projections, assemble_attention
from keyhole.models.stack import Stack
from keyhole.targets import check_gguf, suggest

SIDE_BY_SIDE = {"llama": True, "qwen2": False}  # by architecture: how pairs that turn are kept
PART = re.compile(r"blk\.(\d+)(?:\.(attn|ffn))?")


def from_gguf(path: str | Path, part: str = "") -> Attention | Mlp | Block | Stack:
    """The model of a part of the file: "blk.0", "blk.0.attn", "blk.0.ffn", or all of it."""
    path = Path(path)
    check_gguf(path)
    gguf = need("gguf", "gguf", "a GGUF file")
    try:
        weights = Weights(gguf.GGUFReader(path), gguf)
        architecture = str(weights.told("general.architecture"))
    except Exception as error:  # whatever a damaged file makes the reader raise
        raise FileFormatError(f"{path} cannot be read as GGUF: {str(error)[:300]}") from error
    if architecture not in SIDE_BY_SIDE:
        raise InvalidArgument(
            f"{path} holds a model of the architecture {architecture!r}; "
            f"{', '.join(SIDE_BY_SIDE)} can be read"
        )
    count = int(weights.told(f"{architecture}.block_count"))
    if not part:
        blocks = [read_block(weights, number) for number in range(count)]
        return Stack(blocks, read_norm(weights, "output_norm"), causal=True)
    match = PART.fullmatch(part)
    if match is None or int(match[1]) >= count:
        known = [f"blk.{number}{end}" for number in range(count) for end in ("", ".attn", ".ffn")]
        raise InvalidArgument(f"{path} has no part {part!r}; {suggest(part, known)}")
    number = int(match[1])
    if match[2] == "attn":
        return read_attention(weights, number)
    return read_mlp(weights, number) if match[2] == "ffn" else read_block(weights, number)


@dataclass(frozen=True, eq=False)
class Weights:
    """What a file holds: tensors by name, and what is told beside them."""

    reader: Any
    gguf: Any

    def told(self, name: str, otherwise: Any = None) -> Any:
        field = self.reader.get_field(name)
        if field is None and otherwise is None:
            raise FileFormatError(f"the file does not tell {name}")
        return otherwise if field is None else field.contents()

    @property
    def architecture(self) -> str:
        return str(self.told("general.architecture"))

    def setting(self, name: str, otherwise: Any = None) -> Any:
        return self.told(f"{self.architecture}.{name}", otherwise)

    def find(self, name: str) -> Array | None:
        """A tensor as plain numbers, None where there is none of that name."""
        for tensor in self.reader.tensors:
            if tensor.name == name:
                numbers = self.gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                return np.asarray(numbers, dtype=np.float64)
        return None

    def get(self, name: str) -> Array:
        found = self.find(name)
        if found is None:
            raise FileFormatError(f"the file has no tensor {name}")
        return found

    def linear(self, name: str) -> Linear:
        weight, bias = self.get(f"{name}.weight"), self.find(f"{name}.bias")
        return Linear(weight, np.zeros(len(weight)) if bias is None else bias)


def read_attention(weights: Weights, number: int) -> Attention:
    names = ("q_norm", "k_norm", "sinks")
    odd = [name for name in names if weights.find(f"blk.{number}.attn_{name}.weight") is not None]
    if odd:
        raise InvalidArgument(f"blk.{number} has attn_{odd[0]}, which no model here has")
    heads = int(weights.setting("attention.head_count"))
    query, key, value, out = (
        weights.linear(f"blk.{number}.attn_{name}") for name in ("q", "k", "v", "output")
    )
    inner = len(query.weight) // heads
    turned = int(weights.setting("rope.dimension_count", inner))
    if SIDE_BY_SIDE[weights.architecture]:
        query, key = (apart(linear, inner, turned) for linear in (query, key))
    return assemble_attention(
        Projections(query, key, value, out, heads), read_frequencies(weights, turned)
    )


def apart(linear: Linear, inner: int, turned: int) -> Linear:
    """The rows of each head with the second of every pair behind all the first."""
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, inner)]
    rows = np.concatenate(
        [start + np.array(order) for start in range(0, len(linear.weight), inner)]
    )
    return Linear(linear.weight[rows], linear.bias[rows])


def read_frequencies(weights: Weights, turned: int) -> Float[Array, " n"]:
    """Radians per place; a file may divide them, one by one."""
    if str(weights.setting("rope.scaling.type", "none")) != "none":
        raise InvalidArgument("the rotary embedding of this file scales with the length: not read")
    base = float(weights.setting("rope.freq_base", 10000.0))
    found = base ** (-np.arange(0, turned, 2) / turned)
    divided = weights.find("rope_freqs.weight")
    return np.asarray(found if divided is None else found / divided)


def read_mlp(weights: Weights, number: int) -> Mlp:
    gate, inner, outer = (
        weights.linear(f"blk.{number}.ffn_{name}") for name in ("gate", "up", "down")
    )
    return Mlp(
        inner.weight,
        inner.bias,
        outer.weight,
        activation="silu",
        offset=outer.bias,
        gate=gate.weight,
        gate_bias=gate.bias,
    )


def read_norm(weights: Weights, name: str) -> Norm:
    epsilon = float(weights.setting("attention.layer_norm_rms_epsilon"))
    return Norm(weights.get(f"{name}.weight"), None, epsilon, "rms")


def read_block(weights: Weights, number: int) -> Block:
    norms = [read_norm(weights, f"blk.{number}.{name}_norm") for name in ("attn", "ffn")]
    return Block(
        read_attention(weights, number),
        read_mlp(weights, number),
        norm="pre",
        kind="rms",
        epsilons=[norm.epsilon for norm in norms],
        gain=[norm.gain for norm in norms],
    )
