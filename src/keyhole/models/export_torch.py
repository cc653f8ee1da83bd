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
from keyhole.models.block import Block
from keyhole.models.factors import head_width, layer_maps
from keyhole.models.mlp import ACTIVATIONS, Mlp
from keyhole.models.norm import Norm
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel


def to_module(
    model: Any, dtype: Any = None, everywhere: bool = False, causal: bool = False
) -> nn.Module:
    """A module on tokens (batch, length, width) that answers like the model.

    Parameters are named as in `model.to_arrays()`, with underscores for dots, and can be trained
    on. They are of the model's own number format unless another is given."""
    if not isinstance(model, (Attention, Block, Mlp, ReluNetwork, TransformerModel)):
        raise InvalidArgument(f"cannot export a {type(model).__name__} to torch")
    kind = torch_dtype(model.dtype if dtype is None else dtype)
    if isinstance(model, Attention):
        if everywhere and not causal and model.position is not None:
            raise InvalidArgument("at all positions, a layer with positions must be causal")
        return AttentionModule(model, kind, everywhere, causal).eval()
    if everywhere or causal:
        raise InvalidArgument("all positions are for attention; other models read the last one")
    if isinstance(model, Mlp):
        return MlpModule(model, kind).eval()
    if isinstance(model, Block):
        return BlockModule(model, kind).eval()
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
    """Softmax attention on (batch, length, width), read at the last position or, `everywhere`, at
    all of them: at each from the tokens up to it (`causal`) or from all tokens."""

    def __init__(
        self, model: Attention, dtype: torch.dtype, everywhere: bool = False, causal: bool = False
    ) -> None:
        super().__init__()
        self.everywhere, self.causal = everywhere, causal
        self.width, self.outputs, self.count = model.width, model.outputs, len(model.heads)
        self.factored = [head.score_factors is not None for head in model.heads]
        self.window = None if model.position is None else model.position.window
        arrays = model.to_arrays()
        self.masked = None if model.position is None else model.position.masked
        self.masked_anchor = model.position is not None and bool(model.position.masked_anchor)
        for name in ("window", "masked", "masked_anchor"):
            arrays.pop(f"position.{name}", None)
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
        """Of scores (batch, queries, length)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        distances = places[-query.shape[1] :, None] - places
        bias, slopes, sinks = (self._part(name) for name in ("bias", "slopes", "sinks"))
        if "position_keys" in self.parameters_by_name:
            keys = self._pairs(self._part("keys")[head], tokens)
            queries = self._pairs(self._part("queries")[head], query)
            angles = distances[..., None] * self._part("frequencies")
            turn = torch.polar(torch.ones_like(angles), angles)
            turned = torch.einsum("bnp,qnp,bqp->bqn", keys, turn, queries)
            scores = scores + turned.real
        if bias is not None:
            scores = scores + bias[head][torch.clamp(distances, 0, bias.shape[1] - 1)]
        if slopes is not None:
            scores = scores - slopes[head] * distances
        if self.window is not None:
            scores = scores.masked_fill(distances >= self.window, -torch.inf)
        if self.masked is not None:
            hidden = (places < self.masked) & (self.masked_anchor | (distances != 0))
            scores = scores.masked_fill(hidden, -torch.inf)
        if self.causal:
            scores = scores.masked_fill(distances < 0, -torch.inf)
        if sinks is None:
            weights = torch.softmax(scores, dim=-1)
            return torch.nan_to_num(weights) if self.masked_anchor else weights
        row = sinks[head]
        constant = row if row.ndim == 0 else query @ row[:-1, None] + row[-1]
        sink = constant.expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._part("vectors") is not None:
            tokens = tokens + self._part("vectors")[: tokens.shape[1]]
        query = tokens if self.everywhere else tokens[:, -1:, :]
        answer: torch.Tensor = self.parameters_by_name["offset"]
        if "skip" in self.parameters_by_name:
            answer = answer + query @ self.parameters_by_name["skip"]
        for head in range(self.count):
            scores = self._keys(head, query) @ tokens.transpose(1, 2)
            weights = self._weights(head, tokens, query, scores)
            answer = answer + (weights @ tokens) @ self._get(head, "value")
            if self._part("sink_values") is not None:
                share = 1.0 - weights.sum(dim=-1, keepdim=True)
                answer = answer + share * self._part("sink_values")[head]
        return answer if self.everywhere else answer[:, 0]


def apply_activation(name: str, argument: torch.Tensor) -> torch.Tensor:
    """φ of models/mlp by its name there."""
    alias = ACTIVATIONS[name].alias
    if name == "quick_gelu" and alias is not None:
        return argument * torch.sigmoid(alias[1] * argument)
    known: dict[str, Any] = {
        "relu": torch.relu,
        "gelu": nn.functional.gelu,
        "gelu_tanh": lambda a: nn.functional.gelu(a, approximate="tanh"),
        "silu": nn.functional.silu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
    }
    answer: torch.Tensor = known[name](argument)
    return answer


class MlpModule(nn.Module):
    """A network with one hidden layer, with a gate or without, at the last position."""

    def __init__(self, model: Mlp, dtype: torch.dtype) -> None:
        super().__init__()
        for name, array in model.to_arrays().items():
            if array.size or "." not in name:  # not the empty array that names the activation
                tensor = torch.tensor(np.array(array), dtype=dtype)
                self.register_parameter(name, nn.Parameter(tensor))
        self.width, self.outputs = model.width, model.outputs
        self.activation, self.gated = model.activation, model.gated

    def _get(self, name: str) -> Any:
        return getattr(self, name)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        point = tokens[:, -1, :]
        hidden = point @ self._get("inner").T + self._get("inner_bias")
        if self.gated:
            gate = point @ self._get("gate").T + self._get("gate_bias")
            hidden = apply_activation(self.activation, gate) * hidden
        else:
            hidden = apply_activation(self.activation, hidden)
        apply = nn.functional.linear
        straight = apply(point, self._get("linear")) + self._get("offset")
        answer: torch.Tensor = apply(hidden, self._get("outer")) + straight
        return answer


class NormModule(nn.Module):
    """LayerNorm or RMSNorm."""

    def __init__(self, norm: Norm, dtype: torch.dtype) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(np.array(norm.gain), dtype=dtype))
        self.bias = nn.Parameter(torch.tensor(np.array(norm.bias), dtype=dtype))
        self.epsilon, self.centred = norm.epsilon, norm.kind == "layer"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.centred:
            x = x - x.mean(dim=-1, keepdim=True)
        size = torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.epsilon)
        answer: torch.Tensor = self.gain * (x / size) + self.bias
        return answer


class BlockModule(nn.Module):
    """A Transformer block at the last position: the steps of models/block, parts by their names."""

    def __init__(self, model: Block, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.outputs = model.width, model.outputs
        self.pre, self.parallel = model.norm == "pre", model.parallel
        norms = [NormModule(norm, dtype) for norm in model.norms]
        first, last = (norms[0], norms[-1]) if norms else (None, None)
        self.attention = self.attention_norm = self.mlp = self.mlp_norm = None
        if model.attention is not None:
            self.attention = AttentionModule(model.attention, dtype)
            self.attention_norm = first
        if model.mlp is not None:
            self.mlp, self.mlp_norm = MlpModule(model.mlp, dtype), last

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        anchor = stream = tokens[:, -1, :]
        if self.attention is not None:
            norm = nn.Identity() if self.attention_norm is None else self.attention_norm
            seen = norm(tokens) if self.pre else tokens
            stream = stream + self.attention(seen)
            stream = stream if self.pre else norm(stream)
        if self.mlp is not None:
            norm = nn.Identity() if self.mlp_norm is None else self.mlp_norm
            point = anchor if self.parallel else stream
            seen = norm(point) if self.pre else point
            stream = stream + self.mlp(seen[:, None, :])
            stream = stream if self.pre else norm(stream)
        return stream


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
