"""A skip connection beside attention: y = S x_N + A(X), S any linear map, found and measured.

Statement.  S is determined by d + 3 queries or so, whatever the heads are; without S the box is
            a layer of attention heads, and everything else is learned as if S were not there.
Queries.    Huge tokens before a huge anchor x, T x and -T x among them (a head for which x scores
            high scores T x higher), T = 4: every head attends to one of them alone, so that a small
            step of x moves the answer by S times the step and by nothing else. One step says
            whether there is a skip. The tokens that heads select, which are needed for the values
            anyway, are found next; with these alone no head changes its choice even if the
            anchor moves by a tenth. d such steps measure S; one more, along all of them together
            and with one token more, must agree. Few digits and scalar answers: four tokens
            instead, [T a; -T a; T b; -T b; x], a along x, and shorter steps.
Algebra.    Differences over the step. A head that leaves its token for another makes a jump, which
            is as large as the answer itself: large responses are repeated. Beside four tokens they
            are believed only if they are the same before another anchor. A head that attends to
            all tokens alike passes a share of the anchor on that depends on the length: one token
            more shows it.
When it fails.  Tokens of bounded norm, where no attention is hard; sequences of fewer than four
            tokens. S is told from the layer's own value of x_N by attention to other tokens only.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.base import Hypothesis
from keyhole.learners.multi_head.hard_attention import (
    CROWD,
    Candidates,
    Selection,
    shift_candidates,
)
from keyhole.linalg.bases import random_directions
from keyhole.measurement.asker import DOUBLE_PRECISION, Asker
from keyhole.models.attention import Attention, Head
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import ROUNDINGS, NoiseModel
from keyhole.oracles.wrappers.restrict import WithPrior, find_known_directions
from keyhole.oracles.wrappers.skip import WithoutSkip

PURPOSE = "skip"
ANCHOR = 1e6  # length of the anchor: attention is hard unless all scores are below 1e-10
TOKENS = 4.0  # length of the other tokens, in anchors
STEP = 0.015  # length of a step, in anchors: one head in a hundred leaves its token on the way
SETUPS = 8  # anchors tried


@dataclass(frozen=True, eq=False)
class Skip:
    """What the anchor adds past the attention, as (d, D), and its standard errors."""

    matrix: Float[Array, "d D"]
    errors: Float[Array, "d D"]
    noise: NoiseModel  # of the box, as far as its answers show it
    scalar: bool
    selected: Selection | None = None  # tokens that heads prefer, where they were looked for

    @property
    def value(self) -> Float[Array, "d *out"]:
        """In the shape of a head's value."""
        return self.matrix[:, 0] if self.scalar else self.matrix

    @property
    def value_errors(self) -> Float[Array, "d *out"]:
        return self.errors[:, 0] if self.scalar else self.errors

    @property
    def sentence(self) -> str:
        """For the reader of the report."""
        height, width = self.matrix.shape
        near = height == width and bool(
            (np.abs(self.matrix - np.eye(height)) <= ROUNDINGS * self.errors).all()
        )
        kind = "the identity within its standard errors" if near else "a linear map of its own"
        return f"The anchor is added past the attention by a skip connection: {kind}."


def learn_beside_skip(
    oracle: Oracle,
    rng: np.random.Generator,
    learn: Callable[[Oracle, np.random.Generator, Selection | None], Hypothesis],
) -> Hypothesis:
    """What `learn` finds, with a skip connection if the box has one."""
    skip = find_skip(oracle, rng.spawn(1)[0])
    if skip is None:
        return learn(oracle, rng, None)
    inner = WithoutSkip(WithPrior(oracle, skip.noise), skip.value)
    selected = skip.selected
    if selected is not None:
        selected = selected.subtract(selected.pattern.anchor @ skip.matrix)
    learned = learn(inner, rng, selected)
    doubt = skip.value_errors  # of S, and with it of the sum of all values
    return replace(
        learned,
        model=add_skip(learned.model, skip.value),
        errors=add_skip(widen_values(learned.errors, doubt), doubt),
        floor=learned.floor + oracle.spec.width,
        notes=(*learned.notes, skip.sentence),
    )


