"""A recovered layer as a `torch.nn.MultiheadAttention` that computes the same function."""

from typing import TYPE_CHECKING, Any

import numpy as np

from keyhole.errors import InvalidArgument, MissingExtra
from keyhole.models.attention import Attention, Head
from keyhole.models.factors import head_width, layer_maps

if TYPE_CHECKING:
    import torch


def to_torch(model: Attention, dtype: Any = None) -> "torch.nn.MultiheadAttention":
    """A module with `module(last, tokens, tokens)[0]` equal to `model(tokens)`, where `last` is
    the last token of each sequence as a sequence of length one, batch first.

    Torch divides the width among the heads, so the layer must fit: a number of heads that divides
    the width, with parts no narrower than the widest head. Missing heads are added without effect.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("exporting to torch needs it: pip install 'keyhole[torch]'") from error
    width = model.width
    if model.outputs != width:
        raise InvalidArgument(
            f"torch's attention answers with vectors of the tokens' width {width}, this model "
            f"with {'scalars' if model.outputs is None else f'{model.outputs} numbers'}"
        )
    count, inner = torch_shape(model)
    blank = Head(np.zeros((width, width)), None, np.zeros((width, width)))
    padded = Attention([*model.heads, *[blank] * (count - len(model.heads))], model.offset)
    maps = layer_maps(padded, inner)
    kind = torch.float64 if dtype is None else dtype
    module = torch.nn.MultiheadAttention(width, count, batch_first=True, dtype=kind)
    parts = [[m.query for m in maps], [m.key for m in maps], [m.into.T for m in maps]]
    stacked = np.concatenate([np.concatenate(part) for part in parts])
    biases = np.concatenate([np.concatenate([m.query_bias for m in maps]), np.zeros(2 * width)])
    outs = np.concatenate([m.out for m in maps]).T
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.as_tensor(stacked))
        module.in_proj_bias.copy_(torch.as_tensor(biases))
        module.out_proj.weight.copy_(torch.as_tensor(outs))
        module.out_proj.bias.copy_(torch.as_tensor(np.array(model.offset)))
    return module.eval()


def torch_shape(model: Attention) -> tuple[int, int]:
    """Number of heads and inner width of a torch layer that can hold this one."""
    width, needed = model.width, max(head_width(head) for head in model.heads)
    for count in range(len(model.heads), width + 1):
        if width % count == 0 and width // count >= needed:
            return count, width // count
    raise InvalidArgument(
        f"{len(model.heads)} heads of inner width {needed} do not fit into torch's layer of width "
        f"{width}, which divides its width among the heads"
    )
