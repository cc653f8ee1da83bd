"""Recovered parts under the names that other programs have for them.

`to_transformer_lens`: the weights of one layer as TransformerLens names them (W_Q, W_K, W_V, W_O,
b_Q, b_K, b_V, b_O, W_in, b_in, W_out, b_out, ln1.w …). `to_hf`: a state dict for a module of
`transformers` or torch, so that a recovered part can be put back into the model and run.

The gauge. Answers show the products W_Q W_K^T and W_V W_O of a head, and no key bias: the maps are
the balanced choice (models/factors), b_K is zero, and all that the value bias does is in b_O. The
heads stand in the order in which they were recovered.
"""

from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument
from keyhole.extras import need
from keyhole.models.attention import Attention
from keyhole.models.block import Block
from keyhole.models.factors import HeadMaps, layer_maps
from keyhole.models.mlp import Mlp


def to_transformer_lens(model: Any, head_width: int | None = None) -> dict[str, Array]:
    """The weights of one layer by TransformerLens' names.

    Args:
        model: A layer of attention, a network, or a block of both.
        head_width: Inner width of a head, by whose square root scores are divided there; None for
            the smallest that all heads fit into.

    Returns:
        Arrays by name: W_Q, W_K, W_V, W_O, b_Q, … Answers know only products of these: the factors
        are the balanced ones.

    Raises:
        InvalidArgument: A model that has no such weights.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.random import attention
        >>> layer = attention(np.random.default_rng(0), 6, heads=2, rank=2, outputs=6)
        >>> named = to_transformer_lens(layer)
        >>> named["W_Q"].shape
        (2, 6, 6)
    """
    if isinstance(model, Attention):
        return _name_attention(model, head_width)
    if isinstance(model, Mlp):
        return _name_mlp(model)
    if isinstance(model, Block):
        return _name_block(model, head_width)
    raise InvalidArgument(f"TransformerLens has no names for a {type(model).__name__}")


def _name_attention(model: Attention, head_width: int | None) -> dict[str, Array]:
    maps = _plain_maps(model, head_width)
    count, inner = len(maps), maps[0].width
    return {
        "W_Q": np.stack([m.query.T for m in maps]),
        "W_K": np.stack([m.key.T for m in maps]),
        "W_V": np.stack([m.into for m in maps]),
        "W_O": np.stack([m.out for m in maps]),
        "b_Q": np.stack([m.query_bias for m in maps]),
        "b_K": np.zeros((count, inner)),
        "b_V": np.zeros((count, inner)),
        "b_O": np.array(model.offset),
    }


def _plain_maps(model: Attention, head_width: int | None) -> tuple[HeadMaps, ...]:
    if model.outputs is None:
        raise InvalidArgument("a layer that answers with one number has no output map to name")
    if model.position is not None or model.skip is not None:
        raise InvalidArgument("a layer with positions or a skip of its own has no such weights")
    return layer_maps(model, head_width)


def _name_mlp(model: Mlp) -> dict[str, Array]:
    if model.linear.any():
        raise InvalidArgument("a network with a linear part of its own has no such weights")
    named = {
        "W_in": model.inner.T,
        "b_in": model.inner_bias,
        "W_out": model.outer.T,
        "b_out": model.offset,
    }
    if model.gate is not None and model.gate_bias is not None:
        named |= {"W_gate": model.gate.T, "b_gate": model.gate_bias}
    return {name: np.array(array) for name, array in named.items()}


def _name_block(model: Block, head_width: int | None) -> dict[str, Array]:
    named: dict[str, Array] = {}
    if model.attention is not None:
        attention = _name_attention(model.attention, head_width)
        named |= {f"attn.{name}": array for name, array in attention.items()}
    if model.mlp is not None:
        named |= {f"mlp.{name}": array for name, array in _name_mlp(model.mlp).items()}
    for number, norm in enumerate(model.norms, start=1):
        named |= {f"ln{number}.w": np.array(norm.gain), f"ln{number}.b": np.array(norm.bias)}
    return named


def to_hf(model: Attention, like: Any) -> dict[str, Any]:
    """Makes a state dict for an attention module that makes it answer like the model.

    Args:
        model: A layer of attention with vector answers, without positions and skip.
        like: The module: of GPT-2, BERT, ViT, Llama without positions, or nn.MultiheadAttention.

    Returns:
        What `like.load_state_dict(…, strict=False)` takes.

    Raises:
        InvalidArgument: A layer or a module for which that cannot be done; the message says why.
        MissingExtra: torch is not installed.

    Example:
        >>> import torch
        >>> from keyhole.models.export import from_torch
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> sorted(to_hf(from_torch(layer), layer))
        ['in_proj_bias', 'in_proj_weight', 'out_proj.bias', 'out_proj.weight']
    """
    need("torch", "torch", "a state dict")
    from keyhole.models.import_torch import name_projections

    return name_projections(model, like)
