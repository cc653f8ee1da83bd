"""Huge tokens: every head attends to exactly one of them, and the box becomes linear.

Statement. At a fixed anchor x the box gets candidate tokens s t_i with s enormous. Head h attends
to the one with the largest t_i . k_h(x) alone and answers with its value: f = sum_h s t_i(h) . v_h,
exactly. The tokens that heads attend to (the selected tokens) are found, a token that several
heads share is split, and small shifts of the selected tokens give the values.

Queries. Shifting token i by a_i delta changes the answer by sum_h a_i(h) (delta . v_h).
(1) Scalar answers: the patterns a = cos(k theta), sin(k theta) make them trigonometric moments,
which name the selected tokens (linalg/sparse_moments). With few digits, halves of groups are
shifted instead: about log2(candidates) queries per head, each of which need only show whether
anybody attends to the group.
(2) Vector answers: as many random patterns as heads, and one more, suffice, as long as there are no
more selected tokens than outputs.
(3) A token w that several heads share becomes w + eta, w - eta with eta turning in a random plane.
While all its heads choose the same side the answer changes by ± eta . value; between the angles at
which two heads change sides it does not, and bisection finds such an angle.

Algebra. All answers are exact linear equations in the values (linalg/linear_system). A head with
score zero attends to all tokens alike: it shifts the constant moment alone, and is recognised by
that.

When it fails. Heads whose keys agree to rounding are never separated: they count as one. A box
whose attention never hardens (a cap on scores) explains no moments: WrongFamily.

Source. Keyhole's own; the moments are Prony's method on the unit circle.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import Counterexample, DomainError, NotIdentifiable, WrongFamily
from keyhole.linalg.bases import random_directions
from keyhole.linalg.linear_system import LinearSystem
from keyhole.linalg.sparse_moments import (
    Support,
    build_trigonometric_patterns,
    find_support_from_moments,
    find_support_from_vectors,
    fit_support,
)
from keyhole.measurement.asker import Asker
from keyhole.oracles.noise import ROUNDINGS

CANDIDATES = 256  # tokens offered: two heads share one in about H²/512 of all cases
CROWD = 4 * CANDIDATES  # tokens offered where answers are vectors, which tell more of them apart
MOST_HEADS = 64  # heads beyond which an unknown number of them is no longer looked for
HUGE_TOKENS = 1e4  # relative errors of what is measured behind huge tokens, in roundings
HARD_SCALE = 1e10  # token size over anchor size that makes attention hard at ordinary scores
CANDIDATE_SETS = 4  # sets of candidates tried before the family is doubted
SAFE_SHIFT = 3e-3  # shift of a selected token, relative, that changes nobody's choice
MISFIT = 1e3  # misfit of an answer, in its rounding errors, that is not rounding
SAME_SIDE = 1e-6  # relative deviation within which an answer counts as the expected one
NO_VALUE = "every answer is zero: no head has a value, so no score can be known"


class NeverHard(WrongFamily):
    """No choice of tokens explains the answers to huge ones. To vector answers, heads whose values
    are alike hide each other's choices too."""


NEVER_HARD = (
    "no number of heads explains the answers to huge tokens: attention never settles on single "
    "tokens as softmax attention does"
)


class Overcomplete(Exception):
    """There are more heads, or wider ones, than outputs: answers do not keep the heads apart."""


@dataclass(frozen=True, eq=False)
class HardAttentionPattern:
    """One selected token per group of heads, and every equation in their values known so far."""

    anchor: Float[Array, " d"]
    tokens: Float[Array, "h d"]  # of size one; attention is hard when multiplied by `scale`
    reach: Float[Array, " h"]  # shifts up to this change nobody's choice
    scale: float
    system: LinearSystem  # in units of `scale`; the last block is the uniform head, if any
    uniform: bool

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def blocks(self) -> int:
        return len(self) + int(self.uniform)

    def arrange(self, shifts: Float[Array, "n b d"]) -> tuple[Array, Array]:
        """Sequences in which the selected tokens are shifted, and the rows of their equations.

        A uniform head sees the mean of the sequence; a dummy token nobody else attends to shifts
        that mean independently of the selected tokens.
        """
        heads = len(self)
        selected = self.tokens + shifts[:, :heads]
        if not self.uniform:
            return selected, selected
        length = heads + 2  # selected tokens, dummy, anchor
        dummy = shifts[:, heads] * length - shifts[:, :heads].sum(axis=1)
        mean = (selected.sum(axis=1) + dummy + self.anchor / self.scale) / length
        tokens = np.concatenate([selected, dummy[:, None]], axis=1)
        return tokens, np.concatenate([selected, mean[:, None]], axis=1)

    def query(self, ask: Asker, tokens: Float[Array, "n k d"], purpose: str) -> Array:
        return query_hard(ask, tokens, self.anchor, self.scale, purpose)


