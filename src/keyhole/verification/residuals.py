"""The finished model against the answers it was made from, query by query.

Costs no query: the answers were kept. It shows where in a run model and box part, if they do.
"""

from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.models.base import predict
from keyhole.models.sign_attention import LabelledAttention
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.record import Kept
from keyhole.results import Trace

POINTS = 400  # queries compared: enough for a picture


def traced(model: Any, past: list[Kept], total: int) -> Trace | None:
    """Deviations of a sample spread over the run; None where the answers cannot be compared, or
    are labels, which near a border say nothing about the size of an error."""
    if isinstance(model, LabelledAttention) or not past:
        return None
    largest = max(8 * kept.queries.length * kept.queries.width for kept in past)
    # at most 32 MB of tokens: the comparison stays cheap beside the run
    count = max(1, min(POINTS, total, 2**25 // largest))
    known = np.sort(np.concatenate([kept.numbers for kept in past]))
    spread = np.linspace(0, known[-1], count).astype(int)
    chosen = np.unique(known[np.searchsorted(known, spread)])
    asked: list[int] = []
    purposes: list[str] = []
    gaps, sizes = [], []
    for kept in past:
        # the numbers of a batch are consecutive: between its first and last are none of another
        first, last = np.searchsorted(chosen, [kept.numbers[0], kept.numbers[-1] + 1])
        queries, here = kept.queries, np.searchsorted(kept.numbers, chosen[first:last])
        if len(here):
            tokens = QueryBatch(queries.bank, queries.index[here], queries.purpose).tokens()
            seen = kept.answers[here]
            predicted = predict(model, tokens, seen)
            if predicted.shape != seen.shape:
                return None
            gaps.append(_size(predicted - seen.astype(np.float64)))
            sizes.append(_size(seen))
            asked += [int(number) for number in kept.numbers[here] + 1]
            purposes += [queries.purpose] * len(here)
    size, gap = np.concatenate(sizes), np.concatenate(gaps)
    if not (np.isfinite(size).all() and np.isfinite(gap).all()):
        return None
    # an answer that happens to be near zero is compared with what answers usually are
    scale = np.maximum(size, np.median(size))
    deviation = gap / np.where(scale > 0, scale, 1.0)
    return Trace(tuple(asked), tuple(purposes), tuple(deviation.tolist()), total)


def _size(answers: Array) -> Array:
    numbers = np.abs(np.asarray(answers, dtype=np.float64))
    return np.asarray(numbers.reshape(len(numbers), -1).max(axis=1))
