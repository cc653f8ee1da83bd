"""Sequences with no room for a token per head: queries of two tokens.

Statement. [x + u; x] is answered by x . V + u . V / 2 + sum_h (u . v_h) tanh(u . k_h(x) / 2) / 2
with V the sum of the values: a head and its mirror image (score, key bias and value negated) answer
alike, but for V. So the layer of fewest heads is determined if exactly one choice of signs gives
sum of ± v_h = V, and then it is recovered. If none does, some head attends to all tokens alike, or
two have opposite scores, and every choice of signs is a layer that answers all pairs as the box
does: no query of two tokens can tell. Three tokens can (`measure_uniform_value`).

Queries. (1) [x + s T; x] with s enormous: head h attends to the first token if T . k_h(x) > 0, else
to the anchor, so f = x . V + s T . (sum of the values of the heads that do), exactly. T runs over
half a circle (an angular sweep). Between the angles at which heads switch the answer is linear in
T, with two coefficients in the plane of the circle; intervals whose ends differ are halved. Near a
switch angle s is lowered until the head attends to both tokens: two such answers give the angle and
how sharply the head reacts. About 20 per head. (2) Soft probes [x + t; x] with t = a_h + u. The
pivot a_h is long and at right angles to k_h(x), so head h weighs both tokens, whereas every other
head is far to one side: it attends to the first token or to the anchor alone. As many as with
separators: H(d² + d).

Algebra. The change of the coefficients at a switch angle is ± v_h. t . k_h(x) = logit((f - x . V -
t . A_h) / (t . v_h)), A_h the sum of the values of the heads that attend to the first token.

When it fails. Two heads that switch at almost the same angle (nearly equal or nearly opposite
heads, or bad luck: another circle). A box whose attention never hardens switches everywhere. At
other anchors a_h . k_h is no longer zero: they must lie closer to the first one than separators
require.

Source. Keyhole's own; docs/methods/multi_head.md.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import qr

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.errors import Counterexample, IllConditioned, NotIdentifiable, WrongFamily
from keyhole.learners.base import Hypothesis, Result
from keyhole.learners.multi_head.hard_attention import (
    HARD_SCALE,
    HUGE_TOKENS,
    MOST_HEADS,
    NO_VALUE,
    query_hard,
)
from keyhole.learners.multi_head.isolated_heads import (
    MARGIN,
    TARGET,
    Draft,
    HeadValues,
    IsolatedHeads,
    Progress,
    ScalarProblem,
    attempt_with_separators,
    draft_uniform,
    draw_conclusion,
    measure_first_keys_again,
    measure_other_keys,
    start_table,
    try_anchors,
)
from keyhole.learners.multi_head.soft_probe import (
    SATURATED,
    Isolation,
    Unexplained,
)
from keyhole.learners.multi_head.validation import PriorKnowledge
from keyhole.linalg.bases import random_directions
from keyhole.linalg.linear_system import LinearSystem
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention

MISFIT_ERRORS = 30.0  # standard errors by which an answer, or a sum of values, may be off
ANGLE_WIDTH = 1e-4  # width, in radians, of an interval with one switch angle
VISIBLE = 1e-3  # misfit, relative to the answers, that shows that a head has switched
CANCEL = 1e-6  # relative size that counts as zero in scores and sums of values
KEPT = 0.8  # share of the margins at the first anchor that must be left at another
MIRRORED = (
    "queries of two tokens cannot tell a head from its mirror image (score, key bias and value "
    "negated), and here the sum of the values does not tell either: {why}. Longer sequences would"
)
OPPOSITE = "a head attends to all tokens alike, or two heads have opposite scores"
FEWEST = "Queries of two tokens: of all layers that answer them alike this has the fewest heads."


# --- the strategy ---------------------------------------------------------------------------------


def learn_from_pairs(
    ask: Asker,
    rng: np.random.Generator,
    prior: PriorKnowledge,
    frame: Float[Array, "d d"],
    first: Float[Array, "one outputs"],
) -> Result:
    """The whole recovery; `first` is the answer to the first row of `frame` alone."""
    result = try_anchors(
        ask, rng, prior, frame, first, attempt_with_pairs, repeat_unidentifiable=True
    )
    if isinstance(result, Hypothesis) and allows_only_pairs(ask):
        return replace(result, notes=(*result.notes, FEWEST))
    return result


def allows_only_pairs(ask: Asker) -> bool:
    """Whether the box takes no more than two tokens."""
    return ask.oracle.spec.domain.max_length == 2


def attempt_with_pairs(problem: ScalarProblem, rng: np.random.Generator) -> Draft:
    """All stages from one anchor."""
    if problem.heads == 1:
        return attempt_with_separators(problem, rng)
    found = sweep_angles(problem.ask, problem.anchor, problem.total, rng)
    uniform = None
    if not allows_only_pairs(problem.ask):
        uniform = measure_uniform_value(problem.ask, problem.anchor, problem.total, rng)
    count = len(found.angles) + (uniform is not None)
    if problem.heads is not None and count > problem.heads:
        raise WrongFamily(
            f"{count} heads answer where {problem.heads} were claimed: pass heads={count}, or "
            "leave heads= out"
        )
    if not len(found.angles):
        if np.abs(problem.total).max() <= problem.ask.undetected:
            raise NotIdentifiable(NO_VALUE)
        return draft_uniform(problem)
    signs = choose_signs(problem, found, uniform, rng)
    if count == 1:  # the sum of the values is the value, and nothing need isolate the head
        return attempt_with_separators(replace(problem, heads=1), rng)
    values = collect_values(problem, found, signs, uniform is not None)
    progress = measure_first_keys_by_pairs(problem, values, found, signs, rng)
    progress = measure_values_by_pairs(progress, rng)
    progress = redesign_pivots(progress, rng)
    progress = measure_other_keys(progress, rng)
    return draw_conclusion(progress, rng)


# --- stage 1: an angular sweep finds the heads ----------------------------------------------------


def build_unit_vectors(angles: Float[Array, " n"]) -> Float[Array, "n two"]:
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


@dataclass(frozen=True, eq=False)
class LinearArc:
    """The answer between two switch angles, linear in the token."""

    angles: Float[Array, " n"]
    answers: Float[Array, "n outputs"]

    @property
    def coefficients(self) -> Float[Array, "two outputs"]:
        """In the plane of the circle."""
        return np.asarray(
            np.linalg.lstsq(build_unit_vectors(self.angles), self.answers, rcond=None)[0]
        )

    @property
    def amplification(self) -> float:
        """Errors of the coefficients in units of those of the answers."""
        return 1 / float(np.sin(np.ptp(self.angles) / 2))

    def measure_misfit(self, angle: float, answer: Float[Array, " outputs"]) -> float:
        return float(
            np.abs(answer - build_unit_vectors(np.array([angle])) @ self.coefficients).max()
        )

    def add(self, angle: float, answer: Float[Array, " outputs"]) -> "LinearArc":
        """With one answer more: the farther apart, the better known."""
        return LinearArc(np.append(self.angles, angle), np.vstack([self.answers, answer]))

    def reverse(self, total: Float[Array, "two outputs"]) -> "LinearArc":
        """Half a circle further on, where every head is on the other side."""
        angles = self.angles + np.pi
        return LinearArc(angles, build_unit_vectors(angles) @ (total - self.coefficients))


@dataclass(eq=False)
class AngularSweep:
    """Directions in one plane around one anchor; remembers the largest answer."""

    ask: Asker
    anchor: Float[Array, " d"]
    total: Float[Array, "d outputs"]  # sum of the values of all heads
    plane: Float[Array, "two d"]
    output_scale: float  # the largest answer so far, per size of token

    @property
    def hard_size(self) -> float:
        """Size of huge tokens."""
        return HARD_SCALE / float(np.linalg.norm(self.anchor))

    def build_tokens(self, angles: Array) -> Float[Array, "n d"]:
        return build_unit_vectors(angles) @ self.plane

    def query(self, tokens: Float[Array, "n d"], size: float) -> Float[Array, "n outputs"]:
        """What tokens of that size add to the answer, per size."""
        last = np.broadcast_to(self.anchor, (len(tokens), 1, len(self.anchor)))
        pairs = np.concatenate([last + size * tokens[:, None], last], axis=1)
        got = (self.ask(pairs, "switch angles") - self.anchor @ self.total) / size
        self.output_scale = max(self.output_scale, float(np.linalg.norm(got, axis=1).max()))
        return np.asarray(got)

    def measure_arc(self, angle: float, width: float) -> LinearArc:
        """The answer around an angle, from two queries close to each other."""
        angles = angle + np.array([0.0, float(self.ask.unit ** (1 / 3)) * width])
        return LinearArc(angles, self.query(self.build_tokens(angles), self.hard_size))

    def estimate_error(self, arc: LinearArc) -> float:
        """By how much an arc may be off."""
        noise = self.ask.unit * self.output_scale + self.ask.additive / self.hard_size
        return MISFIT_ERRORS * noise * arc.amplification

    def find_switches(self) -> list[tuple[float, float, Float[Array, "two outputs"]]]:
        """Angle and sharpness of every head, and the coefficients before it switches."""
        first = self.measure_arc(0.0, 1.0)
        last = first.reverse(self.plane @ self.total)
        todo, found = [(0.0, first, np.pi, last)], []
        while todo:
            left, before, right, after = todo.pop()
            change = np.abs(before.coefficients - after.coefficients).max()
            if change <= self.estimate_error(before) + self.estimate_error(after):
                continue
            if right - left < ANGLE_WIDTH:
                place = self.locate(left, before.coefficients, right, after.coefficients)
                found.append((*place, before.coefficients))
                if len(found) > MOST_HEADS:
                    raise WrongFamily(
                        "the answers to huge tokens switch at every angle: attention never "
                        "settles on single tokens as softmax attention does"
                    )
                continue
            middle = (left + right) / 2
            seen = self.query(self.build_tokens(np.array([middle])), self.hard_size)[0]
            gaps = [part.measure_misfit(middle, seen) for part in (before, after)]
            if gaps[0] > self.estimate_error(before) and gaps[1] > self.estimate_error(after):
                between = self.measure_arc(middle, right - left)
                todo += [(left, before, middle, between), (middle, between, right, after)]
            elif gaps[0] <= gaps[1]:
                todo.append((middle, before.add(middle, seen), right, after))
            else:
                todo.append((left, before, middle, after.add(middle, seen)))
        return sorted(found, key=lambda part: part[0])

    def locate(self, left: float, before: Array, right: float, after: Array) -> tuple[float, float]:
        """Angle and sharpness of a switch between two arcs, from two answers in which the head
        attends to both tokens."""
        size, seen = self.hard_size, []
        for _ in range(40):
            angle = (left + right) / 2
            odds = self.measure_log_odds(angle, size, before, after)
            if np.isfinite(odds) and abs(odds) < 12:  # beyond, an answer is all one arc's
                seen.append((angle, odds / size))
                if len(seen) == 2:
                    (a, u), (b, v) = seen
                    slope = (v - u) / (b - a)
                    if slope > 0:
                        return float(a - u / slope), float(slope)
                    break
            else:
                size *= 0.03
            left, right = (left, angle) if odds > 0 else (angle, right)
        raise IllConditioned("a switch between two linear pieces is no softmax of two scores")

    def measure_log_odds(self, angle: float, size: float, before: Array, after: Array) -> float:
        """Of the arc on the right against the one on the left."""
        direction = build_unit_vectors(np.array([angle]))[0]
        got = self.query(self.build_tokens(np.array([angle])), size)[0] - direction @ before
        jump = direction @ (after - before)
        share = float(got @ jump / (jump @ jump))
        if not 0 < share < 1:
            return np.inf if share >= 1 else -np.inf
        return float(np.log(share / (1 - share)))

    def measure_off_plane(
        self,
        angle: float,
        safe: float,
        coefficients: Float[Array, "two outputs"],
        rng: np.random.Generator,
    ) -> tuple[Float[Array, "d outputs"], Float[Array, "d d"]]:
        """All coefficients of an arc, from shifts up to `safe` off the plane, and the matrix that
        takes errors of answers to errors of them."""
        width = len(self.anchor)
        for shorter in (1.0, 0.1, 0.1**2):
            frame = np.linalg.qr(rng.standard_normal((width, width)))[0]
            rows = self.build_tokens(np.array([angle])) + safe * shorter * frame
            inverse = np.linalg.inv(rows)
            found = inverse @ self.query(rows, self.hard_size)
            if np.abs(self.plane @ found - coefficients).max() <= VISIBLE * self.output_scale:
                return found, inverse
        raise IllConditioned("heads switch however short a shift")


@dataclass(frozen=True, eq=False)
class SweptHeads:
    """What the sweep shows of each head, in the order of the switch angles."""

    sweep: AngularSweep
    angles: Float[Array, " h"]
    sharpness: Float[Array, " h"]  # log-odds per length of token and radian
    jumps: Float[Array, "h d outputs"]  # values of the heads, up to their signs
    inverse: Float[Array, "k n"]  # from relative errors of answers to errors of the jumps

    @property
    def tokens(self) -> Float[Array, "h d"]:
        """Unit vectors at which the heads switch."""
        return self.sweep.build_tokens(self.angles)

    def find_counterexample(self, rng: np.random.Generator) -> Counterexample | None:
        """A pair with an ordinary token of the plane that is not answered as these heads, mirrored
        or not, answer it: V / 2 + sum of J_h tanh(log-odds / 2) / 2."""
        angles = rng.uniform(0, np.pi, 4)
        size = 1 / float(np.median(self.sharpness))
        tokens = self.sweep.build_tokens(angles)
        odds = size * np.sin(angles[:, None] - self.angles) * self.sharpness
        guess = tokens @ self.sweep.total / 2
        guess += np.einsum("nh,nd,hdo->no", np.tanh(odds / 2) / 2, tokens, self.jumps)
        seen = self.sweep.query(tokens, size)
        worst = int(np.argmax(np.abs(seen - guess).max(axis=1)))
        if np.abs(seen[worst] - guess[worst]).max() <= VISIBLE * self.sweep.output_scale:
            return None
        anchor = self.sweep.anchor
        alone = anchor @ self.sweep.total + self.sweep.ask.offset
        return Counterexample(
            input=np.stack([anchor + size * tokens[worst], anchor]),
            box_answer=np.squeeze(alone + size * seen[worst]),
            model_answer=np.squeeze(alone + size * guess[worst]),
            reason="the heads that huge tokens show, at an ordinary token",
        )


def sweep_angles(
    ask: Asker,
    anchor: Float[Array, " d"],
    total: Float[Array, "d outputs"],
    rng: np.random.Generator,
) -> SweptHeads:
    """All heads, and their values up to the sign."""
    plane = np.linalg.qr(rng.standard_normal((len(anchor), 2)))[0].T
    sweep = AngularSweep(ask, anchor, total, plane, float(np.linalg.norm(total)))
    switches = sweep.find_switches()
    angles, sharpness = np.array([part[:2] for part in switches]).reshape(-1, 2).T
    heads = len(angles)
    if not heads:
        return SweptHeads(sweep, angles, sharpness, total[None][:0], np.zeros((0, 0)))
    before = np.append(angles[-1] - np.pi, angles[:-1])
    if (angles - before < 30 * ANGLE_WIDTH).any():
        raise IllConditioned("two heads switch at almost the same angle")
    middles = (before + angles) / 2
    # a small share of the way to the next switch
    safe = 0.02 * np.abs(np.sin(middles[:, None] - angles)).min(axis=1)
    measured = [
        sweep.measure_off_plane(middle, reach, coefficients, rng)
        for middle, reach, (*_, coefficients) in zip(middles, safe, switches, strict=True)
    ]
    arcs, inverses = zip(*measured, strict=True)
    steps = np.eye(heads, k=1) - np.eye(heads)
    steps[-1, 0] -= 1.0  # what follows the last switch is the first arc reversed
    jumps = np.einsum("hk,kdo->hdo", steps, np.stack(arcs))
    jumps[-1] += total
    inverse = np.block([[s * part for s, part in zip(row, inverses, strict=True)] for row in steps])
    return SweptHeads(sweep, angles, sharpness, jumps, inverse)


def measure_uniform_value(
    ask: Asker,
    anchor: Float[Array, " d"],
    total: Float[Array, "d outputs"],
    rng: np.random.Generator,
) -> Float[Array, "d outputs"] | None:
    """The value of a head that attends to all tokens alike; None where there is none. A huge token
    twice instead of once moves two thirds of such a head instead of a half, and no other head."""
    width, hard = len(anchor), HARD_SCALE / float(np.linalg.norm(anchor))
    rows = np.linalg.qr(rng.standard_normal((width, width)))[0]
    found: list[Array] = []
    for part in (rows[:1], rows[1:]):
        last = np.broadcast_to(anchor, (len(part), 1, width))
        huge = last + hard * part[:, None]
        once = ask(np.concatenate([huge, last], axis=1), "uniform head?") / hard
        twice = ask(np.concatenate([huge, huge, last], axis=1), "uniform head?") / hard
        scale = float(np.abs(once).max() + np.linalg.norm(total))
        noise = MISFIT_ERRORS * (ask.unit * scale + ask.additive / hard)
        if not found and np.abs(twice - once).max() <= noise:
            return None
        found.append(6 * (twice - once))
    return np.asarray(rows.T @ np.concatenate(found))


# --- stage 2: which of two mirror images each head is ---------------------------------------------


def find_signs(
    values: Float[Array, "h n"], total: Float[Array, " n"], allowed: float
) -> Float[Array, "k h"]:
    """All choices of signs for which the values add up to `total`; of more than sixteen heads, the
    one that linear equations give."""
    heads = len(values)
    if heads <= 16:
        choices = 1.0 - 2.0 * ((np.arange(2**heads)[:, None] >> np.arange(heads)) & 1)
    else:
        choices = np.sign(np.linalg.lstsq(values.T, total, rcond=None)[0])[None]
    return np.asarray(choices[np.abs(choices @ values - total).max(axis=1) <= allowed])


def describe_cancellation(count: int) -> str:
    return f"the values of some heads cancel, so that {count} layers answer alike"


def explain_ambiguity(model: Attention) -> str | None:
    """Why pairs do not determine this model; None where they do."""
    keys = np.stack([np.column_stack([head.score, head.key_bias]) for head in model.heads])
    sums = np.linalg.norm((keys[:, None] + keys).reshape(len(keys), len(keys), -1), axis=2)
    sizes = np.linalg.norm(keys.reshape(len(keys), -1), axis=1)
    if len(keys) > 1 and (sums <= CANCEL * sizes.max()).any():  # the diagonal: a head of score zero
        return OPPOSITE
    values = np.stack([head.value.ravel() for head in model.heads])
    scale = float(np.linalg.norm(values, axis=1).sum())
    count = len(find_signs(values, values.sum(axis=0), CANCEL * scale))
    return describe_cancellation(count) if count > 1 else None


def choose_signs(
    problem: ScalarProblem, found: SweptHeads, uniform: Array | None, rng: np.random.Generator
) -> Float[Array, " h"]:
    """The choice of signs for which the values add up."""
    ask, heads = problem.ask, len(found.jumps)
    flat = found.jumps.reshape(heads, -1)
    target = (problem.total - (0.0 if uniform is None else uniform)).ravel()
    spread = float(np.linalg.norm(found.inverse, axis=1).max()) * float(np.sqrt(heads))
    scale = float(np.linalg.norm(flat, axis=1).sum() + np.linalg.norm(target))
    allowed = max(CANCEL, MISFIT_ERRORS * ask.unit * spread) * scale
    good = find_signs(flat, target, allowed)
    if len(good) == 1:
        return np.asarray(good[0])
    counterexample = found.find_counterexample(rng)
    if counterexample is not None:
        raise Unexplained("softmax heads that explain huge tokens fail at others", counterexample)
    if not allows_only_pairs(ask):
        raise IllConditioned(
            "two heads have opposite scores, or the values of some heads cancel: that takes "
            f"sequences of {heads + 4} tokens, longer than max_length="
            f"{ask.oracle.spec.domain.max_length}"
        )
    why = describe_cancellation(len(good)) if len(good) else OPPOSITE
    if not ask.affords(HUGE_TOKENS):  # a head may have been missed
        raise IllConditioned(MIRRORED.format(why=why))
    raise NotIdentifiable(MIRRORED.format(why=why))


def collect_values(
    problem: ScalarProblem, found: SweptHeads, signs: Float[Array, " h"], has_uniform: bool
) -> HeadValues:
    """The values with their signs; a uniform head has what the others leave of the sum."""
    heads, width = len(signs), problem.width
    blocks = signs[:, None, None] * found.jumps
    inverse = np.repeat(signs, width)[:, None] * found.inverse
    if has_uniform:
        rest = -inverse.reshape(heads, width, -1).sum(axis=0)
        blocks = np.concatenate([blocks, (problem.total - blocks.sum(axis=0))[None]])
        inverse = np.concatenate([inverse, rest])
    return problem.build_values(blocks, inverse, has_uniform)


# --- stage 3: soft probes of one head by pairs ----------------------------------------------------


@dataclass(frozen=True, eq=False)
class PivotIsolation(Isolation):
    """An anchor with the pivots at which one head weighs both tokens and all others do not."""

    pivots: Float[Array, "h d"]
    sides: Float[Array, "h h"]  # 1 where head k attends to the pivot of head h, 0 where not
    margin: float  # at the first anchor

    @property
    def alone(self) -> bool:
        return False

    @property
    def longest(self) -> float:
        return float(np.linalg.norm(self.pivots, axis=1).max())

    def measure_span(self, head: int) -> float:
        return float(np.linalg.norm(self.pivots[head]))

    def measure_margins(self, keys: Float[Array, "h d"]) -> Float[Array, " h"]:
        return np.full(len(keys), min(SATURATED, (1 - KEPT) * self.margin))

    def holds(self, keys: Float[Array, "h d"]) -> bool:
        aside = (2 * self.sides - 1) * (self.pivots @ keys.T)
        np.fill_diagonal(aside, np.inf)
        return bool(aside.min() > KEPT * self.margin)

    def output_scale(self, sizes: Float[Array, " h"]) -> float:
        uniform = 0.0 if self.uniform is None else float(np.linalg.norm(self.uniform))
        return (float(np.linalg.norm(self.anchor)) + self.longest) * (float(sizes.sum()) + uniform)

    def displace(self, heads: Int[Array, " n"], probes: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return np.asarray(self.pivots[heads] + probes)

    def measure_changes(self, answers: Array, tokens: Array, heads: Array) -> Float[Array, " n"]:
        displaced = tokens[:, 0] - self.anchor
        others = np.einsum("nd,nd->n", displaced, (self.sides @ self.values)[heads])
        return np.asarray(super().measure_changes(answers, tokens, heads) - others)

    def propagate_value_errors(
        self, head: int, probes: Array, shares: Array, errors: Float[Array, "h d"]
    ) -> Float[Array, " n"]:
        others = probes @ (self.sides[head] @ errors)
        own = super().propagate_value_errors(head, probes, shares, errors)
        return np.asarray(own - others)


def isolate_by_pivots(
    problem: ScalarProblem, values: HeadValues, pivots: Array, sides: Array, margin: float
) -> Isolation:
    beside = sides.astype(float)
    np.fill_diagonal(beside, 0.0)
    alone = problem.isolate_alone(values)
    isolation = PivotIsolation(**vars(alone), pivots=pivots, sides=beside, margin=margin)
    return isolation.move(problem.anchor)


def measure_first_keys_by_pairs(
    problem: ScalarProblem,
    values: HeadValues,
    found: SweptHeads,
    signs: Float[Array, " h"],
    rng: np.random.Generator,
) -> Progress:
    """The keys at the anchor, with the long pivots from the sweep: d probes per head."""
    width = problem.width
    reach = np.sin(found.angles[:, None] - found.angles) * found.sharpness
    np.fill_diagonal(reach, np.inf)
    margin = MARGIN * problem.digits
    # a head that no other is beside needs no pivot
    pivots = found.tokens * (margin / np.abs(reach).min(axis=1).clip(max=1e300))[:, None]
    isolation = isolate_by_pivots(problem, values, pivots, signs * reach > 0, margin)
    isolated, tables = IsolatedHeads(problem, values, isolation), []
    for head in range(len(values.choosing)):
        rows = isolated.lean_probes(head, rng)
        size = found.sharpness[head] * np.sqrt(width / 2)  # estimate of |k_h|
        probes = rows * (TARGET * np.sqrt(width) / size)
        got = isolated.probe(np.full(width, head), probes, "first keys")
        tables.append(start_table(isolated, head, got))
    if not isolation.holds(np.stack([table.first for table in tables])):
        raise IllConditioned("a head that was to be isolated reacted to a probe")
    return Progress(problem, values, isolation, tuple(tables))


def measure_values_by_pairs(progress: Progress, rng: np.random.Generator) -> Progress:
    """Values once more, now that it is known who attends to a huge token: any direction is an exact
    equation, and the best of many are better conditioned than the small shifts before."""
    problem, keys = progress.problem, progress.first_keys
    norms = np.linalg.norm(keys, axis=1)
    blocks, width = len(progress.values.blocks), problem.width
    shared = np.repeat(problem.total_rows[:, None], blocks, axis=1)
    system = LinearSystem.of(shared, problem.total_answers)
    tokens = random_directions(rng, 4 * blocks * width, width)
    tokens = tokens[np.abs(tokens @ keys.T / norms).min(axis=1) > 1e-2]  # all heads are decided
    shares = np.full((len(tokens), blocks), 0.5)  # of a uniform head, which comes last
    shares[:, : len(keys)] = tokens @ keys.T > 0
    beyond = (shares - shares.mean(axis=1, keepdims=True))[:, :, None] * tokens[:, None]
    order = qr(beyond.reshape(len(tokens), -1).T, mode="r", pivoting=True)[1]  # the sum is known
    best = order[: (blocks - 1) * width]
    tokens, shares = tokens[best], shares[best]
    scale = HARD_SCALE / float(np.linalg.norm(problem.anchor))
    answers = query_hard(
        problem.ask, tokens[:, None] + problem.anchor / scale, problem.anchor, scale, "values"
    )
    answers -= problem.anchor @ problem.total / scale
    system = system.add(shares[:, :, None] * tokens[:, None], answers)
    values = problem.build_values(*system.solve(), progress.values.has_uniform)
    return replace(progress, values=values)


def redesign_pivots(progress: Progress, rng: np.random.Generator) -> Progress:
    """Shorter pivots, from the measured keys, and with them the first keys once more: their errors
    weigh most, because all other anchors lie close to the first."""
    problem, values, keys = progress.problem, progress.values, progress.first_keys
    tokens = design_pivots(keys, values.choosing, rng)
    norms = np.linalg.norm(keys, axis=1)
    margin = MARGIN * problem.digits
    pivots = tokens * (margin / norms.min())
    isolation = isolate_by_pivots(problem, values, pivots, pivots @ keys.T > 0, margin)
    moved = isolation.longest * float(norms.max()) / np.sqrt(problem.width)
    return measure_first_keys_again(
        replace(
            progress,
            isolation=isolation,
            separator_norm=float(np.linalg.norm(tokens, axis=1).max()),
            step=min(0.5, SATURATED / 3 / max(moved, TINY)),
        ),
        rng,
    )


def design_pivots(
    keys: Float[Array, "h d"], values: Float[Array, "h d"], rng: np.random.Generator
) -> Float[Array, "h d"]:
    """For each head a token at right angles to its key that is at least |k_g| to one side of every
    other: of 256 patterns of sides the one that is short and that the head's value sees."""
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    if len(unit) == 1:  # nothing to isolate
        return np.zeros_like(keys)
    inverse = np.linalg.pinv(unit)
    best = []
    for head, own in enumerate(unit):
        wanted = rng.choice([-1.0, 1.0], (256, len(unit)))
        wanted[:, head] = 0.0
        tokens = wanted @ inverse.T
        tokens -= np.outer(tokens @ own, own)
        aside = np.abs(tokens @ np.delete(unit, head, axis=0).T).min(axis=1)
        tokens = tokens / np.maximum(aside, TINY)[:, None]
        sizes = np.linalg.norm(tokens, axis=1)
        seen = np.abs(tokens @ values[head]) / (sizes * np.linalg.norm(values[head]))
        best.append(tokens[int(np.argmin(sizes / np.maximum(seen, TINY)))])
    if not np.isfinite(best).all():
        raise IllConditioned("no pivots separate these heads: two of them attend alike")
    return np.stack(best)
