"""From a template and answers to weights: many short starts, the best of them carried on.

Statement.  Weights are found with which the template explains all answers to their rounding; or
            the best that were reached, with the loss that is left.
Queries.    None: more starts use the same answers.
Algebra.    Starts see answers to short tokens: with these attention is soft and networks are nearly
            polynomials, and far more starts end in the right valley than with long tokens, where
            weights saturate. (Scalar attention of width 8: of eight starts five to eight end at
            rounding with tokens of 0.6 times the ordinary size, on four boxes; with 0.5 to 2 times
            the ordinary size none of twelve starts did on three of eleven boxes.)
            A round is a number of starts of few steps each; the best of the round is carried on
            with the answers to short tokens, then with all. A start that is at rounding already
            ends the round.
When it fails. All rounds end in wrong places, or in valleys too slow for the time: what is returned
            says so by its loss. A right template sticks too: a loss above rounding is no evidence
            against the template.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.template.descent import Fitted, fit
from keyhole.learners.template.forward import Answered, Forward, Residuals
from keyhole.oracles.noise import ROUNDINGS

EXPLAINED = ROUNDINGS**2  # mean square residual in units of rounding: as good as exact


@dataclass(frozen=True)
class Effort:
    """How long is searched.

    starts: in a round, at most; more of them find the right valley more often, each costs `short`
    steps. short: steps of a start. long: steps with which the best start of a round is carried on,
    each time that it still gains.
    """

    starts: int = 8
    short: int = 45
    long: int = 200


@dataclass(frozen=True, eq=False)
class Search:
    """The best weights of a search; loss: mean square residual in units of rounding."""

    weights: Float[Array, " unknowns"]
    loss: float
    rounds: int
    starts: int

    @property
    def explained(self) -> bool:
        return self.loss <= EXPLAINED


def search(
    forward: Forward,
    short_tokens: Sequence[Answered],
    data: Sequence[Answered],
    effort: Effort,
    rng: np.random.Generator,
    until: float,
    known: Float[Array, " unknowns"] | None = None,
    watch: Callable[[float], None] | None = None,
) -> Search:
    """The weights that explain all answers, or the best when the time is up.

    Args:
        forward: the template.
        short_tokens: answers that starts are made with.
        data: all answers.
        effort: starts and steps.
        rng: draws the starts.
        until: time (`time.monotonic`) at which it ends.
        known: weights that explained fewer answers: the first start, if given.
        watch: called with the loss after each step.
    """
    easy, whole = Residuals(forward, short_tokens), Residuals(forward, data)
    best: Fitted | None = None
    rounds = starts = 0
    while best is None or (best.loss > EXPLAINED and time.monotonic() < until):
        rounds += 1
        chosen: Fitted | None = None
        for _ in range(effort.starts):
            start = fit(
                easy,
                forward.draw(rng) if known is None or starts else known,
                steps=effort.short,
                target=EXPLAINED,
                until=until,
                watch=watch,
            )
            starts += 1
            chosen = start if chosen is None or start.loss < chosen.loss else chosen
            if chosen.loss <= EXPLAINED or time.monotonic() > until:
                break
        assert chosen is not None
        if chosen.loss > EXPLAINED:
            chosen = carry_on(easy, chosen, effort, until, watch)
        ended = carry_on(whole, chosen, effort, until, watch)
        best = ended if best is None or ended.loss < best.loss else best
    return Search(best.weights, best.loss, rounds, starts)


def carry_on(
    residuals: Residuals,
    start: Fitted,
    effort: Effort,
    until: float,
    watch: Callable[[float], None] | None = None,
) -> Fitted:
    """On from a start as long as a long run takes most of the loss away, or to rounding."""
    before, now = (
        np.inf,
        fit(
            residuals, start.weights, steps=effort.long, target=EXPLAINED, until=until, watch=watch
        ),
    )
    while now.loss > EXPLAINED and now.loss < 0.1 * before and time.monotonic() < until:
        before = now.loss
        now = fit(
            residuals, now.weights, steps=effort.long, target=EXPLAINED, until=until, watch=watch
        )
    if now.loss <= EXPLAINED:  # a few steps more, down to where rounding ends it
        now = fit(residuals, now.weights, steps=effort.short, target=1.0, until=until, watch=watch)
    return now
