"""A real attention layer through its vector answers, heads and head width unknown.

Statement. out = offset + sum_h softmax_i(x_i . (W_h x_N + c_h)) X M_h with M_h = V_h O_h of
rank r and [W_h | c_h] of rank r is recovered from about 4d + 2 - 2r answers of D = d numbers,
the number of unknowns per answer, and a few percent more.

Queries. (1) Huge tokens tell the heads apart (hard_attention). (2) Each head's selected token
shifted along r + r/8 common directions: answers span the rows of O_h. (3) Length one: offset and
M = sum M_h, along the directions that (2) has not summed already. (4) Soft queries with r tokens
around an anchor: all attention weights of all heads at once, because the O_h keep the heads
apart. At r + r/8 anchors the tokens cover all directions, which gives the ranges U_h of the
scores; at the others r tokens suffice.

Algebra. V = M O⁺. Tokens are designed so that every head sees every block well conditioned
(linalg/token_frames). Log-ratios of weights are linear in W_h x + c_h.

When it fails. More inner dimensions than outputs (sum of r over D): then heads are probed one
at a time (isolated_heads). Nearly dependent O_h cost digits: standard errors, by repetition of the
algebra on perturbed answers, say so.

Source. Keyhole's own; docs/methods/multi_head.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.errors import DomainError, IllConditioned, WrongFamily
from keyhole.fitting.bootstrap import bootstrap_errors
from keyhole.learners.base import Hypothesis, Inconclusive, Refuted, Result
from keyhole.learners.multi_head.hard_attention import (
    HUGE_TOKENS,
    HardAttentionPattern,
    NeverHard,
    Overcomplete,
    Selection,
    find_selected_tokens_by_vectors,
    query_hard,
)
from keyhole.learners.multi_head.isolated_heads import factor_score
from keyhole.learners.multi_head.validation import (
    Disagreement,
    MultiHeadDiagnostics,
    PriorKnowledge,
    find_counterexample,
    graver,
    note_missing_heads,
)
from keyhole.linalg.bases import random_directions
from keyhole.linalg.linear_system import LinearSystem
from keyhole.linalg.rank import count_above, find_fall, noise_edge
from keyhole.linalg.token_frames import spread_tokens
from keyhole.measurement.asker import Asker
from keyhole.measurement.noise import decimals
from keyhole.models.attention import Attention, Head
from keyhole.models.factors import find_groups, tell_groups

NOISE_NORMS = 30.0  # singular values below this many norms of the noise are noise
LENGTHENINGS = 12  # corrections of a soft query's length


@dataclass(frozen=True, eq=False)
class HiddenChoices(Refuted):
    """Huge tokens do not show which of them heads choose. One head at a time, values that are alike
    do not matter: the family is refuted where that fails as well."""


@dataclass(frozen=True)
class SamplingPolicy:
    """How much is asked beyond the minimum: the less, the more errors are amplified."""

    reach: float  # shift of a selected token, relative to its size
    candidate_sets: int  # sets whose selected tokens are added up, to allow longer shifts
    spare: float  # directions and anchors beyond the rank, as a share of it
    share: float  # tokens in a soft query, as a share of the rank
    groups: int  # groups of heads whose value maps are told apart by shifting them together
    peak: float  # largest log-odds aimed at in a soft query
    anchor: float  # size of an entry of the anchors

    def exceed(self, rank: int) -> int:
        """So many directions or anchors for a rank."""
        return rank + max(1, int(rank * self.spare))

    def count_wide_columns(self, ranks: Sequence[int], width: int) -> int:
        """Anchors at which tokens in all directions are asked, before ranks of scores are known."""
        goal = self.exceed(max(ranks))
        if self.groups > 1 and 1 < len(ranks) <= 4:  # few heads, few digits: more of them
            goal += int(0.3 * width / (2 * len(ranks) - 2))
        return goal


FEWEST = SamplingPolicy(0.1, 1, spare=0.125, share=1.0, groups=1, peak=2.0, anchor=1.0)
STEADY = SamplingPolicy(0.1, 3, spare=0.4, share=0.5, groups=2, peak=1.5, anchor=0.5)
# Where least squares follow: off by a few per cent at a ninth above the minimum.
ROUGH = SamplingPolicy(0.1, 3, spare=0.15, share=1.0, groups=1, peak=1.5, anchor=0.5)


# --- the strategy ---------------------------------------------------------------------------------


def learn_joint_heads(
    ask: Asker,
    rng: np.random.Generator,
    prior: PriorKnowledge,
    frame: Float[Array, "d d"],
    first: Float[Array, "one outputs"],
    selected: Selection | None = None,
) -> Result:
    """The whole recovery; `first` is the answer to the first row of `frame` alone. Tokens that are
    known to be `selected`, with what they answer to that row, need not be looked for."""
    offset = ask(np.zeros((1, 1, ask.width)), "values")[0]
    ask = ask.subtracting(offset)
    selected = None if selected is None else selected.subtract(offset)
    size = float(np.linalg.norm(frame[0]))
    exact = ask.affords(HUGE_TOKENS)
    policy = FEWEST if exact else STEADY
    # a plain answer with few decimals has fewer digits than one to huge tokens
    rounded = not exact or decimals(first) is not None
    trouble: Exception | None = None
    for number in range(prior.attempts):
        if number == 1 and exact:  # a head may have left its token unnoticed
            policy = replace(policy, reach=0.3 * policy.reach)
        problem = VectorProblem(
            ask, frame / size, (first - offset) / size, size, prior.heads, prior.rank, policy,
            expect_equal_ranks=not exact and number == 0,
            believe_marks=not rounded and number == 0,
            believe_whole=not rounded,
            selected=selected if number == 0 else None,
        )  # fmt: skip
        try:
            model, errors, maps, answers = attempt_with_vectors(problem, rng)
        except Overcomplete as error:
            if not problem.expect_equal_ranks:
                return Inconclusive(f"the answers do not keep the heads apart: {error}")
            trouble = error  # ranks read off few digits are believed the second time
            continue
        except DomainError as error:
            return Inconclusive(str(error))
        except (IllConditioned, WrongFamily, np.linalg.LinAlgError) as error:
            trouble = graver(trouble, error)
            continue
        model, errors = drop_spurious_biases(model, errors)
        counterexample = find_counterexample(ask, model, errors, rng)
        if counterexample is None:
            return report_layer(maps, answers, model, errors, prior.heads)
        trouble = Disagreement(
            "the hypothesis disagrees with the box on a fresh query: it is not a layer of "
            "softmax attention heads",
            counterexample,
        )
    return conclude_trouble(trouble)


def conclude_trouble(trouble: Exception | None) -> Refuted | Inconclusive:
    """What to say where no anchor led to a model, after the last trouble."""
    if isinstance(trouble, NeverHard):
        return HiddenChoices(str(trouble), trouble.counterexample, conclusive=False)
    if isinstance(trouble, WrongFamily):
        conclusive = not isinstance(trouble, Disagreement)
        return Refuted(str(trouble), trouble.counterexample, conclusive)
    return Inconclusive(f"no anchor led to a model: {trouble}")


def start_with_vectors(
    ask: Asker,
    rng: np.random.Generator,
    prior: PriorKnowledge,
    frame: Float[Array, "d d"],
    first: Float[Array, "one outputs"],
) -> Hypothesis | Inconclusive:
    """A layer off by a few per cent for least squares to start from, neither validated nor with
    standard errors (those of the hypothesis are the layer itself). Scores are taken to have the
    ranks of the values: few digits do not tell."""
    offset = ask(np.zeros((1, 1, ask.width)), "values")[0]
    ask = ask.subtracting(offset)
    size = float(np.linalg.norm(frame[0]))
    problem = VectorProblem(
        ask, frame / size, (first - offset) / size, size, prior.heads, prior.rank, ROUGH,
        expect_equal_ranks=True,
    )  # fmt: skip
    trouble: Exception | None = None
    for _ in range(2):
        try:
            _, maps, answers = measure_layer(problem, rng)
            scores, biases = answers.solve_keys(maps)
            heads = assemble_heads(scores, biases, maps, answers.score_ranks)
            model = Attention(heads, np.asarray(ask.offset))
            return report_layer(maps, answers, model, model, prior.heads)
        except (
            DomainError, IllConditioned, Overcomplete, WrongFamily, np.linalg.LinAlgError,
        ) as error:  # fmt: skip
            trouble = error
    return Inconclusive(f"no start for least squares: {trouble}")


@dataclass(frozen=True, eq=False)
class VectorProblem:
    """What one attempt starts from; the offset is subtracted from all answers."""

    ask: Asker
    frame: Float[Array, "d d"]  # orthonormal directions
    first: Float[Array, "one outputs"]  # the answer to the first of them
    token_size: float  # of single tokens
    heads: int | None
    rank: int | None
    policy: SamplingPolicy
    expect_equal_ranks: bool = False  # whether few digits are read as of one rank for all maps
    believe_marks: bool = False  # whether the marks of selected tokens may show ranks
    believe_whole: bool = False  # whether `first` has the digits of answers to huge tokens
    selected: Selection | None = None  # from before, if any


def attempt_with_vectors(
    problem: VectorProblem, rng: np.random.Generator
) -> tuple[Attention, Attention, "ValueMaps", "SoftAnswers"]:
    """All stages from one anchor: the model, its standard errors, and what they come from."""
    ask = problem.ask
    responses, maps, answers = measure_layer(problem, rng)
    scores, biases = answers.solve_keys(maps)
    best = (scores, biases, maps.products)

    scale = float(np.linalg.norm(maps.products)) / np.sqrt(ask.width)

    def noise(size: float) -> float:
        """Standard error of the answer to tokens of this size."""
        return float(np.hypot(ask.unit * scale * size, ask.additive))

    def sample() -> tuple[Array, ...]:
        other = responses.perturb(noise(1.0), rng).solve_maps()
        return (*answers.perturb(noise, rng).solve_keys(other), other.products)

    bootstrap_samples = 6  # repetitions of the algebra on perturbed answers
    bars = bootstrap_errors(best, sample, bootstrap_samples)
    if not all(np.isfinite(part).all() for part in bars):
        raise IllConditioned("rounding may turn the sign of a weight")
    heads = assemble_heads(scores, biases, maps, answers.score_ranks)
    return *with_offset(ask, heads, bars), maps, answers


def with_offset(
    ask: Asker, heads: list[Head], bars: Sequence[Array]
) -> tuple[Attention, Attention]:
    """The layer, and its standard errors."""
    offset = np.asarray(ask.offset)
    doubt = ask.unit * np.abs(offset) + ask.additive
    errors = [Head(*parts) for parts in zip(*bars, strict=True)]
    return Attention(heads, offset), Attention(errors, doubt)


def measure_layer(
    problem: VectorProblem, rng: np.random.Generator
) -> tuple["ValueResponses", "ValueMaps", "SoftAnswers"]:
    """All queries, from one anchor."""
    ask = problem.ask
    anchor = np.sqrt(ask.width) * random_directions(rng, 1, ask.width)[0]
    responses = measure_responses(problem, anchor, rng)
    maps = responses.solve_maps()
    answers = measure_soft_answers(
        ask, maps, problem.frame, problem.policy, rng,
        expect_ranks=problem.expect_equal_ranks,
    )  # fmt: skip
    return responses, maps, answers


# --- stage 1: heads and value maps through hard attention -----------------------------------------


@dataclass(frozen=True, eq=False)
class ValueMaps:
    """M_h = V_h O_h of every head, and their sum."""

    ins: tuple[Array, ...]  # V_h, (d, r_h)
    outs: tuple[Array, ...]  # O_h, (r_h, outputs)
    total: Float[Array, "d outputs"]
    condition: float  # of what keeps the heads apart

    @property
    def ranks(self) -> list[int]:
        return [part.shape[1] for part in self.ins]

    @cached_property
    def products(self) -> Float[Array, "h d outputs"]:
        return np.stack([a @ b for a, b in zip(self.ins, self.outs, strict=True)])

    @classmethod
    def of_ranges(cls, ranges: Sequence[Array], total: Float[Array, "d d"]) -> "ValueMaps":
        """The maps of heads whose V_h have these ranges, which share out the whole space."""
        stacked = np.concatenate(ranges, axis=1)
        cuts = np.cumsum([part.shape[1] for part in ranges])[:-1]
        outs = np.split(np.linalg.solve(stacked, total), cuts)
        return cls(tuple(ranges), tuple(outs), total, float(np.linalg.cond(stacked)))


@dataclass(frozen=True, eq=False)
class ValueResponses:
    """What hard attention and single tokens say of the values."""

    frame: Float[Array, "d d"]  # orthonormal directions
    singles: Float[Array, "n outputs"]  # answers to the first rows of the frame, alone
    shifted: tuple[Array, ...]  # per head, (e, outputs): responses to the last rows of the frame
    grouped: tuple[Array, ...]  # per group but the last: to the first rows
    members: tuple[tuple[int, ...], ...]  # heads of each group
    ranks: tuple[int, ...]
    reach: float  # the shift that was used

    def solve_maps(self) -> ValueMaps:
        """The value maps; the O_h have orthonormal rows."""
        count = len(self.frame) - len(self.singles)
        tails = [part[len(part) - count :] for part in self.shifted]
        outs = [
            np.linalg.svd(part, full_matrices=False)[2][:rank]
            for part, rank in zip(self.shifted, self.ranks, strict=True)
        ]
        total = self.frame.T @ np.concatenate([self.singles, np.sum(tails, axis=0)])
        left, worst = total, 1.0
        ins: list[Array] = [np.zeros(0)] * len(outs)
        for place, heads in enumerate(self.members):
            part = left
            if place < len(self.grouped):
                tail = np.sum([tails[h] for h in heads], axis=0)
                part = self.frame.T @ np.concatenate([self.grouped[place], tail])
                left = left - part
            stacked = np.concatenate([outs[h] for h in heads])
            if len(stacked) > stacked.shape[1]:
                raise Overcomplete("they have more inner dimensions together than outputs")
            u, s, vt = np.linalg.svd(stacked, full_matrices=False)
            worst = max(worst, float(s[0] / s[-1]))
            cuts = np.cumsum([self.ranks[h] for h in heads])[:-1]
            columns = np.split(part @ (vt.T / s) @ u.T, cuts, axis=1)
            for h, each in zip(heads, columns, strict=True):
                ins[h] = each
        return ValueMaps(tuple(ins), tuple(outs), total, worst)

    def perturb(self, noise: float, rng: np.random.Generator) -> "ValueResponses":
        """The same responses, had the answers been rounded otherwise, by this standard error per
        size of tokens."""

        def perturb_part(part: Array, level: float) -> Array:
            return np.asarray(part + level * rng.standard_normal(part.shape))

        return replace(
            self,
            singles=perturb_part(self.singles, noise),
            shifted=tuple(perturb_part(part, noise / self.reach) for part in self.shifted),
            grouped=tuple(perturb_part(part, noise / self.reach) for part in self.grouped),
        )


class SelectedTokens(NamedTuple):
    """Selected tokens, what each answers to the first direction of the frame, and how far they may
    be shifted."""

    pattern: HardAttentionPattern
    marks: Float[Array, "h outputs"]
    reach: float


def measure_responses(
    problem: VectorProblem, anchor: Float[Array, " d"], rng: np.random.Generator
) -> ValueResponses:
    """Responses of all heads to shifts of their tokens, and answers to the single tokens that
    these do not add up to."""
    selected, shifted = tell_heads_apart(problem, anchor, rng)
    ranks = tuple(find_response_rank(problem, part, selected.reach) for part in shifted)
    if sum(ranks) > problem.first.shape[1]:
        if problem.believe_marks and len(set(ranks)) > 1:
            raise IllConditioned("a head seems to have left its token")
        raise Overcomplete("they have more inner dimensions together than outputs")
    rows = problem.frame[: max(1, len(anchor) - min(len(part) for part in shifted))]
    asked = problem.ask(problem.token_size * rows[1:, None], "values") / problem.token_size
    singles = np.concatenate([problem.first, asked])
    order = rng.permutation(len(shifted))
    groups = np.array_split(order, min(problem.policy.groups, len(shifted)))
    members = tuple(tuple(sorted(int(h) for h in part)) for part in groups)
    grouped = tuple(shift_together(problem, selected, heads, rows) for heads in members[:-1])
    return ValueResponses(
        problem.frame, singles, tuple(shifted), grouped, members, ranks, selected.reach
    )


def tell_heads_apart(
    problem: VectorProblem, anchor: Array, rng: np.random.Generator
) -> tuple[SelectedTokens, list[Array]]:
    """Selected tokens and their responses. Where two heads seem to share a token, other candidates
    are asked, and the responses of the other heads are kept."""
    selected = select_most_heads(problem, anchor, rng)
    shifted = measure_shifts(problem, selected, list(range(len(selected.pattern))))
    ranks = [find_response_rank(problem, part, selected.reach) for part in shifted]
    if not seem_shared(ranks, problem.heads):
        return selected, shifted
    candidate_sets = 4  # asked until one shows more heads
    for _ in range(candidate_sets):
        again = select_tokens(problem, anchor, rng)
        if len(again.pattern) > len(selected.pattern):
            return again, share_responses(problem, selected, shifted, again)
    if problem.expect_equal_ranks:
        raise IllConditioned("two heads seem to share a token")
    return selected, shifted


def select_tokens(
    problem: VectorProblem, anchor: Array, rng: np.random.Generator
) -> SelectedTokens:
    """Those that heads select among random candidates."""
    whole = problem.first[0] if problem.believe_whole else None
    pattern, marks = find_selected_tokens_by_vectors(
        problem.ask, anchor, problem.heads, problem.frame[0], rng, whole
    )
    return SelectedTokens(pattern, marks, problem.policy.reach)


def select_most_heads(
    problem: VectorProblem, anchor: Array, rng: np.random.Generator
) -> SelectedTokens:
    """Of the first sets of candidates, added up where that allows longer shifts."""
    before, policy = problem.selected, problem.policy
    if before is not None and len(before.marks) <= (problem.heads or len(before.marks)):
        first = SelectedTokens(before.pattern, before.marks, policy.reach)
    else:
        first = select_tokens(problem, anchor, rng)
    if not len(first.pattern):
        raise WrongFamily("no head answers to the tokens before the last one: no attention")
    # sets of candidates may cost 0.4 queries per dimension
    affordable = int(0.4 * len(anchor) / (len(first.pattern) + 3))
    others = [
        select_tokens(problem, anchor, rng)
        for _ in range(min(policy.candidate_sets - 1, affordable))
    ]
    # where a set shows more heads than the first, two had shared a token there
    fullest = max(range(len(others)), key=lambda k: len(others[k].pattern), default=0)
    if others and len(others[fullest].pattern) > len(first.pattern):
        first, others[fullest] = others[fullest], first
    return add_up_tokens(problem, first, others, rng)


def share_responses(
    problem: VectorProblem, first: SelectedTokens, shifted: list[Array], again: SelectedTokens
) -> list[Array]:
    """Responses of the heads that `again` keeps apart: those measured at the `first` set where a
    head is the same, the others asked or split off."""
    known = match_marks(problem.ask, again.marks, first.marks, float(np.abs(again.marks).max()))
    heads = range(len(again.pattern))
    rest = [i for i in heads if i not in known]
    crowded = [i for i in range(len(first.pattern)) if i not in known.values()]
    responses = {i: shifted[k] for i, k in known.items()}
    if problem.believe_marks and len(rest) == 2 and len(crowded) == 1:
        one = crowded[0]
        responses |= split_responses(problem, again, rest, shifted[one], first.marks[one])
    rest = [i for i in rest if i not in responses]
    if rest:
        responses |= dict(zip(rest, measure_shifts(problem, again, rest), strict=True))
    return [responses[i] for i in heads]


def split_responses(
    problem: VectorProblem, again: SelectedTokens, pair: list[int], joint: Array, mark: Array
) -> dict[int, Array]:
    """Responses of two tokens whose heads shared one before: where their marks add up, those of
    the second are what the first leaves of the joint ones, as far as these reach."""
    sums = again.marks[pair].sum(axis=0)
    if not match_marks(problem.ask, sums[None], mark[None], float(np.abs(mark).max())):
        return {}
    (first,) = measure_shifts(problem, again, pair[:1])
    count = min(len(first), len(joint))
    other = joint[len(joint) - count :] - first[len(first) - count :]
    found = {pair[0]: first}
    if spans_range(problem, other, again.marks[pair[1]], again.reach):
        found[pair[1]] = other
    return found


def seem_shared(ranks: Sequence[int], heads: int | None) -> bool:
    """Whether two heads may share a token: one is missing, or one token has far more than the
    usual rank."""
    if heads is not None:
        return len(ranks) < heads
    return len(ranks) > 1 and max(ranks) > 1.5 * float(np.median(ranks))


def match_marks(ask: Asker, these: Array, others: Array, scale: float) -> dict[int, int]:
    """Which of the other responses belong to the same head, for those that have one."""
    same = 1e-5 * max(1.0, (ask.unit / UNIT_ROUNDOFF) ** (1 / 3))
    gaps = np.abs(these[:, None] - others[None]).max(axis=2) / scale
    return {int(i): int(np.argmin(gaps[i])) for i in np.flatnonzero(gaps.min(axis=1) < same)}


def add_up_tokens(
    problem: VectorProblem,
    selected: SelectedTokens,
    more: list[SelectedTokens],
    rng: np.random.Generator,
) -> SelectedTokens:
    """Tokens selected from several sets of candidates added up, head by head: what they have in
    common is the head's own direction, so shifts may be longer before a head changes its choice."""
    pattern, marks = selected.pattern, selected.marks
    sums, used = pattern.tokens.copy(), np.ones(len(pattern))
    for other in more:
        matches = match_marks(problem.ask, marks, other.marks, float(np.abs(marks).max()))
        for head, match in matches.items():
            sums[head] += other.pattern.tokens[match]
            used[head] += 1
    if used.min() < 2:
        return selected
    tokens = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    factors = rng.uniform(-1, 1, len(tokens))
    check = np.stack([tokens, tokens + selected.reach * factors[:, None] * problem.frame[0]])
    base, changed = query_hard(problem.ask, check, pattern.anchor, pattern.scale, "selected tokens")
    misfit = np.abs((changed - base) / selected.reach - factors @ marks).max()
    if misfit > 0.05 * np.abs(marks).max():  # some head left its token
        return selected
    system = LinearSystem.of(tokens[None], base[None])
    reach = problem.policy.reach * float(used.min())
    return SelectedTokens(replace(pattern, tokens=tokens, system=system), marks, reach)


