"""A whole model of one attention layer on tokens: embedding, attention, unembedding.

Statement.  Logits of anchor t behind tokens s_j: U (E_t + sum_h sum_j a_hj O_h E_sj) with
            a_h = softmax_j(E_t W_h E_sj). Known are the tables direct, ov_h and qk_h up to what
            does not show (`models.canonical`); heads, width and ranks are found, not given, and
            whether input and output share their embedding.
Queries.    Tokens alone (`coordinates`); a few prompts that only positions tell apart; pairs of
            tokens in proportions (`multiplicities`), three anchors to choose from; mixed prompts
            and random contexts (`algebra`).
Algebra.    As in these files; then all answers at once (`refinement`).
When it fails. Positions: copies of a token are no longer alike, which is refuted with the prompt. A
            network or norm behind the attention: answers depend on proportions as no heads do.
            Heads that hardly differ, or weights below the noise: ill-conditioned.
Source.     The statement in this form is ours; the tables are the circuits of Elhage et al., "A
            mathematical framework for transformer circuits" (2021).
"""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from keyhole.arrays import TINY, Array, Float, random_stream
from keyhole.errors import Counterexample, InvalidArgument
from keyhole.learners.base import (
    Diagnostics,
    Hypothesis,
    Inconclusive,
    Refuted,
    Result,
    run_strategies,
)
from keyhole.learners.output_layer import estimate_format
from keyhole.learners.token_attention.algebra import (
    Maps,
    choose_contexts,
    match_heads,
    solve_scores,
    solve_values,
)
from keyhole.learners.token_attention.contexts import Contexts, CountedPrompts
from keyhole.learners.token_attention.coordinates import Coordinates, find_coordinates
from keyhole.learners.token_attention.multiplicities import (
    Pair,
    choose_proportions,
    count_heads,
    exceeds_attention,
    solve_pair,
)
from keyhole.learners.token_attention.refinement import (
    AnsweredPrompts,
    AttentionModel,
    LowRankMap,
    RefinedMaps,
    choose_rank,
    refine,
)
from keyhole.measurement.asker import Asker
from keyhole.models.language_model import Table, TokenAttention, TokenHead
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import NoiseModel

ORDER, PAIRS, MIXED, CONTEXTS = "order of tokens", "proportions", "mixed tokens", "contexts"


# Standard errors of an answer beyond which the heads of a pair of tokens do not fit it.
UNFITTED = 1e4


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenAttentionDiagnostics(Diagnostics):
    """What was found beside the tables."""

    width: int
    heads: int
    tied: bool
    value_ranks: tuple[int, ...]
    score_ranks: tuple[int, ...]
    misfit: float  # root mean square residual, in units of what noise leaves


