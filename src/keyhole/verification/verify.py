"""Is the box this model? Fresh questions, compared one by one.

Agreement is not equality. The verdict says what the agreements allow one to claim: of questions
drawn like these, at most a certain fraction can be answered differently, with 95% confidence.
"""

from itertools import chain
from typing import Any

import numpy as np

from keyhole.arrays import Array, whole_number
from keyhole.errors import Counterexample, InvalidArgument
from keyhole.oracles.base import Oracle, Precision
from keyhole.oracles.open import opened
from keyhole.oracles.questions import Questions
from keyhole.oracles.wrappers.border import Border
from keyhole.oracles.wrappers.drift import PURPOSE as RECALL
from keyhole.oracles.wrappers.drift import REASON as CHANGED
from keyhole.results import Verdict
from keyhole.verification.cases import OLD, Case, deviations, old_cases, portions
from keyhole.verification.exactness import Measuring
from keyhole.verification.questions import Designer
from keyhole.verification.tolerance import allowance
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
    if isinstance(model, type) or not callable(model):
        raise InvalidArgument(f"model must be a model, callable like the box, got {model!r}")
    with opened(box) as oracle:
        return _verdict(Border(oracle), model, errors, queries, seed, past, precision)


def _verdict(
    box: Oracle,
    model: Any,
    errors: Any,
    queries: int | None,
    seed: int,
    past: list[tuple[Questions, Array]] | None,
    precision: Precision | None,
) -> Verdict:
    count = DEFAULT_QUERIES if queries is None else whole_number("queries", queries, 1)
    if getattr(model, "width", box.spec.width) != box.spec.width:
        raise InvalidArgument(f"the model has width {model.width}, the box {box.spec.width}")
    rng = np.random.default_rng([whole_number("seed", seed, 0), 1])
    natural = model.natural_length() if hasattr(model, "natural_length") else box.spec.width**0.5
    known = precision or box.spec.precision
    designed = list(Designer(box.spec, natural, rng, model).stream(count))
    measured = Measuring(box, designed, count if known is None else 0)
    fresh = designed[: count - measured.spent]
    asked = [box.ask(Questions.of(q.tokens[None], PURPOSE)) for q in fresh[len(measured.first) :]]
    answers = [*measured.first, *asked]
    precision = known or measured.precision(answers)
    asked_now = [
        Case.of(model, question.tokens[None], answer, question.reason)
        for question, answer in zip(fresh, answers, strict=True)
    ]
    shapes = (c.example(0, "answers of another shape") for c in asked_now if not c.comparable)
    recalled, drift = _recall(box, model, errors, past or [], precision, rng)
    example = drift or next(shapes, None)  # a change explains the rest
    worst, replayed = recalled if example is drift else np.inf, 0
    for portion in portions(chain(asked_now, old_cases(model, past or []))):
        cases = [case for case in portion if case.comparable]
        for case, ratios in zip(
            cases, deviations(model, errors, cases, precision, rng), strict=True
        ):
            if case.reason == OLD:
                replayed += len(ratios)
            else:
                worst = max(worst, float(ratios.max()))
            if example is None and (ratios > 1.0).any():
                example = case.example(int(np.argmax(ratios > 1.0)), case.reason)
    return Verdict(
        agrees=example is None,
        queries=count + (1 if past else 0),
        replayed=replayed,
        worst=worst,
        tolerance=precision.relative,
        bound=in_words(len(fresh), replayed, example),
        counterexample=example,
    )


REPEATABLE = 64.0  # roundoffs by which a deterministic box may differ from itself across batches


def _recall(
    box: Oracle,
    model: Any,
    errors: Any,
    past: list[tuple[Questions, Array]],
    precision: Precision,
    rng: np.random.Generator,
) -> tuple[float, Counterexample | None]:
    """One old question again: has the box changed meanwhile?"""
    if not past:
        return 0.0, None
    longest = max(q.length for q, _ in past)
    questions, answers = next((q, a) for q, a in past if q.length == longest)
    again = box.ask(Questions(questions.bank, questions.index[:1], RECALL))[0]
    first = np.asarray(answers[0], dtype=np.float64)
    rounding = REPEATABLE * precision.relative * np.max(np.abs(first), initial=0.0)
    steady = 8.0 * precision.additive + precision.step + 2.0 * precision.tolerance
    gap = float(np.max(np.abs(again - first)))
    tokens = questions[:1].tokens()
    if gap > rounding + steady and np.shape(model(tokens))[1:] == first.shape:
        # terms that cancel round at their own size
        own = float(np.max(allowance(model, errors, tokens, precision, rng)))
        rounding = max(rounding, own)
    allowed = rounding + steady
    if gap <= allowed:
        return gap / max(allowed, np.finfo(float).tiny), None
    return np.inf, Counterexample(tokens[0], again, first, CHANGED)