def measure_shifts(
    problem: VectorProblem, selected: SelectedTokens, which: list[int]
) -> list[Float[Array, "e outputs"]]:
    """What single tokens answer to shifts along the last rows of the frame, one row after the
    other until the answers' rank stops growing."""
    found: dict[int, list[Array]] = {token: [] for token in which}
    active = list(which)
    for row in problem.frame[::-1]:
        answers = shift_each(problem, selected, active, row, selected.reach)
        typical = float(np.median(np.linalg.norm(answers, axis=1)))
        for token, answer in zip(active, answers, strict=True):
            sizes = [float(np.linalg.norm(a)) for a in found[token]] or [typical]
            usual = 3 * float(np.median(sizes))
            for reach in (-selected.reach, 0.1 * selected.reach):
                if np.linalg.norm(answer) <= usual:
                    break  # no head has left its token
                answer = shift_each(problem, selected, [token], row, reach)[0]
            found[token].append(answer)
        active = [
            token
            for token in active
            if not spans_range(
                problem, np.stack(found[token]), selected.marks[token], selected.reach
            )
        ]
        if not active:
            break
    return [np.stack(found[token][::-1]) for token in which]


def shift_each(
    problem: VectorProblem, selected: SelectedTokens, which: list[int], row: Array, reach: float
) -> Float[Array, "n outputs"]:
    """The answers, per unit of shift, with one of the tokens shifted along `row`."""
    pattern = selected.pattern
    tokens = np.repeat(pattern.tokens[None], len(which), axis=0)
    tokens[np.arange(len(which)), which] += reach * row
    answers = pattern.query(problem.ask, tokens, "value maps")
    return np.asarray((answers - pattern.system.answers[0]) / reach)


