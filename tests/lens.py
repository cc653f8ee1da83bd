"""Attention as TransformerLens computes it, from weights under its names."""

import numpy as np

from keyhole.linalg.softmax import softmax


def lens_attention(named, x, causal=False):
    """What TransformerLens computes with these weights, at all positions."""
    q, k, v = (
        np.einsum("bpd,hdi->bhpi", x, named[f"W_{n}"]) + named[f"b_{n}"][:, None] for n in "QKV"
    )
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    return np.einsum("bhpi,hid->bpd", softmax(scores) @ v, named["W_O"]) + named["b_O"]
