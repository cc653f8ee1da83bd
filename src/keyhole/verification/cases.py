"""Answers of the box beside those of the model, and how far apart they may be."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import Counterexample
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch
from keyhole.verification.tolerance import DRAWS, allowances, rounding

REPLAYED = 256  # past answers compared, spread over the run
PORTION_BYTES = 2**26  # tokens compared at once: a disturbed model costs more than asking it
SECOND_OPINIONS = 4  # times as many disturbed copies judge an answer before it counts as another
OLD = "a query asked while learning"
OTHER_SHAPE = "answers of another shape"

Past = list[tuple[QueryBatch, Array]]


@dataclass(frozen=True, eq=False)
class Case:
    """Queries of one length with both answers."""

    tokens: Float[Array, "n length d"]
    answers: Float[Array, "n *out"]
    predicted: Array
    reason: str  # why they were asked

    @classmethod
    def of(cls, model: Any, tokens: Array, answers: Array, reason: str) -> "Case":
        predicted = np.atleast_1d(model(tokens))
        return cls(tokens, np.asarray(answers, dtype=np.float64), predicted, reason)

    @property
    def comparable(self) -> bool:
        return bool(self.predicted.shape == self.answers.shape)


@dataclass(frozen=True, eq=False)
class Judged:
    """How far the answers of a case are apart, and how far they may be."""

    case: Case
    ratios: Float[Array, " n"]  # deviations in units of what is allowed
    allowed: Float[Array, " n"]  # root mean squares over the numbers of an answer

    @property
    def example(self) -> Counterexample | None:
        """The first answer that is not the model's."""
        (odd,) = np.nonzero(self.ratios > 1.0)
        if not len(odd):
            return None
        case, k = self.case, odd[0]
        reason = case.reason if case.comparable else OTHER_SHAPE
        return Counterexample(case.tokens[k], case.answers[k], case.predicted[k], reason)


def old_cases(model: Any, past: Past) -> Iterator[Case]:
    """A sample of every batch of the run, by lengths, a limited amount at once."""
    total = sum(len(q) for q, _ in past)
    for length in sorted({q.length for q, _ in past}):
        sample: list[tuple[Array, Array]] = []
        for queries, answers in past:
            if queries.length != length:
                continue
            share = max(1, round(REPLAYED * len(queries) / total))
            chosen = np.unique(np.linspace(0, len(queries) - 1, share).astype(int))
            tokens = QueryBatch(queries.bank, queries.index[chosen], "").tokens()
            sample.append((tokens, np.asarray(answers)[chosen]))
            if sum(tokens.nbytes for tokens, _ in sample) > PORTION_BYTES:
                yield _old_case(model, sample)
        if sample:
            yield _old_case(model, sample)


def _old_case(model: Any, sample: list[tuple[Array, Array]]) -> Case:
    """All of the sample, which is then let go."""
    tokens, answers = (np.concatenate(part) for part in zip(*sample, strict=True))
    sample.clear()
    return Case.of(model, tokens, answers, OLD)


def portions(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Cases to be judged together, by one set of disturbed models."""
    portion: list[Case] = []
    for case in cases:
        portion.append(case)
        if sum(part.tokens.nbytes for part in portion) > PORTION_BYTES:
            yield portion
            portion = []
    if portion:
        yield portion


def judged(
    model: Any, errors: Any, cases: list[Case], precision: NoiseModel, rng: np.random.Generator
) -> list[Judged]:
    """Deviations of every case in units of what is allowed (or, of an old query, of what
    rounding alone allows, if that explains it: there are many). Disturbed copies of the model are
    asked for the rest, and since a few of them may all happen to be close to the model, more where
    these do not explain it either. Answers of another shape are as far apart as can be."""
    found = [_before(case, precision, labels=hasattr(model, "margin")) for case in cases]
    for draws in (DRAWS, SECOND_OPINIONS * DRAWS):
        odd = [np.flatnonzero(one.ratios > 1.0) for one in found]
        doubtful = [k for k in range(len(cases)) if len(odd[k]) and cases[k].comparable]
        if not doubtful:
            break
        tokens = [cases[k].tokens[odd[k]] for k in doubtful]
        limits = allowances(model, errors, tokens, precision, rng, draws)
        for k, limit in zip(doubtful, limits, strict=True):
            one, part = found[k], odd[k]
            one.ratios[part] = np.minimum(one.ratios[part], _worst(cases[k], limit, part))
            if draws == DRAWS:
                one.allowed[part] = _typical(limit)
    return found


def _before(case: Case, precision: NoiseModel, labels: bool) -> Judged:
    """What is known before disturbed models are asked."""
    if case.reason == OLD and case.comparable and not labels:
        limit = rounding(case.predicted, precision)
        return Judged(case, _worst(case, limit, slice(None)), _typical(limit))
    count = len(case.tokens)
    return Judged(case, np.full(count, np.inf), np.zeros(count))


def _typical(limit: Float[Array, "n *out"]) -> Float[Array, " n"]:
    return np.asarray(np.sqrt(np.mean(limit.reshape(len(limit), -1) ** 2, axis=1)))


def _worst(case: Case, allowed: Array, part: Any) -> Float[Array, " n"]:
    """In units of what is allowed; an answer that is no number differs."""
    gap = np.abs(case.answers[part] - case.predicted[part])
    ratio = gap / np.maximum(allowed, TINY)
    return np.nan_to_num(ratio.reshape(len(ratio), -1).max(axis=1), nan=np.inf)
