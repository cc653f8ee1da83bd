"""A multi-head layer from random labelled examples; nothing is asked.

Statement. F(X) = sum_i softmax(X score_i^t X^t) X value_i, read at every position or at the last.
Pairs (X, F(X)) determine scores and values up to the order of heads once there are enough: the
numbers must outnumber the unknowns, and the score differences the entries of a score. With m heads
of width d, as many outputs and k tokens the floor is N* = max(2 m d / k, d^2 / (k (k - 1)))
examples.

Queries. None. A share of the rows is kept aside and judges the fit.

Algebra. Given the scores, the values are linear: variable projection (fitting/variable_projection)
with Levenberg-Marquardt (fitting/levenberg_marquardt) from small random starts, one head swapped at
a time when stuck (restarts, head_count); one head with fewer tokens than outputs has a closed form
(fitting/initial_guess). The number of heads is the first with an exact fit, or the last that
explains more than a head fitted to noise does. Standard errors are those of the Fisher information
(fitting/fisher, hypothesis).

When it fails. Below about twice the floor with two heads or more most starts end in local minima
and time runs out; below the floor any fit is one of many, and it is reported as such. Very strong
attention (scores of standard deviation 100) needs 25 times the floor.

Source. Chen, Li, "Provably learning a multi-head attention layer", STOC 2025 (arXiv 2402.04084),
whose own algorithm is published/chen_li_sculpting; Golub, Pereyra (1973) for the projection.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from keyhole.arrays import real_number, whole_number
from keyhole.errors import InvalidArgument, NotIdentifiable
from keyhole.fitting.attention_rows import Rows
from keyhole.fitting.initial_guess import whiten_tokens
from keyhole.learners.examples.data import Examples, build_examples, check_span
from keyhole.learners.examples.head_count import Found, Progress, SearchOptions, search_heads
from keyhole.learners.examples.hypothesis import (
    HELD_SHARE,
    Fitted,
    add_certificates,
    count_copies_once,
    fit_layer,
    hold_rows,
)
from keyhole.learners.published.chen_li_sculpting import search_by_sculpting

METHODS = ("varpro", "sculpting")
ENOUGH = 12.0  # times the floor: the search needs no more examples; the last descent takes all


@dataclass(frozen=True)
class FromExamples:
    """Learner for attention from labelled examples, without a query: what `keyhole.learn` uses.

    Args:
        heads: Their number; None finds it.
        method: "varpro" (the solver) or "sculpting" (the paper's algorithm, for Boolean inputs and
            at most two heads).
        restarts: Starts of the search, at most.
        seconds: Time of the search, at most.
        workers: Processes that share the restarts.
        most_heads: Heads that are tried, at most.
        bias: Whether key biases and an offset are fitted too.
        noise: Standard deviation of the labels' errors over the labels' root mean square, where it
            is known: 0 for exact labels.

    Example:
        >>> import numpy as np, keyhole
        >>> rng = np.random.default_rng(0)
        >>> X = rng.standard_normal((30, 3, 3))
        >>> P = np.exp(X @ X.transpose(0, 2, 1))
        >>> found = keyhole.learn(X, P / P.sum(axis=2, keepdims=True) @ X, FromExamples(heads=1))
        >>> bool(np.abs(found.model.heads[0].score - np.eye(3)).max() < 1e-8)
        True
    """

    heads: int | None = None
    method: str = "varpro"
    restarts: int = 100_000
    seconds: float = 60.0
    workers: int = 1
    most_heads: int = 8
    bias: bool = False
    noise: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidArgument(f"method must be one of {METHODS}, got {self.method!r}")
        for name in ("heads", "restarts", "workers", "most_heads"):
            if name != "heads" or self.heads is not None:
                whole_number(name, getattr(self, name), 1)
        real_number("seconds", self.seconds, 0.0, finite=False)
        if self.noise is not None:
            real_number("noise", self.noise, 0.0, 1.0, with_low=True)

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
        data = build_examples(X, Y, mask, bias=self.bias)
        # small matrices: shared out over threads, their factorisations take up to ten times as long
        with threadpool_limits(1, "blas"):
            return self._fit(data, rng, progress)

    def _fit(
        self,
        data: Examples,
        rng: np.random.Generator,
        progress: Callable[[Progress], None] | None,
    ) -> Fitted:
        check_span(data.rows)
        kept = hold_rows(data.rows, rng)
        train = data.rows.with_weights(data.rows.weights * ~kept)
        most, least = self._count_affordable(count_copies_once(train)), self.heads or 1
        # squared residual, relative, of an exact fit: labels may miss it by 16 roundings
        solved = max(1e-18, (16.0 * data.roundoff) ** 2)
        if self.method == "sculpting":
            end = search_by_sculpting(train, self.heads, solved, self.seconds, rng)
            found = Found(
                end.theta,
                end.relative,
                "exact" if end.relative <= solved else "spent",
                end.restarts,
                end.seconds,
                1,
                end.residuals,
            )
            fitted = fit_layer(data, train, kept, found, solved, least, rng)
            return add_certificates(fitted, end.sculpted.values, end.sculpted.certificates)
        options = SearchOptions(self.heads, most, self.restarts, self.seconds, self.workers, solved)
        if self.noise is not None:  # what is left may be twice as loud
            options = replace(options, noise=(2.0 * self.noise) ** 2)
        white, back = whiten_tokens(train.sample(most, ENOUGH, rng))
        found = search_heads(white, options, rng, progress)
        found = replace(found, theta=back(found.theta))
        self._refuse_capped(found, most, train)
        return fit_layer(data, train, kept, found, solved, least, rng)

    def _count_affordable(self, train: Rows) -> int:
        """The largest number of heads whose unknowns the rows outnumber."""
        least = 1 if self.heads is None else self.heads
        if train.ratio(least) < 1.0:
            needed = int(np.ceil(len(train.tokens) / train.ratio(least)))
            raise NotIdentifiable(
                f"{len(train.tokens)} examples are too few: {least} head(s) of this width have "
                f"{train.unknowns(least)} unknowns, the examples (a share of {HELD_SHARE:.0%} "
                f"kept aside) hold {train.counted * train.outputs} numbers and "
                f"{train.score_differences} score differences per head, copies not counted. At "
                f"least {needed} examples are needed, four times as many for an easy fit"
            )
        if self.heads is not None:
            return self.heads
        return max(m for m in range(1, self.most_heads + 1) if m == 1 or train.ratio(m) >= 1.0)

    def _refuse_capped(self, found: Found, most: int, train: Rows) -> None:
        """Without an exact fit, more heads would have to be tried than the data can tell."""
        capped = self.heads is None and most < self.most_heads
        share = 1 - train.unknowns(1) / (train.counted * train.outputs)
        if found.residuals.get(1, 0.0) > 0.95 * share**2:
            return  # one head explains nothing at all: it does not matter how many there are
        if capped and found.ending != "exact" and found.theta.shape[1] == most:
            raise NotIdentifiable(
                f"no layer of up to {most} head(s) reproduces the labels (residual "
                f"{np.sqrt(found.relative):.1e} of their size), and {most + 1} heads have more "
                f"unknowns ({train.unknowns(most + 1)}) than the examples have numbers. More "
                "examples are needed (or, if so few heads are right, more seconds)"
            )
