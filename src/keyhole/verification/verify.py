"""Is the box this model? Fresh queries, compared one by one, and every answer paid for before.

Agreement is not equality. The verdict says what the agreements allow one to claim: of ordinary
queries (`challenge_queries` lists them) at most a certain share is answered differently, with 95%
confidence: one in twenty where 59 agree, one in a hundred where 299 do.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import TINY, Array, random_stream, whole_number
from keyhole.errors import Counterexample, Inconsistent, InvalidArgument, OracleError
from keyhole.measurement.noise import PURPOSE as PRECISION
from keyhole.measurement.noise import bound_noise
from keyhole.models.base import natural_length, predict, takes_numbers
from keyhole.oracles.base import Oracle
from keyhole.oracles.http.retry import Outage
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.open import opened
from keyhole.oracles.queries import VERIFICATION, QueryBatch
from keyhole.oracles.wrappers.drift import PURPOSE as RECALL
from keyhole.oracles.wrappers.drift import REASON as CHANGED
from keyhole.oracles.wrappers.validate import Validator
from keyhole.results import Recovery, Verdict
from keyhole.verification.challenge_queries import (
    KINDS,
    Designer,
    Fresh,
    Recipe,
    can_change_parameters,
)
from keyhole.verification.dispatch import read_reference, verify_target
from keyhole.verification.replay import Replay, replay
from keyhole.verification.signature import Signature
from keyhole.verification.statement import (
    state_contradiction,
    state_difference,
    state_format,
    state_hidden,
    state_noticed,
    state_space,
    state_verdict,
)
from keyhole.verification.tolerance import (
    FEW,
    LONG,
    Case,
    Judged,
    Past,
    Rates,
    allow,
    allow_rounding,
    judge,
    rate_changes,
    settle_by_rounding,
    tell_noticed,
)


def verify(
    box: Any,
    reference: Any,
    *,
    errors: Any = None,
    queries: int | None = None,
    seed: int = 0,
    past: Past | None = None,
    precision: NoiseModel | None = None,
) -> Verdict:
    """Compares a box with what it should be on fresh queries, and with past answers for free.

    Where the precision of the box is not known, a few queries more measure it. Box and reference
    may be swapped where it is plain which is which.

    Args:
        box: Anything that `open_oracle` takes; beside a reference on token numbers also a function
            (tokens, attention_mask) -> (batch, outputs), and the address of an embedding server or
            of a language model.
        reference: A model, callable like the box, or a `Recovery`: its standard errors are then
            used, and a box that computes in another number format than it did is told. The path of
            a saved one, or of a signature. Another box (`hf:FOLDER`, a torch module, an ONNX file,
            an address …), which is asked the same queries; no family is needed.
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
    model = read_reference(reference)
    if _is_claim(box) and model is not None and not _is_claim(model):
        box, model = model, box
    other = verify_target(box, model, queries, seed)
    if other is not None:
        return other
    before = ""
    if isinstance(model, Recovery):
        before = "" if model.verdict is None else model.verdict.format
        model, errors = _claimed(model), model.errors if errors is None else errors
    if isinstance(model, type) or not (callable(model) or hasattr(model, "nearest")):
        raise InvalidArgument(f"model must be a model, callable like the box, got {model!r}")
    with opened(box) as oracle:
        verdict = _verdict(Validator(oracle), model, errors, queries, seed, past or [], precision)
    changed = state_format(before, verdict.format)
    limits = state_space() if hasattr(model, "nearest") else ""
    bound = " ".join(part for part in (limits, verdict.bound, changed) if part)
    return replace(verdict, bound=bound, format_before=before if changed else verdict.format)


def _is_claim(given: Any) -> bool:
    """Whether this is a model, a run or a signature, and not a box of another kind."""
    return isinstance(given, (Recovery, Signature)) or hasattr(given, "to_arrays")


FIRST_ROUND = sum(kind.together for kind in KINDS)  # queries in which every kind comes once
FRESH = 59  # queries that must agree until at most 5% can differ, with 95% confidence


