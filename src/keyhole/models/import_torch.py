"""The true model of a module whose weights one has: `from_torch` and `from_hf`.

Attention is read by the names of its projections (query, key, value, output), a block by the names
of its parts, so that whatever is built like BERT, GPT-2, Llama or ViT can be read. What has no
weights (activations, norms) is recognised by its values. Keyhole's models answer at the last
position, where a causal layer sees every token, as a bidirectional one does.

Imports torch at the top: reach these through models/export.py, which explains a missing torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from keyhole.arrays import Array, Float
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention
from keyhole.models.block import Block
from keyhole.models.factors import layer_maps
from keyhole.models.mlp import ACTIVATIONS, Mlp
from keyhole.models.norm import KINDS, Norm
from keyhole.models.parts import submodule
from keyhole.models.projections import Linear, Projections, assemble_attention

READABLE = (
    "nn.MultiheadAttention, nn.TransformerEncoderLayer, and attention, networks and blocks built "
    "as in BERT, GPT-2, Llama or ViT"
)


def from_torch(module: Any) -> Attention | Mlp | Block:
    """The model that this module computes, from its weights."""
    return _read(module, None)


def from_hf(model: Any, layer: int | str = 0) -> Attention | Mlp | Block:
    """The model of one part of a `transformers` model: a block by its number, or any part by its
    dotted name ("encoder.layer.0.attention.self")."""
    if isinstance(layer, str):
        part = submodule(model, layer)
    else:
        blocks = list(_blocks(model))
        if not -len(blocks) <= layer < len(blocks):
            raise InvalidArgument(
                f"{type(model).__name__} has {len(blocks)} blocks that can be read, so there is no "
                f"block {layer}"
            )
        part = blocks[layer]
    return _read(part, _frequencies(model))


def _blocks(model: Any) -> Iterator[Any]:
    """The blocks of a model in order: the entries of its longest list of alike parts."""
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    readable = [part for part in lists if len(part) and _reader(part[0]) is _read_block]
    return iter(max(readable, key=len, default=[]))


def _read(module: Any, frequencies: Float[Array, " n"] | None) -> Attention | Mlp | Block:
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"expected a torch module, got a {type(module).__name__}")
    reader = _reader(module)
    if reader is None:
        parts = [
            name for name, part in module.named_modules() if name and _reader(part) is not None
        ]
        inner = f". Parts of it that can be: {', '.join(parts[:8])}" if parts else ""
        raise InvalidArgument(
            f"{type(module).__name__} cannot be read as a model; {READABLE} can{inner}"
        )
    return reader(module, frequencies)


def _reader(module: Any) -> Callable[..., Attention | Mlp | Block] | None:
    """The function that reads a module of this build."""
    if _block_parts(module) is not None:
        return _read_block
    if _projections(module) is not None:
        return _read_attention
    return _read_mlp if _network_parts(module) is not None else None


# -- linear maps ---------------------------------------------------------------------------------


def _numbers(tensor: Any) -> Array:
    return np.asarray(tensor.detach().cpu().to(torch.float64).numpy())


def _linear(module: Any) -> Linear | None:
    """A linear map; the Conv1D of GPT-2 keeps its matrix the other way round."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 2 or isinstance(module, nn.Embedding):
        return None
    matrix = _numbers(weight)
    matrix = matrix.T if type(module).__name__ == "Conv1D" else matrix
    bias = getattr(module, "bias", None)
    return Linear(matrix, np.zeros(len(matrix)) if bias is None else _numbers(bias))


def _first(module: Any, *names: str) -> Linear | None:
    """The first linear map among parts of these names."""
    found = (_linear(getattr(module, name, None)) for name in names)
    return next((linear for linear in found if linear is not None), None)


# -- attention -----------------------------------------------------------------------------------


def _projections(module: Any) -> Projections | None:
    if isinstance(module, nn.MultiheadAttention):
        return _torch_projections(module)
    merged = _first(module, "c_attn")
    if merged is not None:  # GPT-2: query, key and value are one map
        width = merged.weight.shape[1]
        query, key, value = (merged.rows(slice(k * width, (k + 1) * width)) for k in range(3))
        out = _first(module, "c_proj")
        if len(merged.weight) != 3 * width or out is None:
            return None
        scale = getattr(module, "scaling", None)
        return Projections(query, key, value, out, module.num_heads, scale)
    parts = [
        _first(module, *names)
        for names in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
    ]
    if parts[0] is None or parts[1] is None or parts[2] is None:
        return None
    return Projections(
        parts[0],
        parts[1],
        parts[2],
        _first(module, "o_proj", "out_proj"),
        _count_heads(module, len(parts[0].weight)),
        getattr(module, "scaling", None),
        getattr(module, "sliding_window", None),
    )


