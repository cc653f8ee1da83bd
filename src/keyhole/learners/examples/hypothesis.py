"""From scores to a hypothesis one can judge: polish, standard errors, rows kept aside."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.attention_rows import Rows, averages, patterns
from keyhole.fitting.fisher import Information, information, unknown
from keyhole.fitting.levenberg_marquardt import DENSE_PRECISE, Limits, descend, label_power
from keyhole.fitting.variable_projection import Projection
from keyhole.learners.base import Hypothesis
from keyhole.learners.examples.data import Examples
from keyhole.learners.examples.head_count import Found
from keyhole.learners.published.chen_li_sculpting import Sculpted
from keyhole.models.attention import Attention, Head

HELD_SHARE = 0.05  # of the rows, kept aside to judge the fit
HELD_NUMBERS = 24  # numbers that are kept aside at least
HELD_MOST = 0.2  # and at most this share of the rows
HASH_DIGITS = 9  # of the hash that finds copies of rows: coarser than rounding, finer than chance
OWN_ROUNDINGS = (
    32.0  # of double precision: of computing labels, with safety as it is not independent
)
NEAR = 1e-8  # damping that hardly shortens the first step: the search ended beside a minimum
FAINT = 0.01  # standard deviation of a score that changes attention by a hundredth
POLISH = Limits(iterations=60)
SETTLED = ("exact", "noise")  # endings of a search that has found a fit to rely on
HURRIED = Limits(iterations=5)  # time is up, the fit is not one to rely on
LAST_DIGITS = replace(POLISH, finished=0.0, precise=True)  # weak directions settle last


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows the fit has not seen, and what it says about them."""

    example: Array  # (rows,) which example
    position: Array  # (rows,) which position in it
    answers: Float[Array, "rows D"]
    predictions: Float[Array, "rows D"]


@dataclass(frozen=True, eq=False)
class Fitted:
    """A hypothesis with what is needed to judge it."""

    learned: Hypothesis
    held_out: HeldOut
    residuals: Float[Array, "rows D"]  # of the rows that were fitted
    predictions: Float[Array, "rows D"]  # for the rows that were fitted
    anchors: Float[Array, "rows p"]
    refitted: Float[Array, "kept D"]  # of the rows kept aside, once they are fitted too
    costs: tuple[
        float, float
    ]  # squared residual of the fitted rows, and of all once all are fitted
    noise: float  # standard deviation of the labels' noise, dof-corrected
    power: float  # root mean square of the labels
    freedom: tuple[int, int]  # numbers fitted, unknowns
    data: Examples


def distinct(rows: Rows) -> Rows:
    """The same with only one of each set of equal rows counted."""
    _, first = np.unique(sameness(rows), return_index=True)
    weights = np.zeros(rows.weights.size)
    weights[first] = 1.0
    return rows.with_weights(weights.reshape(rows.weights.shape) * (rows.weights > 0))


def sameness(rows: Rows) -> Array:
    """Equal numbers (n, a) for rows of the same anchor and the same tokens in any order, which have
    the same output whatever the layer; -1 for rows that do not count."""
    rng = np.random.default_rng(0)  # fixed: a hash, not a choice
    scale = np.sqrt(np.mean(rows.tokens**2, axis=(0, 1))) + TINY
    waves = np.sin((rows.tokens / scale) @ rng.standard_normal(rows.width))
    if rows.padding is not None:
        waves = np.where(rows.padding[:, 0] == 0, waves, 0.0)
    anchors = (rows.anchors[:, :, : rows.width] / scale) @ rng.standard_normal(rows.width)
    bags = np.repeat(waves.sum(axis=1)[:, None], rows.weights.shape[1], axis=1)
    keys = np.round(np.stack([bags, anchors], axis=2), HASH_DIGITS).reshape(-1, 2)
    _, number = np.unique(keys, axis=0, return_inverse=True)
    return np.where(rows.weights > 0, number.reshape(rows.weights.shape), -1)


def held_rows(rows: Rows, rng: np.random.Generator) -> Array:
    """Which rows (n, a) are kept aside: a random share of those with something to attend to, and
    with each row its copies, which would give it away."""
    numbers = sameness(rows)
    candidates = np.unique(numbers[(rows.weights > 0) & (rows.lengths > 1)[:, None]])
    share = max(HELD_SHARE * len(candidates), HELD_NUMBERS / rows.outputs)
    count = int(np.ceil(min(share, HELD_MOST * len(candidates))))
    return np.isin(numbers, candidates[rng.permutation(len(candidates))[:count]])