def _claimed(run: Recovery) -> Any:
    if run.model is None:
        raise InvalidArgument(f"this run ended without a model ({run.outcome.name})")
    return run.model


def _verdict(
    box: Oracle,
    model: Any,
    errors: Any,
    queries: int | None,
    seed: int,
    past: Past,
    precision: NoiseModel | None,
) -> Verdict:
    count = FRESH if queries is None else whole_number("queries", queries, 1)
    _check_sizes(box, model)
    rng = random_stream(whole_number("seed", seed, 0), "verification")
    designer = Designer(box.spec, natural_length(model, box.spec.width), rng, model)
    # one old query again comes first, and what fresh queries are left to the end: a run that is
    # continued with a larger budget begins with the same ones
    recalled = _recall(box, past)
    fresh = _FreshQueries(box, model, designer)
    asked = fresh.ask(min(count, FIRST_ROUND))
    noise = precision or box.spec.precision or _measure_noise(box, designer, asked)
    asked = asked + fresh.ask(count - len(asked))
    predicted = [case.predicted for case, _ in asked]
    replayed = replay(model, errors, past, noise, rng, predicted)
    contradiction = replayed.contradiction
    if contradiction is not None:  # does the box stand by it?
        recalled = _ask_again(box, contradiction)
    worst, changed = _compare_recalled(model, errors, recalled, noise, rng)
    worst = worst if contradiction is None else np.inf
    judged = _judge_fresh(model, errors, asked, designer, noise, rng)
    differing = [one.example for one in judged if one.example]
    example = next((one for one in (changed, contradiction, *differing) if one), None)
    worst = max(worst, *(one.worst for one in judged))
    ordinary = _Ordinary.of(judged, noise)
    hidden = bool(noise.additive > 0 and ordinary.allowed > ordinary.scatter)
    noticed = {} if example is not None else _notice_changes(model, judged, seed)
    tolerance = ordinary.allowed / ordinary.scale
    if example is not None:
        bound = _state_counterexample(example, tolerance, (len(differing), count), replayed)
    elif hidden:
        bound = state_hidden(count)
    else:
        agreed = state_verdict(count, replayed.compared, tolerance, ordinary.precision)
        bound = f"{agreed} {state_noticed(noticed)}"
    relative, absolute = _largest_difference(judged, ordinary.scale)
    return Verdict(
        agrees=example is None and not hidden,
        queries=count,
        replayed=replayed.compared,
        contradicted=replayed.contradicted,
        worst=worst,
        tolerance=tolerance,
        bound=bound.strip(),
        counterexample=example,
        precision=ordinary.precision,
        noticed=noticed,
        format=noise.format,
        difference=relative,
        absolute=absolute,
    )


def _notice_changes(model: Any, judged: list[Judged], seed: int) -> dict[str, float]:
    """The smallest change of each block of parameters that some answer would have shown."""
    if not can_change_parameters(model):
        return tell_noticed(Rates())
    return tell_noticed(rate_changes(model, judged, random_stream(seed, "changes")))


def _check_sizes(box: Oracle, model: Any) -> None:
    """Raises InvalidArgument where the model takes other tokens than the box."""
    if takes_numbers(model):
        tokens = box.spec.outputs or box.spec.domain.tokens  # fewer where some were chosen
        if model.tokens != tokens:
            raise InvalidArgument(f"the model has {model.tokens} tokens, the box {tokens}")
    elif getattr(model, "width", box.spec.width) != box.spec.width:
        raise InvalidArgument(f"the model has width {model.width}, the box {box.spec.width}")


def _measure_noise(box: Oracle, designer: Designer, asked: list[tuple[Case, Recipe]]) -> NoiseModel:
    # an answer of zero to zeros says nothing about rounding
    telling = [case.given for case, recipe in asked if KINDS[recipe.kind].draw != "draw_padded"]
    ordinary = _choose_ordinary(designer, asked)
    return bound_noise(box, ordinary, telling or [case.given for case, _ in asked], PRECISION)


