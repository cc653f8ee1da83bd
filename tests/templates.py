"""Architectures that tests write down as people do, and boxes made from them."""

import math
from typing import Any

import torch
from torch import nn


class AttentionHeads(nn.Module):
    """Attention of the last token, "softmax", "sigmoid", "linear" or with a "sink", and a head."""

    def __init__(self, width: int = 8, heads: int = 2, kind: str = "softmax") -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, 1)
        self.heads, self.kind = heads, kind
        if kind == "sink":
            self.sink = nn.Parameter(torch.zeros(heads))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length, width = tokens.shape
        size = width // self.heads
        q = self.q(tokens[:, -1]).reshape(batch, self.heads, size)
        k, v = (f(tokens).reshape(batch, length, self.heads, size) for f in (self.k, self.v))
        scores = torch.einsum("bhe,blhe->bhl", q, k) / math.sqrt(size)
        if self.kind == "softmax":
            weights = scores.softmax(-1)
        elif self.kind == "sigmoid":
            weights = scores.sigmoid()
        elif self.kind == "linear":
            weights = scores / length
        else:
            sinks = self.sink[None, :, None].expand(batch, self.heads, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.out(torch.einsum("bhl,blhe->bhe", weights, v).reshape(batch, width))


class Encoder(nn.Module):
    """A projection in, learned positions up to a longest length, layers, pooling, a head out."""

    def __init__(
        self,
        inputs: int = 6,
        width: int = 6,
        heads: int = 2,
        neurons: int = 8,
        outputs: int = 6,
        *,
        norm_first: bool = False,
        activation: str = "gelu",
        pooling: str = "last",
        layers: int = 1,
        longest: int = 0,
    ) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, width)
        self.layer, *others = (
            nn.TransformerEncoderLayer(
                width, heads, neurons, 0.0, activation, batch_first=True, norm_first=norm_first
            )
            for _ in range(layers)
        )
        self.others, self.longest = nn.Sequential(*others), longest
        if longest:
            self.positions = nn.Parameter(torch.zeros(longest, width))
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.out, self.pooling = nn.Linear(width, outputs), pooling

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.project(tokens)
        if self.longest:
            stream = stream + self.positions[: tokens.shape[1]]
        stream = self.norm(self.others(self.layer(stream)))
        return self.out(stream[:, -1] if self.pooling == "last" else stream.mean(1))


class KernelAttention(nn.Module):
    """Attention with positive features, elu + 1, in place of the softmax, and a head."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k = (nn.functional.elu(part) + 1.0 for part in (self.q(tokens[:, -1]), self.k(tokens)))
        weights = torch.einsum("be,ble->bl", q, k)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.out(torch.einsum("bl,ble->be", weights, self.v(tokens)))


class Mixture(nn.Module):
    """Two networks, each with its share, behind a mean."""

    def __init__(self, width: int = 4, neurons: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, neurons), nn.GELU(), nn.Linear(neurons, 1))
            for _ in range(2)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        pooled = tokens.mean(1)
        answers = torch.cat([expert(pooled) for expert in self.experts], -1)
        return (self.gate(pooled).softmax(-1) * answers).sum(-1)


class StateSpace(nn.Module):
    """A diagonal linear recurrence, read after the last token by a small network."""

    def __init__(self, width: int = 4, states: int = 4, neurons: int = 3) -> None:
        super().__init__()
        self.enter, self.decay = nn.Linear(width, states), nn.Parameter(torch.zeros(states))
        self.net = nn.Sequential(nn.Linear(states, neurons), nn.GELU(), nn.Linear(neurons, 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        entered, keep = self.enter(tokens), self.decay.sigmoid()
        state = torch.zeros_like(entered[:, 0])
        for position in range(tokens.shape[1]):
            state = keep * state + entered[:, position]
        return self.net(state)


class Pooled(nn.Module):
    """A network with one smooth hidden layer behind a mean."""

    def __init__(self, neurons: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, neurons), nn.GELU(), nn.Linear(neurons, 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens.mean(1))


class TorchHeads(nn.Module):
    """Attention of the last token by torch's own layer, without a network."""

    def __init__(self, width: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.attend(tokens, tokens, tokens, need_weights=False)[0][:, -1]


def randomise(module: Any, seed: int) -> Any:
    """The module in double precision with random weights: none is zero, norms are near one."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for name, part in module.named_parameters():
            noise = torch.randn(part.shape, generator=generator, dtype=torch.float64)
            if part.ndim > 1:
                part.copy_(noise / math.sqrt(part.shape[-1]))
            elif "norm" in name and name.endswith("weight"):
                part.copy_(1.0 + 0.2 * noise)
            else:
                part.copy_(0.3 * noise)
    return module
