"""From scores to a hypothesis one can judge: last descent, standard errors, rows kept aside."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.attention_rows import Rows, average_tokens, compute_patterns
from keyhole.fitting.fisher import FisherInformation, estimate_information
from keyhole.fitting.levenberg_marquardt import DescentOptions, descend, measure_label_power
from keyhole.fitting.variable_projection import DENSE_LIMIT, ProjectedFit
from keyhole.learners.base import Diagnostics, Hypothesis
from keyhole.learners.examples.data import Examples
from keyhole.learners.examples.head_count import Ending, Found
from keyhole.learners.published.chen_li_sculpting import Certificates
from keyhole.models.attention import Attention, Head

HELD_SHARE = 0.05  # of the rows, kept aside to judge the fit


@dataclass(frozen=True, eq=False, kw_only=True)
class ExamplesDiagnostics(Diagnostics):
    """How a layer was found among labelled examples. Residuals, noise and errors are root mean
    squares relative to the labels'."""

    heads: int
    examples: int
    floor: float  # examples that so many heads need at least
    ratio: float  # examples over the floor
    ratio_least: float  # the same for as few heads as were tried
    conditioning: float  # of the scores: smallest over largest singular value
    deficient: bool  # whether some change of the scores leaves no trace in the labels
    amplification: float  # relative error of a block of parameters per relative error of labels
    residual: float
    noise: float
    held_out_error: float
    held_out_rows: int
    ending: Ending
    agreeing_starts: int
    restarts: int
    seconds: float
    residual_by_heads: dict[int, float]
    sum_of_values: Array | None = None  # by sculpting
    certificates: Certificates | None = None

    @property
    def certified(self) -> int | None:
        return None if self.certificates is None else len(self.certificates)

    def as_dict(self) -> dict[str, Any]:
        parts = super().as_dict()
        if self.certificates is not None:
            parts["certified"] = self.certified
            parts["certificates"] = vars(self.certificates)
        return parts


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
    diagnostics: ExamplesDiagnostics
    held_out: HeldOut
    residuals: Float[Array, "rows D"]  # of the rows that were fitted
    predictions: Float[Array, "rows D"]  # for the rows that were fitted
    anchors: Float[Array, "rows p"]
    refitted: Float[Array, "kept D"]  # of the rows kept aside, once they are fitted too
    costs: tuple[float, float]  # squared residual of the fitted rows; of all once all are fitted
    noise: float  # standard deviation of the labels' noise, dof-corrected
    power: float  # root mean square of the labels
    freedom: int  # numbers fitted minus unknowns
    data: Examples


def count_copies_once(rows: Rows) -> Rows:
    """The same with only one of each set of equal rows counted."""
    _, first = np.unique(number_copies(rows), return_index=True)
    weights = np.zeros(rows.weights.size)
    weights[first] = 1.0
    return rows.with_weights(weights.reshape(rows.weights.shape) * (rows.weights > 0))


def number_copies(rows: Rows) -> Array:
    """Equal numbers (n, a) for rows of the same anchor and the same tokens in any order, which have
    the same output whatever the layer; -1 for rows that do not count."""
    rng = np.random.default_rng(0)  # fixed: a hash, not a choice
    scale = np.sqrt(np.mean(rows.tokens**2, axis=(0, 1))) + TINY
    waves = np.sin((rows.tokens / scale) @ rng.standard_normal(rows.width))
    if rows.padding is not None:
        waves = np.where(rows.padding[:, 0] == 0, waves, 0.0)
    anchors = (rows.anchors[:, :, : rows.width] / scale) @ rng.standard_normal(rows.width)
    bags = np.repeat(waves.sum(axis=1)[:, None], rows.weights.shape[1], axis=1)
    # nine digits are coarser than rounding and finer than chance
    keys = np.round(np.stack([bags, anchors], axis=2), 9).reshape(-1, 2)
    _, number = np.unique(keys, axis=0, return_inverse=True)
    return np.where(rows.weights > 0, number.reshape(rows.weights.shape), -1)


def hold_rows(rows: Rows, rng: np.random.Generator) -> Array:
    """Which rows (n, a) are kept aside: a random share of those with something to attend to, and
    with each row its copies, which would give it away."""
    numbers = number_copies(rows)
    candidates = np.unique(numbers[(rows.weights > 0) & (rows.lengths > 1)[:, None]])
    # at least 24 numbers, and at most a fifth of the rows
    share = max(HELD_SHARE * len(candidates), 24 / rows.outputs)
    count = int(np.ceil(min(share, 0.2 * len(candidates))))
    return np.isin(numbers, candidates[rng.permutation(len(candidates))[:count]])


