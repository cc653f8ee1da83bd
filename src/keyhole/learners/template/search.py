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
from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.template.descent import Fitted, fit
from keyhole.learners.template.forward import Answered, Forward, Residuals
from keyhole.learners.template.pruning import prune
from keyhole.learners.template.widening import (
    WIDER,
    Neuron,
    Pair,
    draw_wide,
    find_dead,
    find_heads,
    find_neurons,
    narrow,
    widen,
)
from keyhole.oracles.noise import ROUNDINGS

EXPLAINED = ROUNDINGS**2  # mean square residual in units of rounding: as good as exact
PROMISING = 1e-6  # loss of a start beside the answers' mean square, from which it is carried on
POOR = 1e-3  # a start that is above it after a few steps is given up
PRUNED = 1e-9  # from which surplus neurons go
SHARPNESS = (2.0, 6.0, 20.0, 60.0)  # of what stands for ReLU, stage by stage


@dataclass(frozen=True)
class Effort:
    """How long is searched.

    starts: in a round, at most; more of them find the right valley more often, each costs `short`
    steps. short: steps of a start. long: steps with which the best start of a round is carried on,
    each time that it still gains. refit: steps after a neuron was taken away. at_most: whether
    neurons and heads go that are not needed, beyond the template's number. until: CPU time of the
    process (`time.process_time`) at which it ends. watch: called with the loss after
    each step.
    """

    until: float
    starts: int = 8
    short: int = 45
    long: int = 200
    refit: int = 12
    at_most: bool = False
    watch: Callable[[float], None] | None = None
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
    """
    easy, whole = Residuals(forward, short_tokens), Residuals(forward, data)
    wide = Wide(forward, pairs, short_tokens, effort)
    best: Fitted | None = None
    rounds = starts = 0
    if known is not None:
        best = carry_on(whole, known, effort, free=find_free(forward, pairs, known))
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
        if chosen.loss > PROMISING * wide.size and wide.may_be_given_up:
            continue
        if pairs or effort.at_most:
            chosen = wide.carry_on(chosen)
        if chosen.loss > PRUNED * wide.size and wide.may_be_given_up:
            continue
        weights = wide.narrow(chosen) if pairs or effort.at_most else chosen.weights
        free = find_free(forward, pairs, weights)
        ended = carry_on(easy, weights, effort, free=free)
        ended = carry_on(whole, ended.weights, effort, free=free)
        best = ended if best is None or ended.loss < best.loss else best
    return Search(best.weights, best.loss, rounds, starts)


class Wide:
    """The fits of a round, with more neurons than the template has."""

    def __init__(
        self, template: Forward, pairs: Sequence[Pair], data: Sequence[Answered], effort: Effort
    ) -> None:
        self.template, self.pairs, self.data, self.effort = template, pairs, data, effort
        kinked = any(pair.kinked for pair in pairs)
        self.stages = [widen(template, pairs, WIDER, sharp) for sharp in SHARPNESS if kinked]
        self.stages.append(widen(template, pairs, WIDER))
        self.forward = self.stages[0]
        numbers = sum(one.answers.size for one in data)
        self.size = sum(float(np.sum((one.answers / one.errors) ** 2)) for one in data) / numbers

    def fit(self, start: Array) -> Fitted:
        """A start, as long as a few steps take most of the loss away."""
        residuals, effort = Residuals(self.forward, self.data), self.effort
        before, now = np.inf, run(residuals, start, effort, effort.short)
        while self.pairs and PRUNED * self.size < now.loss < 0.2 * before and not effort.over:
            if now.loss > POOR * self.size:
                break
            before, now = now.loss, run(residuals, now.weights, effort, effort.short)
        return now

    @property
    def may_be_given_up(self) -> bool:
        """Whether a loss says that a start is a bad one: not while ReLU is another function, and
        not where the time is nearly up."""
        return len(self.stages) == 1 and bool(self.pairs) and not self.effort.late

    def carry_on(self, start: Fitted) -> Fitted:
        """A start on through all stages, until surplus neurons may go or nothing is gained."""
        for stage in self.stages:
            residuals = Residuals(stage, self.data)
            start = carry_on(residuals, start.weights, self.effort, target=PRUNED * self.size)
        return start

    def narrow(self, fitted: Fitted) -> Float[Array, " unknowns"]:
        """A fit without its surplus neurons, as weights of the template."""
        stage, effort = self.stages[-1], self.effort
        residuals = Residuals(stage, self.data)

        def refit(weights: Array, free: Array, deep: bool) -> Fitted:
            steps = effort.long // 2 if deep else effort.refit
            return run(residuals, weights, effort, steps, free=free)

        def out_of_time() -> bool:
            return effort.over

        neurons = find_neurons(stage, self.pairs)
        pruned = prune(residuals, fitted, neurons, self.pairs, refit, out_of_time)
        if effort.at_most and not effort.over:
            heads = find_heads(stage, len(self.pairs))
            parts = [*pruned.neurons, *(one for layer in heads for one in layer)]
            none = [replace(pair, neurons=0) for pair in self.pairs]
            none += [Pair("", "", 0, 0.0, False) for _ in heads]
            pruned = prune(
                residuals, pruned.fitted, parts, none, refit, out_of_time,
                free=pruned.free, force=False,
            )  # fmt: skip
        deep = refit(pruned.fitted.weights, pruned.free, True)
        kept = [one for one in pruned.neurons if one.pair < len(self.pairs)]
        return narrow(self.template, stage, self.pairs, deep.weights, kept)


def find_free(forward: Forward, pairs: Sequence[Pair], weights: Array) -> Array:
    """Which weights move: not those of parts that were taken away."""
    free = np.ones(len(weights), dtype=bool)
    for part in find_dead(find_parts(forward, pairs), weights):
        free[part.all] = False
    return free


def find_parts(forward: Forward, pairs: Sequence[Pair]) -> list[Neuron]:
    """Neurons and heads of the template, heads with numbers behind those of the pairs."""
    heads = find_heads(forward, len(pairs))
    return [*find_neurons(forward, pairs), *(one for layer in heads for one in layer)]


def run(
    residuals: Residuals,
    start: Array,
    effort: Effort,
    steps: int,
    target: float = EXPLAINED,
    free: Array | None = None,
) -> Fitted:
    """A fit of so many steps."""
    return fit(
        residuals, start, steps=steps, target=target, free=free,
        until=effort.until, watch=effort.watch,
    )  # fmt: skip


def carry_on(
    residuals: Residuals,
    start: Array,
    effort: Effort,
    target: float = EXPLAINED,
    free: Array | None = None,
) -> Fitted:
    """On from a start as long as a long run takes most of the loss away, or to a target."""
    before, now = np.inf, run(residuals, start, effort, effort.short, target, free)
    while now.loss > target and now.loss < 0.1 * before and not effort.over:
        before = now.loss
        now = run(residuals, now.weights, effort, effort.long, target, free)
    if now.loss <= EXPLAINED:  # a few steps more, down to where rounding ends it
        now = run(residuals, now.weights, effort, effort.short, 1.0, free)
    return now
