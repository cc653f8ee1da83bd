"""Recovers a PyTorch layer that is only called, and compares with the weights that were inside."""

import numpy as np
import torch
from torch import nn

import keyhole


class Layer(nn.Module):
    """Self-attention as most people write it."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(t: torch.Tensor) -> torch.Tensor:
            return t.reshape(*t.shape[:2], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        mixed: torch.Tensor = self.out((weights @ v).transpose(1, 2).flatten(-2))
        return mixed


def truth(layer: Layer) -> keyhole.Attention:
    """What can be known of the layer: one score, key bias and value map per head, and an offset."""
    weights = {name: p.detach().double().numpy() for name, p in layer.named_parameters()}
    inner = len(weights["query.weight"]) // layer.heads
    heads = []
    for part in (slice(h * inner, (h + 1) * inner) for h in range(layer.heads)):
        key = weights["key.weight"][part] / np.sqrt(inner)
        score, key_bias = key.T @ weights["query.weight"][part], key.T @ weights["query.bias"][part]
        value = weights["value.weight"][part].T @ weights["out.weight"][:, part].T
        heads.append(keyhole.Head(score, key_bias, value))
    offset = weights["out.weight"] @ weights["value.bias"] + weights["out.bias"]
    return keyhole.Attention(heads, offset)


def main() -> None:
    torch.manual_seed(0)
    for layer in (Layer().double(), Layer()):
        recovery = keyhole.recover(layer)
        error = keyhole.distance(recovery.model, truth(layer))
        queries = f"{recovery.ledger.paid} queries (floor {recovery.ledger.floor:.0f})"
        kind = layer.out.weight.dtype
        print(f"{kind}: {recovery.outcome.name}, {queries}, error of the weights {error:.0e}")


if __name__ == "__main__":
    main()