def query_hard(ask: Asker, tokens: Array, anchor: Array, scale: float, purpose: str) -> Array:
    """Answers, in units of `scale`, to sequences of scaled tokens with the anchor last."""
    last = np.broadcast_to(anchor, (len(tokens), 1, len(anchor)))
    return ask(np.concatenate([scale * tokens, last], axis=1), purpose) / scale


def count_candidates(ask: Asker, most: int, heads: int | None = None) -> int:
    """How many tokens to offer, at most, so that every head has its own in most cases."""
    limit = ask.oracle.spec.domain.max_length
    size = most if limit is None else min(most, limit - 1)
    if size < 2 or (heads is not None and size < heads + 2):
        raise DomainError(
            f"finding {heads or 'several'} heads needs sequences longer than max_length={limit}"
        )
    return size


def describe_surplus(count: int, heads: int) -> str:
    """Why a box is refused that has more heads than were claimed."""
    return (
        f"{count} heads answer where {heads} were claimed: huge tokens are attended to in {count} "
        f"different ways. Pass heads={count}, or leave heads= out"
    )


def keeps_choices(ask: Asker, pattern: HardAttentionPattern, base: Array) -> bool:
    """Whether every head still attends to its token when all other candidates are left out."""
    answer = pattern.query(ask, pattern.tokens[None], "selected tokens")[0]
    return bool(np.abs(answer - base).max() <= MISFIT * ask.unit * np.abs(base).max())


# --- scalar answers: moments ----------------------------------------------------------------------


def find_selected_tokens(
    ask: Asker,
    anchor: Float[Array, " d"],
    total: Float[Array, "d outputs"],
    heads: int | None,
    rng: np.random.Generator,
) -> HardAttentionPattern:
    """The selected tokens among random candidates; `total` is the sum of all values."""
    size = count_candidates(ask, CANDIDATES, heads)
    scale = HARD_SCALE / float(np.linalg.norm(anchor))
    if not ask.affords(HUGE_TOKENS) and not ask.additive:
        by_halves = halve_candidates(ask, anchor, total, heads, rng, size, scale)
        if by_halves is not None:
            return by_halves
    trouble: WrongFamily = NeverHard(NEVER_HARD)
    surplus_seen = False
    for number in range(CANDIDATE_SETS):
        # moments asked beyond the claimed number of heads; the last set of candidates gets more
        spare = 24 if number == CANDIDATE_SETS - 1 else 3
        candidates = draw_candidates(ask, anchor, total, rng, size, scale)
        found = explain_candidates(ask, candidates, heads, spare)
        if isinstance(found, HardAttentionPattern):
            return found
        if isinstance(found, WrongFamily):
            if surplus_seen:  # two sets agree that there are more heads than claimed
                raise found
            trouble, surplus_seen = found, True
        else:
            trouble = NeverHard(NEVER_HARD, found)
            scale *= 1e4  # attention may not have been hard yet
    raise trouble