@dataclass(frozen=True)
class _Ordinary:
    """An ordinary answer: its size, how much answers differ, what it may be off, and what of that
    is the box's own rounding, in units of its size."""

    scale: float
    scatter: float
    allowed: float
    precision: float

    @classmethod
    def of(cls, judged: list[Judged], noise: NoiseModel) -> "_Ordinary":
        """Of the answers that were judged: one to huge tokens would make every tolerance look
        small, and so would those of a network that is silent at most of them."""
        given = np.concatenate([one.case.given for one in judged])
        numbers = given.reshape(len(judged), -1).astype(np.float64)
        scatter = np.sqrt(np.mean(np.var(numbers, axis=0)))
        sizes = np.sqrt(np.mean(numbers**2, axis=1))
        speaking, scale = judged, float(np.median(sizes))
        if scale == 0.0 and sizes.any():
            speaking = [one for one in judged if one.case.answers.any()]
            scale = float(np.median(sizes[sizes > 0]))
        scale = max(scale, TINY)
        wide = [one.allowed for one in speaking if one.disturbed] or [speaking[0].allowed]
        rounding = [allow_rounding(one.case.answers, noise) for one in speaking]
        return cls(scale, scatter, _median(wide), _median(rounding) / scale)


def _largest_difference(judged: list[Judged], scale: float) -> tuple[float, float]:
    """The largest difference beside the answers' size, and the largest one."""
    differences = [one.case.difference for one in judged]
    sizes = [max(scale, float(np.max(np.abs(one.case.answers)))) for one in judged]
    relative = [gap / size for gap, size in zip(differences, sizes, strict=True)]
    return max(relative, default=0.0), max(differences, default=0.0)


def _state_counterexample(
    example: Counterexample, tolerance: float, fresh: tuple[int, int], replayed: Replay
) -> str:
    if example.reason == CHANGED:
        return state_contradiction()
    old = replayed.contradicted, replayed.compared
    return state_difference(example, tolerance, *fresh, *old)


def _judge_fresh(
    model: Any,
    errors: Any,
    asked: list[tuple[Case, Recipe]],
    designer: Designer,
    noise: NoiseModel,
    rng: np.random.Generator,
) -> list[Judged]:
    """Short queries against disturbed models, which say how far apart answers may be; long ones
    against rounding, and against disturbed models where that does not explain the answer. Tokens of
    long ones are made again only then."""
    predicted = [case.predicted for case, _ in asked]
    held = [k for k, (case, _) in enumerate(asked) if case.tokens.size]
    settled = {k: settle_by_rounding(case, noise) for k, (case, _) in enumerate(asked)}
    shortest = min(range(len(asked)), key=lambda k: asked[k][1].length)
    short = held or [shortest]
    cases = [_with_tokens(*asked[k], designer) for k in short]
    found = dict(zip(short, judge(model, errors, cases, noise, rng, predicted), strict=True))
    for k, (case, recipe) in enumerate(asked):
        if k in found:
            continue
        one = settled[k]
        if one is None:
            again = _with_tokens(case, recipe, designer)
            (one,) = judge(model, errors, [again], noise, rng, predicted, FEW)
            one = replace(one if one.example else one.without_tokens(), disturbed=False)
            del again
        found[k] = one
    return [found[k] for k in sorted(found)]


def _with_tokens(case: Case, recipe: Recipe, designer: Designer) -> Case:
    if case.tokens.size:
        return case
    return replace(case, tokens=designer.draw_again(recipe).tokens[None])


