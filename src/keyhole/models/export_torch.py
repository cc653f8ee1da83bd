"""Models as PyTorch modules: the same formulas, trainable parameters, the names of our files.

Imports torch at the top: reach `to_module` through models/export.py, which explains a missing
torch. `to_multihead_attention` builds torch's own layer instead, where the model fits into it.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head
from keyhole.models.factors import head_width, layer_maps
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel


def to_module(model: Any, dtype: Any = None) -> nn.Module:
    """A module on tokens (batch, length, width) that answers like the model.

    Parameters are named as in `model.to_arrays()`, with underscores for dots, and can be trained
    on. They are of the model's own number format unless another is given."""
    if not isinstance(model, (Attention, ReluNetwork, TransformerModel)):
        raise InvalidArgument(f"cannot export a {type(model).__name__} to torch")
    kind = torch_dtype(model.dtype if dtype is None else dtype)
    if isinstance(model, Attention):
        return AttentionModule(model, kind).eval()
    return NetworkModule(model, kind).eval()


def torch_dtype(dtype: Any) -> torch.dtype:
    """Torch's own name of a number format."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = np.dtype(dtype).name
    if name not in ("float16", "float32", "float64"):
        raise InvalidArgument(f"dtype must be float16, float32 or float64, got {name}")
    kind: torch.dtype = getattr(torch, name)
    return kind


class AttentionModule(nn.Module):
    """Softmax attention read at the last position, on (batch, length, width)."""

    def __init__(self, model: Attention, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.outputs, self.count = model.width, model.outputs, len(model.heads)
        self.factored = [head.score_factors is not None for head in model.heads]
        self.window = None if model.position is None else model.position.window
        arrays = model.to_arrays()
        arrays.pop("position.window", None)
        self.parameters_by_name = nn.ParameterDict()
        for name, array in arrays.items():
            tensor = torch.tensor(array, dtype=dtype)
            self.parameters_by_name[name.replace(".", "_")] = nn.Parameter(tensor)

    def _get(self, head: int, name: str) -> Any:
        return self.parameters_by_name[f"heads_{head}_{name}"]

    def _keys(self, head: int, query: torch.Tensor) -> torch.Tensor:
        if self.factored[head]:
            inner = query @ self._get(head, "score_right").T
            keys = inner @ self._get(head, "score_left").T
        else:
            keys = query @ self._get(head, "score").T
        answer: torch.Tensor = keys + self._get(head, "key_bias")
        return answer

    def _part(self, name: str) -> Any:
        """A part of the position, None where the layer has none."""
        place = f"position_{name}"
        return self.parameters_by_name.get(place, None)

    def _pairs(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        values = tokens @ rows[:, :-1].T + rows[:, -1]
        return torch.complex(values[..., ::2], values[..., 1::2])

    def _weights(
        self, head: int, tokens: torch.Tensor, query: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        distances = torch.arange(tokens.shape[1] - 1, -1, -1, device=tokens.device)
        bias, slopes, sinks = (self._part(name) for name in ("bias", "slopes", "sinks"))
        if "position_keys" in self.parameters_by_name:
            keys = self._pairs(self._part("keys")[head], tokens)
            queries = self._pairs(self._part("queries")[head], query)
            angles = distances[:, None] * self._part("frequencies")
            turn = torch.polar(torch.ones_like(angles), angles)
            scores = scores + (keys * turn * queries[:, None]).real.sum(dim=2)
        if bias is not None:
            scores = scores + bias[head][torch.clamp(distances, max=bias.shape[1] - 1)]
        if slopes is not None:
            scores = scores - slopes[head] * distances
        if self.window is not None:
            scores = scores.masked_fill(distances >= self.window, -torch.inf)
        if sinks is None:
            return torch.softmax(scores, dim=1)
        sink = sinks[head].expand(len(scores), 1)
        return torch.softmax(torch.cat([scores, sink], dim=1), dim=1)[:, :-1]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._part("vectors") is not None:
            tokens = tokens + self._part("vectors")[: tokens.shape[1]]
        query = tokens[:, -1, :]
        answer: torch.Tensor = self.parameters_by_name["offset"]
        if "skip" in self.parameters_by_name:
            answer = answer + query @ self.parameters_by_name["skip"]
        for head in range(self.count):
            scores = (tokens @ self._keys(head, query).unsqueeze(-1)).squeeze(-1)
            weights = self._weights(head, tokens, query, scores)
            mean = (weights.unsqueeze(1) @ tokens).squeeze(1)
            answer = answer + mean @ self._get(head, "value")
        return answer


class NetworkModule(nn.Module):
    """A network of ReLUs at the last position, behind attention if the model has it."""

    def __init__(self, model: ReluNetwork | TransformerModel, dtype: torch.dtype) -> None:
        super().__init__()
        for name, array in model.to_arrays().items():
            tensor = torch.tensor(np.array(array), dtype=dtype)
            self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor))
        self.width, self.outputs = model.width, model.outputs
        self.prefix = "network_" if isinstance(model, TransformerModel) else ""
        self.residual = isinstance(model, TransformerModel) and model.residual

    def _get(self, name: str) -> Any:
        return getattr(self, name)

    def _part(self, name: str) -> Any:
        return getattr(self, self.prefix + name)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query = point = tokens[:, -1, :]
        if self.prefix:
            keys = query @ self._get("score").T + self._get("key_bias")
            weights = torch.softmax((tokens @ keys[:, :, None])[:, :, 0], dim=1)
            point = (weights[:, None, :] @ tokens)[:, 0, :]
        if self.residual:
            moved = point - query
            hidden = query @ self._part("weight").T + moved @ self._get("mixed_weight").T
            straight = query @ self._part("skip") + moved @ self._get("mixed_skip")
        else:
            hidden, straight = point @ self._part("weight").T, point @ self._part("skip")
        bent = torch.relu(hidden + self._part("bias")) @ self._part("output")
        answer: torch.Tensor = bent + straight + self._part("offset")
        return answer


def to_multihead_attention(model: Attention, dtype: Any = None) -> nn.MultiheadAttention:
    """A module with `module(last, tokens, tokens)[0]` equal to `model(tokens)`, where `last` is
    the last token of each sequence as a sequence of length one, batch first.

    Torch divides the width among the heads, so the layer must fit: a number of heads that divides
    the width, with parts no narrower than the widest head. Missing heads are added without effect.
    """
    width = model.width
    if model.outputs != width:
        raise InvalidArgument(
            f"torch's attention answers with vectors of the tokens' width {width}, this model "
            f"with {'scalars' if model.outputs is None else f'{model.outputs} numbers'}"
        )
    if model.skip is not None or model.position is not None:
        raise InvalidArgument(
            "torch's attention has no skip and no positions; to_module exports the whole layer"
        )
    count, inner = fit_torch_shape(model)
    blank = Head(np.zeros((width, width)), None, np.zeros((width, width)))
    padded = Attention([*model.heads, *[blank] * (count - len(model.heads))], model.offset)
    maps = layer_maps(padded, inner)
    kind = torch.float64 if dtype is None else torch_dtype(dtype)
    module = nn.MultiheadAttention(width, count, batch_first=True, dtype=kind)
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


def fit_torch_shape(model: Attention) -> tuple[int, int]:
    """Number of heads and inner width of a torch layer that can hold this one."""
    width, needed = model.width, max(head_width(head) for head in model.heads)
    for count in range(len(model.heads), width + 1):
        if width % count == 0 and width // count >= needed:
            return count, width // count
    raise InvalidArgument(
        f"{len(model.heads)} heads of inner width {needed} do not fit into torch's layer of width "
        f"{width}, which divides its width among the heads"
    )
