"""A multi-head layer from random labelled examples; nothing is asked.

Statement. F(X) = sum_i softmax(X score_i^t X^t) X value_i, read at every position or at the last.
Pairs (X, F(X)) determine scores and values up to the order of heads once there are enough: the
numbers must outnumber the unknowns, and the score differences the entries of a score. With m heads
of width d, as many outputs and k tokens the floor is N* = max(2 m d / k, d^2 / (k (k - 1)))
examples.

Questions. None. A share of the rows is kept aside and judges the fit.

Algebra. Given the scores, the values are linear: variable projection (algebra/variable_projection)
with Levenberg-Marquardt (algebra/levenberg_marquardt) from small random starts, one head swapped at
a time when stuck (learners/head_search); one head with fewer tokens than outputs has a closed form
(algebra/closed_form). The number of heads is the first with an exact fit, or the minimum of the
Bayesian information criterion. Standard errors are those of the Fisher information
(algebra/attention_information).

When it fails. Below about twice the floor with two heads or more most starts end in local minima
and time runs out; below the floor any fit is one of many, and it is reported as such. Very strong
attention (scores of standard deviation 100) needs 25 times the floor.

Source. Chen, Li, "Provably learning a multi-head attention layer", STOC 2025 (arXiv 2402.04084),
whose own algorithm is learners/sculpting; Golub, Pereyra (1973) for the projection.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.algebra.attention_information import Information, information
from keyhole.algebra.attention_rows import Rows, averages, patterns
from keyhole.algebra.levenberg_marquardt import Limits, descend, label_power
from keyhole.algebra.variable_projection import Projection
from keyhole.algebra.whitening import whitened
from keyhole.arrays import Array, Float
from keyhole.errors import InvalidArgument, NotIdentifiable
from keyhole.learners.base import Learned
from keyhole.learners.example_data import Examples, check_span, examples
from keyhole.learners.head_search import Found, Plan, Progress, search
from keyhole.models.attention import Attention, Head

METHODS = ("varpro", "sculpting")
HELD_SHARE = 0.05  # of the rows, kept aside to judge the fit
HELD_NUMBERS = 24  # numbers that are kept aside at least
HELD_MOST = 0.2  # and at most this share of the rows
EXACT = 1e-18  # squared residual relative to the labels that only an exact fit of doubles reaches
ROUNDINGS = 16.0  # unit roundoffs by which exact labels may miss the model, root mean square
POLISH = Limits(iterations=60)


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

    learned: Learned
    held_out: HeldOut
    residuals: Float[Array, "rows D"]  # of the rows that were fitted
    refitted: Float[Array, "rows D"]  # of the rows kept aside, once they are fitted too
    costs: tuple[float, float]  # squared residual of the fitted rows, and of all once all are fitted
    noise: float  # standard deviation of the labels' noise, dof-corrected
    power: float  # root mean square of the labels
    freedom: tuple[int, int]  # numbers fitted, unknowns
    data: Examples


@dataclass(frozen=True)
class FromExamples:
    """Learns an `Attention` from labelled examples.

    heads: their number, None to find it. method: "varpro" (the solver) or "sculpting" (the paper's
    algorithm, for Boolean inputs and at most two heads). restarts, seconds: the budget. workers:
    processes that share the restarts. bias: whether key biases and an offset are fitted too.
    most_heads: the largest number tried.
    """

    heads: int | None = None
    method: str = "varpro"
    restarts: int = 100_000
    seconds: float = 60.0
    workers: int = 1
    most_heads: int = 8
    bias: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidArgument(f"method must be one of {METHODS}, got {self.method!r}")
        for name in ("heads", "restarts", "workers", "most_heads"):
            value = getattr(self, name)
            if name == "heads" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name} must be a whole number of at least 1, got {value!r}")
        if not self.seconds > 0:
            raise InvalidArgument(f"seconds must be positive, got {self.seconds!r}")

    def fit(
        self,
        X: Any,
        Y: Any,
        rng: np.random.Generator,
        *,
        mask: Any = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Fitted:
        """The layer behind the examples, and how it does on rows it has not seen."""
        data = examples(X, Y, mask, bias=self.bias)
        rows = data.rows
        check_span(rows)
        kept = held_rows(rows, rng)
        train = rows.with_weights(rows.weights * ~kept)
        most = self._affordable(train)
        solved = max(EXACT, (ROUNDINGS * data.roundoff) ** 2)
        plan = Plan(
            self.heads, most, self.restarts, self.seconds, self.workers, solved, progress
        )
        white, back = whitened(train)
        found = search(white, plan, rng)
        at = descend(train, back(found.theta), POLISH, damping=1e-8).at
        self._refuse_capped(found, most, train)
        return _fitted(data, train, kept, at, found, rng)

    def _affordable(self, train: Rows) -> int:
        """The largest number of heads whose unknowns the rows outnumber."""
        least = 1 if self.heads is None else self.heads
        if ratio(train, least) < 1.0:
            raise NotIdentifiable(
                f"{len(train.tokens)} examples are too few: {least} head(s) of this width have "
                f"{train.unknowns(least)} unknowns, the examples (a share of {HELD_SHARE:.0%} "
                f"kept aside) hold {train.counted * train.outputs} numbers and "
                f"{train.score_differences} score differences per head. At least "
                f"{int(np.ceil(len(train.tokens) / ratio(train, least)))} examples are needed, "
                "four times as many for an easy fit"
            )
        if self.heads is not None:
            return self.heads
        return max(m for m in range(1, self.most_heads + 1) if m == 1 or ratio(train, m) >= 1.0)

    def _refuse_capped(self, found: Found, most: int, train: Rows) -> None:
        """Without an exact fit, more heads would have to be tried than the data can tell."""
        capped = self.heads is None and most < self.most_heads
        if capped and found.ending != "exact" and found.theta.shape[1] == most:
            raise NotIdentifiable(
                f"no layer of up to {most} head(s) reproduces the labels (residual "
                f"{np.sqrt(found.relative):.1e} of their size), and {most + 1} heads have more "
                f"unknowns ({train.unknowns(most + 1)}) than the examples have numbers. More "
                "examples are needed (or, if so few heads are right, more seconds)"
            )


def ratio(rows: Rows, heads: int) -> float:
    """Examples over the floor: how many times the rows outnumber the unknowns."""
    numbers = rows.counted * rows.outputs / rows.unknowns(heads)
    return min(numbers, rows.score_differences / (rows.queries.shape[2] * rows.width))


def held_rows(rows: Rows, rng: np.random.Generator) -> Array:
    """Which rows (n, a) are kept aside: a random share of those with something to attend to."""
    candidates = np.argwhere((rows.weights > 0) & (rows.lengths > 1)[:, None])
    share = max(HELD_SHARE * len(candidates), HELD_NUMBERS / rows.outputs)
    count = int(np.ceil(min(share, HELD_MOST * len(candidates))))
    chosen = candidates[rng.permutation(len(candidates))[:count]]
    kept = np.zeros(rows.weights.shape, bool)
    kept[chosen[:, 0], chosen[:, 1]] = True
    return kept


def _fitted(
    data: Examples, train: Rows, kept: Array, at: Projection, found: Found, rng: Any
) -> Fitted:
    rows, heads = data.rows, at.theta.shape[1]
    numbers, unknowns = train.counted * train.outputs, train.unknowns(heads)
    power = float(np.sqrt(label_power(rows) / (rows.counted * rows.outputs)))
    noise = np.sqrt(at.cost / max(numbers - unknowns, 1))
    used = train.weights.ravel() > 0
    held_out = _held_out(rows, kept, at)
    final = descend(rows, at.theta, POLISH, damping=1e-8).at
    spread = information(rows, final, rng)
    total = rows.counted * rows.outputs
    level = np.sqrt(final.cost / max(total - unknowns, 1))
    level = max(float(level), data.roundoff * power)
    errors = _errors(rows, spread, level, data.form)
    model = assembled(rows, final.theta, final.values, final.offset, data.form)
    times = ratio(rows, heads)
    details = {
        "heads": heads,
        "examples": data.count,
        "floor": data.count / times,
        "ratio": times,
        "conditioning": spread.conditioning,
        "deficient": spread.deficient,
        "amplification": _amplification(final, spread, power),
        "residual": float(np.sqrt(final.cost / total) / power),
        "noise": float(level / power),
        "held_out_error": float(
            np.sqrt(np.mean((held_out.answers - held_out.predictions) ** 2)) / power
        ),
        "held_out_rows": int(kept.sum()),
        "ending": found.ending,
        "agreeing_starts": found.hits,
        "restarts": found.restarts,
        "seconds": found.seconds,
        "residual_by_heads": {m: float(np.sqrt(r)) for m, r in found.residuals.items()},
    }
    learned = Learned(model, errors, data.count / times, _notes(details), details)
    return Fitted(
        learned,
        held_out,
        at.residual[used],
        final.residual[kept.ravel()],
        (at.cost, final.cost),
        float(noise),
        power,
        (numbers, unknowns),
        data,
    )


def _held_out(rows: Rows, kept: Array, at: Projection) -> HeldOut:
    aside = project_fixed(rows.with_weights(kept.astype(np.float64)), at)
    example, position = np.nonzero(kept)
    return HeldOut(example, position, rows.targets[kept], aside[kept])


def project_fixed(rows: Rows, at: Projection) -> Float[Array, "n a D"]:
    """Outputs of the fitted layer on the rows that count."""
    mixed = averages(rows, patterns(rows, at.theta)) @ at.values
    return mixed.reshape(*rows.weights.shape, -1) + at.offset


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


def _amplification(at: Projection, spread: Information, power: float) -> float:
    """Largest relative standard error of a block for relative noise 1 on the labels."""
    d = at.theta.shape[2]
    worst = 0.0
    for i in range(at.theta.shape[1]):
        for error, block in (
            (spread.theta[:, i], at.theta[:, i]),
            (spread.values[i * d : i * d + d], at.values[i * d : i * d + d]),
        ):
            worst = max(worst, float(np.linalg.norm(error) / max(np.linalg.norm(block), 1e-300)))
    return worst * power


def _notes(details: dict[str, Any]) -> tuple[str, ...]:
    ending = {
        "exact": "The labels are reproduced to rounding.",
        "noise": "What remains behaves like noise: two independent starts end in the same fit, and "
        "one more head explains no more than chance.",
        "spent": "The budget of time or restarts was spent before the fit was settled.",
    }[details["ending"]]
    return (
        f"{details['examples']} examples are {details['ratio']:.2g} times the floor of "
        f"{details['floor']:.3g} for {details['heads']} head(s).",
        ending,
    )