def fit_layer(
    data: Examples,
    train: Rows,
    kept: Array,
    found: Found,
    solved: float,
    least: int,
    rng: np.random.Generator,
) -> Fitted:
    """Last descent, standard errors and held-out rows for the scores a search has found."""
    last_steps = DescentOptions(iterations=60, damping=1e-8)  # the search ended beside a minimum
    steps = last_steps
    if found.ending not in ("exact", "noise"):
        steps = replace(steps, iterations=5)  # time is up, the fit is not one to rely on
    elif found.theta.size <= DENSE_LIMIT:
        steps = replace(steps, finished=0.0, precise=True)  # weak directions settle last
    end = descend(train, found.theta, steps)
    at = end.at
    if end.relative <= solved:
        found = replace(found, ending="exact")
    final = descend(data.rows, at.theta, steps).at
    rows, heads = data.rows, at.theta.shape[1]
    freedom = train.counted * train.outputs - train.unknowns(heads)
    total = rows.counted * rows.outputs
    power = float(np.sqrt(measure_label_power(rows) / total))
    level = float(np.sqrt(final.cost / max(total - train.unknowns(heads), 1)))
    level = max(level, data.roundoff * power)
    # computing labels costs up to 32 roundings of double precision, which are not independent
    level = float(np.hypot(level, 32.0 * UNIT_ROUNDOFF * power))
    spread = FisherInformation.missing(final, np.nan)
    if found.ending in ("exact", "noise"):
        spread = estimate_information(rows, final, rng)
    held_out = _predict_held_out(rows, kept, at)
    off = held_out.answers - held_out.predictions
    diagnostics = ExamplesDiagnostics(
        heads=heads,
        examples=data.count,
        floor=data.count / rows.ratio(heads),
        ratio=rows.ratio(heads),
        ratio_least=rows.ratio(least),
        conditioning=spread.conditioning,
        deficient=spread.deficient,
        amplification=measure_amplification(rows, final, spread, power),
        residual=float(np.sqrt(final.cost / total) / power),
        noise=float(level / power),
        held_out_error=float(np.sqrt(np.mean(off**2)) / power),
        held_out_rows=int(kept.sum()),
        ending=found.ending,
        agreeing_starts=found.hits,
        restarts=found.restarts,
        seconds=found.seconds,
        residual_by_heads={m: float(np.sqrt(r)) for m, r in found.residuals.items()},
    )
    learned = Hypothesis(
        assemble_layer(rows, final.theta, final.values, final.offset, data.form),
        _assemble_errors(rows, spread, level, data.form),
        diagnostics.floor,
        describe_search(diagnostics),
        diagnostics=diagnostics,
    )
    used = train.weights.ravel() > 0
    return Fitted(
        learned,
        diagnostics,
        held_out,
        residuals=at.residual[used],
        predictions=rows.targets.reshape(len(used), -1)[used] - at.residual[used],
        anchors=rows.anchors.reshape(len(used), -1)[used][:, : rows.width],
        refitted=final.residual[kept.ravel()],
        costs=(at.cost, final.cost),
        noise=float(np.sqrt(at.cost / max(freedom, 1))),
        power=power,
        freedom=freedom,
        data=data,
    )


def _predict_held_out(rows: Rows, kept: Array, at: ProjectedFit) -> HeldOut:
    aside = predict(rows.with_weights(kept.astype(np.float64)), at)
    example, position = np.nonzero(kept)
    return HeldOut(example, position, rows.targets[kept], aside[kept])


def predict(rows: Rows, at: ProjectedFit) -> Float[Array, "n a D"]:
    """Outputs of the fitted layer on the rows that count."""
    mixed = average_tokens(rows, compute_patterns(rows, at.theta)) @ at.values
    return np.asarray(mixed.reshape(*rows.weights.shape, -1) + at.offset)


def assemble_layer(rows: Rows, theta: Array, values: Array, offset: Array, form: str) -> Attention:
    """The layer in the user's form; x_q^t theta x_i = x_i . (score x_q + key_bias)."""
    d = rows.width
    shaped = values.reshape(-1, d, values.shape[1])
    heads = []
    for i, value in enumerate(shaped):
        bias = theta[d, i] if theta.shape[0] > d else None
        heads.append(Head(theta[:d, i].T, bias, value[:, 0] if form == "scalar" else value))
    return Attention(heads, offset[0] if form == "scalar" else offset)


def _assemble_errors(
    rows: Rows, spread: FisherInformation, level: float, form: str
) -> Attention | None:
    if not np.isfinite(spread.theta).all():
        return None
    parts = (level * spread.theta, level * spread.values, level * spread.offset)
    return assemble_layer(rows, *parts, form)


def measure_amplification(
    rows: Rows, at: ProjectedFit, spread: FisherInformation, power: float
) -> float:
    """Largest relative standard error of a block for relative noise 1 on the labels. Scores of a
    head that attends to all tokens alike are relative to the faintest that would show."""
    d = rows.width
    # scores of standard deviation 0.01 change attention by a hundredth
    faintest = 0.01 / max(np.sqrt(np.mean(rows.anchors**2) * np.mean(rows.tokens**2)), TINY)
    worst = 0.0
    for i in range(at.theta.shape[1]):
        for error, block, least in (
            (spread.theta[:, i], at.theta[:, i], faintest),
            (spread.values[i * d : i * d + d], at.values[i * d : i * d + d], TINY),
        ):
            size = max(float(np.linalg.norm(block)), float(least))
            worst = max(worst, float(np.linalg.norm(error)) / size)
    return worst * power


def describe_search(found: ExamplesDiagnostics) -> tuple[str, ...]:
    """Sentences for the reader."""
    ending = {
        "exact": "The labels are reproduced to rounding.",
        "noise": "What remains behaves like noise: two independent starts end in the same fit, and "
        "one more head explains no more than chance.",
        "spent": "The budget of time or restarts was spent before the fit was settled.",
        "interrupted": "The search was stopped before the fit was settled.",
    }[found.ending]
    return (
        f"{found.examples} examples are {found.ratio:.2g} times the floor of {found.floor:.3g} for "
        f"{found.heads} head(s).",
        ending,
    )


def add_certificates(fitted: Fitted, values: Array, certificates: Certificates) -> Fitted:
    """The same with what sculpting found: the sum of the values, and inequalities."""
    more = replace(fitted.diagnostics, sum_of_values=values, certificates=certificates)
    return replace(fitted, diagnostics=more, learned=replace(fitted.learned, diagnostics=more))