def widen_values(errors: Attention, doubt: Array) -> Attention:
    """Standard errors of the values with that of the skip, which was subtracted from their sum."""
    heads = [Head(h.score, h.key_bias, np.hypot(h.value, doubt)) for h in errors.heads]
    return errors.with_heads(heads)


def add_skip(model: Any, skip: Array) -> Any:
    """The layer, or its standard errors, with those of the skip."""
    return Attention(model.heads, model.offset, skip, model.position)


def find_skip(oracle: Oracle, rng: np.random.Generator) -> Skip | None:
    """The skip connection of a box of attention heads; None where it has none (two queries tell),
    where tokens are too short or too few to tell, and where the anchor acts as no linear map."""
    domain, width = oracle.spec.domain, oracle.spec.width
    room = domain.max_length or np.inf
    fewest = 4  # tokens of a query, the anchor among them
    if not domain.unbounded or room < fewest:
        return None
    known = find_known_directions(oracle)
    drawn = rng.standard_normal((width, width))
    drawn[: len(known)] = known
    q, r = np.linalg.qr(drawn.T)
    directions = (q * np.sign(np.diag(r))).T
    crowd = Setup.draw(oracle, rng, crowded=True)
    probe = 1e-3  # length of a step, in anchors, on which hardly any head leaves its token
    first = crowd.measure(directions[:1], probe)
    if not crowd.is_signal(first, probe)[0]:
        return None
    found = None
    if not crowd.scalar and crowd.noise.relative < DOUBLE_PRECISION and not crowd.noise.error_floor:
        whole = None
        if len(known):  # single tokens along that direction are known
            zero, one = Asker(oracle)(np.outer((0.0, 1.0), directions[0])[:, None], PURPOSE)
            whole = one - zero - first[0]
        found = measure_beside_selected(crowd, directions, rng, whole)
    return found or measure_beside_four(oracle, directions, rng)


def measure_beside_selected(
    crowd: "Setup",
    directions: Float[Array, "d d"],
    rng: np.random.Generator,
    whole: Float[Array, " D"] | None,
) -> Skip | None:
    """The skip by steps of an anchor behind the tokens alone that heads select from a crowd; None
    where they are not found or the anchor does not act linearly. `whole` is what all heads answer
    to the first direction, where that is known."""
    oracle, scale, shift = crowd.ask.oracle, TOKENS * ANCHOR, directions[0]
    candidates = Candidates(crowd.anchor, scale, crowd.choices / scale, crowd.base[None] / scale)
    seen = shift_candidates(Asker(oracle), candidates, None, shift, rng, whole)
    if not seen.explained:
        return None
    setup = replace(crowd, choices=crowd.choices[seen.support.nodes])
    step = 0.1  # of the anchor
    first = setup.measure(directions[:1], step)
    if not setup.is_signal(first, step)[0]:
        return None  # a head had left its token
    others = setup.measure(directions[1:], step)
    slopes = remove_jumps(setup, directions, np.concatenate([first, others]), step)
    if slopes is None:
        return None
    mixed = rng.choice((-1.0, 1.0), len(directions)) / np.sqrt(len(directions))
    spare = np.delete(crowd.choices, seen.support.nodes, axis=0)[:1]
    longer = replace(setup, choices=np.concatenate([setup.choices, spare]))
    for way in (mixed, -mixed):  # a head may leave its token on one way
        check = longer.measure((way @ directions)[None], step)
        if setup.agree(check, (way @ slopes)[None], step)[0]:
            break
    else:
        return None
    selected = Selection(seen.select(), seen.support.weights, shift)
    return replace(setup.conclude(directions, slopes, step), selected=selected)