def _torch_projections(module: nn.MultiheadAttention) -> Projections:
    if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
        raise InvalidArgument(
            "only self-attention can be read: not bias_k, add_zero_attn, kdim or vdim"
        )
    width = module.embed_dim
    bias = module.in_proj_bias
    merged = Linear(
        _numbers(module.in_proj_weight), np.zeros(3 * width) if bias is None else _numbers(bias)
    )
    query, key, value = (merged.rows(slice(k * width, (k + 1) * width)) for k in range(3))
    return Projections(query, key, value, _linear(module.out_proj), module.num_heads)


def _count_heads(module: Any, rows: int) -> int:
    for holder in (module, getattr(module, "config", None)):
        for name in ("num_attention_heads", "num_heads", "n_head"):
            found = getattr(holder, name, None)
            if isinstance(found, int):
                return found
    width = getattr(module, "head_dim", None)
    if isinstance(width, int):
        return rows // width
    raise InvalidArgument(f"{type(module).__name__} does not tell its number of heads")


def _read_attention(module: Any, frequencies: Float[Array, " n"] | None) -> Attention:
    maps = _projections(module)
    assert maps is not None
    if any(type(part).__name__.endswith("Norm") for part in module.children()):
        raise InvalidArgument(
            f"{type(module).__name__} normalises queries or keys, which no model here does"
        )
    if frequencies is None:
        frequencies = _configured_frequencies(module)
    return assemble_attention(maps, frequencies)


def _frequencies(model: Any) -> Float[Array, " n"] | None:
    """Radians per place of a model's rotary embedding, None where it has none."""
    holders = [part for part in model.modules() if hasattr(part, "inv_freq")]
    if not holders:
        return None
    found = [_numbers(part.inv_freq) for part in holders]
    if any(one.shape != found[0].shape or (one != found[0]).any() for one in found):
        raise InvalidArgument("the parts of this model turn with different frequencies")
    if getattr(holders[0], "attention_scaling", 1.0) != 1.0:
        raise InvalidArgument("this model's rotary embedding scales with the length: not read")
    return found[0]


def _configured_frequencies(module: Any) -> Float[Array, " n"] | None:
    """The same of an attention layer alone, which knows its configuration only."""
    config = getattr(module, "config", None)
    settings = getattr(config, "rope_parameters", None)
    if not settings:
        return None
    if settings.get("rope_type", "default") != "default":
        raise InvalidArgument(
            "the frequencies of this rotary embedding are not in the layer: from_hf(model, layer) "
            "reads them from the model"
        )
    width = int(module.head_dim * settings.get("partial_rotary_factor", 1.0))
    return np.asarray(float(settings["rope_theta"]) ** (-np.arange(0, width, 2) / width))


# -- and back ------------------------------------------------------------------------------------


def name_projections(model: Attention, like: Any) -> dict[str, Any]:
    """The state dict with which the attention module `like` answers like the model."""
    kept = _projections(like) if isinstance(like, nn.Module) else None
    if kept is None:
        raise InvalidArgument(f"{type(like).__name__} is no attention that can be read")
    if model.position is not None or model.skip is not None or model.outputs is None:
        raise InvalidArgument("only a layer of vectors without positions and skip can be put back")
    _check_fits(model, kept)
    inner, width = len(kept.query.weight) // kept.heads, kept.query.weight.shape[1]
    maps = layer_maps(model, inner)
    slots = range(kept.heads) if kept.out is not None else _slots(model, inner)
    scale = 1.0 if kept.scale is None else inner**-0.5 / kept.scale  # ours is in the scores
    query, key, value = (np.zeros((kept.heads * inner, width)) for _ in range(3))
    bias, out = np.zeros(kept.heads * inner), np.zeros((model.outputs, kept.heads * inner))
    for slot, head, one in zip(slots, model.heads, maps, strict=False):
        own = slice(slot * inner, (slot + 1) * inner)
        query[own], bias[own], key[own] = scale * one.query, scale * one.query_bias, one.key
        value[own] = head.value[:, own].T if kept.out is None else one.into.T
        out[:, own] = one.out.T
    offset = np.array(model.offset)
    zero = np.zeros_like(bias)
    parts = {
        "query": Linear(query, bias),
        "key": Linear(key, zero),
        "value": Linear(value, zero),
    }
    if kept.out is None:
        parts["value"] = Linear(value, offset)
    else:
        parts["out"] = Linear(out, offset)
    return _under_names(parts, like)


