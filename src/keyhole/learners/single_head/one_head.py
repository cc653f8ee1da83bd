"""One head in the shape of the box's answers, from tables with a column for every output."""

from typing import Any

from keyhole.arrays import Array, Float
from keyhole.models.attention import Attention, Head


def shaped_head(
    scalar: bool,
    score: Any,
    key_bias: Float[Array, " d"],
    value: Float[Array, "d D"],
    offset: Float[Array, " D"],
) -> Attention:
    """A layer of one head, or the errors of one; a scalar box has no axis of outputs."""
    if scalar:
        value, offset = value[:, 0], offset.reshape(())
    return Attention([Head(score, key_bias, value)], offset)


def floor(model: Attention, unknowns: int) -> float:
    """Unknowns per number in an answer, given those of the score: a key bias and an offset count
    where there is one."""
    (head,) = model.heads
    total = unknowns + head.value.size
    total += sum(part.size for part in (head.key_bias, model.offset) if part.any())
    return total / model.offset.size