def shift_together(
    problem: VectorProblem, selected: SelectedTokens, heads: Sequence[int], rows: Array
) -> Float[Array, "n outputs"]:
    """The same with all tokens of a group shifted at once, along one row after the other."""
    pattern = selected.pattern

    def shift(rows: Array, reach: float) -> Array:
        tokens = np.repeat(pattern.tokens[None], len(rows), axis=0)
        tokens[:, list(heads)] += reach * rows[:, None]
        answers = pattern.query(problem.ask, tokens, "value maps")
        return np.asarray((answers - pattern.system.answers[0]) / reach)

    found = shift(rows, selected.reach)
    sizes = np.linalg.norm(found, axis=1)
    jumped = np.flatnonzero(sizes > 3 * np.median(sizes))  # a head has left its token
    if len(jumped):
        found[jumped] = shift(rows[jumped], 0.1 * selected.reach)
    return found


def spans_range(problem: VectorProblem, responses: Array, mark: Array, reach: float) -> bool:
    """Whether there are spare responses beyond the rank, and again as many where chance made them
    nearly dependent. With many digits the mark of the token, along another direction, is a spare
    one that was paid for already."""
    rank = problem.rank
    if rank is None:
        rank = find_response_rank(problem, responses, reach)
    goal = problem.policy.exceed(rank)
    sizes = np.linalg.svd(responses, compute_uv=False)
    size = sizes[rank - 1] / max(float(sizes[0]), TINY)
    if problem.believe_marks and size > 0.005 and len(responses) >= rank:
        rows = np.linalg.svd(responses, full_matrices=False)[2][:rank]
        off = np.linalg.norm(mark - mark @ rows.T @ rows)
        seen = 1e-6  # part of a mark, which has ten digits, that is not rounding
        return bool(off <= seen * np.linalg.norm(mark))
    return bool(len(responses) >= 2 * goal - rank or (len(responses) >= goal and size > 0.02))


