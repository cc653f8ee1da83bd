"""One attention function for all models of `transformers`, with switches for its faults.

Statement: scores = factor · scaling · q kᵀ (+ mask, cap), weights = softmax, answer = weights v.
Every family that uses transformers' register of attention functions calls this one after
`register()`, so that a fault that is stated here carries over to all of them.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

NAME = "keyhole_doctor"


@dataclass(frozen=True)
class Attention:
    """What is different about attention; the defaults change nothing."""

    factor: float = 1.0  # of the scores
    cap: float | None = None  # cap · tanh(score / cap)
    causal: bool | None = None  # added (True) or taken away (False)
    window: int | None = None  # tokens that a token looks back, itself included
    exchanged: bool = False  # queries and keys
    interleaved: str = ""  # heads split as (head width, heads): "split" or "split and merge"
    tiled: bool = False  # shared keys repeated as a b a b, not a a b b
    sink: bool = False  # a zero among the scores: softmax with 1 added below the line
    inside: frozenset[int] | None = None  # the modules changed, by their ids; all, where None


_current: ContextVar[tuple[Attention, ...]] = ContextVar("attention", default=())
_padding: ContextVar[Any] = ContextVar("padding", default=None)


@contextlib.contextmanager
def attending(changes: tuple[Attention, ...], padding: Any) -> Iterator[None]:
    """While this lasts, attention is changed; `padding` (batch, length) is true for tokens."""
    first, second = _current.set(changes), _padding.set(padding)
    try:
        yield
    finally:
        _current.reset(first)
        _padding.reset(second)


def current_padding() -> Any:
    """The mask (batch, length) of the rows under way, true for tokens."""
    return _padding.get()


def register() -> str:
    """Makes the function known to transformers; the name it is called by there."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Any, Any]:
    """Attention as transformers' eager function computes it, with the changes in force.

    Args:
        module: the attention module, which says whether a change of one layer concerns it.
        query: (batch, heads, length, head width).
        key: the same, perhaps with fewer heads.
        value: the same as the keys.
        attention_mask: (batch, 1, length, length), added to the scores, or None.
        scaling: factor of the scores; by default one over the root of the head width.
        dropout: share of weights set to zero while training.
        softcap: the model's own cap of scores.

    Returns:
        The answer (batch, length, heads, head width) and the weights.
    """
    import torch

    changes = [c for c in _current.get() if c.inside is None or id(module) in c.inside]
    query, key, value = _change_heads(query, key, value, changes)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = _change_scores(query @ key.transpose(-1, -2) * scale, softcap, changes)
    scores = scores + _mask(scores, attention_mask, changes)
    sink = any(change.sink for change in changes)
    if sink:
        scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = (weights[..., :-1] if sink else weights).to(value.dtype)
    weights = torch.nn.functional.dropout(weights, dropout, training=module.training)
    answer = weights @ value
    if any(change.interleaved == "split and merge" for change in changes):
        answer = _remerge(answer)
    return answer.transpose(1, 2).contiguous(), weights


def _change_heads(
    query: Any, key: Any, value: Any, changes: list[Attention]
) -> tuple[Any, Any, Any]:
    """Queries, keys and values, those of a group repeated for its heads."""
    for change in changes:
        if change.interleaved:
            query, key, value = (_resplit(part) for part in (query, key, value))
        if change.exchanged:
            query, key = key, query
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        tiled = any(change.tiled for change in changes)
        key, value = (_repeat(part, groups, tiled) for part in (key, value))
    return query, key, value


def _change_scores(scores: Any, softcap: float | None, changes: list[Attention]) -> Any:
    """Scores with all factors, then all caps, the model's own first."""
    import torch

    for change in changes:
        scores = scores * change.factor if change.factor != 1 else scores
    for cap in (softcap, *(change.cap for change in changes)):
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
    return scores


def _mask(scores: Any, given: Any, changes: list[Attention]) -> Any:
    import torch

    lowest = torch.finfo(scores.dtype).min
    length = scores.shape[-1]
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if given is not None:
        allowed = given > lowest / 2 if given.is_floating_point() else given
    row = torch.arange(length)
    for change in changes:
        if change.causal is False:
            padding = _padding.get()
            allowed = torch.ones_like(allowed)
            if padding is not None:
                allowed = allowed & padding[:, None, None, :]
        if change.causal is True:
            allowed = allowed & (row[None, :] <= row[:, None])
        if change.window is not None:
            allowed = allowed & ((row[:, None] - row[None, :]).abs() < change.window)
    return torch.zeros((), dtype=scores.dtype).masked_fill(~allowed, lowest)


def _repeat(part: Any, groups: int, tiled: bool) -> Any:
    return part.repeat(1, groups, 1, 1) if tiled else part.repeat_interleave(groups, dim=1)


def _resplit(part: Any) -> Any:
    batch, heads, length, width = part.shape
    flat = part.transpose(1, 2).reshape(batch, length, heads * width)
    return flat.view(batch, length, width, heads).permute(0, 3, 1, 2)


def _remerge(answer: Any) -> Any:
    batch, heads, length, width = answer.shape
    flat = answer.permute(0, 2, 3, 1).reshape(batch, length, heads * width)
    return flat.view(batch, length, heads, width).transpose(1, 2)
