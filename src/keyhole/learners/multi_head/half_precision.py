"""Layers that compute in half precision: two or three honest digits, from tokens of ordinary size.

Statement.  A layer of H heads of rank r whose arithmetic has 8 or 11 bits (bfloat16, float16) is
            recovered until its answers are within the box's own rounding, from three to ten times
            as many queries as there are unknowns per number in an answer; number of heads unknown.
Queries.    All tokens are numbers of the box's format. [x] for a frame of x; bags of tokens so long
            that attention is hard, with groups of tokens set to zero; the tokens in use alone, one
            of them moved; then random sequences of a few tokens at which attention is soft.
Algebra.    A bag whose answer doubles with its tokens is decided: every head attends to one token.
            The tokens that matter are those whose absence changes the answer (halving). The changes
            that moves of one of them cause are the value map of its head. (Fewer moves, as many as
            the map has rank, would show what it spans, and all spans split the sum of the maps; but
            nearly dependent spans lose the two or three digits that there are.)
            With the value maps, one soft answer tells the weights of every head by linear least
            squares, and their log-ratios are linear in the scores. From there, all soft answers are
            fitted at once (fitting/layer_gauss_newton), which forgives a start off by a third.
            The rounding of the box is measured by asking neighbours of the same sequences.
When it fails.  Scalar answers; more inner dimensions than outputs; heads that attend to all tokens
            alike. A fit that leaves more than rounding is not believed, and another bag is tried.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse.linalg import LinearOperator, lsmr

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.errors import Counterexample
from keyhole.fitting.gauss_newton import FitOptions
from keyhole.fitting.layer_gauss_newton import FactoredLayer, LayerAnswers, Polished, fit_layer
from keyhole.learners.base import Hypothesis, Inconclusive, Refuted, Result
from keyhole.learners.multi_head.least_squares import estimate_answer_errors, replace_layer
from keyhole.learners.multi_head.validation import (
    MultiHeadDiagnostics,
    PriorKnowledge,
    note_missing_heads,
)
from keyhole.linalg.low_rank_fit import Factored
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.oracles.noise import REJECTION, NoiseModel


@dataclass(frozen=True)
class HalfPrecisionOptions:
    """What a person might tune.

    candidates: tokens of a bag, of which each head prefers one. bags: tried until a fit leaves no
    more than rounding. move: of a token in use, relative to its length. floors: numbers in soft
    answers per unknown, at least. rows: log-ratios per entry of a score, at least. softness: 0
    where attention is even, 1 where it is hard. neighbours: soft queries asked again, rounded
    otherwise. misfit: of a fit that is believed, in standard deviations of the rounding.
    """

    candidates: int = 128
    bags: int = 12
    move: float = 0.25
    floors: float = 5.5
    rows: float = 1.6
    softness: float = 0.25
    neighbours: int = 16
    misfit: float = 1.5


# Far from the fit a step needs one digit; the last ones are taken until the cost stays.
FIT = FitOptions(
    steps=40, damping=1e-2, dense_unknowns=0, accuracy=0.03, inner_steps=150, tolerance=1e-3,
    probes=0,
)  # fmt: skip


def learn_half_precision(
    ask: Asker,
    rng: np.random.Generator,
    prior: PriorKnowledge,
    options: HalfPrecisionOptions | None = None,
) -> Result:
    """The whole recovery of a box that computes in half precision."""
    options = options or HalfPrecisionOptions()
    problem = HalfPrecisionProblem(ask, rng, options)
    single = measure_single_tokens(problem)
    if not isinstance(single, SingleTokens):
        return single
    hard = find_hard_size(problem, single)
    if isinstance(hard, Inconclusive):
        return hard
    soft: SoftSequences | None = None
    level = 0.0
    trouble = Inconclusive("no bag of long tokens showed the heads")
    for _ in range(options.bags):
        maps = measure_value_maps(problem, single, hard)
        if isinstance(maps, str):
            trouble = Inconclusive(maps)
            continue
        length = choose_length(problem, maps)
        if soft is None or soft.length > length:
            soft = SoftSequences.draw(problem, single, length)
        soft = soft.extend(problem, count_start_queries(problem, maps, soft.length))
        longer = soft.lengthen(problem, count_further_queries(problem, maps, soft))
        start = solve_scores(single, maps, soft)
        fit, errors = fit_soft_answers(problem, start, (soft, longer))
        found = describe(problem, start, fit, prior)
        level = level or measure_rounding(ask, rng, longer.tokens, longer.answers, found.model)
        off = fit.misfit * errors / level
        if off > options.misfit:
            trouble = Inconclusive(
                f"a layer of {len(maps)} heads leaves {off:.1f} times as much as rounding does"
            )
            continue
        odd = check_long_query(problem, found.model, soft.size, level)
        return found if odd is None else odd
    return trouble


# -- Asking ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HalfPrecisionProblem:
    """The problem, which rounds tokens to its own number format, and what the search may draw."""

    ask: Asker
    rng: np.random.Generator
    options: HalfPrecisionOptions

    @property
    def width(self) -> int:
        return self.ask.width

    @property
    def unit(self) -> float:
        return self.ask.unit

    def draw(self, *shape: int) -> Float[Array, "*shape d"]:
        return self.rng.standard_normal((*shape, self.width))

    def answer(
        self, tokens: Float[Array, "n length d"], purpose: str
    ) -> tuple[Float[Array, "n length d"], Float[Array, "n D"]]:
        """The tokens as the box sees them, and its answers."""
        tokens = self.ask.representable(tokens)
        return tokens, self.ask(tokens, purpose)


# -- Single tokens -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SingleTokens:
    """f([x]) = offset + x total."""

    offset: Float[Array, " D"]
    total: Float[Array, "d D"]

    def predict(self, tokens: Float[Array, "n d"]) -> Float[Array, "n D"]:
        return np.asarray(tokens @ self.total + self.offset)


def measure_single_tokens(problem: HalfPrecisionProblem) -> SingleTokens | Refuted | Inconclusive:
    """The sum of the value maps. Eight further tokens, longer and shorter, show that it is one."""
    _, zero = problem.answer(np.zeros((1, 1, problem.width)), "values")
    if problem.ask.scalar:
        return Inconclusive("half precision and scalar answers: heads cannot be told apart")
    frame = 8.0 * np.linalg.qr(problem.rng.standard_normal((problem.width, problem.width)))[0]
    others = problem.draw(8) * np.repeat([0.5, 4.0], 4)[:, None]
    tokens, answers = problem.answer(np.concatenate([frame, others])[:, None], "values")
    linear = np.linalg.lstsq(tokens[:, 0], answers - zero, rcond=None)[0]
    found = SingleTokens(zero[0], linear)
    off = np.linalg.norm(answers - found.predict(tokens[:, 0]), axis=1)
    # terms of an answer may cancel: rounding is judged by the largest of them
    sizes = np.linalg.norm(tokens[:, 0], axis=1) * np.linalg.norm(linear, 2)
    odd = off > 2.0 * REJECTION * problem.unit * (sizes + np.linalg.norm(zero))
    if odd.any():
        k, reason = int(np.argmax(odd)), "single tokens do not act linearly"
        guess = found.predict(tokens[k])[0]
        return Refuted(reason, Counterexample(tokens[k], answers[k], guess, reason))
    return found


# -- Hard attention ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DecidedBag:
    """Tokens before an anchor, and the answer, less the offset."""

    tokens: Float[Array, "n d"]
    anchor: Float[Array, " d"]
    answer: Float[Array, " D"]


def ask_bags(
    problem: HalfPrecisionProblem, single: SingleTokens, tokens: Float[Array, "n length d"]
) -> tuple[Float[Array, "n length d"], Float[Array, "n D"]]:
    seen, answers = problem.answer(tokens, "hard attention")
    return seen, answers - single.offset


def draw_bags(
    problem: HalfPrecisionProblem, count: int, size: float
) -> Float[Array, "count length d"]:
    """Bags of long tokens before short anchors, which no head then attends to itself."""
    domain = problem.ask.oracle.spec.domain
    length = min(problem.options.candidates, (domain.max_length or np.inf) - 1)
    bags = size * problem.draw(count, int(length) + 1)
    bags[:, -1] *= 0.25
    return np.asarray(bags)


def is_decided(
    problem: HalfPrecisionProblem, answers: Float[Array, "n D"], doubled: Float[Array, "n D"]
) -> Array:
    """Which answers double with their tokens: attention is hard there."""
    gap = np.linalg.norm(doubled - 2.0 * answers, axis=1)
    return np.asarray(gap <= REJECTION * problem.unit * np.linalg.norm(doubled, axis=1))


def find_hard_size(problem: HalfPrecisionProblem, single: SingleTokens) -> float | Inconclusive:
    """Entries of tokens at which most bags are decided."""
    size = 4.0
    bags = draw_bags(problem, 4, 1.0)
    _, answers = ask_bags(problem, single, size * bags)
    while size < 2.0**9:  # squares of entries are still far from the largest float16
        _, doubled = ask_bags(problem, single, 2.0 * size * bags)
        if is_decided(problem, answers, doubled).mean() >= 0.5:
            return size
        size, answers = 2.0 * size, doubled
    return Inconclusive("no tokens that half precision can hold make attention hard")


def measure_value_maps(
    problem: HalfPrecisionProblem, single: SingleTokens, size: float
) -> list[Float[Array, "d D"]] | str:
    """Value maps of all heads by one bag, or why it does not lead to them."""
    bag = draw_decided_bag(problem, single, size)
    if bag is None:
        return "no bag of long tokens is decided"
    used = name_tokens_in_use(problem, single, bag)
    tokens = np.concatenate([np.zeros_like(bag.tokens), bag.anchor[None]])
    tokens[used] = bag.tokens[used]  # in their places, which may matter
    tokens, base = ask_bags(problem, single, tokens[None])
    count, outputs = len(used), len(single.offset)
    scale = float(np.linalg.norm(bag.answer))
    if not count or np.linalg.norm(base[0] - bag.answer) > 2.0 * REJECTION * problem.unit * scale:
        return "the tokens in use alone are answered otherwise than the bag"
    rank, rest = divmod(min(problem.width, outputs), count)
    if rest:
        return f"{count} tokens in use do not share out the width"
    maps = []
    for number in used:
        moves = move_token(problem, single, tokens[0], base[0], int(number), rank)
        if len(moves.changes) < problem.width:
            return "heads leave the tokens in use when these are moved"
        maps.append(moves.solve_map(rank))
    return maps


def draw_decided_bag(
    problem: HalfPrecisionProblem, single: SingleTokens, size: float
) -> DecidedBag | None:
    for _ in range(4):
        bags = draw_bags(problem, 2, size)
        tokens, answers = ask_bags(problem, single, np.concatenate([bags, 2.0 * bags]))
        decided = np.flatnonzero(is_decided(problem, answers[:2], answers[2:]))
        if len(decided):
            chosen = tokens[2 + decided[0]]
            return DecidedBag(chosen[:-1], chosen[-1], answers[2 + decided[0]])
    return None


def name_tokens_in_use(
    problem: HalfPrecisionProblem, single: SingleTokens, bag: DecidedBag
) -> Int[Array, " k"]:
    """Tokens without which the answer is another, by halving groups of them."""

    def matters(groups: list[Array]) -> list[bool]:
        if not groups:
            return []
        tokens = np.repeat(np.concatenate([bag.tokens, bag.anchor[None]])[None], len(groups), 0)
        for place, group in enumerate(groups):
            tokens[place, group] = 0.0
        _, answers = ask_bags(problem, single, tokens)
        gaps = np.linalg.norm(answers - bag.answer, axis=1)
        return (gaps > 2.0 * REJECTION * problem.unit * np.linalg.norm(bag.answer)).tolist()

    active = [np.arange(len(bag.tokens))]
    while any(len(group) > 1 for group in active):
        halves = [np.array_split(group, 2) for group in active if len(group) > 1]
        kept = [group for group in active if len(group) == 1]
        left = matters([first for first, _ in halves])
        # one half of a group that matters must matter: the second is asked only beside the first
        unsure = [second for (_, second), seen in zip(halves, left, strict=True) if seen]
        right = iter(matters(unsure))
        for (first, second), seen in zip(halves, left, strict=True):
            if seen:
                kept.append(first)
            if not seen or next(right):
                kept.append(second)
        active = kept
    return np.sort(np.concatenate(active)) if active else np.zeros(0, int)


@dataclass(frozen=True, eq=False)
class MovedToken:
    """Orthonormal directions in which a token was moved, and changes of the answer per length."""

    directions: Float[Array, "n d"]
    changes: Float[Array, "n D"]

    def solve_map(self, rank: int) -> Float[Array, "d D"]:
        """The value map of the head that attends to the token."""
        left, sizes, right = np.linalg.svd(self.directions.T @ self.changes)
        return np.asarray((left[:, :rank] * sizes[:rank]) @ right[:rank])


def move_token(
    problem: HalfPrecisionProblem,
    single: SingleTokens,
    tokens: Float[Array, "length d"],
    base: Float[Array, " D"],
    number: int,
    rank: int,
) -> MovedToken:
    """Moves of one token in all directions. As many as show the outputs of its head are made to and
    fro: a head that leaves its token on the way does so on one side only. In the other directions
    one move will do, which must stay within those outputs."""
    rounding = REJECTION * problem.unit * float(np.linalg.norm(base))
    length = problem.options.move * float(np.linalg.norm(tokens[number]))
    frame = np.linalg.qr(problem.rng.standard_normal((problem.width, problem.width)))[0]

    def change(steps: Array) -> Array:
        moved = np.repeat(tokens[None], len(steps), axis=0)
        moved[:, number] += steps
        return np.asarray(ask_bags(problem, single, moved)[1] - base)

    def move_both_ways(steps: Array) -> tuple[Array, Array]:
        forth, back = change(np.concatenate([steps, -steps])).reshape(2, len(steps), -1)
        odd = np.linalg.norm(forth + back, axis=1)
        fine = odd <= 0.2 * np.linalg.norm(forth - back, axis=1) + rounding
        return (forth - back) / 2.0, fine

    sure = shorten_moves(move_both_ways, frame[: rank + 2], length)
    if len(sure.changes) < rank:
        return sure
    outs = np.linalg.svd(sure.changes)[2][:rank]
    most = 2.0 * float(np.linalg.norm(sure.changes, axis=1).max())

    def move_one_way(steps: Array) -> tuple[Array, Array]:
        forth = change(steps)
        sizes, odd = (np.linalg.norm(p, axis=1) for p in (forth, forth - forth @ outs.T @ outs))
        lengths = np.linalg.norm(steps, axis=1)
        return forth, (odd <= 0.2 * sizes + rounding) & (sizes <= most * lengths + rounding)

    if len(frame) <= rank + 2:
        return sure
    more = shorten_moves(move_one_way, frame[rank + 2 :], length)
    return MovedToken(
        np.concatenate([sure.directions, more.directions]),
        np.concatenate([sure.changes, more.changes]),
    )


def shorten_moves(
    move: Callable[[Float[Array, "n d"]], tuple[Array, Array]],
    directions: Float[Array, "n d"],
    length: float,
) -> MovedToken:
    """Moves of this length, or shorter where a head does not stay; `move` tells the changes of the
    answers, and which of them are fine."""
    kept, changes = [], []
    for _ in range(4):
        changed, fine = move(length * directions)
        kept.append(directions[fine])
        changes.append(changed[fine] / length)
        directions, length = directions[~fine], 0.5 * length
        if not len(directions):
            break
    return MovedToken(np.concatenate(kept), np.concatenate(changes))


@dataclass(frozen=True, eq=False)
class CoarseValues:
    """Value maps of all heads to a few per cent, the offset, and the size of the entries of tokens
    at which attention is soft."""

    offset: Float[Array, " D"]
    maps: tuple[Float[Array, "d D"], ...]
    size: float

    @property
    def rank(self) -> int:
        return min(self.maps[0].shape) // len(self.maps)


def measure_coarse_values(
    ask: Asker, rng: np.random.Generator, options: HalfPrecisionOptions | None = None
) -> CoarseValues | Refuted | Inconclusive:
    """Value maps of a box that computes in half precision; what makes its scores may depend on
    where tokens stand."""
    options = options or HalfPrecisionOptions()
    problem = HalfPrecisionProblem(ask, rng, options)
    single = measure_single_tokens(problem)
    if not isinstance(single, SingleTokens):
        return single
    hard = find_hard_size(problem, single)
    if isinstance(hard, Inconclusive):
        return hard
    trouble = "no bag of long tokens showed the heads"
    for _ in range(options.bags):
        maps = measure_value_maps(problem, single, hard)
        if isinstance(maps, str):
            trouble = maps
            continue
        soft = SoftSequences.draw(problem, single, choose_length(problem, maps))
        return CoarseValues(single.offset, tuple(maps), soft.size)
    return Inconclusive(trouble)


# -- Soft attention ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SoftSequences:
    """Random sequences of one length, and their answers."""

    size: float  # of the entries of tokens
    tokens: Float[Array, "n length d"]
    answers: Float[Array, "n D"]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @classmethod
    def draw(
        cls, problem: HalfPrecisionProblem, single: SingleTokens, length: int
    ) -> "SoftSequences":
        """Sequences of a size at which attention is as soft as wished: the answer then lies
        between the mean of what the tokens give alone, and one of them."""
        sequences, size, factor = problem.draw(8, length), 1.0, 2.0
        found: list[tuple[float, Array, Array]] = []
        for _ in range(10):
            tokens, answers = problem.answer(size * sequences, "soft")
            found.append((size, tokens, answers))
            gap = answers - single.predict(tokens.mean(axis=1))
            hard = (np.linalg.norm(size * single.total) ** 2) * (1.0 - 1.0 / length)
            softness = float(np.mean(np.sum(gap**2, axis=1)) / hard)
            if 0.8 < softness / problem.options.softness < 1.25:
                break
            grow = softness < problem.options.softness
            if len(found) > 1 and grow != (found[-1][0] > found[-2][0]):
                factor = np.sqrt(factor)
            size *= factor if grow else 1.0 / factor
        size = found[-1][0]
        near = [part for part in found if 0.6 < part[0] / size < 1.7]
        return cls(size, np.concatenate([p[1] for p in near]), np.concatenate([p[2] for p in near]))

    def lengthen(self, problem: HalfPrecisionProblem, count: int) -> "SoftSequences":
        """Fresh sequences of more and longer tokens: attention is harder there, and tells more."""
        length = int(min(2 * self.length, problem.ask.oracle.spec.domain.max_length or np.inf))
        empty = np.zeros((0, length, problem.width)), np.zeros((0, self.answers.shape[1]))
        return SoftSequences(1.2 * self.size, *empty).extend(problem, count)

    def extend(self, problem: HalfPrecisionProblem, count: int) -> "SoftSequences":
        missing = count - len(self.tokens)
        if missing <= 0:
            return self
        tokens, answers = problem.answer(self.size * problem.draw(missing, self.length), "soft")
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]),
            answers=np.concatenate([self.answers, answers]),
        )


def measure_rounding(
    ask: Asker,
    rng: np.random.Generator,
    tokens: Float[Array, "n length d"],
    answers: Float[Array, "n D"],
    model: Attention,
) -> float:
    """Standard deviation of the rounding of an answer to such tokens: neighbours of some of them in
    the number format are rounded otherwise. The model says what else the neighbours change, which
    is hardly more than rounding itself: a rough model will do."""
    count = HalfPrecisionOptions().neighbours
    old, answers = tokens[-count:], answers[-count:]
    signs = rng.choice((-1.0, 1.0), old.shape)
    new = ask.representable(old * (1.0 + 2.0 * ask.unit * signs))
    gaps = (ask(new, "precision") - answers) - (model(new) - model(old))
    # the rounding of neighbours is related: 0.75 to 0.97 of it is seen
    return max(float(np.sqrt(np.mean(gaps**2) / 2.0)) / 0.86, TINY)


def choose_length(problem: HalfPrecisionProblem, maps: list[Array]) -> int:
    """Tokens of a soft query: its answer has twice as many numbers as there are weights, but long
    sequences have small weights."""
    rank = min(maps[0].shape) // len(maps)
    return int(min(max(2, rank // 2 + 1), 12, problem.ask.oracle.spec.domain.max_length or 12))


def count_start_queries(problem: HalfPrecisionProblem, maps: list[Array], length: int) -> int:
    """As many log-ratios as the entries of a score and its key bias ask for."""
    width = problem.width
    return int(np.ceil(problem.options.rows * width * (width + 1) / (length - 1)))


def count_further_queries(
    problem: HalfPrecisionProblem, maps: list[Array], soft: "SoftSequences"
) -> int:
    """Up to so many numbers per unknown, and one at least."""
    width, outputs = maps[0].shape
    rank = min(width, outputs) // len(maps)
    floor = len(maps) * 2 * (2 * rank * width - rank**2) / outputs + 2
    return int(np.ceil(max(floor, problem.options.floors * floor - len(soft.tokens))))


def solve_scores(single: SingleTokens, maps: list[Array], soft: SoftSequences) -> FactoredLayer:
    """Scores with key biases from the log-ratios of weights, each to the largest of its query."""
    weights, errors = solve_weights(single, maps, soft)
    width, outputs = maps[0].shape
    score_rank, rank = (max(1, n // len(maps)) for n in (width, min(width, outputs)))
    anchors = np.concatenate([soft.tokens[:, -1], np.ones((len(soft.tokens), 1))], axis=1)
    places = np.arange(len(anchors))
    scores = []
    for h in range(len(maps)):
        own = np.clip(weights[:, h], errors[:, h], 1.0)  # a logarithm of no less than an error
        largest = own.argmax(axis=1)
        first = own[places, largest][:, None]
        doubt = errors[:, h] / own
        doubt = np.hypot(doubt, doubt[places, largest][:, None])
        apart = soft.tokens - soft.tokens[places, largest][:, None]
        # a start need not be better than a few per cent of a score of order one
        trust = 1.0 / np.hypot(doubt, 0.03)
        dense = fit_bilinear(apart, anchors, np.log(own / first), trust)
        scores.append(Factored.of(np.eye(width), dense, score_rank))
    values = [Factored.of(np.eye(width), part, rank) for part in maps]
    return FactoredLayer(tuple(scores), tuple(values), single.offset)


def solve_weights(
    single: SingleTokens, maps: list[Array], soft: SoftSequences
) -> tuple[Float[Array, "n heads length"], Float[Array, "n heads length"]]:
    """Weights of every head by linear least squares, each head's of sum one, and their standard
    errors: rounding, and errors of the maps, are as large as what the answers leave unexplained."""
    apart = soft.tokens[:, :-1] - soft.tokens[:, -1:]
    design = np.stack([apart @ value for value in maps], axis=1)  # (n, heads, length - 1, D)
    count, heads, others, outputs = design.shape
    design = design.reshape(count, heads * others, outputs)
    rest = soft.answers - single.predict(soft.tokens[:, -1])
    normal = design @ design.transpose(0, 2, 1)
    scale = np.trace(normal, axis1=1, axis2=2) / normal.shape[1]
    even = np.full(normal.shape[1], 1.0 / (others + 1))
    level = 1e-6 * scale  # of the ridge, before the noise is known
    for _ in range(2):
        # weights that an answer does not tell stay at their mean, up to about as much
        ridge = level[:, None, None] * np.eye(normal.shape[1])
        inverse = np.linalg.inv(normal + ridge)
        right = np.einsum("nkd,nd->nk", design, rest) + ridge @ even
        found = np.einsum("nkj,nj->nk", inverse, right)
        left = rest - np.einsum("nk,nkd->nd", found, design)
        noise = float(np.median((left**2).sum(axis=1))) / max(outputs - heads * others, 1)
        level = np.full(count, noise) * (others + 1) ** 2
    spread = noise * inverse.reshape(count, heads, others, heads, others)
    spread = np.stack([spread[:, h, :, h] for h in range(heads)], axis=1)
    errors = np.sqrt(np.diagonal(spread, axis1=2, axis2=3))
    last = np.sqrt(spread.sum(axis=(2, 3)))
    found = found.reshape(count, heads, others)
    return (
        np.concatenate([found, 1.0 - found.sum(axis=2, keepdims=True)], axis=2),
        np.maximum(np.concatenate([errors, last[:, :, None]], axis=2), TINY),
    )


def fit_bilinear(
    tokens: Float[Array, "n m d"],
    anchors: Float[Array, "n e"],
    products: Float[Array, "n m"],
    trust: Float[Array, "n m"],
) -> Float[Array, "d e"]:
    """P with tokens P anchors = products, weighted; stopped early, since the rows are rough."""
    shape = tokens.shape[2], anchors.shape[1]

    def push(flat: Array) -> Array:
        matrix = flat.reshape(shape)
        return np.asarray((trust * np.einsum("nmd,nd->nm", tokens, anchors @ matrix.T)).ravel())

    def pull(flat: Array) -> Array:
        pulled = np.einsum("nmd,nm->nd", tokens, trust * flat.reshape(trust.shape))
        return np.asarray((pulled.T @ anchors).ravel())

    operator = LinearOperator(
        (trust.size, shape[0] * shape[1]), matvec=push, rmatvec=pull, dtype=np.float64
    )
    return np.asarray(lsmr(operator, (trust * products).ravel(), maxiter=200)[0].reshape(shape))


# -- The fit -----------------------------------------------------------------------------------


def fit_soft_answers(
    problem: HalfPrecisionProblem, start: FactoredLayer, soft: tuple[SoftSequences, ...]
) -> tuple[Polished, float]:
    """The layer fitted to all soft answers, and the typical standard error that these have by the
    sizes of their terms: how much larger than the rounding that is, the misfit tells."""
    model, data = build_attention(start), []
    for part in soft:
        errors = estimate_answer_errors(problem.ask, model, part.tokens)
        data.append(LayerAnswers(part.tokens, part.answers, errors))
    fit = fit_layer(start, data, problem.rng, FIT)
    return fit, float(np.sqrt(np.mean(np.concatenate([part.errors for part in data]) ** 2)))


def build_attention(layer: FactoredLayer) -> Attention:
    heads = []
    for keys, value in zip(layer.scores, layer.values, strict=True):
        score = (keys.left * keys.singular) @ keys.right
        heads.append(Head(score[:, :-1], score[:, -1], (value.left * value.singular) @ value.right))
    return Attention(heads, layer.offset)


def describe(
    problem: HalfPrecisionProblem, start: FactoredLayer, fit: Polished, prior: PriorKnowledge
) -> Hypothesis:
    """The fitted layer as a hypothesis."""
    layer = fit.layer
    ranks = tuple(part.rank for part in layer.scores)
    values = tuple(part.rank for part in layer.values)
    model = build_attention(start)
    found = Hypothesis(
        model,
        model,
        layer.unknowns / len(layer.offset),
        ("The box computes in half precision.", *note_missing_heads(prior.heads, len(ranks))),
        noise=problem.ask.oracle.spec.precision or NoiseModel(problem.unit),
        diagnostics=MultiHeadDiagnostics(
            heads=len(ranks), ranks=ranks, key_ranks=ranks, value_ranks=values, unit=problem.unit
        ),
    )
    return drop_faint_biases(replace_layer(found, fit))


def drop_faint_biases(found: Hypothesis) -> Hypothesis:
    """Key biases and an offset that are nothing but error are zero, as in many layers; their
    standard errors stay."""

    def is_seen(block: Array, error: Array) -> bool:
        return float(np.linalg.norm(block)) > 1.5 * float(np.linalg.norm(error))

    model, errors = found.model, found.errors
    heads = []
    for head, error in zip(model.heads, errors.heads, strict=True):
        factors = head.score_factors
        score = head.score if factors is None else (factors.left, factors.right)
        bias = head.key_bias if is_seen(head.key_bias, error.key_bias) else None
        heads.append(Head(score, bias, head.value))
    offset = model.offset if is_seen(model.offset, errors.offset) else np.zeros_like(model.offset)
    return replace(found, model=Attention(heads, offset))


def check_long_query(
    problem: HalfPrecisionProblem, model: Attention, size: float, level: float
) -> Inconclusive | None:
    """Sequences longer than those of the fit: a window or a mask does not show in these."""
    limit = problem.ask.oracle.spec.domain.max_length
    for length in (20, 300):
        count = length if limit is None else min(limit, length)
        tokens, answers = problem.answer(size * problem.draw(1, count), "validation")
        off = float(np.sqrt(np.mean((answers - model(tokens)) ** 2)))
        # sums over many tokens round more often, and the model has errors of its own
        if off > 12.0 * level:
            return Inconclusive(
                f"a layer that explains short sequences misses one of {count} tokens by "
                f"{off / level:.0f} times the rounding"
            )
    return None