def find_response_rank(
    problem: VectorProblem, responses: Float[Array, "n outputs"], reach: float
) -> int:
    sizes = np.linalg.svd(responses, compute_uv=False)
    count, outputs = responses.shape
    rms = float(np.sqrt((responses**2).mean()))
    entry = problem.ask.unit * rms * np.sqrt(len(problem.frame))
    return count_singular_values(sizes, noise_edge(entry / reach, (count, outputs)))


def count_singular_values(sizes: Float[Array, " n"], noise: float) -> int:
    """How many singular values are real: up to a gap, or to where they drown in noise of this
    norm."""
    above = max(1, count_above(sizes, NOISE_NORMS * noise))
    # a fall is believed where many digits show it and what follows is small beside the largest
    return min(above, find_fall(sizes, fall=1e4, small=1e-5) or len(sizes))


# --- stage 2: soft queries ------------------------------------------------------------------------


class SoftAnswer(NamedTuple):
    """One soft query: anchor, which group of tokens, their length, and the answer."""

    anchor: Float[Array, " d"]
    group: int
    length: float
    answer: Float[Array, " outputs"]


def build_reader(maps: ValueMaps, tokens: Float[Array, "k d"]) -> Float[Array, "outputs n"]:
    """The matrix that takes an answer to the weights of all tokens in all heads: the right inverse
    of the values that tokens have in heads."""
    products = maps.products
    values = (tokens @ products).reshape(-1, products.shape[2])
    q, r = np.linalg.qr(values.T)
    return np.asarray(q @ np.linalg.inv(r).T)