def _check_fits(model: Attention, kept: Projections) -> None:
    """Raises InvalidArgument where the module has no room for the heads, or shares their keys."""
    inner = len(kept.query.weight) // kept.heads
    width = kept.query.weight.shape[1]
    answers = kept.heads * inner if kept.out is None else len(kept.out.weight)
    if (model.width, model.outputs) != (width, answers) or len(model.heads) > kept.heads:
        raise InvalidArgument(
            f"{model} does not fit into {kept.heads} heads of width {width} with {answers} outputs"
        )
    if len(kept.key.weight) != len(kept.query.weight):
        raise InvalidArgument("heads that share their keys cannot be told apart by answers")


def _slots(model: Attention, inner: int) -> list[int]:
    """Which part of the answer each head writes, where the values stand side by side."""
    sizes = np.array(
        [[np.linalg.norm(part) for part in np.split(h.value, h.value.shape[1] // inner, axis=1)]
         for h in model.heads]
    )  # fmt: skip
    slots = sizes.argmax(axis=1).tolist()
    others = np.sort(sizes, axis=1)[:, :-1]
    if len(set(slots)) < len(slots) or (others > 1e-4 * sizes.max(axis=1, keepdims=True)).any():
        raise InvalidArgument("the heads of this layer do not write to parts of the answer each")
    return slots


def _under_names(parts: dict[str, Linear], like: Any) -> dict[str, Any]:
    """The maps under the names, in the layout and number format of the module."""
    if isinstance(like, nn.MultiheadAttention):
        merged = [parts[name] for name in ("query", "key", "value")]
        state = {
            "in_proj_weight": np.concatenate([part.weight for part in merged]),
            "in_proj_bias": np.concatenate([part.bias for part in merged]),
            "out_proj.weight": parts["out"].weight,
            "out_proj.bias": parts["out"].bias,
        }
    elif hasattr(like, "c_attn"):
        merged = [parts[name] for name in ("query", "key", "value")]
        state = {
            "c_attn.weight": np.concatenate([part.weight for part in merged]).T,
            "c_attn.bias": np.concatenate([part.bias for part in merged]),
            "c_proj.weight": parts["out"].weight.T,
            "c_proj.bias": parts["out"].bias,
        }
    else:
        names = {"query": ("query", "q_proj"), "key": ("key", "k_proj"),
                 "value": ("value", "v_proj"), "out": ("o_proj", "out_proj")}  # fmt: skip
        state = {}
        for part, linear in parts.items():
            name = next(name for name in names[part] if hasattr(like, name))
            state |= {f"{name}.weight": linear.weight, f"{name}.bias": linear.bias}
    own = like.state_dict()
    lost = [name for name, array in state.items() if name not in own and array.any()]
    if lost:
        raise InvalidArgument(f"{type(like).__name__} has no {', '.join(lost)} to put this into")
    return {
        name: torch.tensor(array, dtype=own[name].dtype)
        for name, array in state.items()
        if name in own
    }


# -- networks ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Network:
    inner: Linear
    outer: Linear
    activation: Callable[..., Any]
    gate: Linear | None = None


def _network_parts(module: Any) -> _Network | None:
    """Two linear maps with an activation between them, and perhaps a gate."""
    gate = _first(module, "gate_proj")
    inner = _first(module, "up_proj", "c_fc", "fc1", "linear1")
    outer = _first(module, "down_proj", "c_proj", "fc2", "linear2")
    if inner is None or outer is None:
        return None
    return _Network(inner, outer, _activation_of(module), gate)


def _activation_of(module: Any) -> Callable[..., Any]:
    for name in ("act_fn", "activation_fn", "act", "activation", "intermediate_act_fn"):
        found = getattr(module, name, None)
        if callable(found):
            return found
    raise InvalidArgument(f"{type(module).__name__} does not tell its activation")


def _read_mlp(module: Any, frequencies: Float[Array, " n"] | None) -> Mlp:
    parts = _network_parts(module)
    assert parts is not None
    return _assemble_mlp(parts)


def _assemble_mlp(parts: _Network) -> Mlp:
    return Mlp(
        parts.inner.weight,
        parts.inner.bias,
        parts.outer.weight,
        activation=_name_activation(parts.activation),
        offset=parts.outer.bias,
        gate=None if parts.gate is None else parts.gate.weight,
        gate_bias=None if parts.gate is None else parts.gate.bias,
    )


def _name_activation(function: Callable[..., Any]) -> str:
    """The activation of the table that has the same values."""
    points = np.linspace(-4.0, 4.0, 33)
    with torch.no_grad():
        values = _numbers(function(torch.from_numpy(points)))
    for name, activation in ACTIVATIONS.items():
        if np.allclose(activation.value(points), values, rtol=0.0, atol=1e-9):
            return name
    raise InvalidArgument(
        f"the activation {getattr(function, '__name__', type(function).__name__)} is none of "
        f"{', '.join(ACTIVATIONS)}"
    )


# -- blocks --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _BlockParts:
    """The modules of a block; what they hold is read later."""

    attention: Any
    network: Any  # None: attention alone
    norms: tuple[Any, ...]
    order: str
    out: Linear | None = None  # the output map, where it stands outside the attention


def _block_parts(module: Any) -> _BlockParts | None:
    if isinstance(module, nn.TransformerEncoderLayer):
        order = "pre" if module.norm_first else "post"
        return _BlockParts(module.self_attn, module, (module.norm1, module.norm2), order)
    bert = _bert_parts(module)
    if bert is not None:
        return bert
    for first, attention, second, network in (
        ("ln_1", "attn", "ln_2", "mlp"),  # GPT-2
        ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),  # Llama
        ("layernorm_before", "attention", "layernorm_after", "mlp"),  # ViT
    ):
        parts = [getattr(module, name, None) for name in (first, attention, second, network)]
        if all(isinstance(part, nn.Module) for part in parts):
            return _BlockParts(parts[1], parts[3], (parts[0], parts[2]), "pre")
    return None


def _bert_parts(module: Any) -> _BlockParts | None:
    """BERT: norms stand inside the output maps; its attention alone is half a block."""
    attention = getattr(module, "attention", module)
    inner, output = getattr(attention, "self", None), getattr(attention, "output", None)
    out, norm = _first(output, "dense"), getattr(output, "LayerNorm", None)
    if inner is None or out is None or norm is None:
        return None
    if attention is module:
        return _BlockParts(inner, None, (norm,), "post", out)
    last = getattr(module.output, "LayerNorm", None)
    if last is None or _first(getattr(module, "intermediate", None), "dense") is None:
        return None
    return _BlockParts(inner, module, (norm, last), "post", out)


def _read_block(module: Any, frequencies: Float[Array, " n"] | None) -> Block:
    parts = _block_parts(module)
    assert parts is not None
    if parts.out is None:
        attention = _read_attention(parts.attention, frequencies)
    else:
        maps = _projections(parts.attention)
        if maps is None:
            raise InvalidArgument(f"the attention of {type(module).__name__} cannot be read")
        attention = assemble_attention(replace(maps, out=parts.out), frequencies)
    mlp = None if parts.network is None else _read_network(parts)
    norms = [_read_norm(norm) for norm in parts.norms]
    if len({norm.kind for norm in norms}) != 1:
        raise InvalidArgument("the norms of a block must be of one kind")
    return Block(
        attention,
        mlp,
        norm=parts.order,
        kind=norms[0].kind,
        epsilons=[norm.epsilon for norm in norms],
        gain=[norm.gain for norm in norms],
        bias=[norm.bias for norm in norms],
    )


def _read_network(parts: _BlockParts) -> Mlp:
    if parts.out is None:
        return _read_mlp(parts.network, None)
    block = parts.network  # BERT: the two maps are in parts of their own
    inner, outer = _linear(block.intermediate.dense), _linear(block.output.dense)
    assert inner is not None
    assert outer is not None
    return _assemble_mlp(_Network(inner, outer, _activation_of(block.intermediate)))


def _read_norm(module: Any) -> Norm:
    """A norm, recognised by its values on a random input."""
    weight = getattr(module, "weight", None)
    if weight is None:
        raise InvalidArgument(f"{type(module).__name__} is no norm with a gain")
    bias = getattr(module, "bias", None)
    epsilon = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None) or 1e-5
    x = np.random.default_rng(0).standard_normal((2, weight.numel()))
    with torch.no_grad():
        asked = torch.from_numpy(x).to(weight.dtype).to(weight.device)
        answer = _numbers(module(asked))
    for kind in KINDS:
        norm = Norm(_numbers(weight), None if bias is None else _numbers(bias), epsilon, kind)
        # the module rounds in its own number format; Llama's norm in single precision at best
        rounding = max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float32).eps)
        slack = 16.0 * rounding * (1.0 + np.abs(answer).max())
        if np.allclose(norm(_numbers(asked)), answer, rtol=0.0, atol=slack):
            return norm
    raise InvalidArgument(f"{type(module).__name__} is neither a LayerNorm nor an RMSNorm")
