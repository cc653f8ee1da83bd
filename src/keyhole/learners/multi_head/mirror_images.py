"""What queries of two tokens leave open: heads and their mirror images.

[x + u; x] is answered by x . V + u . V / 2 + sum_h (u . v_h) tanh(u . p_h / 2) / 2. A head and its
mirror image (score, key bias and value negated) differ in the sum V of the values alone. So a layer
is the only one of its size that answers so unless signs can be turned without changing V: the
values of some heads add up to zero, or the difference is taken up by a head with score zero or by
two heads with opposite scores.
"""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.models.attention import Attention

MOST_SIGNS = 16  # heads whose signs are all tried; of more, the linear equations decide
CANCEL = 1e-6  # relative size that counts as zero in scores and sums of values
MIRRORED = (
    "queries of two tokens cannot tell a head from its mirror image (score, key bias and value "
    "negated), and here the sum of the values does not tell either: {why}. Longer sequences would"
)
OPPOSITE = "a head attends to all tokens alike, or two heads have opposite scores"
FEWEST = "Queries of two tokens: of all layers that answer them alike this has the fewest heads."


def signs_with_sum(
    values: Float[Array, "h n"], total: Float[Array, " n"], allowed: float
) -> Float[Array, "k h"]:
    """All choices of signs for which the values add up to `total`."""
    heads = len(values)
    if heads <= MOST_SIGNS:
        choices = 1.0 - 2.0 * ((np.arange(2**heads)[:, None] >> np.arange(heads)) & 1)
    else:
        choices = np.sign(np.linalg.lstsq(values.T, total, rcond=None)[0])[None]
    return np.asarray(choices[np.abs(choices @ values - total).max(axis=1) <= allowed])


def cancelling(count: int) -> str:
    return f"the values of some heads cancel, so that {count} layers answer alike"


def why_ambiguous(model: Attention) -> str | None:
    """Why pairs do not determine this model; None where they do."""
    keys = np.stack([np.column_stack([head.score, head.key_bias]) for head in model.heads])
    sums = np.linalg.norm((keys[:, None] + keys).reshape(len(keys), len(keys), -1), axis=2)
    sizes = np.linalg.norm(keys.reshape(len(keys), -1), axis=1)
    if len(keys) > 1 and (sums <= CANCEL * sizes.max()).any():  # the diagonal: a head of score zero
        return OPPOSITE
    values = np.stack([head.value.ravel() for head in model.heads])
    loud = float(np.linalg.norm(values, axis=1).sum())
    count = len(signs_with_sum(values, values.sum(axis=0), CANCEL * loud))
    return cancelling(count) if count > 1 else None
