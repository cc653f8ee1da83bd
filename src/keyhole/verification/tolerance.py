"""How far apart the answers of box and model may lie, query by query, and what that leaves unseen.

The box rounds its parameters and tokens, and the recovered parameters have standard errors. Both
are imitated: the hypothesis is asked again with parameters and tokens disturbed by as much. Where
a query amplifies such disturbances (a near tie at large scores), its tolerance grows by itself.

A tolerance that error bars set is wide, and hides changes of the model that are as large. How
large is told: for each block of parameters, the smallest change that some answer would have shown.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.errors import Counterexample
from keyhole.models.base import (
    NormalPool,
    perturb_model,
    predict,
    replace_parameters,
    takes_numbers,
)
from keyhole.oracles.noise import REJECTION, ROUNDINGS, NoiseModel
from keyhole.oracles.queries import QueryBatch

LONG = 2**13  # numbers in a fresh query beyond which disturbed models are asked in doubt only
DRAWS, FEW = 6, 2  # disturbed copies of the model per query; where most queries need few
OLD = "a query asked while learning"
OTHER_SHAPE = "answers of another shape"

Past = list[tuple[QueryBatch, Array]]


def allow(
    model: Any,
    errors: Any,
    batches: list[Array],
    noise: NoiseModel,
    rng: np.random.Generator,
    draws: int = DRAWS,
    seen: list[Array] | None = None,
) -> list[Array]:
    """Largest plausible |box − model| of each answer to batches of queries, if the model is the
    box, whose own answers `seen` are only needed by a model that compares them. Disturbed copies
    of the model are drawn one after the other and asked everything: only one of them is held at a
    time."""
    if hasattr(model, "margin"):
        return [allow_labels(model, errors, part, noise, rng) for part in batches]
    told = batches if seen is None else seen
    answers = [predict(model, *both) for both in zip(batches, told, strict=True)]
    spreads = [np.zeros_like(part) for part in answers]
    normals = NormalPool(rng)
    copies = perturb_model(model, errors, noise.roundoff, rng, normals)
    for _ in range(draws):
        other = next(copies)
        for tokens, own, part, spread in zip(batches, told, answers, spreads, strict=True):
            near = tokens if takes_numbers(model) else normals.disturb(tokens, noise.roundoff)
            np.maximum(spread, np.abs(predict(other, near, own) - part), out=spread)
        del other, near  # before the next is drawn
    return [
        # rounding errors are not independent: the largest disturbance seen is taken eight times
        np.asarray(REJECTION * spread + allow_rounding(part, noise))
        for spread, part in zip(spreads, answers, strict=True)
    ]


def allow_rounding(answers: Float[Array, "n *out"], noise: NoiseModel) -> Float[Array, "n *out"]:
    """What the box's number format and its noise may do to the answers themselves."""
    rounding = ROUNDINGS * noise.roundoff
    scatter = 0.0 if noise.repeatable else REJECTION * noise.relative
    relative = (rounding + scatter) * np.abs(answers)
    if answers.ndim == 2:  # a component may be small because its terms cancel
        largest = np.abs(answers).max(axis=1, keepdims=True)
        relative = np.maximum(relative, (rounding / 8.0 + scatter) * largest)
    return np.asarray(relative + noise.bound)


def allow_underflow(tokens: Array, largest: float, noise: NoiseModel) -> float:
    """What is lost where weights of terms of this size are below the box's smallest number: an
    answer may then be zero, however large the scores between two tokens are."""
    reach = max(1.0, float(np.max(np.abs(tokens), initial=0.0)))
    return noise.underflow * reach * largest


def allow_labels(
    model: Any,
    errors: Any,
    tokens: Float[Array, "n length d"],
    noise: NoiseModel,
    rng: np.random.Generator,
) -> Float[Array, " n"]:
    """Answers that are labels: any label where the margin is within its uncertainty, else none.

    Labels have too few bits to tell in which format the box computes; a format as coarse as that
    of the labels themselves is not believed, and their step is not one of the margin.
    """
    shortest = 2.0**-8  # unit roundoff of the shortest number format: it holds all labels
    believed = noise.relative if noise.relative < shortest else UNIT_ROUNDOFF
    inner, inner_errors = model.model, getattr(errors, "model", errors)
    (uncertain,) = allow(inner, inner_errors, [tokens], NoiseModel(relative=believed), rng)
    # two is the widest gap between two labels: a tie can turn into either
    return np.where(np.abs(inner(tokens)) <= uncertain, 2.0, 0.0)