@dataclass(frozen=True)
class TokenAttentionLearner:
    """Learner for a language model of one attention layer, through the numbers of its tokens alone.

    Args:
        heads: Their number; None finds it.
        most_heads: Heads that are looked for, at most.
        anchors: Tokens of which the best is chosen for the pairs.
        surplus: Contexts relative to what the scores need.
        tolerance: Misfit, relative to what noise leaves, up to which a fit counts as reached.

    Example:
        >>> TokenAttentionLearner(heads=2).heads
        2
    """

    heads: int | None = None
    most_heads: int = 6
    anchors: int = 3
    surplus: float = 1.15
    tolerance: float = 300.0

    def __post_init__(self) -> None:
        if self.heads is not None and not 1 <= self.heads <= self.most_heads:
            raise InvalidArgument(
                f"heads must be between 1 and most_heads={self.most_heads}, got {self.heads}"
            )

    def expected_queries(self, spec: Spec) -> int | None:
        return None  # the width is found first; then `attempt` tells

    def count_rest(self, box: "Box", heads: int) -> int:
        """Queries for pairs, mixed prompts and contexts of so many heads."""
        width = box.coordinates.width
        pairs = (width + 1) * (heads + box.more_proportions)
        mixed = 0 if heads == 1 else (width + 1) // (2 if heads <= 4 else 1) + 1
        return pairs + mixed + self.count_contexts(box, max(1, width // heads))

    def count_contexts(self, box: "Box", others: int) -> int:
        """Contexts of so many tokens beside the anchor that determine the scores. Where answers are
        not precise, twice as many: errors of the scores shrink faster than the root of few
        contexts."""
        surplus = self.surplus * (1.0 if box.precise else 2.0)
        return int(np.ceil(surplus * box.coordinates.width**2 / others)) + 1

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        prompts = open_prompts(oracle, rng)
        box = Box(prompts, find_coordinates(prompts, rng))
        return run_strategies([("attention on tokens", lambda: attempt(box, self, rng))])


def open_prompts(oracle: Oracle, rng: np.random.Generator) -> CountedPrompts:
    """Number format of the answers, and whether they are log-probabilities, from two tokens."""
    spec = oracle.spec
    if spec.domain.tokens is None:
        raise InvalidArgument(
            "attention on tokens is learned from a language model: open the box with "
            "keyhole.open_language_model"
        )
    if spec.answers in ("top_k", "labels"):
        raise InvalidArgument(
            f"this box answers with {spec.answers}; the logits or log-probabilities of the whole "
            "vocabulary are needed"
        )
    if (spec.domain.max_length or 3) < 3:
        raise InvalidArgument("attention is seen in prompts of three tokens or more")
    if spec.precision is not None:
        return CountedPrompts(Asker(oracle), spec.answers == "logprobs", spec.precision)
    tokens = rng.choice(spec.domain.tokens, 2, replace=False)[:, None, None].astype(np.float64)
    asker = Asker(oracle)
    noise = estimate_format(asker(tokens, ORDER), asker.kind)
    return CountedPrompts(asker, spec.answers == "logprobs", noise)


@dataclass(frozen=True, eq=False)
class Box:
    """The box in coordinates of its output space."""

    prompts: CountedPrompts
    coordinates: Coordinates

    @property
    def tokens(self) -> Float[Array, "V d"]:
        return self.coordinates.tokens

    @property
    def sigma(self) -> float:
        """Standard deviation of a difference of two answers, in every coordinate."""
        return float(np.sqrt(2.0)) * self.coordinates.sigma

    @property
    def precise(self) -> bool:
        """Whether answers have the digits of double precision."""
        return bool(self.sigma < 1e-10 * np.abs(self.tokens).max())

    @property
    def more_proportions(self) -> int:
        """Proportions of a pair beyond its heads. Where answers are not precise one
        more is needed: a head is told from the next by small differences."""
        return 1 if self.precise else 2

    def ask(self, contexts: Contexts, purpose: str) -> Float[Array, "n d"]:
        """Answers less those of the anchors alone."""
        answers = self.prompts.ask(contexts, purpose)
        return np.asarray(answers @ self.coordinates.basis - self.tokens[contexts.anchors])

    def whole(self, coordinates: Float[Array, " d"]) -> Float[Array, " V"]:
        return np.asarray(self.coordinates.basis @ coordinates)


@dataclass(frozen=True, eq=False)
class Asked:
    """Prompts and their answers."""

    contexts: Contexts
    answers: Float[Array, "n d"]

    def joined(self, other: "Asked") -> "Asked":
        answers = np.concatenate([self.answers, other.answers])
        return Asked(self.contexts.joined(other.contexts), answers)


def attempt(box: Box, options: TokenAttentionLearner, rng: np.random.Generator) -> Result:
    """The steps of the statement, in their order."""
    expect = box.prompts.asker.oracle.expect
    if not box.coordinates.tied:  # then tokens alone are most of all queries: two heads or others
        pilot = options.anchors * ((options.heads or options.most_heads) + 2)
        expect(3 + pilot + options.count_rest(box, options.heads or 2))
    refuted = check_order(box, rng)
    if refuted is not None:
        return refuted
    pilots = ask_pilots(box, options, rng)
    heads = options.heads or max(pilot.heads for pilot in pilots)
    expect(options.count_rest(box, max(heads, 1)))
    if heads > min(options.most_heads, box.coordinates.width):
        return judge_smoothness(box, pilots[0], heads)
    if heads == 0:
        return Refuted("the tokens before the last do not change the answer: no attention is seen")
    pairs, steps, asked = ask_pairs(box, pilots, heads, rng)
    if np.median([pair.residual for pair in pairs]) > UNFITTED * box.sigma:
        # not one pair fits: the start of a fit would be nothing
        return judge_smoothness(box, pilots[0], heads)
    refined = fit_contexts(box, solve_values(steps, pairs), asked, options, rng)
    if refined.level > options.tolerance:
        outcome = judge_smoothness(box, pilots[0], heads)
        if isinstance(outcome, Refuted):
            return outcome
        return Inconclusive(
            f"{heads} heads leave {refined.level:.0e} standard errors of the answers unexplained: "
            "heads that hardly differ, or not attention alone"
        )
    return describe(box, refined)


def fit_contexts(
    box: Box, values: Array, asked: Asked, options: TokenAttentionLearner, rng: np.random.Generator
) -> RefinedMaps:
    """Contexts that determine the scores, and all answers at once. The more tokens a context has,
    the more an error of the values weighs in its weights: where no fit is reached from there, more
    contexts of half as many, once."""
    # more tokens than a head's values have ranks leave its weights undetermined
    ranks = [choose_rank(value, box.precise) for value in values]
    others = min(box.coordinates.width // len(values), *ranks)
    others = max(1, min(others, box.prompts.longest - 1, box.prompts.tokens - 1))
    refined, asked = fit_more(box, values, asked, others, options, rng)
    if refined.level > options.tolerance and others >= 4:
        refined, _ = fit_more(box, values, asked, others // 2, options, rng)
    return refined


def fit_more(
    box: Box,
    values: Array,
    asked: Asked,
    others: int,
    options: TokenAttentionLearner,
    rng: np.random.Generator,
) -> tuple[RefinedMaps, Asked]:
    """The fit with further contexts of so many tokens beside the anchor, and all that was asked."""
    count, every = options.count_contexts(box, others), np.arange(box.prompts.tokens)
    contexts = choose_contexts(values, box.tokens, every, count, others, rng)
    answers = box.ask(contexts, CONTEXTS)
    scores = solve_scores(values, box.tokens, contexts, answers, box.sigma)
    asked = asked.joined(Asked(contexts, answers))
    sigma, errors = box.coordinates.sigma, box.coordinates.errors
    data = AnsweredPrompts(asked.contexts, asked.answers, box.tokens, sigma, errors)
    return fit(Maps(values, scores), data, options, box.precise, rng), asked


def fit(
    maps: Maps,
    data: AnsweredPrompts,
    options: TokenAttentionLearner,
    precise: bool,
    rng: np.random.Generator,
) -> RefinedMaps:
    """All answers at once: of the ranks that the start shows, and of full rank where that fails;
    then of lower ranks, as long as they explain the answers as well. Heads mostly share one rank,
    which is often the width over their number."""
    width = maps.values.shape[1]
    ranks = [
        (choose_rank(v, precise), choose_rank(w, precise))
        for v, w in zip(maps.values, maps.scores, strict=True)
    ]
    best = refine(maps, ranks, data, rng, steps=40)
    if best.level > options.tolerance and min(map(min, ranks)) < width:
        full = refine(maps, [(width, width)] * maps.heads, data, rng, steps=40)
        best = full if full.level < best.level else best
    tried = {rank for both in ranks for rank in both} | {width // maps.heads}
    for rank in sorted(tried - {0, width}):
        found = Maps(
            np.array([part.matrix for part in best.point[::2]]),
            np.array([part.matrix for part in best.point[1::2]]),
        )
        if max(part.rank for part in best.point) <= rank:
            break
        other = refine(found, [(rank, rank)] * maps.heads, data, rng, steps=20)
        if other.level < 1.5 * max(best.level, 1.0):
            best = other
            break
    return spare_heads(best, data, rng)


def spare_heads(best: RefinedMaps, data: AnsweredPrompts, rng: np.random.Generator) -> RefinedMaps:
    """Heads that explain less than a thousandth of the answers leave, weakest first, as long as the
    others explain them as well: a head too many has values of zero, and any score."""
    while len(best.point) > 2:
        values = best.point[::2]
        weakest = int(np.argmin([np.linalg.norm(value.matrix) for value in values]))
        rest = best.point[: 2 * weakest] + best.point[2 * weakest + 2 :]
        missed = np.linalg.norm(AttentionModel(data).residual(rest))
        if missed > 1e-3 * np.linalg.norm(data.answers) / data.sigma:
            return best
        maps = Maps(
            np.array([part.matrix for part in rest[::2]]),
            np.array([part.matrix for part in rest[1::2]]),
        )
        ranks = [(v.rank, w.rank) for v, w in zip(rest[::2], rest[1::2], strict=True)]
        other = refine(maps, ranks, data, rng, steps=20)
        if other.level >= 1.5 * max(best.level, 1.0):
            return best
        best = other
    return best


# -- Positions, proportions -----------------------------------------------------------------------


def check_order(box: Box, rng: np.random.Generator) -> Refuted | None:
    """Copies of a token are alike and the order before the last does not matter, unless the box
    knows positions."""
    one, other, last = (int(token) for token in rng.choice(box.prompts.tokens, 3, replace=False))
    prompts = [np.array(p) for p in ([one, other, last], [other, one, last], [last, last, last])]
    answers = box.prompts.ask_sequences(prompts, ORDER)
    alone = box.whole(box.tokens[last])
    gaps = [answers[0] - answers[1], answers[2] - alone]
    size = max(float(np.abs(answers).max()), TINY)
    allowed = 64.0 * (box.sigma + box.prompts.noise.apart(size))
    for gap, prompt, answer, expected in zip(
        gaps, (prompts[0], prompts[2]), (answers[0], answers[2]), (answers[1], alone), strict=True
    ):
        if np.abs(gap).max() > allowed:
            shown = Counterexample(
                prompt[:, None].astype(np.float64),
                answer,
                expected,
                "tokens in another order, or copies of one token",
            )
            return Refuted(
                "the box knows positions: tokens in another order (or copies of one token) are "
                "answered differently, which attention without positions does not do",
                shown,
            )
    return None


@dataclass(frozen=True, eq=False)
class Pilot:
    """An anchor and a token in many proportions."""

    anchor: int
    token: int
    contexts: Contexts
    proportions: Float[Array, " n"]
    answers: Float[Array, "n d"]
    heads: int


def ask_proportions(box: Box, anchor: int, token: int, count: int) -> Pilot:
    both = choose_proportions(count, box.prompts.longest)
    contexts = Contexts.of([[(anchor, one), (token, copies)] for copies, one in both])
    answers = box.ask(contexts, PAIRS)
    proportions = np.array([copies / one for copies, one in both])
    # sums over long prompts round more than those of a token alone
    heads = count_heads(answers, 30.0 * box.sigma)
    return Pilot(anchor, token, contexts, proportions, answers, heads)


def ask_pilots(box: Box, options: TokenAttentionLearner, rng: np.random.Generator) -> list[Pilot]:
    """Several anchors, each with a token in more proportions than there may be heads."""
    chosen = rng.choice(box.prompts.tokens, (options.anchors, 2), replace=False)
    heads = options.most_heads if options.heads is None else options.heads
    return [ask_proportions(box, int(a), int(s), heads + 2) for a, s in chosen]


def judge_smoothness(box: Box, pilot: Pilot, heads: int) -> Result:
    """Whether any number of heads explains the answers to one pair in many proportions."""
    many = ask_proportions(box, pilot.anchor, pilot.token, 32)
    width = box.coordinates.width
    odd = exceeds_attention(many.proportions, many.answers, box.sigma)
    if odd is None and many.heads < min(width, len(many.answers) // 2):
        # as many heads as the rank of the answers must explain them
        # of many starts: a search that ends early must not refute an honest box
        rng = random_stream(0, "token attention")
        pair = solve_pair(many.proportions, many.answers, many.heads, rng, starts=64)
        if pair.residual > 1e3 * box.sigma:
            odd = int(np.argmax(np.linalg.norm(many.answers, axis=1)))
    if odd is None:
        return Inconclusive(
            f"answers to two tokens in changing proportions look like {heads} heads or more"
        )
    prompt = many.contexts.sequences()[odd]
    alone = box.tokens[pilot.anchor]
    return Refuted(
        "answers depend on the proportion of two tokens as those of no attention layer do: there "
        "is a network or a norm behind it",
        Counterexample(
            prompt[:, None].astype(np.float64),
            box.whole(alone + many.answers[odd]),
            None,
            "two tokens in changing proportions",
        ),
    )


def ask_pairs(
    box: Box, pilots: list[Pilot], heads: int, rng: np.random.Generator
) -> tuple[list[Pair], Array, Asked]:
    """The pairs of the best anchor with their heads in one order, the steps from the anchor to
    their tokens, and all prompts with their answers."""
    solved = [solve_pair(p.proportions, p.answers, heads, rng) for p in pilots]
    best = int(np.argmin([np.max(pair.move_errors) for pair in solved]))
    pilot, reference = pilots[best], solved[best]
    anchor, width = pilot.anchor, box.coordinates.width
    pool = np.setdiff1d(np.arange(box.prompts.tokens), [anchor, pilot.token])
    drawn = rng.choice(pool, min(width + 1, len(pool)), replace=False)
    both = choose_proportions(heads + box.more_proportions, box.prompts.longest)
    proportions = np.array([copies / one for copies, one in both])
    prompts = Contexts.of(
        [[(anchor, one), (int(token), copies)] for token in drawn for copies, one in both]
    )
    own = Asked(prompts, box.ask(prompts, PAIRS))
    pairs = [
        solve_pair(proportions, answers, heads, rng)
        for answers in own.answers.reshape(len(drawn), len(both), -1)
    ]
    asked = reduce(Asked.joined, [*(Asked(p.contexts, p.answers) for p in pilots), own])
    if heads > 1:
        pairs, mixed = order_pairs(box, pilot, reference, drawn, pairs)
        asked = asked.joined(mixed)
    steps = box.tokens[[pilot.token, *drawn]] - box.tokens[anchor]
    return [reference, *pairs], steps, asked


def order_pairs(
    box: Box, pilot: Pilot, reference: Pair, drawn: Array, pairs: list[Pair]
) -> tuple[list[Pair], Asked]:
    """Heads in the order of the reference, by prompts that mix its token with two of the others
    (one, where there are many orders)."""
    size = 2 if len(reference.odds) <= 4 else 1
    groups = [list(range(k, min(k + size, len(pairs)))) for k in range(0, len(pairs), size)]
    prompts = Contexts.of(
        [
            [(pilot.anchor, 1), (pilot.token, 1), *((int(drawn[k]), 1) for k in group)]
            for group in groups
        ]
    )
    mixed = Asked(prompts, box.ask(prompts, MIXED))
    ordered: list[Pair] = []
    for group, answer in zip(groups, mixed.answers, strict=True):
        ordered += match_heads(reference, [pairs[k] for k in group], answer)
    return ordered, mixed


# -- The model ------------------------------------------------------------------------------------


def describe(box: Box, refined: RefinedMaps) -> Hypothesis:
    """The tables, their standard errors, and what to say about them."""
    tokens, basis = box.tokens, box.coordinates.basis
    values, scores = refined.point[::2], refined.point[1::2]
    heads, doubts = [], []
    width = box.coordinates.width
    kept = np.eye(width) - sum((part.matrix for part in values), np.zeros((width, width)))
    moved = np.zeros((len(tokens), width))
    start = 0
    noise = box.coordinates.errors[:, None]
    for value, score in zip(values, scores, strict=True):
        middle, end = start + value.unknowns, start + value.unknowns + score.unknowns
        steps = [value.split(step[start:middle]) for step in refined.draws]
        turns = [score.split(step[middle:end]) for step in refined.draws]
        start = end
        ov, ov_error = describe_values(value, steps, box)
        qk, qk_error = describe_scores(score, turns, box)
        moved += _rms(tokens @ np.array([value.change_of(x, y).T for x, y in steps])) ** 2
        heads.append(TokenHead(qk=qk, ov=ov))
        doubts.append(TokenHead(qk=qk_error, ov=ov_error))
    direct = Table(tokens @ kept.T, basis.T)
    outside = box.coordinates.sigma / max(float(np.linalg.norm(tokens)) / width, TINY)
    doubt = Table(
        np.hypot(np.sqrt(moved), noise * _size(kept.T)), np.full((width, len(basis)), outside)
    )
    logprobs = box.prompts.shifted
    model = TokenAttention(direct, heads, logprobs=logprobs)
    diagnostics = TokenAttentionDiagnostics(
        width=width,
        heads=len(heads),
        tied=box.coordinates.tied,
        value_ranks=tuple(part.rank for part in values),
        score_ranks=tuple(part.rank for part in scores),
        misfit=refined.level,
    )
    maps = sum(part.unknowns for part in refined.point)
    shared = len(tokens) if not box.coordinates.tied else (width + 1) / 2
    notes = [f"The box is {model}, of width {width}."]
    if box.coordinates.tied:
        notes.append("Input and output tokens share their embedding: a linear fit says so.")
    return Hypothesis(
        model,
        TokenAttention(doubt, doubts, logprobs=logprobs),
        shared + maps / width,
        tuple(notes),
        noise=fitted_noise(box),
        diagnostics=diagnostics,
    )


Steps = list[tuple[Array, Array]]  # of the two factors of a map, drawn from its errors


def describe_values(part: LowRankMap, steps: Steps, box: Box) -> tuple[Table, Table]:
    """What every token adds to the logits, and the standard errors."""
    tokens, basis, noise = box.tokens, box.coordinates.basis, box.coordinates.errors[:, None]
    left, right, lefts, rights = share_singular_values(part, steps)
    rows = np.hypot(_rms(tokens @ rights), noise * _size(right))
    return Table(tokens @ right, (basis @ left).T), Table(rows, _rms(basis @ lefts).T)


def describe_scores(part: LowRankMap, steps: Steps, box: Box) -> tuple[Table, Table]:
    """How every token scores every other, and the standard errors."""
    tokens, noise = box.tokens, box.coordinates.errors[:, None]
    left, right, lefts, rights = share_singular_values(part, steps)
    rows = np.hypot(_rms(tokens @ lefts), noise * _size(left))
    columns = np.hypot(_rms(tokens @ rights), noise * _size(right))
    return Table(tokens @ left, (tokens @ right).T), Table(rows, columns.T)


def share_singular_values(
    part: LowRankMap, steps: Steps
) -> tuple[Float[Array, "d r"], Float[Array, "d r"], Float[Array, "k d r"], Float[Array, "k d r"]]:
    """The factors of a map, each with the roots of its singular values, and the draws of both."""
    root = np.sqrt(np.maximum(part.singular, TINY))
    lefts = np.array([x / root for x, _ in steps])
    rights = np.array([y.T / root for _, y in steps])
    return part.left * root, part.right.T * root, lefts, rights


def _rms(draws: Float[Array, "k n r"]) -> Float[Array, "n r"]:
    return np.asarray(np.sqrt(np.mean(draws**2, axis=0)))


def _size(columns: Float[Array, "d r"]) -> Float[Array, " r"]:
    return np.asarray(np.linalg.norm(columns, axis=0))


def fitted_noise(box: Box) -> NoiseModel:
    """The number format of the box; its sums round a little more than one number does."""
    return box.prompts.noise
