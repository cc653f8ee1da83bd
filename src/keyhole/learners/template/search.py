"""From a template and answers to weights: many short starts, the best of them carried on.

Statement.  Weights are found with which the template explains all answers to their rounding; or
            the best that were reached, with the loss that is left.
Queries.    None: more starts use the same answers.
Algebra.    Without hidden layers starts see answers to short tokens: with these attention is soft,
            and far more starts end in the right valley than with long tokens, where weights
            saturate. (Scalar attention of width 8: of eight starts five to eight end at
            rounding with tokens of 0.6 times the ordinary size, on four boxes; with 0.5 to 2 times
            the ordinary size none of twelve starts did on three of eleven boxes.) Hidden layers are
            nearly linear for short tokens and leave too little trace: starts see ordinary ones.
            A round is a number of starts of few steps each, with more neurons than the template has
            (`widening.py`); the first that is promising, or the best of the round, is carried on,
            its surplus neurons are taken away (`pruning.py`), and what is left is fitted as the
            template itself, to the answers to short tokens and then to all. Where activations are
            ReLU, starts see smooth ones, which become sharper before surplus neurons go.
When it fails. All rounds end in wrong places, or in valleys too slow for the time: what is returned
            says so by its loss. A right template sticks too: a loss above rounding is no evidence
            against the template.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.template.descent import Fitted, fit
from keyhole.learners.template.forward import Answered, Forward, Residuals
from keyhole.learners.template.pruning import prune
from keyhole.learners.template.widening import (
    WIDER,
    Pair,
    draw_wide,
    find_neurons,
    narrow,
    widen,
)
from keyhole.oracles.noise import ROUNDINGS

EXPLAINED = ROUNDINGS**2  # mean square residual in units of rounding: as good as exact
PROMISING = 1e-6  # loss of a start beside the answers' mean square, from which it is carried on
POOR = 1e-3  # a start that is above it after a few steps is given up
PRUNED = 1e-9  # and from which surplus neurons may go
SHARPNESS = (2.0, 6.0, 20.0, 60.0)  # of what stands for ReLU, stage by stage


@dataclass(frozen=True)
class Effort:
    """How long is searched.

    starts: in a round, at most; more of them find the right valley more often, each costs `short`
    steps. short: steps of a start. long: steps with which the best start of a round is carried on,
    each time that it still gains. refit: steps after a neuron was taken away. until: CPU time of
    the process (`time.process_time`) at which it ends.
    """

    until: float
    starts: int = 8
    short: int = 45
    long: int = 200
    refit: int = 12
    begun: float = field(default_factory=time.process_time)

    @property
    def late(self) -> bool:
        """Whether what there is should be brought to an end."""
        return time.process_time() > self.begun + 0.75 * (self.until - self.begun)

    @property
    def over(self) -> bool:
        return time.process_time() > self.until


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
    pairs: Sequence[Pair],
    short_tokens: Sequence[Answered],
    data: Sequence[Answered],
    effort: Effort,
    rng: np.random.Generator,
    known: Float[Array, " unknowns"] | None = None,
    watch: Callable[[float], None] | None = None,
) -> Search:
    """The weights that explain all answers, or the best when the time is up.

    Args:
        forward: the template.
        pairs: its hidden layers, which starts make wider.
        short_tokens: answers that starts are made with.
        data: all answers.
        effort: starts, steps and time.
        rng: draws the starts.
        known: weights that explained fewer answers: the first start, if given.
        watch: called with the loss after each step.
    """
    easy, whole = Residuals(forward, short_tokens), Residuals(forward, data)
    best: Fitted | None = None
    wide = Wide(forward, pairs, short_tokens, effort, watch)
    rounds = starts = 0
    if known is not None:
        best = carry_on(whole, fit_short(whole, known, effort, watch), effort, watch)
    while best is None or (best.loss > EXPLAINED and not effort.over):
        rounds += 1
        chosen: Fitted | None = None
        for _ in range(effort.starts):
            start = wide.fit(draw_wide(wide.forward, rng))
            starts += 1
            chosen = start if chosen is None or start.loss < chosen.loss else chosen
            if chosen.loss <= PROMISING * wide.size or effort.over:
                break
        assert chosen is not None
        if pairs and chosen.loss > PROMISING * wide.size and not effort.late:
            continue
        weights = wide.narrow(chosen) if pairs else chosen.weights
        ended = carry_on(easy, fit_short(easy, weights, effort, watch), effort, watch)
        ended = carry_on(whole, fit_short(whole, ended.weights, effort, watch), effort, watch)
        best = ended if best is None or ended.loss < best.loss else best
    return Search(best.weights, best.loss, rounds, starts)


class Wide:
    """The fits of a round, with more neurons than the template has."""

    def __init__(
        self,
        template: Forward,
        pairs: Sequence[Pair],
        data: Sequence[Answered],
        effort: Effort,
        watch: Callable[[float], None] | None,
    ) -> None:
        self.template, self.pairs, self.data = template, pairs, data
        self.effort, self.watch = effort, watch
        kinked = any(pair.kinked for pair in pairs)
        self.stages = [widen(template, pairs, WIDER, sharp) for sharp in SHARPNESS if kinked]
        self.stages.append(widen(template, pairs, WIDER))
        self.forward = self.stages[0]
        numbers = sum(one.answers.size for one in data)
        self.size = sum(float(np.sum((one.answers / one.errors) ** 2)) for one in data) / numbers

    def fit(self, start: Array) -> Fitted:
        """A start, as long as a few steps take most of the loss away."""
        residuals, effort = Residuals(self.forward, self.data), self.effort
        before, now = np.inf, fit_short(residuals, start, effort, self.watch)
        while self.pairs and PRUNED * self.size < now.loss < 0.2 * before and not effort.over:
            if now.loss > POOR * self.size:
                break
            before, now = now.loss, fit_short(residuals, now.weights, effort, self.watch)
        return now

    def narrow(self, start: Fitted) -> Float[Array, " unknowns"]:
        """The start carried on, without surplus neurons, as weights of the template."""
        fitted = start
        for stage in self.stages:
            residuals = Residuals(stage, self.data)
            fitted = carry_on(
                residuals,
                fit_short(residuals, fitted.weights, self.effort, self.watch),
                self.effort,
                self.watch,
                target=PRUNED * self.size,
            )

        def refit(weights: Array, free: Array, deep: bool) -> Fitted:
            effort = self.effort
            steps = effort.long // 2 if deep else effort.refit
            return fit(residuals, weights, steps=steps, target=EXPLAINED, free=free,
                       until=effort.until, watch=self.watch)  # fmt: skip

        neurons = find_neurons(stage, self.pairs)
        pruned = prune(residuals, fitted, neurons, self.pairs, refit, lambda: self.effort.over)
        deep = refit(pruned.fitted.weights, pruned.free, True)
        return narrow(self.template, stage, self.pairs, deep.weights, pruned.neurons)


def fit_short(
    residuals: Residuals,
    start: Array,
    effort: Effort,
    watch: Callable[[float], None] | None = None,
) -> Fitted:
    """The few steps of a start."""
    return fit(
        residuals, start, steps=effort.short, target=EXPLAINED, until=effort.until, watch=watch
    )


def carry_on(
    residuals: Residuals,
    start: Fitted,
    effort: Effort,
    watch: Callable[[float], None] | None = None,
    target: float = EXPLAINED,
) -> Fitted:
    """On from a start as long as a long run takes most of the loss away, or to a target."""
    before, now = np.inf, start
    while now.loss > target and now.loss < 0.1 * before and not effort.over:
        before = now.loss
        now = fit(residuals, now.weights, steps=effort.long, target=target,
                  until=effort.until, watch=watch)  # fmt: skip
    if now.loss <= EXPLAINED:  # a few steps more, down to where rounding ends it
        now = fit(residuals, now.weights, steps=effort.short, target=1.0,
                  until=effort.until, watch=watch)  # fmt: skip
    return now
