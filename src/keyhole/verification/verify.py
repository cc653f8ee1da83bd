"""Is the box this model? Fresh queries, compared one by one.

Agreement is not equality. The verdict says what the agreements allow one to claim: of queries
drawn like these, at most a certain fraction can be answered differently, with 95% confidence.
"""

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from keyhole.arrays import TINY, Array, random_stream, whole_number
from keyhole.errors import Counterexample, InvalidArgument
from keyhole.measurement.noise import bound_noise
from keyhole.models.base import predict, takes_numbers
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.open import opened
from keyhole.oracles.queries import VERIFICATION, QueryBatch
from keyhole.oracles.wrappers.drift import PURPOSE as RECALL
from keyhole.oracles.wrappers.drift import REASON as CHANGED
from keyhole.oracles.wrappers.validate import Validator
from keyhole.results import Recovery, Verdict
from keyhole.verification.challenge_queries import Designer, Recipe, can_change_parameters
from keyhole.verification.dispatch import read_reference, verify_target
from keyhole.verification.signature import Signature
from keyhole.verification.statement import (
    state_difference,
    state_format,
    state_hidden,
    state_noticed,
    state_verdict,
)
from keyhole.verification.tolerance import (
    OLD,
    Case,
    Judged,
    Past,
    Rates,
    allow,
    allow_rounding,
    join_rates,
    judge,
    rate_changes,
    sample_past,
    split_by_memory,
    tell_noticed,
)


def verify(
    box: Any,
    model: Any,
    *,
    errors: Any = None,
    queries: int | None = None,
    seed: int = 0,
    past: Past | None = None,
    precision: NoiseModel | None = None,
) -> Verdict:
    """Compares a model with a box on fresh queries, and with past answers for free.

    Where the precision of the box is not known, a few queries more measure it. Box and model may be
    swapped where it is plain which is which.

    Args:
        box: Anything that `open_oracle` takes.
        model: Anything callable like the box, or a `Recovery`: its standard errors are then used,
            and a box that computes in another number format than it did is told. Another box as
            the reference (`hf:FOLDER`, a torch module, an address …) is asked as the box is.
        errors: Standard errors of the model, in its own structure.
        queries: Fresh queries.
        seed: The same seed asks the same queries.
        past: Queries that were asked before, with their answers.
        precision: How exact the answers are, where that is known.

    Returns:
        The verdict: whether they agree, what was compared within which tolerance, what the
        agreement does not show, and a counterexample where they differ.

    Raises:
        InvalidArgument: Neither of the two is a model, or their widths differ.
        OracleError: The box did not answer.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.random import attention
        >>> model = attention(np.random.default_rng(0), 4)
        >>> verify(model, model).agrees
        True
    """
    model = read_reference(model)
    if _is_claim(box) and model is not None and not _is_claim(model):
        box, model = model, box
    other = verify_target(box, model, queries, seed)
    if other is not None:
        return other
    before = ""
    if isinstance(model, Recovery):
        if model.model is None:
            raise InvalidArgument(f"this run ended without a model ({model.outcome.name})")
        before = "" if model.verdict is None else model.verdict.format
        model, errors = model.model, model.errors if errors is None else errors
    if isinstance(model, type) or not (callable(model) or hasattr(model, "nearest")):
        raise InvalidArgument(f"model must be a model, callable like the box, got {model!r}")
    with opened(box) as oracle:
        verdict = _verdict(Validator(oracle), model, errors, queries, seed, past or [], precision)
    changed = state_format(before, verdict.format)
    bound = f"{verdict.bound} {changed}".strip()
    return replace(verdict, bound=bound, format_before=before if changed else verdict.format)


def _is_claim(given: Any) -> bool:
    """Whether this is a model, a run or a signature, and not a box of another kind."""
    return isinstance(given, (Recovery, Signature)) or hasattr(given, "to_arrays")


