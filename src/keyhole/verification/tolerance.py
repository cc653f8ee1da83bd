"""How far apart the answers of one and the same model may lie, question by question.

The box rounds its parameters and tokens, and the recovered parameters have standard errors. Both
are imitated: the hypothesis is asked again with parameters and tokens disturbed by as much. Where
a question amplifies such disturbances (a near tie at large scores), its tolerance grows by itself.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
from keyhole.oracles.base import Precision

DRAWS = 6  # disturbed copies per question
SAFETY = 8.0  # largest disturbance seen times this: rounding errors are not independent
ROUNDINGS = 64.0  # of the answer itself, in units of the roundoff: sums over long sequences
CANCELLED = 8.0  # and at least so many of the largest number in a vector
DEVIATIONS = 6.0  # standard deviations of additive noise that one answer may be off
ANY_LABEL = 2.0  # the widest gap between two labels: a tie can turn into either
LABEL_ROUNDOFF = 2.0**-8  # of the shortest number format that holds all labels


def allowance(
    model: Any,
    errors: Any,
    tokens: Float[Array, "n length d"],
    precision: Precision,
    rng: np.random.Generator,
) -> Float[Array, "n *out"]:
    """Largest plausible |box − model| for each answer, if the model is the box."""
    return allowances(model, errors, [tokens], precision, rng)[0]


def allowances(
    model: Any,
    errors: Any,
    batches: list[Array],
    precision: Precision,
    rng: np.random.Generator,
    draws: int = DRAWS,
) -> list[Array]:
    """The same for batches of questions of different lengths. Disturbed copies of the model are
    drawn one after the other and asked everything: only one of them is held at a time."""
    if hasattr(model, "margin"):
        return [label_allowance(model, errors, part, precision, rng) for part in batches]
    answers = [np.asarray(model(tokens)) for tokens in batches]
    spreads = [np.zeros_like(part) for part in answers]
    for _ in range(draws):
        other = disturbed(model, errors, precision.relative, rng)
        for tokens, part, spread in zip(batches, answers, spreads, strict=True):
            near = rng.standard_normal(tokens.shape)
            near *= precision.relative
            near += 1.0
            near *= tokens
            np.maximum(spread, np.abs(other(near) - part), out=spread)
        del other, near  # before the next is drawn
    return [
        np.asarray(SAFETY * spread + rounding(part, precision))
        for spread, part in zip(spreads, answers, strict=True)
    ]


def rounding(answers: Float[Array, "n *out"], precision: Precision) -> Float[Array, "n *out"]:
    """What the box's format and its noise may do to the answers themselves."""
    relative = ROUNDINGS * precision.relative * np.abs(answers)
    if answers.ndim == 2:  # a component may be small because its terms cancel
        largest = np.abs(answers).max(axis=1, keepdims=True)
        relative = np.maximum(relative, CANCELLED * precision.relative * largest)
    steady = DEVIATIONS * precision.additive + 0.5 * precision.step + precision.tolerance
    return np.asarray(relative + steady)


def label_allowance(
    model: Any,
    errors: Any,
    tokens: Float[Array, "n length d"],
    precision: Precision,
    rng: np.random.Generator,
) -> Float[Array, " n"]:
    """Answers that are labels: any label where the margin is within its uncertainty, else none.

    Labels have too few bits to tell in which format the box computes; a format as coarse as that
    of the labels themselves is not believed, and their step is not one of the margin.
    """
    believed = precision.relative if precision.relative < LABEL_ROUNDOFF else UNIT_ROUNDOFF
    precision = Precision(relative=believed)
    inner = model.model
    uncertain = allowance(inner, getattr(errors, "model", errors), tokens, precision, rng)
    return np.where(np.abs(inner(tokens)) <= uncertain, ANY_LABEL, 0.0)


def disturbed(model: Any, errors: Any, relative: float, rng: np.random.Generator) -> Any:
    """The model with parameters off by their standard errors and by the box's rounding."""
    if not hasattr(model, "to_arrays"):
        return model  # any callable may be compared; its parameters are its own affair
    uncertain = {} if errors is None else errors.to_arrays()
    parameters = {}
    for name, array in multiplied_out(model.to_arrays(), uncertain).items():
        change = np.array(array, dtype=np.float64)
        np.abs(change, out=change)
        change *= relative
        factor = name.endswith(("score_left", "score_right"))
        if not factor and name in uncertain and uncertain[name].shape == array.shape:
            np.hypot(change, uncertain[name], out=change)
        change *= rng.standard_normal(array.shape)
        change += array
        change.flags.writeable = False  # so that the model keeps it as it is
        parameters[name] = change
    for name, left in uncertain.items():
        if name.endswith("score_left") and name in parameters:
            _disturb_product(parameters, name, left, uncertain, rng)
    return type(model).from_arrays(parameters)


def multiplied_out(
    parameters: Mapping[str, Array], uncertain: Mapping[str, Array]
) -> dict[str, Array]:
    """The parameters, scores in factors multiplied out where their standard errors are entrywise:
    errors of the factors would say too little, since the factors' range is uncertain as well."""
    found = dict(parameters)
    for name in uncertain:
        left, right = f"{name}_left", f"{name}_right"
        if name.endswith("score") and name not in found and left in found:
            found[name] = found.pop(left) @ found.pop(right)
    return found


def _disturb_product(
    parameters: dict[str, Array], name: str, left: Array, uncertain: Any, rng: np.random.Generator
) -> None:
    """A factored score whose standard errors are factored too: adds a random matrix in factors
    whose entries have them."""
    other = name.removesuffix("left") + "right"
    right = uncertain[other]
    parameters[name] = np.hstack([parameters[name], left * rng.standard_normal(left.shape)])
    parameters[other] = np.vstack([parameters[other], right * rng.standard_normal(right.shape)])
