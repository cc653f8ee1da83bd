"""How far apart the answers of one and the same model may lie, query by query.

The box rounds its parameters and tokens, and the recovered parameters have standard errors. Both
are imitated: the hypothesis is asked again with parameters and tokens disturbed by as much. Where
a query amplifies such disturbances (a near tie at large scores), its tolerance grows by itself.
"""

from typing import Any

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
from keyhole.models.base import perturb_model
from keyhole.oracles.noise import NoiseModel

DRAWS = 6  # disturbed copies per query
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
    precision: NoiseModel,
    rng: np.random.Generator,
) -> Float[Array, "n *out"]:
    """Largest plausible |box − model| for each answer, if the model is the box."""
    return allowances(model, errors, [tokens], precision, rng)[0]


def allowances(
    model: Any,
    errors: Any,
    batches: list[Array],
    precision: NoiseModel,
    rng: np.random.Generator,
    draws: int = DRAWS,
) -> list[Array]:
    """The same for batches of queries of different lengths. Perturbed copies of the model are
    drawn one after the other and asked everything: only one of them is held at a time."""
    if hasattr(model, "margin"):
        return [label_allowance(model, errors, part, precision, rng) for part in batches]
    answers = [np.asarray(model(tokens)) for tokens in batches]
    spreads = [np.zeros_like(part) for part in answers]
    copies = perturb_model(model, errors, precision.relative, rng)
    for _ in range(draws):
        other = next(copies)
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


def rounding(answers: Float[Array, "n *out"], precision: NoiseModel) -> Float[Array, "n *out"]:
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
    precision: NoiseModel,
    rng: np.random.Generator,
) -> Float[Array, " n"]:
    """Answers that are labels: any label where the margin is within its uncertainty, else none.

    Labels have too few bits to tell in which format the box computes; a format as coarse as that
    of the labels themselves is not believed, and their step is not one of the margin.
    """
    believed = precision.relative if precision.relative < LABEL_ROUNDOFF else UNIT_ROUNDOFF
    precision = NoiseModel(relative=believed)
    inner = model.model
    uncertain = allowance(inner, getattr(errors, "model", errors), tokens, precision, rng)
    return np.where(np.abs(inner(tokens)) <= uncertain, ANY_LABEL, 0.0)