def read_log_odds(
    soft: SoftAnswer, maps: ValueMaps, reader: Float[Array, "outputs n"]
) -> Float[Array, "h k"]:
    """Log-odds of the tokens against the anchor, for every head; NaN where a weight is not
    positive."""
    left = soft.answer - soft.anchor @ maps.total
    weights = (left @ reader).reshape(len(maps.ins), -1) / soft.length
    rest = 1.0 - weights.sum(axis=1, keepdims=True)
    if not ((rest > 0).all() and (weights > 0).all()):
        return np.full(weights.shape, np.nan)
    return np.asarray(np.log(weights / rest))


@dataclass(frozen=True, eq=False)
class SoftAnswers:
    """All soft queries in columns of one anchor each, those with tokens in all directions first."""

    groups: tuple[Float[Array, "k d"], ...]  # tokens that are asked together
    columns: tuple[tuple[SoftAnswer, ...], ...]
    wide: int  # columns that see all of W_h x + c_h
    score_ranks: tuple[int, ...]  # of [W_h | c_h]

    def _read(
        self, columns: Sequence[Sequence[SoftAnswer]], maps: ValueMaps
    ) -> tuple[Float[Array, "k d"], Float[Array, "h k n"]]:
        """The tokens t that columns share, and t . (W_h x + c_h)."""
        groups = [soft.group for soft in columns[0]]
        readers = {group: build_reader(maps, self.groups[group]) for group in groups}
        rows = [
            np.concatenate([read_log_odds(s, maps, readers[s.group]) / s.length for s in each], 1)
            for each in columns
        ]
        return np.concatenate([self.groups[group] for group in groups]), np.stack(rows, axis=2)

    def solve_wide_keys(self, maps: ValueMaps) -> Float[Array, "h d n"]:
        tokens, seen = self._read(self.columns[: self.wide], maps)
        return np.asarray(np.linalg.pinv(tokens) @ seen)

    def solve_keys(self, maps: ValueMaps) -> tuple[Float[Array, "h d d"], Float[Array, "h d"]]:
        """Scores and key biases."""
        width = len(self.columns[0][0].anchor)
        keys = np.zeros((len(maps.ins), width, len(self.columns)))
        keys[:, :, : self.wide] = self.solve_wide_keys(maps)
        narrow = self.columns[self.wide :]
        tokens, seen = self._read(narrow, maps) if narrow else (np.zeros((0, width)), None)
        for h, rank in enumerate(self.score_ranks):
            u, s, vt = np.linalg.svd(keys[h, :, : self.wide], full_matrices=False)
            # the columns beyond the rank sharpen its range
            keys[h, :, : self.wide] = (u[:, :rank] * s[:rank]) @ vt[:rank]
            if seen is not None:
                inside = tokens @ u[:, :rank]
                keys[h, :, self.wide :] = u[:, :rank] @ (np.linalg.pinv(inside) @ seen[h])
        design = np.stack([column[0].anchor for column in self.columns], axis=1)
        design = np.vstack([design, np.ones(design.shape[1])])
        joint = np.linalg.solve(design.T, keys.transpose(0, 2, 1)).transpose(0, 2, 1)
        return joint[:, :, :width], joint[:, :, width]

    def perturb(self, noise: Callable[[float], float], rng: np.random.Generator) -> "SoftAnswers":
        """The same queries, had the answers been rounded otherwise; `noise` is the standard error
        of the answer to tokens of a size."""

        def perturb_one(soft: SoftAnswer) -> SoftAnswer:
            level = noise(float(np.linalg.norm(soft.anchor)) + soft.length)
            return soft._replace(
                answer=soft.answer + level * rng.standard_normal(soft.answer.shape)
            )

        columns = tuple(tuple(perturb_one(soft) for soft in column) for column in self.columns)
        return replace(self, columns=columns)