@dataclass(frozen=True, eq=False)
class Case:
    """Queries of one length with the answers of the box and of the model."""

    tokens: Float[Array, "n length d"]
    answers: Float[Array, "n *out"]
    predicted: Array
    reason: str  # why they were asked
    given: Array  # the box's answers in its own number format

    @classmethod
    def of(cls, model: Any, tokens: Array, answers: Array, reason: str) -> "Case":
        given, answers = answers, np.asarray(answers, dtype=np.float64)
        return cls(tokens, answers, np.atleast_1d(predict(model, tokens, answers)), reason, given)

    @property
    def difference(self) -> float:
        """The largest |box − model|; infinite where the two cannot be compared."""
        if not self.comparable:
            return np.inf
        return float(np.max(np.abs(self.answers - self.predicted), initial=0.0))

    def without_tokens(self) -> "Case":
        return replace(self, tokens=self.tokens[:, :0].copy())  # no view, which would hold all

    @property
    def comparable(self) -> bool:
        return bool(self.predicted.shape == self.answers.shape)


@dataclass(frozen=True, eq=False)
class Judged:
    """How far the answers of a case are apart, and how far they may be."""

    case: Case
    ratios: Float[Array, " n"]  # deviations in units of what is allowed
    allowed: Array  # of every number; zeros where the answers cannot be compared
    disturbed: bool = False  # whether disturbed models had a say in what is allowed

    def without_tokens(self) -> "Judged":
        return replace(self, case=self.case.without_tokens())

    @property
    def worst(self) -> float:
        """The largest deviation in units of what is allowed."""
        return float(self.ratios.max())

    @property
    def example(self) -> Counterexample | None:
        """The first answer that is not the model's."""
        (odd,) = np.nonzero(self.ratios > 1.0)
        if not len(odd):
            return None
        case, k = self.case, odd[0]
        reason = case.reason if case.comparable else OTHER_SHAPE
        return Counterexample(case.tokens[k], case.answers[k], case.predicted[k], reason)


def judge(
    model: Any,
    errors: Any,
    cases: list[Case],
    noise: NoiseModel,
    rng: np.random.Generator,
    answers: list[Array] | None = None,
    first: int = DRAWS,
) -> list[Judged]:
    """Deviations of every case in units of what is allowed (or, of old queries, of what rounding
    alone allows, if that explains it: there are many). Disturbed copies of the model, `first` of
    them at first, are asked for the rest, and since a few may all happen to be close to the model,
    more where these do not explain it. Answers of another shape are as far apart as can be.
    `answers` are what the sizes of answers are judged by: those predicted for these cases, or for
    more."""
    labels = hasattr(model, "margin")
    known = [case.predicted for case in cases] if answers is None else answers
    typical, largest = _typical_size(known)
    lost = [allow_underflow(case.tokens, largest, noise) for case in cases]
    found = [_judge_by_rounding(*both, noise, labels) for both in zip(cases, lost, strict=True)]
    # more opinions before an answer counts as another model's
    for draws in sorted({first, DRAWS, 4 * DRAWS}):
        comparable = [k for k, case in enumerate(cases) if case.comparable]
        odd = {k: np.flatnonzero(found[k].ratios > 1.0) for k in comparable}
        doubtful = [k for k in comparable if len(odd[k])]
        if not doubtful:
            break
        tokens = [cases[k].tokens[_compact(odd[k], cases[k])] for k in doubtful]
        seen = [cases[k].answers[odd[k]] for k in doubtful]
        limits = allow(model, errors, tokens, noise, rng, draws, seen)
        for k, limit in zip(doubtful, limits, strict=True):
            limit = limit + lost[k]
            if draws > DRAWS and errors is not None:
                limit = widen(limit, cases[k].predicted[odd[k]], typical, noise)
            found[k] = _allow_more(found[k], odd[k], limit)
    return found


def _allow_more(one: Judged, part: Array, limit: Array) -> Judged:
    """The same case with wider limits for a part of its answers."""
    ratios, allowed = one.ratios.copy(), one.allowed.copy()
    ratios[part] = np.minimum(ratios[part], _worst_ratio(one.case, limit, part))
    allowed[part] = np.maximum(allowed[part], limit)
    return Judged(one.case, ratios, allowed, disturbed=True)


