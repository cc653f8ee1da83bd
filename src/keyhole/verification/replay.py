"""Every answer that was paid for, against the finished model.

Statement.  A model that contradicts an answer of its own run is not the box, whatever fresh queries
            say; and a box that contradicts itself has no model.
Queries.    None, but one that is asked again where an answer contradicts the model.
Algebra.    A described query is made again, a few megabytes at a time. What rounding alone explains
            needs no more; disturbed copies of the model (`tolerance`) are asked the rest. Pairs
            [probe + anchor; …; anchor], of which a run has the most, are answered from one product
            of probes and anchors: their tokens are never made.
Fails.      An output layer knows which answers are possible, and not to which query: its answers
            are compared with the nearest possible one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import TINY, Array, Int
from keyhole.errors import Counterexample
from keyhole.linalg.softmax import softmax
from keyhole.models.attention import Attention
from keyhole.models.base import predict
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import ProbeAnchorBank, QueryBatch
from keyhole.verification.tolerance import FEW, OLD, Case, Judged, Past, allow_rounding, judge

MANY = 64  # contradicted answers after which no more are looked at
PORTION = 2**19  # bytes of tokens that are made and compared at once, or as many as the model has


@dataclass(frozen=True, eq=False)
class Replay:
    """What the answers of a run say of its model."""

    compared: int  # answers
    contradicted: int = 0  # of these, answers that the model cannot have given
    contradiction: Counterexample | None = None  # the first of them


def replay(
    model: Any,
    errors: Any,
    past: Past,
    noise: NoiseModel,
    rng: np.random.Generator,
    predicted: list[Array],
) -> Replay:
    """Compares all past answers with the model; once enough of them contradict it to say whether
    few or many do, no more. `predicted` are answers of the model by whose sizes a small one is
    judged."""
    compared = contradicted = 0
    first: Counterexample | None = None
    for portion in read_portions(model, past):
        for one in judge_portion(model, errors, portion, noise, rng, predicted):
            first = first or one.example
            contradicted += int(np.sum(one.ratios > 1.0))
        compared += sum(len(answers) for _, answers in portion)
        if contradicted >= MANY:
            break
    return Replay(compared, contradicted, first)


def count_bytes(model: Any) -> int:
    """Of tokens that are compared at once."""
    own = model.to_arrays().values() if hasattr(model, "to_arrays") else ()
    return max(PORTION, sum(array.nbytes for array in own))


def read_portions(model: Any, past: Past) -> Iterator[Past]:
    """Batches of one length that are compared together: many are of a few queries."""
    portion_bytes = count_bytes(model)
    for length in sorted({queries.length for queries, _ in past}):
        portion: Past = []
        held = 0
        for queries, answers in past:
            if queries.length != length:
                continue
            size = 8 * length * queries.width
            step = max(1, portion_bytes // size)
            if predicts_pairs(model, queries):
                step *= queries.width  # no tokens are made
            for start in range(0, len(queries), step):
                part = slice(start, start + step)
                portion.append((queries[part], answers[part]))
                held += len(portion[-1][1]) * size
                if held >= portion_bytes:
                    yield portion
                    portion, held = [], 0
        if portion:
            yield portion


def judge_portion(
    model: Any,
    errors: Any,
    portion: Past,
    noise: NoiseModel,
    rng: np.random.Generator,
    predicted: list[Array],
) -> list[Judged]:
    """What rounding alone does not explain, judged with disturbed models."""
    doubtful: list[tuple[QueryBatch, Array, Array]] = []
    labels = hasattr(model, "margin")
    for pairs, batch in split_pairs(model, portion):
        answers = [np.asarray(answers, dtype=np.float64) for _, answers in batch]
        if pairs:
            told = [predict_pairs(model, queries) for queries, _ in batch]
        else:
            tokens = np.concatenate([queries.tokens() for queries, _ in batch])
            both = np.atleast_1d(predict(model, tokens, np.concatenate(answers)))
            told = np.split(both, np.cumsum([len(part) for part in answers])[:-1])
        for (queries, _), box, own in zip(batch, answers, told, strict=True):
            if labels or own.shape != box.shape:
                odd = np.arange(len(box))
            else:
                gap = np.abs(box - own) / np.maximum(allow_rounding(own, noise), TINY)
                odd = np.flatnonzero(~(gap.reshape(len(gap), -1).max(axis=1) <= 1.0))
            if len(odd):
                again = QueryBatch(queries.bank, queries.index[odd], queries.purpose)
                doubtful.append((again, box[odd], own[odd]))
    judged = []
    for case in read_cases(doubtful, count_bytes(model)):
        judged += judge(model, errors, [case], noise, rng, predicted, FEW)
    return judged


def read_cases(
    batches: list[tuple[QueryBatch, Array, Array]], portion_bytes: int
) -> Iterator[Case]:
    """Queries with the answers of box and model, a portion of tokens at a time."""
    tokens: list[Array] = []
    answers: list[tuple[Array, Array]] = []

    def join() -> Case:
        box, own = (np.concatenate(part) for part in zip(*answers, strict=True))
        return Case(np.concatenate(tokens), box, own, OLD, box)

    for queries, box, own in batches:
        step = max(1, portion_bytes // (8 * queries.length * queries.width))
        for start in range(0, len(queries), step):
            part = slice(start, start + step)
            tokens.append(queries[part].tokens())
            answers.append((box[part], own[part]))
            if sum(made.nbytes for made in tokens) >= portion_bytes:
                yield join()
                tokens, answers = [], []
    if tokens:
        yield join()


def split_pairs(model: Any, portion: Past) -> Iterator[tuple[bool, Past]]:
    """Batches whose tokens need not be made, and the others."""
    for pairs in (True, False):
        batch = [one for one in portion if predicts_pairs(model, one[0]) is pairs]
        if batch:
            yield pairs, batch


def predicts_pairs(model: Any, queries: QueryBatch) -> bool:
    """Whether the answers follow from products of probes and anchors."""
    return (
        isinstance(queries.bank, ProbeAnchorBank)
        and isinstance(model, Attention)
        and model.position is None
        and queries.length > 1
    )


def predict_pairs(model: Attention, queries: QueryBatch) -> Array:
    """The model's answers to queries [probe + anchor; …; anchor]: scores count from that of the
    anchor, which leaves the products of probes and keys."""
    bank: Any = queries.bank
    index = np.asarray(queries.index, dtype=np.int64)
    anchor = index[:, -1] - bank.size * bank.count
    probe = (index[:, :-1] - anchor[:, None]) // bank.count
    anchors, which = _renumber(anchor)
    probes, tried = _renumber(probe)
    if len(anchors) * len(probes) > max(8 * probe.size, 2**16):  # most products are not in use
        return np.asarray(model(queries.tokens()))
    x, u = bank.anchors.rows(anchors), bank.probes.rows(probes)
    answer = np.broadcast_to(model.offset, (len(index), *model.offset.shape)).copy()
    if model.skip is not None:
        answer += (x @ model.skip)[which]
    for head in model.heads:
        scores = (head.keys(x) @ u.T)[which[:, None], tried]
        weights = softmax(np.concatenate([scores, np.zeros((len(index), 1))], axis=1))[:, :-1]
        answer += (x @ head.value)[which]
        values = u @ head.value
        for place in range(weights.shape[1]):
            weight = weights[:, place]
            here = values[tried[:, place]]
            answer += weight * here if here.ndim == 1 else weight[:, None] * here
    return np.asarray(answer)


def _renumber(numbers: Int[Array, "*n"]) -> tuple[Array, Array]:
    """The different numbers, from zero on, and for each its place among them."""
    present = np.zeros(numbers.max(initial=0) + 1, dtype=bool)
    present[numbers] = True
    return np.flatnonzero(present), np.cumsum(present)[numbers] - 1
