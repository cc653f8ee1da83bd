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
            Every other start of these sees single tokens alone at first, among which attention is
            trivial; then what these do not show, queries and keys, is drawn anew, rather small.
            A round is a number of starts of few steps each, with more neurons than the template has
            (`widening.py`); the first that is promising, or the best of the round, is carried on,
            its surplus neurons are taken away (`pruning.py`), its leaks become signs
            (`turning.py`), and what is left is fitted as the template itself, to the answers to
            short tokens and then to all. Where activations are ReLU, starts see smooth ones, which
            become sharper before surplus neurons go.
When it fails. All rounds end in wrong places, or in valleys too slow for the time: what is returned
            says so by its loss. A right template sticks too: a loss above rounding is no evidence
            against the template.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.template.descent import Fitted, fit
from keyhole.learners.template.forward import Answered, Forward, Residuals
from keyhole.learners.template.pruning import Pruned, count_surplus, prune
from keyhole.learners.template.turning import Pulled, pull_leaks
from keyhole.learners.template.widening import (
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
POOR = 5e-3  # a start that is above it after a few steps is given up
PRUNED = 1e-7  # from which surplus neurons go
FOUND = 1e-12  # from which what single tokens show is taken as found, if it is no more than that
GONE = 1e-11  # of starts that came so far, while their surplus neurons go
SMOOTHED = 1e-8  # in place of FOUND for a smooth function in place of ReLU
WIDER = 1.5  # neurons of a start beside the template's
WIDTHS = (1.5, 3.0, 2.0)  # the same of starts that see single tokens alone, one after another
SPREADS = (0.5, 0.3, 0.7)  # of weights that single tokens do not show, beside ordinary ones
DEEP = 1e-18  # to which the fit goes before leaks become signs
TURNS = 4  # patterns of signs that are drawn
MORE_TURNS = 12  # where single tokens show a slice of the layers, and a start has cost far more
GAIN = 0.8  # loss after a few steps over that before, from which more of them are worth while
SHARPNESS = (2.0, 6.0, 20.0, 60.0)  # of what stands for ReLU, stage by stage


@dataclass(frozen=True)
class Effort:
    """How long is searched.

    starts: in a round, at most; more of them find the right valley more often, each costs `short`
    steps, or up to `longest` if it goes on halving its loss. long: steps with which the best start
    of a round is carried on, each time that it still gains. refit: steps after a neuron was taken
    away. polish: steps once the answers are explained, again while they gain. at_most: whether
    neurons and heads go that are not needed, beyond the template's number. until: CPU time of the
    process (`time.process_time`) at which it ends. watch: called with the loss after each step.
    """

    until: float
    starts: int = 8
    short: int = 45
    long: int = 200
    longest: int = 600
    refit: int = 60
    polish: int = 10
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
    ways: list[Route] = [AllAtOnce(forward, pairs, easy, effort)]
    if pairs and not effort.at_most and any(one.tokens.shape[1] == 1 for one in short_tokens):
        ways.insert(0, SingleTokens(forward, pairs, easy, effort))
    best: Fitted | None = None
    rounds = 0
    if known is not None:
        free = find_free(forward, pairs, known)
        best = polish(whole, carry_on(whole, known, effort, free=free), effort, free)
    while best is None or (best.loss > EXPLAINED and not effort.over):
        ended = ways[rounds % len(ways)].go(rng)
        rounds += 1
        if ended is None:
            continue
        free = find_free(forward, pairs, ended.weights)
        ended = polish(whole, carry_on(whole, ended.weights, effort, free=free), effort, free)
        best = ended if best is None or ended.loss < best.loss else best
    return Search(best.weights, best.loss, rounds, sum(way.starts for way in ways))


class Route(Protocol):
    """A way from random starts to weights of the template. starts: made so far."""

    starts: int

    def go(self, rng: np.random.Generator) -> Fitted | None:
        """Weights that explain answers to short tokens; None where this round found none."""


class SingleTokens:
    """What single tokens show is found from these alone, down to the template's own neurons; then
    queries and keys, with all. Tokens narrower than the stream show a slice of the hidden layers
    only, and the neurons that are left on a slice are mostly wrong beside it: there all answers are
    explained with the surplus, which goes afterwards."""

    def __init__(
        self, template: Forward, pairs: Sequence[Pair], easy: Residuals, effort: Effort
    ) -> None:
        single = [one for one in easy.data if one.tokens.shape[1] == 1]
        self.template, self.easy, self.effort = template, easy, effort
        self.alone = Residuals(template, single)
        self.shown = find_shown(self.alone)
        stream = max(template.shapes[pair.inner + ".weight"][1] for pair in pairs)
        self.sliced = single[0].tokens.shape[2] < stream
        level, turns = (FOUND, MORE_TURNS) if self.sliced else (PRUNED, TURNS)
        self.wides = [
            (
                Wide(template, pairs, single, effort, factor, FOUND),
                Wide(template, pairs, easy.data, effort, factor, level, turns),
            )
            for factor in WIDTHS
        ]
        self.starts = 0

    def go(self, rng: np.random.Generator) -> Fitted | None:
        for _ in range(self.effort.starts):
            if self.effort.late:
                break
            wide, whole = self.wides[self.starts % len(self.wides)]
            self.starts += 1
            start = wide.descend(wide.draw(rng))
            if start.loss > limit(wide.residuals, SMOOTHED if wide.kinked else FOUND):
                continue
            if self.sliced:
                ended = self.attach_wide(whole, start.weights, wide.shown, rng)
                if ended is not None:
                    return ended
                continue
            ended = wide.end(start, self.alone, rng)
            if ended is None or ended.loss > limit(self.alone, FOUND):
                continue
            known = self.attach(self.easy, ended.weights, self.shown, rng)
            if known.loss > limit(self.easy, FOUND) and not self.shown.all():
                known = self.attach(whole.residuals, start.weights, wide.shown, rng)
                if known.loss <= limit(whole.residuals, PROMISING):
                    return whole.end(known, self.easy, rng)
                continue
            return carry_on(self.easy, known.weights, self.effort)
        return None

    def attach_wide(
        self, whole: "Wide", known: Array, shown: Array, rng: np.random.Generator
    ) -> Fitted | None:
        """All answers with the surplus, then the template itself; None where it is given up."""
        ended = self.attach(whole.residuals, known, shown, rng)
        return whole.end(ended, self.easy, rng) if ended.loss <= whole.promising else None

    def attach(
        self, residuals: Residuals, known: Array, shown: Array, rng: np.random.Generator
    ) -> Fitted:
        """On with all weights from those that single tokens show, the others drawn rather small."""
        level, best = limit(residuals, FOUND), None
        for spread in SPREADS:
            start = np.where(shown, known, residuals.forward.draw(rng, spread))
            ended = descend(residuals, start, self.effort, level, POOR * residuals.size)
            best = ended if best is None or ended.loss < best.loss else best
            if best.loss <= level or shown.all() or self.effort.over:
                break
        assert best is not None
        return best


class AllAtOnce:
    """Starts see sequences of all lengths."""

    def __init__(
        self, template: Forward, pairs: Sequence[Pair], easy: Residuals, effort: Effort
    ) -> None:
        self.easy, self.effort, self.starts = easy, effort, 0
        self.wide = Wide(template, pairs, easy.data, effort, WIDER, PRUNED)

    def go(self, rng: np.random.Generator) -> Fitted | None:
        wide, chosen = self.wide, None
        for _ in range(self.effort.starts):
            start = wide.fit(rng, self.starts)
            self.starts += 1
            chosen = start if chosen is None or start.loss < chosen.loss else chosen
            if chosen.loss <= wide.promising or self.effort.over:
                break
        assert chosen is not None
        if chosen.loss > POOR * wide.size and wide.may_be_given_up:
            return None
        ended = wide.end(chosen, self.easy, rng)
        if ended is None or (ended.loss > limit(self.easy, PRUNED) and wide.may_be_given_up):
            return None
        return ended


class Wide:
    """Fits with more neurons than the template has.

    Args:
        template: what is wanted in the end.
        pairs: its hidden layers.
        data: answers that are fitted.
        effort: starts, steps and time.
        factor: neurons over the template's.
        level: loss beside the answers' mean square at which surplus neurons go.
        turns: patterns of signs that are drawn, at most.
    """

    def __init__(
        self,
        template: Forward,
        pairs: Sequence[Pair],
        data: Sequence[Answered],
        effort: Effort,
        factor: float,
        level: float,
        turns: int = TURNS,
    ) -> None:
        self.template, self.pairs, self.data, self.effort = template, pairs, data, effort
        self.turns = turns
        self.kinked = any(pair.kinked for pair in pairs)
        # starts that become as good as exact with a smooth function have made it sharp themselves
        self.exact = level == FOUND
        sharp = SHARPNESS[: 1 if self.exact else None] if self.kinked else ()
        self.stages = [widen(template, pairs, factor, one) for one in (*sharp, 0.0)]
        self.forward = self.stages[0]
        self.residuals = Residuals(self.forward, data)
        least = min(one.tokens.shape[1] for one in data)
        self.single = Residuals(
            self.forward, [one for one in data if one.tokens.shape[1] == least == 1]
        )
        self.size, self.target = self.residuals.size, limit(self.residuals, level)
        self.shown = find_shown(self.residuals)

    @property
    def promising(self) -> float:
        """Loss of a start from which it is carried on."""
        return limit(self.residuals, PRUNED if self.pairs else PROMISING)

    @property
    def may_be_given_up(self) -> bool:
        """Whether a loss says that a start is a bad one: not where the time is nearly up."""
        return bool(self.pairs) and not self.effort.late

    def draw(self, rng: np.random.Generator) -> Float[Array, " unknowns"]:
        return draw_wide(self.forward, rng)

    def descend(self, start: Array) -> Fitted:
        """Short runs to where surplus neurons may go."""
        most = POOR * self.size
        return descend(self.residuals, start, self.effort, self.target, most, self.shown)

    def fit(self, rng: np.random.Generator, number: int) -> Fitted:
        """A start, as long as a few steps take enough of the loss away. Every other start sees
        single tokens alone at first, among which no attention is needed."""
        start = self.draw(rng)
        if not self.pairs:
            return run(self.residuals, start, self.effort, self.effort.short)
        if self.single.numbers and number % 2 == 0:
            shown, level = find_shown(self.single), limit(self.single, PROMISING)
            single = descend(self.single, start, self.effort, level, self.single.size, shown)
            unseen = self.forward.draw(rng, SPREADS[number // 2 % len(SPREADS)])
            start = np.where(shown, single.weights, unseen)
        return self.descend(start)

    def end(self, start: Fitted, easy: Residuals, rng: np.random.Generator) -> Fitted | None:
        """A start on as the template itself, to the same answers; None where it is given up.

        Args:
            start: of the wide template.
            easy: residuals of the template.
            rng: draws signs of neurons.
        """
        if not (self.pairs or self.effort.at_most):
            return carry_on(easy, start.weights, self.effort)
        if self.kinked and start.loss > limit(self.residuals, PROMISING) and self.may_be_given_up:
            return None
        for stage in self.stages if start.loss > self.target or self.kinked else []:
            residuals = Residuals(stage, self.data)
            start = carry_on(residuals, start.weights, self.effort, self.target, self.shown)
        if start.loss > limit(self.residuals, PROMISING) and self.may_be_given_up:
            return None
        pruned = self.prune(start)
        lost = self.exact and bool(count_surplus(pruned.neurons, self.pairs))
        if (lost or pruned.fitted.loss > POOR * self.size) and self.may_be_given_up:
            return None
        stage, effort, best = self.stages[-1], self.effort, None
        residuals = Residuals(stage, self.data)
        kept = [one for one in pruned.neurons if one.pair < len(self.pairs)]
        tried: list[bytes] = []
        for turn in range(self.turns):
            pull = pull_leaks(
                residuals, pruned.fitted.weights, kept, self.pairs, rng if turn else None
            )
            if isinstance(pull, Pulled):
                tried.append(pull.targets.tobytes())
                if tried[-1] in tried[:-1]:
                    continue
            weights = pruned.fitted.weights
            if pull is not residuals:
                weights = carry_on(
                    pull, weights, effort, limit(self.residuals, DEEP), pruned.free
                ).weights
            weights = narrow(self.template, stage, self.pairs, weights, kept)
            free = find_free(self.template, self.pairs, weights) & find_shown(easy)
            ended = carry_on(easy, weights, effort, free=free)
            best = ended if best is None or ended.loss < best.loss else best
            if best.loss <= EXPLAINED or pull is residuals or effort.over:
                break
        assert best is not None
        return best

    def prune(self, fitted: Fitted) -> Pruned:
        """A fit without its surplus neurons, and heads if they may go, carried on."""
        stage, effort = self.stages[-1], self.effort
        residuals = Residuals(stage, self.data)
        level, bottom = limit(residuals, GONE if self.exact else PRUNED), limit(residuals, DEEP)

        def refit(weights: Array, free: Array, deep: bool) -> Fitted:
            if deep:
                return run(residuals, weights, effort, effort.long, bottom, free)
            return fit(
                residuals, weights, steps=effort.refit, target=level, free=free,
                patience=effort.refit // 3, until=effort.until, watch=effort.watch,
            )  # fmt: skip

        def refit_exactly(weights: Array, free: Array, deep: bool) -> Fitted:
            return run(residuals, weights, effort, effort.long, free=free)

        neurons = find_neurons(stage, self.pairs)
        pruned = prune(
            residuals, fitted, neurons, self.pairs, refit, lambda: effort.over,
            free=self.shown, level=level, force=not self.exact,
        )  # fmt: skip
        if self.exact and count_surplus(pruned.neurons, self.pairs):
            return pruned
        deep = carry_on(residuals, pruned.fitted.weights, effort, bottom, pruned.free)
        pruned = replace(pruned, fitted=deep)
        if effort.at_most and not effort.over:
            heads = find_heads(stage, len(self.pairs))
            parts = [*pruned.neurons, *(one for layer in heads for one in layer)]
            none = [replace(pair, neurons=0) for pair in self.pairs]
            none += [Pair("", "", 0, 0.0, False) for _ in heads]
            pruned = prune(
                residuals, deep, parts, none, refit_exactly, lambda: effort.over,
                free=pruned.free, force=False,
            )  # fmt: skip
        return pruned


def limit(residuals: Residuals, share: float) -> float:
    """A share of the answers' mean square, or what is as good as exact where that is more."""
    return max(share * residuals.size, EXPLAINED)


def find_shown(residuals: Residuals) -> Array:
    """Which weights these answers depend on at all."""
    weights = residuals.forward.draw(np.random.default_rng(0))
    return np.asarray(residuals.jacobian(weights).any(axis=0))


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


def descend(
    residuals: Residuals,
    start: Array,
    effort: Effort,
    target: float,
    most: float,
    free: Array | None = None,
) -> Fitted:
    """A short run, and if it ends below `most` on to a target, as long as so many steps more halve
    the loss."""
    now = run(residuals, start, effort, effort.short, target, free)
    if target < now.loss < most and not effort.over:
        now = fit(
            residuals, now.weights, steps=effort.longest, target=target, free=free,
            patience=effort.short, until=effort.until, watch=effort.watch,
        )  # fmt: skip
    return now


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
    return now


def polish(residuals: Residuals, fitted: Fitted, effort: Effort, free: Array) -> Fitted:
    """Some steps more where the answers are explained, while they bring something: down to where
    rounding ends it."""
    before, now = np.inf, fitted
    while now.loss <= min(EXPLAINED, GAIN * before) and not effort.over:
        before, now = now.loss, run(residuals, now.weights, effort, effort.polish, 1.0, free)
    return now