def _compact(chosen: Array, case: Case) -> Any:
    """The same choice of queries, as a slice where it is all of them: tokens are not copied."""
    return slice(None) if len(chosen) == len(case.answers) else chosen


def widen(
    limit: Array, answers: Array, typical: float, noise: NoiseModel, doubt: float = 100.0
) -> Array:
    """What is allowed where standard errors themselves are in doubt: an estimate from few answers
    may be too small by this factor. A model with half of the box's digits is the box's all the
    same; what is allowed then is stated with the verdict."""
    size = np.maximum(_sizes(answers), typical).reshape(-1, *[1] * (answers.ndim - 1))
    half = np.sqrt(noise.relative) * size
    return np.asarray(np.maximum(limit, np.minimum(doubt * limit, half)))


def _sizes(answers: Array) -> Float[Array, " n"]:
    """The largest number of each answer."""
    return np.asarray(np.abs(answers).reshape(len(answers), -1).max(axis=1, initial=0.0))


def _typical_size(answers: list[Array]) -> tuple[float, float]:
    """The median of the sizes of answers, and the largest finite one."""
    sizes = np.concatenate([_sizes(part) for part in answers])
    return float(np.median(sizes)), float(np.max(sizes[np.isfinite(sizes)], initial=0.0))


def _judge_by_rounding(case: Case, lost: float, noise: NoiseModel, labels: bool) -> Judged:
    """What is known of an old answer before disturbed models are asked; of a fresh one nothing:
    disturbed models say how far it may be off."""
    if case.reason == OLD and case.comparable and not labels:
        limit = allow_rounding(case.predicted, noise) + lost
        return Judged(case, _worst_ratio(case, limit, slice(None)), limit)
    return Judged(case, np.full(len(case.tokens), np.inf), np.zeros_like(case.predicted))


def settle_by_rounding(case: Case, noise: NoiseModel) -> Judged | None:
    """The answer of a long query that rounding alone explains, for which no tokens are needed; None
    where it does not, or where answers are labels."""
    if not case.comparable or np.isin(case.answers, (-1.0, 0.0, 1.0)).all():
        return None
    limit = allow_rounding(case.predicted, noise)
    ratios = _worst_ratio(case, limit, slice(None))
    return Judged(case, ratios, limit) if (ratios <= 1.0).all() else None


def _worst_ratio(case: Case, allowed: Array, part: Any) -> Float[Array, " n"]:
    """In units of what is allowed; an answer that is no number differs."""
    gap = np.abs(case.answers[part] - case.predicted[part])
    ratio = gap / np.maximum(allowed, TINY)
    return np.nan_to_num(ratio.reshape(len(ratio), -1).max(axis=1), nan=np.inf)


Rates = dict[str, list[float]]  # of each block, for several ways to change it


def tell_noticed(rates: Rates) -> dict[str, float]:
    """For each block of parameters, the smallest relative change that one of the answers would have
    shown: of its scale and in a random direction, whichever shows less. Infinite for a block that
    none of them sees; a change in the least visible direction may be larger."""
    least = {name: min(shown) for name, shown in rates.items()}
    return {
        name.removesuffix("_left"): 1.0 / shown if shown > 0 else np.inf
        for name, shown in least.items()
    }


def rate_changes(model: Any, judged: list[Judged], rng: np.random.Generator) -> Rates:
    """How far, in units of what is allowed, answers move with a relative change of each block: of
    its scale, and in a random direction."""
    found: Rates = {}
    step = 2.0**-10  # relative change of a block: small, and far above rounding
    comparable = [one for one in judged if one.case.comparable and one.disturbed]
    for name, array in model.to_arrays().items():
        if not np.any(array) or name.endswith("score_right") or array.dtype.kind != "f":
            continue  # changing the left factor of a score changes the score
        noise = rng.standard_normal(array.shape)
        noise *= np.linalg.norm(array) / max(float(np.linalg.norm(noise)), TINY)
        found[name] = []
        for direction in (array, noise):
            changed = np.asarray(step * direction)
            changed += array
            changed.flags.writeable = False  # so that the model keeps it as it is
            other = replace_parameters(model, {name: changed})
            shown = [
                np.max(
                    np.abs(
                        np.atleast_1d(predict(other, one.case.tokens, one.case.answers))
                        - one.case.predicted
                    )
                    / np.maximum(one.allowed, TINY)
                )
                for one in comparable
            ]
            found[name].append(max(map(float, shown), default=0.0) / step)
            del other, changed  # before the next is made: scores may be large
    return found