@dataclass(eq=False)
class SoftQuerier:
    """Asks soft queries and learns from each how long the tokens of the next may be: the one
    accumulator of this algorithm."""

    ask: Asker
    maps: ValueMaps
    policy: SamplingPolicy
    radius: float  # norm that no token may exceed
    groups: list[Float[Array, "k d"]] = field(default_factory=list)
    readers: list[Float[Array, "outputs n"]] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)  # largest log-odds per length of tokens

    def add_groups(self, tokens: Float[Array, "g k d"]) -> list[int]:
        """Registers groups of tokens; how their weights are read is worked out once."""
        first = len(self.groups)
        self.groups.extend(tokens)
        self.readers.extend(build_reader(self.maps, group) for group in tokens)
        return list(range(first, len(self.groups)))

    def measure_peak(self, soft: SoftAnswer) -> float:
        return float(np.abs(read_log_odds(soft, self.maps, self.readers[soft.group])).max())

    def query(self, anchor: Array, group: int, length: float | None = None) -> SoftAnswer:
        """One soft query, by default as long as the ones before suggest, and shorter where a weight
        is lost in rounding."""
        if length is None:  # nine tenths of the last 64 would have stayed below the aim
            length = self.policy.peak / float(np.quantile(self.peaks[-64:], 0.9))
        length = min(length, self.radius / 2)
        for _ in range(LENGTHENINGS):
            tokens = np.concatenate([anchor + length * self.groups[group], anchor[None]])[None]
            soft = SoftAnswer(anchor, group, length, self.ask(tokens, "keys")[0])
            peak = self.measure_peak(soft)
            if np.isfinite(peak):
                self.peaks.append(max(peak / length, TINY))
                return soft
            length *= 0.25
        raise IllConditioned("soft queries saturate at every length")

    def query_first(self, anchor: Array, group: int) -> SoftAnswer:
        """The first soft query, its length corrected until it is worth keeping."""
        soft = self.query(anchor, group, np.sqrt(len(anchor)))
        for _ in range(LENGTHENINGS):
            peak = self.measure_peak(soft)
            if peak <= 5.0 and (peak >= 0.3 or soft.length >= self.radius / 2):
                break
            # fainter log-odds than 1e-9 tell no length: a longer leap would miss the range
            soft = self.query(anchor, group, soft.length * self.policy.peak / max(peak, 1e-9))
        self.peaks = self.peaks[-1:]
        return soft


