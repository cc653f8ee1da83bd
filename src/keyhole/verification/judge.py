"""Which answers count as those of the model: the deviation from it, beside what is allowed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample
from keyhole.oracles.base import Oracle, Precision
from keyhole.oracles.questions import Questions
from keyhole.oracles.wrappers.drift import PURPOSE as RECALL
from keyhole.oracles.wrappers.drift import REASON as CHANGED
from keyhole.verification.tolerance import allowance, copies

SECOND_OPINIONS = 4  # times as many disturbed copies judge an answer before it counts as another
REPLAYED = 256  # past answers compared, spread over the run
REPLAYED_BYTES = 2**26  # tokens compared at once; disturbing a large model costs more than asking
OTHER_SHAPE = "answers of another shape"

Past = list[tuple[Questions, Array]]


@dataclass(frozen=True, eq=False)
class Compared:
    """Answers of the box beside those of the model."""

    tokens: Float[Array, "n length d"]
    answers: Float[Array, "n *out"]
    predicted: Array
    ratios: Float[Array, " n"]  # deviations in units of what is allowed
    allowed: Float[Array, " n"]  # root mean squares over the numbers of an answer
    reason: str  # why these questions were asked, or what is wrong with all of the answers

    @property
    def example(self) -> Counterexample | None:
        """The first answer that is not the model's."""
        (odd,) = np.nonzero(self.ratios > 1.0)
        if not len(odd):
            return None
        k = odd[0]
        return Counterexample(self.tokens[k], self.answers[k], self.predicted[k], self.reason)


class Judge:
    """Compares a model, with its standard errors, and a box of some precision."""

    def __init__(
        self, model: Any, errors: Any, precision: Precision, rng: np.random.Generator
    ) -> None:
        self.model, self.errors, self.precision, self.rng = model, errors, precision, rng
        self.others = self._copies()

    def _copies(self) -> list[Any]:
        return copies(self.model, self.errors, self.precision, self.rng)

    def compare(self, tokens: Array, answers: Array, reason: str) -> Compared:
        """A few disturbed copies may all happen to be close to the model on a question: where one
        is answered differently, more of them are drawn. An answer that is no number differs."""
        answers = np.asarray(answers, dtype=np.float64)
        predicted = np.atleast_1d(self.model(tokens))
        if predicted.shape != answers.shape:
            never, nothing = np.full(len(tokens), np.inf), np.zeros(len(tokens))
            return Compared(tokens, answers, predicted, never, nothing, OTHER_SHAPE)
        gap = np.abs(answers - predicted)
        allowed = self._allowed(tokens, self.others)
        ratios = _in_units(gap, allowed)
        (odd,) = np.nonzero(ratios > 1.0)
        if len(odd) and self.others:
            more = [other for _ in range(SECOND_OPINIONS) for other in self._copies()]
            again = self._allowed(tokens[odd], [*self.others, *more])
            ratios[odd] = np.minimum(ratios[odd], _in_units(gap[odd], again))
        typical = np.sqrt(np.mean(allowed.reshape(len(tokens), -1) ** 2, axis=1))
        return Compared(tokens, answers, predicted, ratios, typical, reason)

    def _allowed(self, tokens: Array, others: list[Any]) -> Array:
        return allowance(self.model, self.errors, tokens, self.precision, self.rng, others)

    def recall(self, box: Oracle, past: Past) -> tuple[float, Counterexample | None]:
        """One old question again: has the box changed meanwhile?"""
        if not past:
            return 0.0, None
        longest = max(q.length for q, _ in past)
        questions, answers = next((q, a) for q, a in past if q.length == longest)
        again = box.ask(Questions(questions.bank, questions.index[:1], RECALL))[0]
        first = np.asarray(answers[0], dtype=np.float64)
        allowed = self.precision.apart(float(np.max(np.abs(first), initial=0.0)))
        gap = float(np.max(np.abs(again - first)))
        tokens = questions[:1].tokens()
        if gap > allowed and np.shape(self.model(tokens))[1:] == first.shape:
            # terms that cancel round at their own size
            own = allowance(self.model, None, tokens, self.precision, self.rng, self.others)
            allowed = max(allowed, self.precision.apart(0.0) + float(np.max(own)))
        if gap <= allowed:
            return gap / max(allowed, np.finfo(float).tiny), None
        return np.inf, Counterexample(tokens[0], again, first, CHANGED)

    def replay(self, past: Past) -> tuple[int, Counterexample | None]:
        """Answers given while learning: how many were compared, and one that differs."""
        seen = 0
        for tokens, answers in _sample(past):
            compared = self.compare(tokens, answers, "a question asked while learning")
            seen += len(tokens)
            if compared.example is not None:
                return seen, compared.example
        return seen, None


def _in_units(gap: Float[Array, "n *out"], allowed: Float[Array, "n *out"]) -> Float[Array, " n"]:
    ratio = gap / np.maximum(allowed, np.finfo(float).tiny)
    return np.nan_to_num(ratio.reshape(len(gap), -1).max(axis=1), nan=np.inf)


def _sample(past: Past) -> Iterator[tuple[Array, Array]]:
    """Tokens and answers from every batch, by lengths, a limited amount at once."""
    total = sum(len(q) for q, _ in past)
    for length in sorted({q.length for q, _ in past}):
        parts: list[tuple[Array, Array]] = []
        size = 0
        for questions, answers in past:
            if questions.length != length:
                continue
            share = max(1, round(REPLAYED * len(questions) / total))
            chosen = np.unique(np.linspace(0, len(questions) - 1, share).astype(int))
            tokens = Questions(questions.bank, questions.index[chosen], "").tokens()
            parts.append((tokens, np.asarray(answers, dtype=np.float64)[chosen]))
            size += tokens.nbytes
            if size > REPLAYED_BYTES:
                yield np.concatenate([t for t, _ in parts]), np.concatenate([a for _, a in parts])
                parts, size = [], 0
        if parts:
            yield np.concatenate([t for t, _ in parts]), np.concatenate([a for _, a in parts])