def remove_jumps(
    setup: "Setup",
    directions: Float[Array, "n d"],
    slopes: Float[Array, "n D"],
    step: float,
) -> Float[Array, "n D"] | None:
    """The slopes without the jumps of heads that left their tokens; None where these cannot be
    told. The opposite step, or a shorter one, shows a jump, which is the same wherever that head
    leaves its token for that other."""
    slopes = slopes.copy()
    usual = 4.0 * float(np.quantile(np.linalg.norm(slopes, axis=1), 0.25))
    for _ in range(len(slopes)):
        large = np.linalg.norm(slopes, axis=1) > usual
        jumped = np.flatnonzero(large & setup.may_jump(slopes, step))
        if not len(jumped):
            return slopes
        one, others = jumped[0], jumped[1:]
        for way, length in ((-1.0, step), (1.0, step / 8.0)):
            again = way * setup.measure(way * directions[[one]], length)[0]
            if np.linalg.norm(again) <= usual:
                break
        else:
            return None
        left = slopes[others] - (slopes[one] - again)
        explained = np.linalg.norm(left, axis=1) <= usual
        slopes[one], slopes[others[explained]] = again, left[explained]
    return None


def measure_beside_four(
    oracle: Oracle, directions: Float[Array, "d d"], rng: np.random.Generator
) -> Skip | None:
    """The skip by short steps of an anchor behind four tokens."""
    shorter = 8.0  # how much shorter a step is when it is repeated
    for _ in range(SETUPS):
        setup = Setup.draw(oracle, rng)
        first = setup.measure(directions[:1])
        if not setup.is_signal(first)[0]:
            return None
        if setup.agree(first, setup.measure(directions[:1], STEP / shorter), STEP / shorter)[0]:
            break
    else:
        return None  # heads do not keep their tokens: attention is not hard
    longer = setup.lengthen()
    slopes: Array | None
    if not setup.is_signal((longer.base - setup.base)[None] / (STEP * ANCHOR))[0]:
        slopes = collect_slopes(setup, directions, first, rng)
    else:  # a head attends to all tokens alike: in a query of N tokens the slope is S + M / N
        short, long = setup.length, longer.length
        other = longer.measure(directions[:1])
        terms = long * max(
            TOKENS * ANCHOR * float(np.abs(first).max()), float(np.abs(longer.base).max())
        )
        if not setup.noise.rejects((long * other - short * first) * STEP * ANCHOR, terms):
            return None
        parts = [
            collect_slopes(one, directions, slope, rng)
            for one, slope in ((setup, first), (longer, other))
        ]
        if parts[0] is None or parts[1] is None:
            return None
        slopes = (long * parts[1] - short * parts[0]) / (long - short)
    if slopes is None or not setup.is_signal(slopes).any():
        return None
    return setup.conclude(directions, slopes)