def measure_soft_answers(
    ask: Asker,
    maps: ValueMaps,
    frame: Float[Array, "d d"],
    policy: SamplingPolicy,
    rng: np.random.Generator,
    *,
    radius: float = np.inf,
    expect_ranks: bool = False,
) -> SoftAnswers:
    """Soft queries at d + 1 anchors. Tokens in all directions at the first of them, until the ranks
    of the scores are known; then tokens that see the range of every score suffice. With
    `expect_ranks` the scores are expected to have the ranks of the value maps."""
    width, ranks = ask.width, maps.ranks
    querier = SoftQuerier(ask, maps, policy, radius)
    bases = [np.linalg.qr(part)[0] for part in maps.ins]
    count = max(1, int(min(ranks) * policy.share))
    longest = ask.oracle.spec.domain.max_length
    count = count if longest is None else min(count, longest - 1)
    cover = -(-width // count)
    tokens = spread_tokens(bases, count, cover, rng).T
    covering = querier.add_groups(tokens.reshape(cover, count, width))
    size = min(policy.anchor * np.sqrt(width), radius / 2)
    anchors = [size * frame[0], np.zeros(width), *(size * frame[1:])]

    goal = min(policy.count_wide_columns(ranks, width), len(anchors))
    start = [querier.query_first(anchors[0], covering[0])]
    columns: list[tuple[SoftAnswer, ...]] = []
    while True:
        for anchor in anchors[len(columns) : goal]:
            rest = (querier.query(anchor, group) for group in covering[len(start) :])
            columns.append((*start, *rest))
            start = []
        answers = SoftAnswers(tuple(querier.groups), tuple(columns), goal, ())
        keys = answers.solve_wide_keys(maps)
        expected = ranks if expect_ranks else [None] * len(ranks)
        score_ranks = [find_key_rank(ask, maps, *pair) for pair in zip(keys, expected, strict=True)]
        rank, telling = max(score_ranks), goal - has_no_bias(ask, maps, keys)
        if goal >= len(anchors) or rank < telling:
            break
        goal = min(goal + (max(2, goal // 4) if rank == goal else 1), len(anchors))
    answers = replace(answers, score_ranks=tuple(score_ranks))
    if goal >= len(anchors):
        return answers
    ranges = [
        np.linalg.svd(part, full_matrices=False)[0][:, :rank]
        for part, rank in zip(keys, score_ranks, strict=True)
    ]
    groups = -(-max(score_ranks) // count)
    tokens = spread_tokens(bases, count, groups, rng, whole=ranges).T
    parts = querier.add_groups(tokens.reshape(groups, count, width))
    narrow = [tuple(querier.query(anchor, part) for part in parts) for anchor in anchors[goal:]]
    return replace(answers, groups=tuple(querier.groups), columns=(*columns, *narrow))


def has_no_bias(ask: Asker, maps: ValueMaps, keys: Float[Array, "h d n"]) -> bool:
    """Whether the second anchor, zero, found no key bias: then it tells no rank."""
    noise = ask.unit * maps.condition * float(np.linalg.norm(keys)) * np.sqrt(ask.width)
    return keys.shape[2] > 1 and bool(np.linalg.norm(keys[:, :, 1]) <= NOISE_NORMS * noise)


def find_key_rank(
    ask: Asker, maps: ValueMaps, keys: Float[Array, "d n"], expected: int | None
) -> int:
    """Rank of [W | c]; the expected one unless the keys clearly have another."""
    sizes = np.linalg.svd(keys, compute_uv=False)
    noise = ask.unit * maps.condition * float(sizes[0]) * np.sqrt(ask.width)
    rank = count_singular_values(sizes, noise)
    if expected is not None and expected < len(sizes):
        ends = sizes[expected] < 0.3 * sizes[expected - 1]
        return expected if ends or rank <= expected else rank
    return rank


# --- the hypothesis -------------------------------------------------------------------------------


def assemble_heads(
    scores: Float[Array, "h d d"],
    biases: Float[Array, "h d"],
    maps: ValueMaps,
    ranks: Sequence[int],
) -> list[Head]:
    """The heads, scores of low rank in factors."""
    factored = (factor_score(score, rank) for score, rank in zip(scores, ranks, strict=True))
    return [Head(*parts) for parts in zip(factored, biases, maps.products, strict=True)]


def drop_spurious_biases(model: Attention, errors: Attention) -> tuple[Attention, Attention]:
    """The model with key biases that may be nothing but error set to zero, and standard errors that
    cover what was found: most layers without biases would otherwise be said to have some, each of
    them wrong by all of its size. (Six samples may see a third of the spread.)"""
    heads, bars = [], []
    for head, error in zip(model.heads, errors.heads, strict=True):
        if np.linalg.norm(head.key_bias) <= 10 * np.linalg.norm(error.key_bias):
            score = head.score if head.score_factors is None else tuple(head.score_factors)
            error = Head(error.score, np.hypot(error.key_bias, head.key_bias), error.value)
            head = Head(score, None, head.value)
        heads.append(head)
        bars.append(error)
    return Attention(heads, model.offset), Attention(bars, errors.offset)


def report_layer(
    maps: ValueMaps,
    answers: SoftAnswers,
    model: Attention,
    errors: Attention,
    heads: int | None,
) -> Hypothesis:
    """The hypothesis with its floor and what the reader should know."""
    width, outputs = model.width, model.outputs or 1
    unknowns = outputs
    for value_rank, score_rank in zip(maps.ranks, answers.score_ranks, strict=True):
        unknowns += value_rank * (width + outputs) - value_rank**2
        unknowns += score_rank * (2 * width + 1) - score_rank**2
    found = len(model.heads)
    diagnostics = MultiHeadDiagnostics(
        heads=found,
        ranks=answers.score_ranks,
        key_ranks=answers.score_ranks,
        value_ranks=tuple(maps.ranks),
        condition=maps.condition,
    )
    groups = find_groups(model)
    told = tell_groups(groups)
    if told:
        diagnostics = replace(diagnostics, key_value_groups=len(groups))
    notes = (*note_missing_heads(heads, found), *told)
    return Hypothesis(model, errors, unknowns / outputs, notes, diagnostics=diagnostics)