@dataclass(frozen=True, eq=False)
class CandidateTokens:
    """Huge tokens at one anchor, shifted along `shift` by one trigonometric pattern after the
    other, and the answers."""

    anchor: Float[Array, " d"]
    scale: float
    tokens: Float[Array, "n d"]
    shift: Float[Array, " d"]
    mix: Float[Array, " outputs"]  # of the outputs into the one number that moments are made of
    whole: float  # what all heads together answer to the shift
    step: float
    base: Float[Array, "one outputs"]
    shifted: Float[Array, "k n d"]
    answers: Float[Array, "k outputs"]

    @property
    def angles(self) -> Float[Array, " n"]:
        return 2 * np.pi * np.arange(len(self.tokens)) / len(self.tokens)

    @property
    def moments(self) -> Float[Array, " m"]:
        return np.concatenate([[self.whole], (self.answers - self.base) @ self.mix / self.step])

    @property
    def patterns(self) -> Float[Array, "p n"]:
        """The patterns that were asked, and before them the constant one."""
        return build_trigonometric_patterns(len(self.answers) // 2, self.angles)

    def extend(self, ask: Asker, order: int) -> "CandidateTokens":
        """With the answers to all patterns up to an order."""
        patterns = build_trigonometric_patterns(order, self.angles)[1 + len(self.answers) :]
        shifted = self.tokens + self.step * patterns[:, :, None] * self.shift
        fresh = query_hard(ask, shifted, self.anchor, self.scale, "selected tokens")
        return replace(
            self,
            shifted=np.concatenate([self.shifted, shifted]),
            answers=np.concatenate([self.answers, fresh]),
        )

    def select(self, nodes: Array, uniform: bool) -> HardAttentionPattern:
        """The tokens chosen, with all that the answers say of their values."""
        origin = self._rows(self.tokens[None], nodes, uniform)
        system = LinearSystem.of(origin, self.base).add(
            self._rows(self.shifted, nodes, uniform), self.answers, origin[0]
        )
        reach = np.full(len(nodes), SAFE_SHIFT)
        return HardAttentionPattern(
            self.anchor, self.tokens[nodes], reach, self.scale, system, uniform
        )

    def _rows(self, tokens: Array, nodes: Array, uniform: bool) -> Array:
        rows = tokens[:, nodes]
        if uniform:
            mean = (tokens.sum(axis=1) + self.anchor / self.scale) / (tokens.shape[1] + 1)
            rows = np.concatenate([rows, mean[:, None]], axis=1)
        return rows

    def fit_fewer(self, support: Support, heads: int) -> Support:
        """The best explanation of the moments by the `heads` heaviest nodes."""
        heaviest = np.sort(np.argsort(-np.abs(support.weights), kind="stable")[:heads])
        return fit_support(self.patterns, self.moments, support.nodes[heaviest])

    def build_counterexample(self, support: Support) -> Counterexample:
        """The query that the best support explains worst."""
        predicted = self.patterns[1:, support.nodes] @ support.weights
        off = predicted - self.moments[1:]
        worst = int(np.argmax(np.abs(off)))
        answer = (self.answers @ self.mix)[worst] * self.scale
        return Counterexample(
            input=np.concatenate([self.scale * self.shifted[worst], self.anchor[None]]),
            box_answer=np.asarray(answer),
            model_answer=np.asarray(answer + off[worst] * self.step * self.scale),
            reason=f"best explanation by {len(support.nodes)} heads that each attend to one token",
        )


def draw_candidates(
    ask: Asker, anchor: Array, total: Array, rng: np.random.Generator, size: int, scale: float
) -> CandidateTokens:
    """Random candidates, asked about without a shift."""
    width, outputs = total.shape
    tokens, shift = random_directions(rng, size, width), random_directions(rng, 1, width)[0]
    mix = np.asarray(rng.standard_normal(outputs)) if outputs > 1 else np.ones(1)
    step = ask.unit**0.25  # balances rounding of the answer against heads that change their choice
    base = query_hard(ask, tokens[None], anchor, scale, "selected tokens")
    shifted, answers = np.zeros((0, size, width)), np.zeros((0, outputs))
    whole = float(shift @ total @ mix)
    return CandidateTokens(anchor, scale, tokens, shift, mix, whole, step, base, shifted, answers)


def explain_candidates(
    ask: Asker, candidates: CandidateTokens, heads: int | None, spare: int
) -> HardAttentionPattern | Counterexample | WrongFamily:
    """The selected tokens, a query that no number of heads explains, or too many heads."""
    doubt = MISFIT * ask.unit / candidates.step
    silent = 1e-280 + ask.undetected / (candidates.step * candidates.scale)
    order, most = (1, MOST_HEADS) if heads is None else (heads, heads + spare)
    most, surplus_seen = min(most, (len(candidates.tokens) - 1) // 2), 0
    while True:
        candidates = candidates.extend(ask, order)
        if max(np.abs(candidates.moments).max(), np.abs(candidates.base).max()) <= silent:
            raise NotIdentifiable(NO_VALUE)
        support, uniform = explain_moments(candidates.moments, candidates.angles, doubt)
        count = len(support.nodes) + int(uniform)
        if support.misfit <= doubt:
            # more heads than claimed are believed when two more moments say so too
            if heads is None or count <= heads or surplus_seen == 2:
                break
            surplus_seen += 1
        order += 1
        if order > most:
            return candidates.build_counterexample(support)
    if heads is not None and count > heads:
        fewer = candidates.fit_fewer(support, heads)
        return WrongFamily(describe_surplus(count, heads), candidates.build_counterexample(fewer))
    return candidates.select(support.nodes, uniform)


def explain_moments(
    moments: Float[Array, " m"], angles: Float[Array, " n"], doubt: float
) -> tuple[Support, bool]:
    """The smallest support; where none fits, one next to a uniform head, whose weight is added
    to the constant moment alone and so shifts the whole spectrum of the Toeplitz matrix."""
    if np.abs(moments[1:]).max() <= doubt * abs(moments[0]):  # nobody chooses: all heads uniform
        return Support(np.zeros(0, int), np.zeros(0), 0.0), True
    support = find_support_from_moments(moments, angles, doubt)
    if support.misfit <= doubt or len(moments) < 5:  # fewer cannot tell a uniform head from two
        return support, False
    free = find_support_from_moments(moments, angles, doubt, constant_known=False)
    return (free, True) if free.misfit <= doubt else (support, False)


# --- scalar answers with few digits: halves -------------------------------------------------------


def halve_candidates(
    ask: Asker,
    anchor: Float[Array, " d"],
    total: Float[Array, "d outputs"],
    heads: int | None,
    rng: np.random.Generator,
    size: int,
    scale: float,
) -> HardAttentionPattern | None:
    """The selected tokens by halving groups of candidates that are shifted together, where answers
    have too few digits for moments. None where no set of candidates works out, as with a head that
    attends to all tokens alike."""
    width, outputs = total.shape
    mix = np.asarray(rng.standard_normal(outputs)) if outputs > 1 else np.ones(1)
    most = heads or MOST_HEADS
    for _ in range(CANDIDATE_SETS):
        tokens, shift = random_directions(rng, size, width), random_directions(rng, 1, width)[0]
        base = query_hard(ask, tokens[None], anchor, scale, "selected tokens")
        search = Halving(ask, anchor, scale, tokens, shift, base, mix, total)
        nodes = search.find_nodes(most)
        if not len(nodes):
            continue
        system = LinearSystem.of(tokens[None][:, nodes], base)
        system = system.add(search.asked[:, nodes], search.answers, tokens[nodes])
        reach = np.full(len(nodes), SAFE_SHIFT)
        pattern = HardAttentionPattern(anchor, tokens[nodes], reach, scale, system, False)
        if keeps_choices(ask, pattern, base[0]):
            return pattern
    return None


class Halving:
    """Candidates, and what was asked of groups of them that are shifted together."""

    step = 2e-3  # relative to a token: a shift of this size rarely changes a choice

    def __init__(
        self,
        ask: Asker,
        anchor: Float[Array, " d"],
        scale: float,
        tokens: Float[Array, "n d"],
        shift: Float[Array, " d"],
        base: Float[Array, "one outputs"],
        mix: Float[Array, " outputs"],
        total: Float[Array, "d outputs"],
    ) -> None:
        self.ask, self.anchor, self.scale = ask, anchor, scale
        self.tokens, self.shift, self.base, self.mix = tokens, shift, base, mix
        self.whole = float(shift @ total @ mix)  # change of the answer where all are shifted
        output_scale = max(float(np.abs(base @ mix).max()), float(np.linalg.norm(total @ mix)))
        self.silent = ROUNDINGS * ask.unit / self.step * output_scale
        # smaller changes may be rounding
        self.asked = np.zeros((0, *tokens.shape))
        self.answers = np.zeros((0, base.shape[1]))

    def find_nodes(self, most: int) -> Int[Array, " nodes"]:
        """Numbers of the candidates that are selected; none where there are too many."""
        groups = [(np.arange(len(self.tokens)), self.whole)]
        while 0 < len(groups) <= most and max(len(group) for group, _ in groups) > 1:
            groups = self.halve(groups)
        if len(groups) > most:
            groups = []
        return np.sort(np.array([group[0] for group, _ in groups], dtype=int))

    def halve(self, groups: list[tuple[Array, float]]) -> list[tuple[Array, float]]:
        """The halves that change the answer, and by how much."""
        halves = [group[: -(-len(group) // 2)] for group, _ in groups]
        shifted = np.repeat(self.tokens[None], len(halves), axis=0)
        for place, half in enumerate(halves):
            shifted[place, half] += self.step * self.shift
        fresh = query_hard(self.ask, shifted, self.anchor, self.scale, "selected tokens")
        changes = (fresh - self.base) @ self.mix / self.step
        self.asked = np.concatenate([self.asked, shifted])
        self.answers = np.concatenate([self.answers, fresh])
        parts: list[tuple[Array, float]] = []
        for (group, whole), half, part in zip(groups, halves, changes, strict=True):
            parts += [(half, float(part)), (group[len(half) :], whole - float(part))]
        return [(g, part) for g, part in parts if len(g) and abs(part) > self.silent]


# --- vector answers -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Candidates:
    """Huge tokens before an anchor, and the answer in units of their size."""

    anchor: Float[Array, " d"]
    scale: float
    tokens: Float[Array, "n d"]
    base: Float[Array, "one outputs"]


@dataclass(frozen=True, eq=False)
class Selection:
    """Selected tokens, and what each answers to `shift`."""

    pattern: HardAttentionPattern
    marks: Float[Array, "h outputs"]
    shift: Float[Array, " d"]

    def subtract(self, constant: Float[Array, " outputs"]) -> "Selection":
        """The same, answers less what does not depend on the tokens before the anchor."""
        pattern = self.pattern
        base = pattern.system.answers[:1] - constant / pattern.scale
        system = LinearSystem.of(pattern.tokens[None], base)
        return replace(self, pattern=replace(pattern, system=system))


def find_selected_tokens_by_vectors(
    ask: Asker,
    anchor: Array,
    heads: int | None,
    shift: Array,
    rng: np.random.Generator,
    whole: Float[Array, " outputs"] | None = None,
) -> tuple[HardAttentionPattern, Float[Array, "h outputs"]]:
    """The selected tokens, and what each answers to `shift`; Overcomplete where there are as many
    as outputs. `whole` is what all heads together answer to it, where that is known."""
    size, scale = count_candidates(ask, CROWD), HARD_SCALE / float(np.linalg.norm(anchor))
    counterexample = None
    accurate = 1e-10  # rounding error below which the selected tokens need no check of their own
    for _ in range(CANDIDATE_SETS):
        tokens = random_directions(rng, size, len(anchor))
        base = query_hard(ask, tokens[None], anchor, scale, "selected tokens")
        candidates = Candidates(anchor, scale, tokens, base)
        seen = shift_candidates(ask, candidates, heads, shift, rng, whole)
        if seen.explained:
            if heads is not None and len(seen.support.nodes) > heads:
                surplus = describe_surplus(len(seen.support.nodes), heads)
                raise WrongFamily(surplus, seen.refute(heads))
            pattern = seen.select()
            if ask.unit < accurate or keeps_choices(ask, pattern, seen.base):
                return pattern, seen.support.weights
            continue
        if len(seen.support.nodes) >= ask.outputs:
            raise Overcomplete("there are as many heads as outputs, or more")
        reason = "no number of heads explains the answers to huge tokens"
        counterexample = seen.build_counterexample(-1, np.zeros(ask.outputs), reason)
        scale *= 1e4  # attention may not have been hard yet
    raise NeverHard(NEVER_HARD, counterexample)


@dataclass(frozen=True, eq=False)
class ShiftedCandidates:
    """Candidates, shifted by some random patterns, and the tokens that explain the answers."""

    anchor: Float[Array, " d"]
    scale: float
    tokens: Float[Array, "n d"]
    shift: Float[Array, " d"]
    patterns: Float[Array, "k n"]
    base: Float[Array, " outputs"]
    answers: Float[Array, "k outputs"]  # changes per unit of a pattern
    step: float
    support: Support
    doubt: float

    @property
    def explained(self) -> bool:
        fewer = len(self.support.nodes) < len(self.patterns)
        return fewer and self.support.misfit <= self.doubt

    def select(self) -> HardAttentionPattern:
        tokens = self.tokens[self.support.nodes]
        system = LinearSystem.of(tokens[None], self.base[None])
        reach = np.full(len(tokens), SAFE_SHIFT)
        return HardAttentionPattern(self.anchor, tokens, reach, self.scale, system, False)

    def refute(self, heads: int) -> Counterexample:
        """What speaks against the `heads` heaviest tokens alone."""
        heaviest = np.argsort(-np.linalg.norm(self.support.weights, axis=1), kind="stable")
        nodes = np.sort(self.support.nodes[heaviest[:heads]])
        fewer = fit_support(self.patterns, self.answers, nodes)
        guess = self.patterns[0, fewer.nodes] @ fewer.weights
        return self.build_counterexample(0, guess, f"best explanation by {heads} heads")

    def build_counterexample(self, number: int, guess: Array, reason: str) -> Counterexample:
        """A query, its answer, and a guess at how the pattern changes it."""
        shifted = self.tokens + self.step * self.patterns[number][:, None] * self.shift
        return Counterexample(
            input=np.concatenate([self.scale * shifted, self.anchor[None]]),
            box_answer=(self.base + self.step * self.answers[number]) * self.scale,
            model_answer=(self.base + self.step * guess) * self.scale,
            reason=reason,
        )


def shift_candidates(
    ask: Asker,
    candidates: Candidates,
    heads: int | None,
    shift: Array,
    rng: np.random.Generator,
    whole: Float[Array, " outputs"] | None = None,
) -> ShiftedCandidates:
    """One pattern after the other, until fewer tokens than patterns explain the answers. What all
    heads answer together is a pattern that need not be asked; if it is not borne out, it is left
    aside."""
    step = ask.unit ** (1 / 3)  # vectors need less signal than moments
    doubt = MISFIT * ask.unit / step
    anchor, scale = candidates.anchor, candidates.scale
    tokens, base, size = candidates.tokens, candidates.base, len(candidates.tokens)
    most = min(size - 1, base.shape[1], MOST_HEADS)
    patterns = rng.standard_normal((most + 1, size))
    patterns /= np.abs(patterns).max(axis=1, keepdims=True)
    answers = np.zeros((0, base.shape[1]))
    known = 0 if whole is None else 1
    goal = 2 if heads is None else max(1, heads + 1 - known)

    def explain(asked: Array, answers: Array) -> ShiftedCandidates:
        support = find_support_from_vectors(answers, asked, doubt)
        return ShiftedCandidates(
            anchor, scale, tokens, shift, asked, base[0], answers, step, support, doubt
        )

    while True:
        shifted = tokens + step * patterns[len(answers) : goal, :, None] * shift
        change = query_hard(ask, shifted, anchor, scale, "selected tokens") - base
        answers = np.concatenate([answers, change / step])
        asked = patterns[: len(answers)]
        if whole is not None:
            seen = explain(np.vstack([asked, np.ones(size)]), np.vstack([answers, whole]))
            if seen.explained:
                return seen
        seen = explain(asked, answers)
        if seen.explained or len(answers) > most:
            return seen
        goal += 1


# --- values, and tokens that several heads share --------------------------------------------------


def measure_values(ask: Asker, pattern: HardAttentionPattern) -> HardAttentionPattern:
    """The pattern with the equations that were still missing to know every value."""
    missing = pattern.system.find_unexplored()
    if not len(missing):
        return pattern
    reach = pattern.reach
    if pattern.uniform:
        reach = np.append(reach, reach.min())
    sizes = np.linalg.norm(missing, axis=2)
    # tokens of which a direction holds next to nothing do not limit its length
    shifts = missing * np.min(reach / np.maximum(sizes, 1e-12), axis=1)[:, None, None]
    tokens, rows = pattern.arrange(shifts)
    answers = pattern.query(ask, tokens, "values")
    still = pattern.arrange(np.zeros((1, pattern.blocks, ask.width)))
    system = pattern.system
    if pattern.uniform:  # the sequence is shorter than before: its own origin must be asked
        system = system.add(still[1], pattern.query(ask, still[0], "values"))
    return replace(pattern, system=system.add(rows, answers, still[1][0]))


def split_selected_token(
    ask: Asker, pattern: HardAttentionPattern, index: int, rng: np.random.Generator
) -> HardAttentionPattern | None:
    """The pattern with two tokens in place of one that several heads share; None where they cannot
    be told apart."""
    values, _ = pattern.system.solve()
    plane = np.linalg.qr(rng.standard_normal((ask.width, 2)))[0].T
    size = 0.02 * pattern.reach[index] / SAFE_SHIFT  # of the pivot, relative to an unsplit token
    low, high, sign = 0.0, np.pi, 0
    for _ in range(45):  # halvings of an angle until two heads count as one
        angle = 0.5 * (low + high) if sign else 0.0
        pivot = size * (np.cos(angle) * plane[0] + np.sin(angle) * plane[1])
        side, change = find_side(ask, pattern, index, pivot, values)
        if side == 0:
            gap = high - low if sign else 1.0
            return adopt_halves(ask, pattern, index, pivot, gap, change, values)
        if sign == 0:
            sign = side
        elif side == sign:
            low = angle
        else:
            high = angle
    return None


def arrange_halves(
    pattern: HardAttentionPattern, index: int, pivot: Array
) -> tuple[Float[Array, "one k d"], Float[Array, "one b d"]]:
    """The sequence in which a token has become two, and its row with the new head after the
    other selected tokens."""
    heads = len(pattern)
    tokens, rows = pattern.arrange(np.zeros((1, pattern.blocks, len(pivot))))
    both = np.stack([pattern.tokens[index] + pivot, pattern.tokens[index] - pivot])
    tokens = np.insert(tokens, heads, both[1], axis=1)
    rows = np.insert(rows, heads, both[1], axis=1)
    tokens[0, index] = rows[0, index] = both[0]
    if pattern.uniform:
        mean = tokens[0].sum(axis=0) + pattern.anchor / pattern.scale
        rows[0, -1] = mean / (tokens.shape[1] + 1)
    return tokens, rows


def predict_unsplit(
    pattern: HardAttentionPattern, index: int, rows: Array, values: Array
) -> Float[Array, " outputs"]:
    """The answer to an arrangement of halves, had the token stayed in the middle."""
    middle = np.delete(rows[0], len(pattern), axis=0)
    middle[index] = pattern.tokens[index]
    return np.asarray(np.einsum("bd,bdo->o", middle, values))


def find_side(
    ask: Asker, pattern: HardAttentionPattern, index: int, pivot: Array, values: Array
) -> tuple[int, Float[Array, " outputs"]]:
    """+1 or -1 where all heads of the token choose the same side, 0 where they part; and by how
    much the answer exceeds the one with the token in the middle."""
    tokens, rows = arrange_halves(pattern, index, pivot)
    answer = pattern.query(ask, tokens, "splitting")[0]
    change = answer - predict_unsplit(pattern, index, rows, values)
    expected = pivot @ values[index]
    size = float(np.linalg.norm(pivot) * np.linalg.norm(values[index]))
    allowed = SAME_SIDE * size + MISFIT * ask.unit * float(np.abs(values).max())
    for side in (1, -1):
        if np.abs(change - side * expected).max() <= allowed:
            return side, change
    return 0, change


def adopt_halves(
    ask: Asker,
    pattern: HardAttentionPattern,
    index: int,
    pivot: Array,
    gap: float,
    change: Array,
    values: Array,
) -> HardAttentionPattern:
    """The pattern with both halves selected, as far apart as their order allows; `gap` is the
    range of angles, in radians, in which the heads part."""
    for factor in (12.0, 4.0):  # larger pivots leave wider margins
        _, wider = find_side(ask, pattern, index, factor * pivot, values)
        if np.abs(wider - factor * change).max() <= SAME_SIDE * np.abs(factor * change).max():
            pivot, change = factor * pivot, wider
            break
    _, rows = arrange_halves(pattern, index, pivot)
    answer = change + predict_unsplit(pattern, index, rows, values)
    # a small share of the room between the halves, which is never taken for none at all
    margin = 2.5e-3 * float(np.linalg.norm(pivot)) * max(gap, 1e-9)
    tokens = np.concatenate([pattern.tokens, (pattern.tokens[index] - pivot)[None]])
    tokens[index] += pivot
    reach = np.append(pattern.reach, margin)
    reach[index] = margin
    system = pattern.system.split(index, len(pattern)).add(rows, answer[None])
    return replace(pattern, tokens=tokens, reach=reach, system=system)