@dataclass(frozen=True, eq=False)
class Setup:
    """Huge tokens before an anchor, and the answer to them."""

    ask: Asker
    choices: Float[Array, "n d"]  # every head attends to one of these
    anchor: Float[Array, " d"]
    base: Float[Array, " D"]
    noise: NoiseModel  # as the answer shows it
    extra: int = 0  # tokens that stand there twice

    @classmethod
    def draw(
        cls, oracle: Oracle, rng: np.random.Generator, extra: int = 0, crowded: bool = False
    ) -> "Setup":
        along, across = random_directions(rng, 2, oracle.spec.width)
        choices = np.stack([along, -along, across, -across])
        if crowded:  # many more of them
            more = random_directions(rng, CROWD - len(choices), oracle.spec.width)
            choices = np.concatenate([choices, more])
        room = oracle.spec.domain.max_length
        if room is not None:  # for one token more
            choices = choices[: max(2, room - 2)]
        return cls.ask_base(oracle, TOKENS * ANCHOR * choices, ANCHOR * along, extra)

    @classmethod
    def ask_base(cls, oracle: Oracle, choices: Array, anchor: Array, extra: int) -> "Setup":
        choices = np.concatenate([choices, choices[:extra]])
        ask = Asker(oracle)
        base = ask_anchors(ask, choices, anchor[None])[0]
        return cls(ask, choices, anchor, base, ask.noise, extra)

    def lengthen(self) -> "Setup":
        """The same tokens before the same anchor, one of them twice."""
        return Setup.ask_base(self.ask.oracle, self.choices, self.anchor, 1)

    @property
    def scalar(self) -> bool:
        return self.ask.scalar

    @property
    def length(self) -> int:
        return len(self.choices) + 1

    @property
    def sigma(self) -> float:
        """Standard error of a difference of two answers."""
        scale = float(np.sqrt(np.mean(self.base**2)))
        return float(np.sqrt(2.0) * self.noise.sigma(scale))

    def measure(self, directions: Float[Array, "n d"], step: float = STEP) -> Float[Array, "n D"]:
        """Change of the answer per length of the anchor's step."""
        answers = ask_anchors(self.ask, self.choices, self.anchor + step * ANCHOR * directions)
        responses = answers - self.base
        return np.asarray(responses / (step * ANCHOR))

    def is_signal(self, slopes: Float[Array, "n D"], step: float = STEP) -> Array:
        """Which slopes, measured by steps of this length, are more than rounding."""
        return np.asarray(np.abs(slopes).max(axis=1) * step * ANCHOR > ROUNDINGS * self.sigma)

    def agree(self, one: Array, other: Array, step: float = STEP) -> Array:
        """Which slopes are the same; one of them was measured by a step of this length."""
        gap = np.abs(one - other).max(axis=1)
        return np.asarray(gap * step * ANCHOR <= ROUNDINGS * self.sigma)

    def may_jump(self, slopes: Float[Array, "n D"], step: float = STEP) -> Array:
        """Which responses are so large that a head may have left its token."""
        # response, relative to the answer itself, that may be a head that left its token
        jump = 0.05
        large = jump * float(np.linalg.norm(self.base))
        return np.asarray(np.linalg.norm(slopes, axis=1) * step * ANCHOR > large)

    def conclude(
        self, directions: Float[Array, "d d"], slopes: Float[Array, "d D"], step: float = STEP
    ) -> Skip:
        """The skip that has these slopes along orthonormal directions."""
        matrix = directions.T @ slopes
        terms = 2.0  # of an answer, which round each by itself, relative to their sum
        errors = np.full(matrix.shape, terms * self.sigma / (step * ANCHOR))
        return Skip(matrix, errors, self.noise, self.scalar)


def collect_slopes(
    setup: Setup,
    directions: Float[Array, "n d"],
    first: Float[Array, "one D"],
    rng: np.random.Generator,
) -> Float[Array, "n D"] | None:
    """Slopes of all directions, of which the first is known; None where they belong to no linear
    map. A slope is believed where its response is small against the answer, so that no head can
    have left its token, or else where it is the same before another anchor. The jump of a scalar
    answer may be small by chance: there all are measured twice."""
    slopes = np.full((len(directions), len(setup.base)), np.nan)
    slopes[0] = first[0]
    settled = np.arange(len(directions)) < 1
    mixed = rng.choice((-1.0, 1.0), len(directions)) / np.sqrt(len(directions))
    portion = 4  # directions asked at once, after which an undecided head shows
    for number in range(SETUPS):
        setup = setup if number == 0 else Setup.draw(setup.ask.oracle, rng, setup.extra)
        left = np.flatnonzero(~settled)
        for part in np.array_split(left, max(1, -(-len(left) // portion))):
            if not len(part):
                break
            found = setup.measure(directions[part])
            jumps = setup.may_jump(found)
            settled[part] = setup.agree(found, slopes[part]) | ~(jumps | setup.scalar)
            slopes[part] = found
            if jumps.mean() > 0.5:
                break  # a head is undecided here: almost every step makes it jump
        if settled.all():
            check = setup.measure((mixed @ directions)[None])
            if setup.agree(check, (mixed @ slopes)[None])[0]:
                return slopes
    return None


def ask_anchors(
    ask: Asker, choices: Float[Array, "n d"], anchors: Float[Array, "m d"]
) -> Float[Array, "m D"]:
    """Answers to the same tokens before different anchors."""
    before = np.broadcast_to(choices, (len(anchors), *choices.shape))
    tokens = np.concatenate([before, anchors[:, None]], axis=1)
    return ask(tokens, PURPOSE)
