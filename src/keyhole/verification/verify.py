"""Is the box this model? Fresh questions, compared one by one.

Agreement is not equality. The verdict says what the agreements allow one to claim: of questions
drawn like these, at most a certain fraction can be answered differently, with 95% confidence.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample, InvalidArgument
from keyhole.oracles.base import Oracle, Precision
from keyhole.oracles.open import open_oracle
from keyhole.oracles.questions import Questions
from keyhole.oracles.wrappers.border import Border
from keyhole.oracles.wrappers.drift import PURPOSE as RECALL
from keyhole.oracles.wrappers.drift import REASON as CHANGED
from keyhole.results import Verdict
from keyhole.verification.exactness import Measuring
from keyhole.verification.questions import Designer, Fresh
from keyhole.verification.tolerance import allowance, copies
from keyhole.verification.words import in_words

DEFAULT_QUERIES = 60
PURPOSE = "verification"


def verify(
    box: Any,
    model: Any,
    *,
    errors: Any = None,
    queries: int | None = None,
    seed: int = 0,
    past: list[tuple[Questions, Array]] | None = None,
    precision: Precision | None = None,
) -> Verdict:
    """Compares the model with the box on fresh questions, and with `past` answers for free.

    `box` is anything `open_oracle` takes, `model` anything callable like the box.
    """
    box = Border(open_oracle(box))
    count = DEFAULT_QUERIES if queries is None else queries
    if count < 1:
        raise InvalidArgument(f"queries must be at least 1, got {queries}")
    if getattr(model, "width", box.spec.width) != box.spec.width:
        raise InvalidArgument(f"the model has width {model.width}, the box {box.spec.width}")
    rng = np.random.default_rng([seed, 1])
    natural = model.natural_length() if hasattr(model, "natural_length") else box.spec.width**0.5
    known = precision or box.spec.precision
    designed = list(Designer(box.spec, natural, rng, model).stream(count))
    measured = Measuring(box, designed, count if known is None else 0)
    fresh = designed[: count - measured.spent]
    asked = [box.ask(Questions.of(q.tokens[None], PURPOSE)) for q in fresh[len(measured.first) :]]
    answers = [*measured.first, *asked]
    precision = known or measured.precision(answers)
    others = copies(model, errors, precision, rng)
    worst, example = 0.0, None
    for question, answer in zip(fresh, answers, strict=True):
        ratio, found = _compare(model, errors, question, answer, precision, rng, others)
        if ratio > worst:
            worst = ratio
        if found is not None and example is None:
            example = found
    recalled, drift = _recall(box, model, past or [], precision, rng, others)
    worst, example = max(worst, recalled), drift or example  # a change explains the rest
    replayed, mismatch = _replay(model, errors, past or [], precision, rng, others)
    example = example or mismatch
    return Verdict(
        agrees=example is None,
        queries=count + (1 if past else 0),
        replayed=replayed,
        worst=worst,
        tolerance=precision.relative,
        bound=in_words(len(fresh), replayed, example),
        counterexample=example,
    )


def _compare(
    model: Any,
    errors: Any,
    fresh: Fresh,
    answer: Array,
    precision: Precision,
    rng: np.random.Generator,
    others: list[Any],
) -> tuple[float, Counterexample | None]:
    tokens = fresh.tokens[None]
    predicted = np.asarray(model(tokens))
    if predicted.shape != answer.shape:
        reason = "answers of another shape"
        return np.inf, Counterexample(fresh.tokens, answer[0], predicted[0], reason)
    gap = np.abs(np.asarray(answer, dtype=np.float64) - predicted)
    ratio = float(_in_tolerances(gap, model, errors, tokens, precision, rng, others)[0])
    if ratio <= 1.0:
        return ratio, None
    return ratio, Counterexample(fresh.tokens, answer[0], predicted[0], fresh.reason)


SECOND_OPINIONS = 4  # times as many disturbed copies judge an answer before it counts as another


def _in_tolerances(
    gap: Array,
    model: Any,
    errors: Any,
    tokens: Array,
    precision: Precision,
    rng: np.random.Generator,
    others: list[Any],
) -> Float[Array, " n"]:
    """Deviations in units of what is allowed. A few disturbed copies may all happen to be close to
    the model on a question: where one is answered differently, more of them are drawn."""

    def worst(part: Array, allowed: Array) -> Float[Array, " n"]:
        ratio = part / np.maximum(allowed, np.finfo(float).tiny)
        return np.asarray(ratio.reshape(len(part), -1).max(axis=1))

    ratios = worst(gap, allowance(model, errors, tokens, precision, rng, others))
    (odd,) = np.nonzero(ratios > 1.0)
    if len(odd) and others:
        more = [c for _ in range(SECOND_OPINIONS) for c in copies(model, errors, precision, rng)]
        allowed = allowance(model, errors, tokens[odd], precision, rng, [*others, *more])
        ratios[odd] = np.minimum(ratios[odd], worst(gap[odd], allowed))
    return ratios


def _recall(
    box: Oracle,
    model: Any,
    past: list[tuple[Questions, Array]],
    precision: Precision,
    rng: np.random.Generator,
    others: list[Any],
) -> tuple[float, Counterexample | None]:
    """One old question again: has the box changed meanwhile?"""
    if not past:
        return 0.0, None
    longest = max(q.length for q, _ in past)
    questions, answers = next((q, a) for q, a in past if q.length == longest)
    again = box.ask(Questions(questions.bank, questions.index[:1], RECALL))[0]
    first = np.asarray(answers[0], dtype=np.float64)
    allowed = precision.apart(float(np.max(np.abs(first), initial=0.0)))
    gap = float(np.max(np.abs(again - first)))
    tokens = questions[:1].tokens()
    if gap > allowed and np.shape(model(tokens))[1:] == first.shape:
        # terms that cancel round at their own size
        own = float(np.max(allowance(model, None, tokens, precision, rng, others)))
        allowed = max(allowed, precision.apart(0.0) + own)
    if gap <= allowed:
        return gap / max(allowed, np.finfo(float).tiny), None
    return np.inf, Counterexample(tokens[0], again, first, CHANGED)


REPLAYED = 256  # past answers compared, spread over the run
REPLAYED_BYTES = 2**26  # tokens compared at once; disturbing a large model costs more than asking


def _replay(
    model: Any,
    errors: Any,
    past: list[tuple[Questions, Array]],
    precision: Precision,
    rng: np.random.Generator,
    others: list[Any],
) -> tuple[int, Counterexample | None]:
    seen = 0
    for tokens, answers in _sample(past):
        predicted = np.asarray(model(tokens))
        if predicted.shape != answers.shape:
            continue
        gap = np.abs(answers - predicted)
        gap = _in_tolerances(gap, model, errors, tokens, precision, rng, others)
        seen += len(tokens)
        if (gap > 1.0).any():
            k = int(np.argmax(gap > 1.0))
            return seen, Counterexample(
                tokens[k], answers[k], predicted[k], "a question asked while learning"
            )
    return seen, None


def _sample(past: list[tuple[Questions, Array]]) -> Iterator[tuple[Array, Array]]:
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