class _FreshQueries:
    """Asks fresh queries; of long ones only the answers are held. A box that refuses a sequence
    longer than all that it answered is asked the end of it, half as long, and no longer ones."""

    def __init__(self, box: Oracle, model: Any, designer: Designer) -> None:
        self.box, self.model, self.calls = box, model, designer.stream()
        self.answered, self.longest = 0, designer.most_tokens

    def ask(self, count: int) -> list[tuple[Case, Recipe]]:
        """So many more queries with the answers of box and model."""
        asked: list[tuple[Case, Recipe]] = []
        while len(asked) < count:
            calls = next(self.calls)
            tokens, given = self._ask(calls, min(len(calls), count - len(asked)))
            for k, answer in enumerate(given):
                fresh, recipe = calls[k]
                if tokens.shape[1] < recipe.length:
                    recipe = replace(recipe, last=tokens.shape[1])
                case = Case.of(self.model, tokens[k : k + 1], answer[None], fresh.reason)
                long = case.tokens.size > max(LONG, FIRST_ROUND * tokens.shape[2])
                asked.append((case.without_tokens() if long else case, recipe))
        return asked

    def _ask(self, calls: list[tuple[Fresh, Recipe]], count: int) -> tuple[Array, Array]:
        """The tokens and the answers of the first `count` queries of a call."""
        alone = len(calls) == 1  # a long one is not copied
        tokens = calls[0][0].tokens[None] if alone else np.stack([one.tokens for one, _ in calls])
        tokens = tokens[:, -self.longest :]
        while True:
            try:
                given = self.box.ask(QueryBatch.of(tokens, VERIFICATION)[:count])
                self.answered = max(self.answered, tokens.shape[1])
                return tokens, given
            except (Outage, Inconsistent):
                raise
            except OracleError:
                if tokens.shape[1] <= max(self.answered, FIRST_ROUND):
                    raise
                self.longest = max(self.answered, tokens.shape[1] // 2, 1)
                tokens = tokens[:, -self.longest :]


def _choose_ordinary(designer: Designer, asked: list[tuple[Case, Recipe]]) -> Array:
    """The shortest query whose answer is not small among them: noise that grows with the answers
    does not show in an answer of zero."""
    sizes = [float(np.max(np.abs(case.answers), initial=0.0)) for case, _ in asked]
    typical = float(np.median(sizes))
    large = [recipe for (_, recipe), size in zip(asked, sizes, strict=True) if size >= typical]
    return designer.draw_again(min(large, key=lambda recipe: recipe.length)).tokens


def _median(allowed: list[Array]) -> float:
    """Over the answers, of the root mean square of what their numbers may be off."""
    return float(np.median([np.sqrt(np.mean(np.square(part))) for part in allowed]))


def _recall(box: Oracle, past: Past) -> "Recalled | None":
    """One old query again: has the box changed meanwhile?"""
    if not past:
        return None
    queries, answers = max(past, key=lambda kept: kept[0].different)
    tokens = queries[:1].tokens()
    again = np.asarray(box.ask(QueryBatch.of(tokens, RECALL))[0])
    return Recalled(tokens, np.asarray(answers[0], dtype=np.float64), again)


def _ask_again(box: Oracle, example: Counterexample) -> "Recalled":
    tokens = np.asarray(example.input)[None]
    again = np.asarray(box.ask(QueryBatch.of(tokens, RECALL))[0])
    return Recalled(tokens, np.asarray(example.box_answer), again)


@dataclass(frozen=True, eq=False)
class Recalled:
    """An old query with its two answers."""

    tokens: Array
    first: Array
    again: Array


def _compare_recalled(
    model: Any,
    errors: Any,
    recalled: Recalled | None,
    noise: NoiseModel,
    rng: np.random.Generator,
) -> tuple[float, Counterexample | None]:
    """How far the two answers are apart in units of what is allowed; the query if it is more."""
    if recalled is None:
        return 0.0, None
    tokens, first, again = recalled.tokens, recalled.first, recalled.again
    allowed = noise.apart(float(np.max(np.abs(first), initial=0.0)))
    gap = float(np.max(np.abs(again - first)))
    if gap > allowed and predict(model, tokens, first[None]).shape[1:] == first.shape:
        # terms that cancel round at their own size
        seen = [first[None]]
        own = float(np.max(allow(model, errors, [tokens], noise, rng, seen=seen)[0]))
        allowed = max(allowed, noise.apart(0.0) + own)
    if gap <= allowed:
        return gap / max(allowed, TINY), None
    return np.inf, Counterexample(tokens[0], again, first, CHANGED)
