"""Is the box this model? Fresh questions, compared one by one.

Agreement is not equality. The verdict says what the agreements allow one to claim: of questions
drawn like these, at most a certain fraction can be answered differently, with 95% confidence.
"""

from typing import Any

import numpy as np

from keyhole.errors import InvalidArgument
from keyhole.oracles.base import Precision
from keyhole.oracles.open import open_oracle
from keyhole.oracles.questions import Questions
from keyhole.oracles.wrappers.border import Border
from keyhole.results import Verdict
from keyhole.verification.exactness import measured
from keyhole.verification.judge import Judge, Past
from keyhole.verification.questions import Designer
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
    past: Past | None = None,
    precision: Precision | None = None,
) -> Verdict:
    """Compares the model with the box on `queries` fresh questions, and with `past` answers for
    free. Where the precision of the box is not known, a few questions more measure it.

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
    fresh = list(Designer(box.spec, natural, rng, model).stream(count))
    answers = [box.ask(Questions.of(q.tokens[None], PURPOSE)) for q in fresh]
    precision = precision or box.spec.precision or measured(box, fresh[0].tokens, answers)
    judge = Judge(model, errors, precision, rng)
    compared = [
        judge.compare(q.tokens[None], answer, q.reason)
        for q, answer in zip(fresh, answers, strict=True)
    ]
    recalled, drift = judge.recall(box, past or [])
    replayed, mismatch = judge.replay(past or [])
    # a change of the box explains the rest
    found = (drift, *(one.example for one in compared), mismatch)
    example = next((one for one in found if one is not None), None)
    allowed = float(np.median([one.allowed for one in compared]))
    numbers = np.concatenate(answers).reshape(count, -1).astype(np.float64)
    hidden = precision.additive > 0 and allowed > np.sqrt(np.mean(np.var(numbers, axis=0)))
    scale = float(np.sqrt(np.mean(numbers**2)))
    return Verdict(
        agrees=example is None and not hidden,
        queries=count,
        replayed=replayed,
        worst=max(recalled, *(float(one.ratios[0]) for one in compared)),
        tolerance=allowed / scale if scale else 0.0,
        bound=in_words(count, replayed, example, hidden),
        counterexample=example,
    )