def fitted_layer(
    data: Examples,
    train: Rows,
    kept: Array,
    found: Found,
    solved: float,
    least: int,
    rng: np.random.Generator,
) -> Fitted:
    """Polish, standard errors and held-out rows for the scores a search has found."""
    polish = LAST_DIGITS if found.theta.size <= DENSE_PRECISE else POLISH
    polish = polish if found.ending in SETTLED else HURRIED
    end = descend(train, found.theta, polish, damping=NEAR)
    at = end.at
    if end.relative <= solved:
        found = replace(found, ending="exact")
    rows, heads = data.rows, at.theta.shape[1]
    numbers, unknowns = train.counted * train.outputs, train.unknowns(heads)
    power = float(np.sqrt(label_power(rows) / (rows.counted * rows.outputs)))
    noise = np.sqrt(at.cost / max(numbers - unknowns, 1))
    used = train.weights.ravel() > 0
    held_out = _held_out(rows, kept, at)
    final = descend(rows, at.theta, polish, damping=NEAR).at
    settled = found.ending in SETTLED
    spread = information(rows, final, rng) if settled else unknown(final, np.nan)
    total = rows.counted * rows.outputs
    level = np.sqrt(final.cost / max(total - unknowns, 1))
    level = max(float(level), data.roundoff * power)
    level = float(np.hypot(level, OWN_ROUNDINGS * UNIT_ROUNDOFF * power))
    errors = _errors(rows, spread, level, data.form)
    model = assembled(rows, final.theta, final.values, final.offset, data.form)
    details = _details(data, found, kept, least, final, spread, level, power, held_out)
    learned = Hypothesis(model, errors, details["floor"], _notes(details), details)
    return Fitted(
        learned,
        held_out,
        at.residual[used],
        rows.targets.reshape(len(used), -1)[used] - at.residual[used],
        rows.anchors.reshape(len(used), -1)[used][:, : rows.width],
        final.residual[kept.ravel()],
        (at.cost, final.cost),
        float(noise),
        power,
        (numbers, unknowns),
        data,
    )


def _details(
    data: Examples,
    found: Found,
    kept: Array,
    least: int,
    final: Projection,
    spread: Information,
    level: float,
    power: float,
    held_out: HeldOut,
) -> dict[str, Any]:
    """Numbers for the report."""
    rows, heads = data.rows, final.theta.shape[1]
    times = rows.ratio(heads)
    off = held_out.answers - held_out.predictions
    return {
        "heads": heads,
        "examples": data.count,
        "floor": data.count / times,
        "ratio": times,
        "ratio_least": rows.ratio(least),
        "conditioning": spread.conditioning,
        "deficient": spread.deficient,
        "amplification": _amplification(rows, final, spread, power),
        "residual": float(np.sqrt(final.cost / (rows.counted * rows.outputs)) / power),
        "noise": float(level / power),
        "held_out_error": float(np.sqrt(np.mean(off**2)) / power),
        "held_out_rows": int(kept.sum()),
        "ending": found.ending,
        "agreeing_starts": found.hits,
        "restarts": found.restarts,
        "seconds": found.seconds,
        "residual_by_heads": {m: float(np.sqrt(r)) for m, r in found.residuals.items()},
    }


def _held_out(rows: Rows, kept: Array, at: Projection) -> HeldOut:
    aside = predicted(rows.with_weights(kept.astype(np.float64)), at)
    example, position = np.nonzero(kept)
    return HeldOut(example, position, rows.targets[kept], aside[kept])


def predicted(rows: Rows, at: Projection) -> Float[Array, "n a D"]:
    """Outputs of the fitted layer on the rows that count."""
    mixed = averages(rows, patterns(rows, at.theta)) @ at.values
    return np.asarray(mixed.reshape(*rows.weights.shape, -1) + at.offset)


def assembled(rows: Rows, theta: Array, values: Array, offset: Array, form: str) -> Attention:
    """The layer in the user's form; x_q^t theta x_i = x_i . (score x_q + key_bias)."""
    d = rows.width
    shaped = values.reshape(-1, d, values.shape[1])
    heads = []
    for i, value in enumerate(shaped):
        bias = theta[d, i] if theta.shape[0] > d else None
        heads.append(Head(theta[:d, i].T, bias, value[:, 0] if form == "scalar" else value))
    return Attention(heads, offset[0] if form == "scalar" else offset)


def _errors(rows: Rows, spread: Information, level: float, form: str) -> Attention | None:
    if not np.isfinite(spread.theta).all():
        return None
    parts = (level * spread.theta, level * spread.values, level * spread.offset)
    return assembled(rows, *parts, form)


def _amplification(rows: Rows, at: Projection, spread: Information, power: float) -> float:
    """Largest relative standard error of a block for relative noise 1 on the labels. Scores of a
    head that attends to all tokens alike are relative to the faintest that would show."""
    d = rows.width
    faintest = FAINT / max(np.sqrt(np.mean(rows.anchors**2) * np.mean(rows.tokens**2)), TINY)
    worst = 0.0
    for i in range(at.theta.shape[1]):
        for error, block, least in (
            (spread.theta[:, i], at.theta[:, i], faintest),
            (spread.values[i * d : i * d + d], at.values[i * d : i * d + d], TINY),
        ):
            size = max(float(np.linalg.norm(block)), float(least))
            worst = max(worst, float(np.linalg.norm(error)) / size)
    return worst * power


def _notes(details: dict[str, Any]) -> tuple[str, ...]:
    ending = {
        "exact": "The labels are reproduced to rounding.",
        "noise": "What remains behaves like noise: two independent starts end in the same fit, and "
        "one more head explains no more than chance.",
        "spent": "The budget of time or restarts was spent before the fit was settled.",
        "interrupted": "The search was stopped before the fit was settled.",
    }[details["ending"]]
    return (
        f"{details['examples']} examples are {details['ratio']:.2g} times the floor of "
        f"{details['floor']:.3g} for {details['heads']} head(s).",
        ending,
    )


def with_certificates(fitted: Fitted, sculpted: Sculpted) -> Fitted:
    """The same, with what sculpting certified among the details."""
    body = sculpted.certificates
    details = {
        **fitted.learned.details,
        "sum_of_values": sculpted.values,
        "certified": len(body),
        "certificates": {
            "anchors": body.anchors,
            "preferred": body.preferred,
            "others": body.others,
        },
    }
    return replace(fitted, learned=replace(fitted.learned, details=details))