def _verdict(
    box: Oracle,
    model: Any,
    errors: Any,
    queries: int | None,
    seed: int,
    past: Past,
    precision: NoiseModel | None,
) -> Verdict:
    count = 60 if queries is None else whole_number("queries", queries, 1)
    if takes_numbers(model):
        told = box.spec.outputs or box.spec.domain.tokens  # fewer where some were chosen
        if model.tokens != told:
            raise InvalidArgument(f"the model has {model.tokens} tokens, the box {told}")
    elif getattr(model, "width", box.spec.width) != box.spec.width:
        raise InvalidArgument(f"the model has width {model.width}, the box {box.spec.width}")
    rng = random_stream(whole_number("seed", seed, 0), "verification")
    natural = model.natural_length() if hasattr(model, "natural_length") else box.spec.width**0.5
    designer = Designer(box.spec, natural, rng, model)
    asked, answers, shortest = _ask_fresh(box, model, designer, count)
    noise = precision or box.spec.precision or bound_noise(box, shortest, answers, VERIFICATION)
    worst, example = _recall(box, model, errors, past, noise, rng)  # a change explains the rest
    predicted = [case.predicted for case, _ in asked]
    sizes = [8 * recipe.length * box.spec.width for _, recipe in asked]
    fresh = (
        [replace(case, tokens=designer.draw_again(recipe).tokens[None]) for case, recipe in part]
        for part in map(asked.__getitem__, split_by_memory(model, sizes))
    )
    old = ([case] for case in sample_past(model, past))
    replayed, rates = 0, Rates()
    judged: list[Judged] = []
    changes = can_change_parameters(model)
    for portion in chain(fresh, old):
        found = judge(model, errors, portion, noise, rng, predicted)
        example = example or next((one.example for one in found if one.example), None)
        new = [one for one in found if one.case.reason != OLD]
        replayed += sum(len(one.ratios) for one in found if one.case.reason == OLD)
        worst = max([worst, *(float(one.ratios.max()) for one in new)])
        if changes and new and example is None:  # the same changes for every portion
            shown = rate_changes(model, new, random_stream(seed, "changes"))
            rates = join_rates(rates, shown)
        judged += [one.without_tokens() for one in new]
        del portion, found, new  # before the next is made: tokens may be large
    numbers = np.concatenate(answers).reshape(count, -1).astype(np.float64)
    scatter = np.sqrt(np.mean(np.var(numbers, axis=0)))
    sizes = np.sqrt(np.mean(numbers**2, axis=1))
    # of an ordinary answer: one to huge tokens would make every tolerance look small
    scale = max(float(np.median(sizes) or np.sqrt(np.mean(sizes**2))), TINY)
    allowed = _median([one.allowed for one in judged])
    own = _median([allow_rounding(one.case.answers, noise) for one in judged]) / scale
    hidden = bool(noise.additive > 0 and allowed > scatter)
    noticed = tell_noticed(rates) if example is None else {}
    if example is not None:
        bound = state_difference(example)
    elif hidden:
        bound = state_hidden(count)
    else:
        bound = f"{state_verdict(count, replayed, allowed / scale, own)} {state_noticed(noticed)}"
    return Verdict(
        agrees=example is None and not hidden,
        queries=count,
        replayed=replayed,
        worst=worst,
        tolerance=allowed / scale,
        bound=bound.strip(),
        counterexample=example,
        precision=own,
        noticed=noticed,
        format=noise.format,
        difference=max((one.case.difference for one in judged), default=0.0) / scale,
        absolute=max((one.case.difference for one in judged), default=0.0),
    )


def _ask_fresh(
    box: Oracle, model: Any, designer: Designer, count: int
) -> tuple[list[tuple[Case, Recipe]], list[Array], Array]:
    """Fresh queries, of which only the answers are held; all answers, and the shortest query."""
    asked, answers = [], []
    shortest: Array | None = None
    for query, recipe in designer.stream(count):
        tokens = query.tokens[None]
        answers.append(box.ask(QueryBatch.of(tokens, VERIFICATION)))
        case = Case.of(model, tokens, answers[-1], query.reason)
        asked.append((case.without_tokens(), recipe))
        if shortest is None or len(query.tokens) < len(shortest):
            shortest = np.array(query.tokens)
    assert shortest is not None
    return asked, answers, shortest


def _median(allowed: list[Array]) -> float:
    """Over the answers, of the root mean square of what their numbers may be off."""
    return float(np.median([np.sqrt(np.mean(np.square(part))) for part in allowed]))


def _recall(
    box: Oracle,
    model: Any,
    errors: Any,
    past: Past,
    noise: NoiseModel,
    rng: np.random.Generator,
) -> tuple[float, Counterexample | None]:
    """One old query again: has the box changed meanwhile?"""
    if not past:
        return 0.0, None
    queries, answers = max(past, key=lambda kept: kept[0].different)
    again = box.ask(QueryBatch(queries.bank, queries.index[:1], RECALL))[0]
    first = np.asarray(answers[0], dtype=np.float64)
    allowed = noise.apart(float(np.max(np.abs(first), initial=0.0)))
    gap = float(np.max(np.abs(again - first)))
    tokens = queries[:1].tokens()
    if gap > allowed and predict(model, tokens, first[None]).shape[1:] == first.shape:
        # terms that cancel round at their own size
        seen = [first[None]]
        own = float(np.max(allow(model, errors, [tokens], noise, rng, seen=seen)[0]))
        allowed = max(allowed, noise.apart(0.0) + own)
    if gap <= allowed:
        return gap / max(allowed, TINY), None
    return np.inf, Counterexample(tokens[0], again, first, CHANGED)
