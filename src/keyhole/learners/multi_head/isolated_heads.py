"""Several heads through scalar answers: hard attention, then one head probed at a time.

Statement. f(X) = offset + sum_h sum_i softmax_i(x_i . (W_h x_N + c_h)) x_i . v_h is determined
up to the canonical form (equal heads merged, heads without value dropped, order free) by H(d² +
d) queries plus a few; with key biases and an offset H(d² + 2d) + 1.

Queries. (1) d of length one: the sum of the values. (2) Huge tokens at one anchor: who attends
where (hard_attention), and with small shifts all v_h. (3) At the same anchor, each head probed
along d directions while the others are isolated: the keys k_h = W_h x + c_h. (4) Separating tokens
of least norm (separators), and where digits are few the values and first keys once more, now that
tokens are a hundred times shorter. (5) The same probes at d - 1 more anchors nearby, where the
separators still hold.

Algebra. k_h at d anchors is W_h. A head whose keys stop growing in rank is probed along their range
alone from then on: H(2rd - r² + d). Errors are propagated by repeating the algebra on perturbed
answers.

When it fails. Bounded tokens (no hard attention). Nearly parallel k_h: digits are lost like the
square of their angle, and the standard errors say so. Two random queries validate; a failure
starts over at another anchor, and after several the family is wrong.

Source. The canonical form: Kim, Kim, Guo, arXiv 2608.03294; non-identifiability beyond it:
Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with Queries", Proposition 7.1.
The method is Keyhole's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.errors import (
    Counterexample,
    DomainError,
    IllConditioned,
    NotIdentifiable,
    WrongFamily,
)
from keyhole.fitting.bootstrap import bootstrap_errors
from keyhole.learners.base import Hypothesis, Inconclusive, Refuted, Result
from keyhole.learners.multi_head.hard_attention import (
    HUGE_TOKENS,
    HardAttentionPattern,
    find_selected_tokens,
    measure_values,
    split_selected_token,
)
from keyhole.learners.multi_head.separators import design_separators, measure_margins
from keyhole.learners.multi_head.soft_probe import (
    SHORTENINGS,
    Isolation,
    SeparatorIsolation,
    SoftProbes,
    Unexplained,
    build_probe_basis,
    probe_heads,
)
from keyhole.learners.multi_head.validation import (
    EXCUSED,
    Disagreement,
    MultiHeadDiagnostics,
    PriorKnowledge,
    find_counterexample,
    graver,
    note_missing_heads,
)
from keyhole.linalg.bases import random_directions
from keyhole.linalg.rank import count_above
from keyhole.linalg.softmax import logit, softmax
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.oracles.noise import ROUNDINGS

TARGET = 1.2  # typical log-odds of a probe: long enough to see, short enough to invert
TILT = 0.5  # how far a probe leans towards the head's value
MARGIN = 80.0  # log-odds by which designed separators hold at the first anchor, float64
CLOSE_HEADS = 12.0  # norm of the separators beyond which two heads count as almost alike


# --- what the stages hand on ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ScalarProblem:
    """What one attempt starts from: an anchor, and what single tokens told."""

    ask: Asker
    total: Float[Array, "d outputs"]  # sum of the values of all heads
    total_rows: Float[Array, "n d"]  # the equations that it is known from
    total_answers: Float[Array, "n outputs"]
    heads: int | None
    rank: int | None  # of [W | c]; None: it is searched for
    bias: bool
    reach: float  # norm of the anchor
    anchor: Float[Array, " d"]
    mix: Float[Array, " outputs"]  # of the outputs into one number
    suspicion: float = 1.0  # factor on the misfit that betrays two heads in one

    @property
    def width(self) -> int:
        return self.ask.width

    @property
    def digits(self) -> float:
        """Digits of the box, as a share of float64's: margins need no more than it can see."""
        return float(np.log(self.ask.unit) / np.log(UNIT_ROUNDOFF))

    def build_values(self, blocks: Array, inverse: Array, uniform: bool = False) -> "HeadValues":
        return HeadValues(blocks, inverse, self.mix, uniform)

    def isolate_alone(self, values: "HeadValues") -> Isolation:
        """The anchor of a head that nothing need isolate."""
        base = np.full(len(values.choosing), float(self.anchor @ self.total @ self.mix))
        total = self.total @ self.mix - (0.0 if values.uniform is None else values.uniform)
        return Isolation(self.anchor, base, values.choosing, values.uniform, self.mix, total)

    def isolate(self, values: "HeadValues", separators: Float[Array, "h d"]) -> Isolation:
        """The anchor with separators, whose own answer is asked, so that no error of the values
        enters it. A uniform head sees the probe too: then each head has an answer of its own."""
        alone = self.isolate_alone(values)
        blank = SeparatorIsolation(**vars(alone), separators=separators)
        if values.uniform is None:
            tokens = np.concatenate([separators, self.anchor[None]])[None]
        else:
            every = np.arange(len(separators))
            tokens = blank.build_sequences(every, np.zeros((len(separators), self.width)))
        base = blank.select_choosing(self.ask(tokens, "separators"), tokens)
        return replace(blank, base=np.broadcast_to(base, (len(separators),)))


@dataclass(frozen=True, eq=False)
class HeadValues:
    """The values of all heads, the uniform one last, if there is one."""

    blocks: Float[Array, "b d outputs"]
    inverse: Float[Array, "k n"]  # takes errors of answers to errors of the values
    mix: Float[Array, " outputs"]
    has_uniform: bool

    @property
    def choosing(self) -> Float[Array, "h d"]:
        """Values of the heads that choose between tokens, outputs mixed."""
        mixed = self.blocks @ self.mix
        return mixed[:-1] if self.has_uniform else mixed

    @property
    def uniform(self) -> Float[Array, " d"] | None:
        """Value of the head that does not choose, outputs mixed."""
        return (self.blocks @ self.mix)[-1] if self.has_uniform else None


class KeyColumn(NamedTuple):
    """Probes of one head at one anchor, and the key they gave."""

    anchor: Float[Array, " d"]
    probes: Float[Array, "n d"]
    changes: Float[Array, " n"]
    standard_errors: Float[Array, " n"]  # of the changes
    key: Float[Array, " d"]


@dataclass(frozen=True, eq=False)
class KeyTable:
    """The keys of one head at all anchors so far, and the dimension of their range once known."""

    columns: tuple[KeyColumn, ...]
    rank: int | None
    searching: bool  # whether the rank is not given: then every column looks for it

    def add(self, column: KeyColumn) -> "KeyTable":
        return replace(self, columns=(*self.columns, column))

    def correct_key(self, place: int, key: Float[Array, " d"]) -> "KeyTable":
        columns = list(self.columns)
        columns[place] = columns[place]._replace(key=key)
        return replace(self, columns=tuple(columns))

    @property
    def first(self) -> Float[Array, " d"]:
        """The key at the first anchor."""
        return self.columns[0].key

    def measure_slopes(self) -> list[float]:
        """How much keys moved per move of the anchor."""
        start = self.columns[0]
        return [
            float(np.linalg.norm(c.key - start.key) / np.linalg.norm(c.anchor - start.anchor))
            for c in self.columns[1:]
        ]

    def span_range(self, alone: bool) -> Float[Array, "d k"]:
        """Orthonormal basis of the keys so far, the first key's direction first."""
        return span_keys([c.key for c in self.columns if len(c.probes) == len(c.key)], alone)


def span_keys(keys: list[Array], alone: bool) -> Float[Array, "d k"]:
    """Orthonormal basis of keys: of themselves for a head alone; else of the first and of what the
    others differ from it by, for anchors that lie close to each other."""
    rest = keys[1:] if alone else [key - keys[0] for key in keys[1:]]
    stack = np.stack([keys[0], *rest]).T
    return np.linalg.qr(stack / np.linalg.norm(stack, axis=0))[0]


def solve_key(
    probes: Float[Array, "n d"], odds: Float[Array, " n"], keys: list[Array], alone: bool
) -> Float[Array, " d"]:
    """The key with these log-odds: all of it from d probes, or from fewer its coordinates in the
    range of the keys that are known completely."""
    if len(probes) == probes.shape[1]:
        return np.asarray(np.linalg.solve(probes, odds))
    known = span_keys(keys, alone)
    start = np.zeros(probes.shape[1]) if alone else keys[0]
    rest = np.linalg.lstsq(probes @ known, odds - probes @ start, rcond=None)[0]
    return np.asarray(start + known @ rest)


@dataclass(frozen=True, eq=False)
class IsolatedHeads:
    """Heads with known values that can be probed one at a time."""

    problem: ScalarProblem
    values: HeadValues
    isolation: Isolation

    def probe(
        self, heads: Array, probes: Array, purpose: str, rounds: int = SHORTENINGS
    ) -> SoftProbes:
        return probe_heads(self.problem.ask, self.isolation, heads, probes, purpose, rounds)

    def lean_probes(self, head: int, rng: np.random.Generator) -> Float[Array, "d d"]:
        """Directions of probes of a head whose keys are unknown, all leaning towards its value."""
        value = self.values.choosing[head]
        rows = build_probe_basis(np.zeros((len(value), 0)), value, rng)
        return np.asarray(rows + TILT * value / np.linalg.norm(value))

    def estimate_change_errors(self, head: int, probes: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Standard errors of the changes: rounding of sums over all separators, and noise."""
        ask, sizes = self.problem.ask, np.linalg.norm(self.values.choosing, axis=1)
        scale = self.isolation.output_scale(sizes) + np.linalg.norm(probes, axis=1) * sizes[head]
        noise = ask.additive * float(np.linalg.norm(self.values.mix)) * np.sqrt(2.0)
        return np.asarray(np.hypot(ask.unit * scale, noise))

    def estimate_odds_errors(
        self, head: int, probes: Array, odds: Array, value_roundings: float
    ) -> Float[Array, " n"]:
        """Standard errors of log-odds, where values carry so many rounding errors."""
        weight = np.abs(probes @ self.values.choosing[head])
        fading = np.exp(-np.abs(odds))
        slope = fading / (1 + fading) ** 2
        own = value_roundings * self.problem.ask.unit * weight
        return np.asarray((self.estimate_change_errors(head, probes) + own) / (weight * slope))


@dataclass(frozen=True, eq=False)
class KnownKeys(IsolatedHeads):
    """What is known after a stage."""

    tables: tuple[KeyTable, ...]  # one per head that chooses
    separator_norm: float = 0.0  # in units of the margin: large where two heads are almost alike
    step: float = 1.0  # distance of the other anchors, relative to the first

    @property
    def first_keys(self) -> Float[Array, "h d"]:
        return np.stack([table.first for table in self.tables])


@dataclass(frozen=True, eq=False)
class Draft:
    """A finished attempt: the parameters and their standard errors."""

    scores: Float[Array, "h d d"]
    biases: Float[Array, "h d"]
    values: Float[Array, "b d outputs"]  # the uniform head last, if there is one
    score_errors: Float[Array, "h d d"]
    bias_errors: Float[Array, "h d"]
    value_errors: Float[Array, "b d outputs"]
    has_uniform: bool
    ranks: tuple[int, ...]  # of the scores
    key_ranks: tuple[int, ...]  # of [W | c]
    separator_norm: float


# --- the strategy: anchors are tried until a hypothesis passes fresh queries ----------------------


def learn_isolated_heads(
    ask: Asker,
    rng: np.random.Generator,
    prior: PriorKnowledge,
    frame: Float[Array, "d d"],
    first: Float[Array, "one outputs"],
    polish: Callable[[Asker, Hypothesis], Result] | None = None,
) -> Result:
    """The whole recovery; `first` is the answer to the first row of `frame` alone. `polish` makes a
    better hypothesis of a draft, where there is a way to."""
    return try_anchors(ask, rng, prior, frame, first, attempt_with_separators, polish=polish)


def try_anchors(
    ask: Asker,
    rng: np.random.Generator,
    prior: PriorKnowledge,
    frame: Float[Array, "d d"],
    first: Float[Array, "one outputs"],
    attempt: Callable[[ScalarProblem, np.random.Generator], Draft],
    *,
    repeat_unidentifiable: bool = False,
    polish: Callable[[Asker, Hypothesis], Result] | None = None,
) -> Result:
    """Attempts at one random anchor after the other. With `repeat_unidentifiable` two of them must
    agree that the box is not identifiable."""
    start, offset = ask_single_tokens(ask, rng, prior, frame, first)
    ask = start.ask
    trouble: Exception | None = None
    best: Hypothesis | None = None
    for number in range(prior.attempts):
        problem = at_random_anchor(start, number, rng)
        try:
            draft = attempt(problem, rng)
        except NotIdentifiable as error:
            if not repeat_unidentifiable or isinstance(trouble, NotIdentifiable):
                raise
            trouble = error
            continue
        except (IllConditioned, np.linalg.LinAlgError) as error:
            trouble = graver(trouble, error)
            continue
        except WrongFamily as error:
            return Refuted(str(error), error.counterexample)
        except DomainError as error:
            return Inconclusive(str(error))
        if polish is not None:
            polished = polish(ask, draft_hypothesis(problem, draft, offset))
            if isinstance(polished, Hypothesis):
                return polished
        result = judge(problem, draft, offset, rng)
        if not isinstance(result, Hypothesis):
            trouble = result
            continue
        if best is not None:
            return min(best, result, key=measure_doubt)
        if not is_unlucky(result, draft, ask.unit):
            return result
        best = result
    return best if best is not None else conclude_failure(trouble)


def ask_single_tokens(
    ask: Asker,
    rng: np.random.Generator,
    prior: PriorKnowledge,
    frame: Float[Array, "d d"],
    first: Float[Array, "one outputs"],
) -> tuple[ScalarProblem, Float[Array, " outputs"]]:
    """What single tokens say, before there is an anchor, and the offset."""
    total_answers = np.concatenate([first, ask(frame[1:, None], "values")])
    offset, bias = find_bias(ask, frame, total_answers, prior.bias, rng)
    ask = ask.subtracting(offset)
    size = float(np.linalg.norm(frame[0]))
    frame, centred = frame / size, (total_answers - offset) / size
    total = frame.T @ centred
    if prior.heads == 1 and np.abs(total).max() <= ask.undetected / size:
        raise NotIdentifiable("every answer is zero: the head has no value, so its score is free")
    # without biases scores shrink with the anchor, which then loses against every separator; where
    # noise does not scale with the answer, other tokens grow in its stead
    reach = 1.0 if bias else 1e-6 if ask.additive else 1e-4
    rank = None if prior.rank is None else min(prior.rank + bias, ask.width)  # [W | c] has one more
    nowhere, mix = np.zeros(ask.width), np.ones(total.shape[1])
    return ScalarProblem(
        ask, total, frame, centred, prior.heads, rank, bias, reach, nowhere, mix
    ), offset


def at_random_anchor(start: ScalarProblem, number: int, rng: np.random.Generator) -> ScalarProblem:
    """The attempt of this number, from zero on, at an anchor of its own."""
    outputs = start.total.shape[1]
    mix = np.asarray(rng.standard_normal(outputs)) if outputs > 1 else np.ones(1)
    anchor = start.reach * random_directions(rng, 1, start.width)[0]
    # each new attempt looks ten times closer for two heads in one, if digits allow it
    suspicion = 0.1**number if start.ask.affords(HUGE_TOKENS) else 1.0
    return replace(start, anchor=anchor, mix=mix, suspicion=suspicion)


def is_unlucky(result: Hypothesis, draft: Draft, unit: float) -> bool:
    """Whether the anchor lost digits that another one may keep, which is no matter of heads almost
    alike: one more anchor is worth its queries."""
    return draft.separator_norm <= CLOSE_HEADS and measure_doubt(result) > min(2e9, 0.05 / unit)


def conclude_failure(trouble: Exception | None) -> Refuted | Inconclusive:
    """What to say where no anchor led to a model, after the last trouble."""
    if isinstance(trouble, WrongFamily):
        conclusive = not isinstance(trouble, Disagreement)
        return Refuted(str(trouble), trouble.counterexample, conclusive)
    reason = f"no anchor led to a model: {trouble}"
    if isinstance(trouble, Unexplained):
        return Refuted(reason, trouble.counterexample, conclusive=False)
    return Inconclusive(reason)


def draft_hypothesis(problem: ScalarProblem, draft: Draft, offset: Array) -> Hypothesis:
    """The draft as a hypothesis, before any query was compared with it."""
    model, errors = assemble(draft, offset, problem.ask)
    return report(problem.ask, model, errors, draft, problem.bias, problem.heads)


def judge(
    problem: ScalarProblem, draft: Draft, offset: Array, rng: np.random.Generator
) -> Hypothesis | IllConditioned | WrongFamily:
    """The hypothesis, if fresh queries agree with it; else why not."""
    ask, heads = problem.ask, problem.heads
    model, errors = assemble(draft, offset, ask)
    # heads almost alike lose digits with the square of their separators' norm
    excused = float(np.clip(2.5e-10 * draft.separator_norm**2, EXCUSED, 1e-3))
    counterexample = find_counterexample(ask, model, errors, rng, excused=excused)
    if counterexample is None:
        return report(ask, model, errors, draft, problem.bias, heads)
    if draft.separator_norm > 1e3:
        return IllConditioned(
            f"two heads attend almost alike (angle about {2 / draft.separator_norm:.0e}): the "
            "answers do not determine their parameters"
        )
    return Disagreement(
        "the hypothesis disagrees with the box on a fresh query: it is not attention with "
        "this many heads" + ("" if heads is None else f" (heads={heads} was claimed)"),
        counterexample,
    )


def measure_doubt(result: Hypothesis) -> float:
    """The worst relative standard error of a score, in units of the box's rounding error."""
    assert isinstance(result.diagnostics, MultiHeadDiagnostics)
    unit = result.diagnostics.unit or UNIT_ROUNDOFF
    worst = [
        float(np.linalg.norm(error.score) / np.linalg.norm(head.score)) / unit
        for head, error in zip(result.model.heads, result.errors.heads, strict=True)
        if head.score.any()
    ]
    return max(worst, default=0.0)


def find_bias(
    ask: Asker, frame: Array, answers: Array, claimed: bool | None, rng: np.random.Generator
) -> tuple[Float[Array, " outputs"], bool]:
    """The offset, and whether there are key biases: at the anchor 0 all scores vanish without them,
    and two tokens count half each."""
    nothing, width = np.zeros(answers.shape[1]), len(frame)
    if claimed is False:
        return nothing, False
    zero = np.zeros((1, 1, width))
    token = random_directions(rng, 1, width)[0] * np.sqrt(width)
    shares = 0.5 * (frame @ token) / float(frame[0] @ frame[0])
    scale = float(np.abs(answers).max() / np.linalg.norm(frame[0])) * np.sqrt(width)
    noise = ROUNDINGS * (ask.unit * scale * np.sqrt(width) + ask.additive)
    pair = ask(np.concatenate([token[None, None], zero], axis=1), "bias?")[0]
    if np.abs(pair - shares @ answers).max() <= noise:
        return nothing, False
    offset = ask(zero, "bias?")[0]
    even = offset + shares @ (answers - offset)
    noise += ROUNDINGS * ask.unit * float(np.abs(offset).max())
    return offset, bool(np.abs(pair - even).max() > noise)


def attempt_with_separators(problem: ScalarProblem, rng: np.random.Generator) -> Draft:
    """All stages from one anchor."""
    if problem.heads == 1:
        values = problem.build_values(problem.total[None], np.zeros((problem.width, 0)))
        found = SeparatedHeads(problem, values, problem.isolate_alone(values), {}, {})
    else:
        separated = separate_heads(problem, rng)
        if separated is None:
            return draft_uniform(problem)
        found = separated
    try:
        progress = measure_first_keys(found, rng)
    except NoReaction:
        if len(found.values.choosing) > 1:
            raise IllConditioned("a head does not react to any probe") from None
        return draft_uniform(problem)
    progress = redesign_separators(progress)
    if not (problem.ask.affords(HUGE_TOKENS) or progress.isolation.alone):
        progress = measure_again(progress, rng)
    progress = measure_other_keys(progress, rng)
    return draw_conclusion(progress, rng)


# --- stage 1: heads, their values, and the keys at the first anchor -------------------------------


class FirstProbe(NamedTuple):
    """The first probe of a head, and the directions of those to come."""

    rows: Float[Array, "d d"]
    reading: SoftProbes
    size: float  # estimate of |k_h|


@dataclass(frozen=True, eq=False)
class SeparatedHeads(IsolatedHeads):
    """Heads told apart at the first anchor, and the first probes of some."""

    first_probes: Mapping[int, FirstProbe]
    sizes: Mapping[int, float]  # estimates of |k_h|


class NoReaction(Exception):
    """A head that no probe moves: its score is zero."""


def separate_heads(problem: ScalarProblem, rng: np.random.Generator) -> SeparatedHeads | None:
    """Selected tokens with one head each, all values, and first separators; None where no head
    chooses between tokens."""
    ask = problem.ask
    pattern = find_selected_tokens(ask, problem.anchor, problem.total, problem.heads, rng)
    shared = np.repeat(problem.total_rows[:, None], pattern.blocks, axis=1)
    pattern = replace(pattern, system=pattern.system.add(shared, problem.total_answers))
    first_probes: dict[int, FirstProbe] = {}
    sizes: dict[int, float] = {}
    checked = 0  # selected tokens known to hold one head each
    while True:
        pattern = measure_values(ask, pattern)
        values = problem.build_values(*pattern.system.solve(), pattern.uniform)
        if not len(pattern):
            return None
        if len(pattern) == 1 and not pattern.uniform:
            heads = IsolatedHeads(problem, values, problem.isolate_alone(values))
        else:
            guess = guess_size(problem, sizes, 0)
            heads = use_as_separators(problem, values, pattern, guess)
            if 0 not in first_probes:
                first_probes[0] = probe_first(heads, 0, guess, rng)
                sizes[0] = first_probes[0].size
            if sizes[0] > 30 * guess:  # separators far larger than needed cost digits
                del first_probes[0]
                heads = use_as_separators(problem, values, pattern, sizes[0])
        found = SeparatedHeads(problem, values, heads.isolation, first_probes, sizes)
        if problem.heads is not None and pattern.blocks >= problem.heads:
            return found
        for head in range(checked, len(values.choosing)):
            if head not in first_probes:
                guess = guess_size(problem, sizes, head)
                first_probes[head] = probe_first(heads, head, guess, rng)
                sizes[head] = first_probes[head].size
            if seems_shared(heads, head, first_probes[head].reading):
                break
        else:
            return found
        parts = split_selected_token(ask, pattern, head, rng)
        if parts is None:
            checked = head + 1
        else:
            pattern = parts
            first_probes.pop(head, None)


def guess_size(problem: ScalarProblem, sizes: Mapping[int, float], head: int) -> float:
    """Estimate of |k_h| at the first anchor, from other heads where this one is unknown."""
    return sizes.get(head, float(np.median(list(sizes.values()) or [problem.reach])))


def use_as_separators(
    problem: ScalarProblem, values: HeadValues, pattern: HardAttentionPattern, size: float
) -> IsolatedHeads:
    """The selected tokens as separators, as small as they still hold."""
    wide_separators = 1e4  # size of the first separators, in units of a head's soft length
    tokens = pattern.tokens * (wide_separators / size)
    for _ in range(6):
        isolation = problem.isolate(values, tokens)
        expected = float(np.einsum("hd,hd->", tokens, values.choosing))
        sizes = np.linalg.norm(values.choosing, axis=1)
        output_scale = float(np.linalg.norm(tokens, axis=1) @ sizes)
        allowed = HUGE_TOKENS * problem.ask.unit * output_scale + problem.ask.undetected
        if np.abs(isolation.base - expected).max() <= allowed:
            return IsolatedHeads(problem, values, isolation)
        tokens, asked = tokens * 30, tokens
    raise Unexplained(
        "the separating tokens do not hold at any size that was tried",
        Counterexample(
            input=np.concatenate([asked, problem.anchor[None]]),
            box_answer=np.asarray(isolation.base[0]),
            model_answer=np.asarray(expected),
            reason="huge tokens: each head should attend to one of them alone",
        ),
    )


def probe_first(
    isolated: IsolatedHeads, head: int, guess: float, rng: np.random.Generator
) -> FirstProbe:
    """The first probe of a head, which also tells its scale."""
    width = isolated.problem.width
    rows = isolated.lean_probes(head, rng)
    probes = rows[:1] * (TARGET * np.sqrt(width) / guess)
    got = isolated.probe(np.array([head]), probes, "first keys")
    if abs(got.log_odds[0]) < 0.02:  # worth a longer probe, up to ten orders of magnitude
        longer = min(TARGET / max(abs(float(got.log_odds[0])), TINY), 1e10)
        got = isolated.probe(np.array([head]), longer * got.probes, "first keys")
    if abs(got.log_odds[0]) < 1e-9:
        raise NoReaction
    seen = abs(float(got.log_odds[0])) / float(np.linalg.norm(got.probes[0]))
    return FirstProbe(rows, got, seen * np.sqrt(width))


def seems_shared(isolated: IsolatedHeads, head: int, first: SoftProbes) -> bool:
    """Whether a token answers unlike one of a single head when the same probe is doubled."""
    factor = 2.0 if abs(first.log_odds[0]) < 3 else 0.5
    second = isolated.probe(np.array([head]), factor * first.probes, "single?")
    used = float(np.linalg.norm(second.probes[0]) / np.linalg.norm(first.probes[0]))
    misfit = abs(float(second.log_odds[0] - used * first.log_odds[0]))
    errors = [
        isolated.estimate_odds_errors(head, part.probes, part.log_odds, HUGE_TOKENS)
        for part in (second, first)
    ]
    return misfit > 100 * isolated.problem.suspicion * float((errors[0] + used * errors[1])[0])


def measure_first_keys(found: SeparatedHeads, rng: np.random.Generator) -> KnownKeys:
    """The keys at the anchor: d probes per head, their length found on the way."""
    width, sizes = found.problem.width, dict(found.sizes)
    tables: list[KeyTable] = []
    for head in range(len(found.values.choosing)):
        first = found.first_probes.get(head)
        if first is None:
            first = probe_first(found, head, guess_size(found.problem, sizes, head), rng)
        got = first.reading
        for stop in sorted({min(3, width), width} - {1}):
            seen = np.abs(got.log_odds) / np.linalg.norm(got.probes, axis=1)
            length = TARGET / float(np.sqrt(np.mean(np.square(seen))))
            rows = first.rows[len(got.probes) : stop]
            probes = rows * min(length, TARGET * np.sqrt(width) / seen.max())
            got = got.join(found.probe(np.full(len(rows), head), probes, "first keys"))
        tables.append(start_table(found, head, got))
        sizes[head] = float(np.linalg.norm(tables[-1].first))
    progress = KnownKeys(found.problem, found.values, found.isolation, tuple(tables))
    return correct_leaks(progress, 0)


def start_table(isolated: IsolatedHeads, head: int, got: SoftProbes) -> KeyTable:
    """The table of a head with its first key, from d probes."""
    errors = isolated.estimate_change_errors(head, got.probes)
    key = np.linalg.solve(got.probes, got.log_odds)
    column = KeyColumn(isolated.problem.anchor, got.probes, got.changes, errors, key)
    return KeyTable((column,), isolated.problem.rank, isolated.problem.rank is None)


def correct_leaks(progress: KnownKeys, place: int) -> KnownKeys:
    """Where separators hold only just, what leaks through them is computed and removed."""
    isolation = progress.isolation
    if not isinstance(isolation, SeparatorIsolation):
        return progress
    separators, values = isolation.separators, progress.values.choosing
    anchor = progress.tables[0].columns[place].anchor
    tables = list(progress.tables)
    moved = replace(isolation, anchor=anchor)
    for _ in range(6):
        keys = np.stack([table.columns[place].key for table in tables])
        # beyond this margin leaks are rounding, whatever a probe may add
        if measure_margins(separators, keys, anchor).min() > 70:
            break
        own = np.stack([table.first for table in tables])  # where the base was asked
        alone = np.concatenate([separators, progress.problem.anchor[None]])[None]
        still = compute_leakage(alone, own, values, separators)
        worst = 0.0
        for head, table in enumerate(tables):
            column = table.columns[place]
            tokens = moved.build_sequences(np.full(len(column.probes), head), column.probes)
            leak = compute_leakage(tokens, keys, values, separators) - still
            weights = column.probes @ values[head]
            leak -= weights / (1 + np.exp(-(column.probes @ keys[head])))
            odds = logit((column.changes - leak) / weights)
            if np.isnan(odds).any():
                return replace(progress, tables=tuple(tables))
            full = [c.key for c in table.columns if len(c.probes) == len(c.key)]
            tables[head] = table.correct_key(place, solve_key(column.probes, odds, full, False))
            worst = max(worst, float(np.abs(leak / weights).max()))
        if worst <= 1e-14:  # rounding
            break
    return replace(progress, tables=tuple(tables))


def compute_leakage(
    tokens: Float[Array, "n length d"],
    keys: Float[Array, "h d"],
    values: Float[Array, "h d"],
    separators: Float[Array, "h d"],
) -> Float[Array, " n"]:
    """How far an answer exceeds the one where every head attends to its own separator."""
    anchor = tokens[:, -1]
    answer = np.zeros(len(tokens))
    for h in range(len(keys)):
        scores = (tokens - anchor[:, None]) @ keys[h]
        answer += np.einsum("nl,nl->n", softmax(scores), (tokens - separators[h]) @ values[h])
    return answer


# --- stage 2: separators of least norm, and what they allow to measure better ---------------------


def redesign_separators(progress: KnownKeys) -> KnownKeys:
    """Separators that hold around the anchor, from the measured keys."""
    problem = progress.problem
    if progress.isolation.alone:
        return replace(progress, separator_norm=0.0, step=1.0)
    keys = progress.first_keys
    separators = design_separators(keys)
    norm = float(np.linalg.norm(separators, axis=1).max())
    smallest = float(np.linalg.norm(keys, axis=1).min())
    own = np.einsum("hd,hd->h", keys, separators)
    margin = MARGIN * problem.digits
    # the anchor must lose against the separators as well
    scale = max(margin / smallest, float(((margin + keys @ problem.anchor) / own).max()))
    isolation = problem.isolate(progress.values, separators * scale)
    # half the anchor's norm; less in few dimensions, and with longer separators
    step = 0.5 * min(1.0, np.sqrt(problem.width) / 8) / max(1.0, norm / 4)
    return replace(progress, isolation=isolation, separator_norm=norm, step=step)


def measure_again(progress: KnownKeys, rng: np.random.Generator) -> KnownKeys:
    """Values and first keys once more, where errors behind huge tokens are too large: designed
    separators are a hundred times shorter, and so are the errors. (H - 1) d and H d queries."""
    if progress.values.uniform is None and len(progress.values.choosing) > 1:
        progress = measure_values_again(progress, rng)
    progress = measure_first_keys_again(progress, rng)
    heads = progress.problem.heads
    if heads is None or len(progress.values.choosing) < heads:
        check_single_heads(progress)
    return redesign_separators(progress)


def measure_values_again(progress: KnownKeys, rng: np.random.Generator) -> KnownKeys:
    """Every separator but the last moved along all directions, as far as all heads stay isolated;
    the last head has what the others leave of the sum."""
    problem, isolation = progress.problem, progress.isolation
    assert isinstance(isolation, SeparatorIsolation)
    separators, width, keys = isolation.separators, problem.width, progress.first_keys
    rows = np.linalg.qr(random_directions(rng, width, width))[0]
    # half of every margin is left, and no move is longer than twice the longest separator
    spare = (1 - 0.5) * measure_margins(separators, keys, problem.anchor)
    lengths = np.min(spare / np.maximum(np.abs(rows @ keys.T), TINY), axis=1)
    lengths = np.minimum(lengths, 2.0 * isolation.longest)
    heads = len(separators)
    moved = np.repeat(separators[None], (heads - 1) * width, axis=0)
    for head in range(heads - 1):
        moved[head * width : (head + 1) * width, head] += lengths[:, None] * rows
    tokens = np.concatenate([separators[None], moved])
    last = np.broadcast_to(problem.anchor, (len(tokens), 1, width))
    answers = problem.ask(np.concatenate([tokens, last], axis=1), "values")
    slopes = (answers[1:] - answers[0]).reshape(heads - 1, width, -1) / lengths[:, None]
    found = np.einsum("id,hio->hdo", rows, slopes)
    blocks = np.concatenate([found, (problem.total - found.sum(axis=0))[None]])
    each = (rows * (isolation.longest / lengths)[:, None]).T
    measured: Array = np.kron(np.eye(heads - 1), each)
    inverse = np.concatenate([measured, -np.tile(each, (1, heads - 1))])
    values = problem.build_values(blocks, inverse)
    isolation = replace(isolation, values=values.choosing)
    return replace(progress, values=values, isolation=isolation)


def measure_first_keys_again(progress: KnownKeys, rng: np.random.Generator) -> KnownKeys:
    """The keys at the anchor, with probes whose effect is known roughly: none disturbs a head that
    is isolated."""
    problem, plans = progress.problem, []
    for head, value in enumerate(progress.values.choosing):
        rows = build_probe_basis(np.zeros((problem.width, 0)), value, rng)
        rows = rows + TILT * lean(progress, head)
        far = 2 * problem.anchor  # lets no direction count as unseen
        plans.append(rows * choose_lengths(progress, head, rows, far)[:, None])
    tables = []
    for head, got in enumerate(probe_all(progress, plans)):
        old = progress.tables[head]
        table = start_table(progress, head, got)
        tables.append(replace(table, rank=old.rank, searching=old.searching))
    return correct_leaks(replace(progress, tables=tuple(tables)), 0)


def check_single_heads(progress: KnownKeys) -> None:
    """Doubles the probes of each head that tell most: two heads behind one separator would answer
    otherwise. The same queries before the separators were designed cannot tell heads that differ
    little."""
    refined_value_roundings = 30.0  # of a value map that was measured again
    longest, roundings = progress.isolation.longest, refined_value_roundings
    plans, before, errors = [], [], []
    for head, table in enumerate(progress.tables):
        first = table.columns[0]
        odds = first.probes @ first.key
        best = np.argsort(-np.where(np.abs(odds) <= 2.0, np.abs(odds), 0.0))[:2]
        probes = first.probes[best]
        plans.append(2 * probes)
        before.append(odds[best])
        # scores are large at the separators, and rounded there
        rounding = progress.problem.ask.unit * longest * float(np.linalg.norm(first.key))
        own = progress.estimate_odds_errors(head, probes, odds[best], roundings)
        errors.append(2 * own + 3 * rounding)
    for head, got in enumerate(probe_all(progress, plans)):
        used = np.linalg.norm(got.probes, axis=1) / np.linalg.norm(plans[head], axis=1)
        own = progress.estimate_odds_errors(head, got.probes, got.log_odds, roundings)
        allowed = errors[head] + own
        if (np.abs(got.log_odds - 2 * used * before[head]) > 2 * allowed).any():
            raise IllConditioned("two heads share a separating token")


# --- stage 3: keys at the other anchors -----------------------------------------------------------


def measure_other_keys(progress: KnownKeys, rng: np.random.Generator) -> KnownKeys:
    """The keys at the remaining anchors, closer to the first where the separators demand it."""
    problem = progress.problem
    start = problem.anchor
    frame = build_probe_basis((start / np.linalg.norm(start))[:, None], start, rng)
    if progress.isolation.alone:
        others = list(problem.reach * frame[1:])
        if problem.bias:
            others.append(np.zeros(problem.width))
    else:
        rows = frame if problem.bias else frame[1:]
        others = [start + progress.step * problem.reach * row for row in rows]
    trouble = IllConditioned("the separating tokens do not hold at any other anchor")
    for place, anchor in enumerate(others):
        problem.ask.oracle.expect(*forecast_keys(progress, len(others) - place))
        near = start + choose_distance(progress) * (anchor - start)
        for _ in range(8):
            result = measure_keys_at(progress, near, rng)
            if isinstance(result, KnownKeys):
                progress = result
                break
            trouble = result or trouble
            near = start + 0.25 * (near - start)
        else:
            raise trouble
    return progress


def forecast_keys(progress: KnownKeys, anchors: int) -> tuple[int | None, int]:
    """Queries for the keys at so many anchors: expected once all ranks are known, and at most."""
    width = progress.problem.width
    ranks = [table.rank for table in progress.tables]
    known = [rank for rank in ranks if rank is not None]
    expected = anchors * sum(known) if len(known) == len(ranks) else None
    return expected, 2 * anchors * width * len(ranks)  # an anchor may be tried twice


def choose_distance(progress: KnownKeys) -> float:
    """How far the next anchor may lie from the first, in planned steps: as far as the separators
    can be expected to hold, judged by how much keys have moved so far."""
    if progress.isolation.alone:
        return 1.0
    problem, keys = progress.problem, progress.first_keys
    margins = progress.isolation.measure_margins(keys)
    worst = TINY
    for head, table in enumerate(progress.tables):
        if len(table.columns) < 2:
            return 0.3  # nothing is known yet of how keys move
        span = progress.isolation.measure_span(head)
        share = table.rank or min(len(table.columns), problem.width)
        slope = float(np.sqrt(np.mean(np.square(table.measure_slopes()))))
        typical = slope * progress.step * problem.reach
        worst = max(worst, typical * span / (float(margins[head]) * np.sqrt(share)))
    # 0.8 of a margin may be lost, at two and a half standard deviations
    return float(np.clip(0.8 / (2.5 * worst), 0.02, 2.0))


def choose_lengths(
    progress: KnownKeys, head: int, rows: Array, anchor: Array
) -> Float[Array, " n"]:
    """How long to probe along each row at a new anchor, from what the key is expected to be."""
    table, problem = progress.tables[head], progress.problem
    width, columns = problem.width, table.columns
    if progress.isolation.alone:
        rms = float(np.mean([np.linalg.norm(c.key) for c in columns])) / np.sqrt(width)
        inside = np.linalg.norm(rows @ table.span_range(alone=True), axis=1)
        share = np.sqrt(max(1, width / max(1, len(columns))))
        # a row that lies in the range so far sees more of the key
        return np.asarray(TARGET / (rms * np.where(inside > 0.9, min(share, 3.0), 1.0)))
    slopes = table.measure_slopes()
    slope = float(np.linalg.norm(table.first)) / problem.reach
    if slopes:
        slope = float(np.sqrt(np.mean(np.square(slopes))))
    step = float(np.linalg.norm(anchor - problem.anchor))
    count = min(width, table.rank or width)
    expected = np.abs(rows @ table.first) + slope * step / np.sqrt(count)
    others = np.abs(rows @ progress.first_keys.T)
    others[:, head] = 0.0
    most = 30 * problem.digits  # log-odds that a probe may reach in a head to be isolated
    return np.asarray(np.minimum(TARGET / expected, most / (others.max(axis=1) + TINY)))


def lean(progress: KnownKeys, head: int) -> Float[Array, " d"]:
    """The value's direction without its part along the first key, which would saturate."""
    value = progress.values.choosing[head]
    value = value / np.linalg.norm(value)
    if not progress.isolation.alone:
        first = progress.tables[head].first
        first = first / np.linalg.norm(first)
        value = value - first * (first @ value)
    return np.asarray(value)


def rotate_known(
    known: Float[Array, "d k"], alone: bool, rng: np.random.Generator
) -> Float[Array, "d k"]:
    """The known directions in a random rotation; the first key's stays where separators have to
    respect it."""
    start = 0 if alone else 1
    count = known.shape[1] - start
    if count < 2:
        return known
    turn = np.linalg.qr(rng.standard_normal((count, count)))[0]
    return np.concatenate([known[:, :start], known[:, start:] @ turn], axis=1)


class ProbePlan(NamedTuple):
    """Probes of one head at an anchor, the `first` of which are asked before the rest; `known`:
    dimension of the range of its keys so far."""

    probes: Float[Array, "d d"]
    first: int
    known: int


def plan_probes(
    progress: KnownKeys, head: int, anchor: Float[Array, " d"], rng: np.random.Generator
) -> ProbePlan:
    table, alone, ask = progress.tables[head], progress.isolation.alone, progress.problem.ask
    known = table.span_range(alone)
    count = known.shape[1]
    turned = rotate_known(known, alone, rng)
    rows = build_probe_basis(turned, progress.values.choosing[head], rng)
    rows = rows + TILT * lean(progress, head)
    rows = rows * choose_lengths(progress, head, rows, anchor)[:, None]
    if table.rank is not None and count >= table.rank:
        return ProbePlan(rows, table.rank, count)
    if table.searching:  # probes beyond the range so far tell whether it grows
        spare = 1 if ask.affords(HUGE_TOKENS) else 3
        return ProbePlan(rows, min(count + spare, ask.width), count)
    return ProbePlan(rows, ask.width, count)


def measure_keys_at(
    progress: KnownKeys, anchor: Float[Array, " d"], rng: np.random.Generator
) -> KnownKeys | Unexplained | None:
    """The progress with one more key of every head; where the separators did not hold at the
    anchor, the answer that shows it, or None where the keys show it."""
    alone = progress.isolation.alone
    moved = replace(progress, isolation=progress.isolation.move(anchor))
    plans = [plan_probes(progress, head, anchor, rng) for head in range(len(progress.tables))]
    try:
        got = probe_all(moved, [plan.probes[: plan.first] for plan in plans])
        tables, rest = [], []
        for head, (table, plan) in enumerate(zip(progress.tables, plans, strict=True)):
            done = table.rank is not None and len(table.columns) >= table.rank
            if not done and table.searching and lies_in_range(progress, head, got[head]):
                table, done = replace(table, rank=plan.known), True
            tables.append(table)
            rest.append(plan.probes[:0] if done else plan.probes[plan.first :])
        more = probe_all(moved, rest)
    except Unexplained as error:  # a separator gave way
        return error
    joined = [a.join(b) for a, b in zip(got, more, strict=True)]
    keys = []
    for table, part in zip(tables, joined, strict=True):
        full = [c.key for c in table.columns if len(c.probes) == len(c.key)]
        keys.append(solve_key(part.probes, part.log_odds, full, alone))
    if not moved.isolation.holds(np.stack(keys)):
        return None
    for head, part in enumerate(joined):
        errors = moved.estimate_change_errors(head, part.probes)
        column = KeyColumn(anchor, part.probes, part.changes, errors, keys[head])
        tables[head] = tables[head].add(column)
    return correct_leaks(replace(progress, tables=tuple(tables)), -1)


def probe_all(isolated: IsolatedHeads, plans: list[Array]) -> list[SoftProbes]:
    """Probes of several heads in one batch."""
    counts = [len(plan) for plan in plans]
    probes = np.concatenate(plans)
    if not len(probes):
        nothing = np.zeros(0)
        return [SoftProbes(probes, nothing, nothing) for _ in plans]
    heads = np.repeat(np.arange(len(plans)), counts)
    # isolated heads that saturate need an anchor closer by rather than shorter probes
    rounds = SHORTENINGS if isolated.isolation.alone else 3
    return isolated.probe(heads, probes, "keys", rounds).split(counts)


def lies_in_range(progress: KnownKeys, head: int, got: SoftProbes) -> bool:
    """Whether a key lies in the range of those before it, judged by more probes than that range has
    dimensions."""
    table, alone = progress.tables[head], progress.isolation.alone
    known = table.span_range(alone)
    if len(got.probes) <= known.shape[1]:
        return False
    seen = got.log_odds if alone else got.log_odds - got.probes @ table.first
    fit = np.linalg.lstsq(got.probes @ known, seen, rcond=None)[0]
    weights = np.abs(got.probes @ progress.values.choosing[head])
    noise = progress.estimate_change_errors(head, got.probes) / weights
    # few digits come with more probes, which tell noise from a new direction more closely
    times = 200.0 if progress.problem.ask.affords(HUGE_TOKENS) else 20.0
    allowed = 1e-7 * np.linalg.norm(seen) + times * np.linalg.norm(noise)
    return bool(np.linalg.norm(got.probes @ known @ fit - seen) <= allowed)


# --- stage 4: parameters with standard errors -----------------------------------------------------


def draw_conclusion(progress: KnownKeys, rng: np.random.Generator) -> Draft:
    """Parameters, and their root mean square deviation over bootstrap samples."""
    problem, values = progress.problem, progress.values
    scores, biases = compute_parameters(progress, values.choosing, None)

    def sample() -> tuple[Array, ...]:
        blocks = perturb_values(problem, values, rng)
        choosing = (blocks @ values.mix)[: len(values.choosing)]
        return (*compute_parameters(progress, choosing, rng), blocks)

    bootstrap_samples = 8  # repetitions of the algebra on perturbed answers
    errors = bootstrap_errors((scores, biases, values.blocks), sample, bootstrap_samples)
    score_errors, bias_errors, value_errors = errors
    ranks = key_ranks = tuple(problem.width if t.rank is None else t.rank for t in progress.tables)
    if problem.bias:
        found = map(find_ranks, scores, biases, score_errors, bias_errors, key_ranks)
        ranks, key_ranks = (tuple(part) for part in zip(*found, strict=True))
    return Draft(
        scores=scores,
        biases=biases,
        values=values.blocks,
        score_errors=score_errors,
        bias_errors=bias_errors,
        value_errors=value_errors,
        has_uniform=values.has_uniform,
        ranks=ranks,
        key_ranks=key_ranks,
        separator_norm=progress.separator_norm,
    )


def find_ranks(
    score: Float[Array, "d d"],
    bias: Float[Array, " d"],
    score_error: Float[Array, "d d"],
    bias_error: Float[Array, " d"],
    most: int,
) -> tuple[int, int]:
    """Ranks of W and of [W | c], at most that of the keys measured, and one apart if c lies outside
    the range of W. What is within its error is nothing, unless all is hardly more than that."""

    def count(matrix: Array, error: Array) -> int:
        sizes = np.linalg.svd(matrix, compute_uv=False)[:most]
        noise = 3 * float(np.linalg.norm(error))
        rank = count_above(sizes, noise)
        return rank if rank > 0 and sizes[rank - 1] > 10 * noise else most

    rank = count(score, score_error)
    joint = count(np.column_stack([score, bias]), np.column_stack([score_error, bias_error]))
    return rank, min(max(rank, joint), rank + 1)


def perturb_values(
    problem: ScalarProblem, values: HeadValues, rng: np.random.Generator
) -> Float[Array, "b d outputs"]:
    """The values, had the answers been rounded otherwise."""
    scale = float(np.linalg.norm(values.blocks, axis=1).sum(axis=0).max())
    shape, unit = values.blocks.shape, problem.ask.unit
    if not values.inverse.size:
        level = unit * scale + problem.ask.additive
        return np.asarray(values.blocks + level * rng.standard_normal(shape))
    noise = rng.standard_normal((values.inverse.shape[1], shape[2]))
    return np.asarray(values.blocks + (unit * scale * (values.inverse @ noise)).reshape(shape))


def compute_parameters(
    progress: KnownKeys, values: Float[Array, "h d"], rng: np.random.Generator | None
) -> tuple[Float[Array, "h d d"], Float[Array, "h d"]]:
    """Scores and key biases; with `rng`, from these values and answers perturbed by their
    errors, to first order around what was measured: leaks stay corrected."""
    problem, isolation = progress.problem, progress.isolation
    width, measured = problem.width, progress.values.choosing
    scores, biases = [], []
    for head, table in enumerate(progress.tables):
        keys: list[Array] = []
        full: list[Array] = []
        shared = 0.0 if rng is None else rng.standard_normal()
        for column in table.columns:
            probes = column.probes
            odds = probes @ column.key
            if rng is not None:
                weights = probes @ measured[head]
                ratio = 1 / (1 + np.exp(-odds))
                slope = weights * ratio * (1 - ratio)
                noise = column.standard_errors * (rng.standard_normal(len(probes)) + shared)
                tilt = isolation.propagate_value_errors(head, probes, ratio, values - measured)
                odds = odds + (noise + tilt) / slope
                # scores are large at the separators, and rounded there
                size = max(float(np.linalg.norm(column.anchor)), isolation.longest)
                rounding = problem.ask.unit * size * float(np.linalg.norm(column.key))
                odds = odds + rounding * rng.standard_normal(len(probes))
            keys.append(solve_key(probes, odds, full, isolation.alone))
            if len(probes) == width:
                full.append(keys[-1])
        design = np.stack([column.anchor for column in table.columns], axis=1)
        if problem.bias:
            design = np.vstack([design, np.ones(design.shape[1])])
        map_ = np.linalg.solve(design.T, np.stack(keys)).T
        scores.append(map_[:, :width])
        biases.append(map_[:, width] if problem.bias else np.zeros(width))
    return np.stack(scores), np.stack(biases)


def draft_uniform(problem: ScalarProblem) -> Draft:
    """Nobody chooses between tokens: one head with score zero holds all the value."""
    width = problem.width
    none, blocks = np.zeros((0, width, width)), problem.total[None]
    noise = problem.ask.unit * np.abs(blocks).max() + problem.ask.additive
    errors = np.full(blocks.shape, noise)
    return Draft(none, none[:, 0], blocks, none, none[:, 0], errors, True, (), (), 0.0)


# --- the hypothesis -------------------------------------------------------------------------------


def factor_score(score: Float[Array, "d d"], rank: int) -> Array | tuple[Array, Array]:
    """The score in factors where its rank is smaller than the width."""
    if rank >= len(score):
        return score
    u, s, vt = np.linalg.svd(score)
    root = np.sqrt(s[:rank])
    return u[:, :rank] * root, root[:, None] * vt[:rank]


def assemble(draft: Draft, offset: Array, ask: Asker) -> tuple[Attention, Attention]:
    """The model, and its standard errors in the same structure."""
    squeeze: Callable[[Array], Array] = (lambda a: a[:, 0]) if ask.scalar else (lambda a: a)
    values, value_errors = map(squeeze, draft.values), map(squeeze, draft.value_errors)
    scores = [factor_score(s, r) for s, r in zip(draft.scores, draft.ranks, strict=True)]
    biases: list[Array | None] = list(draft.biases)
    score_errors, bias_errors = list(draft.score_errors), list[Array | None](draft.bias_errors)
    if draft.has_uniform:
        blank = np.zeros((ask.width, ask.width))
        scores, biases = [*scores, blank], [*biases, None]
        score_errors, bias_errors = [*score_errors, blank], [*bias_errors, None]
    heads = [Head(*parts) for parts in zip(scores, biases, values, strict=True)]
    errors = [Head(*parts) for parts in zip(score_errors, bias_errors, value_errors, strict=True)]
    constant = offset[0] if ask.scalar else offset
    doubt = np.abs(constant) * ask.unit + ask.additive
    return Attention(heads, constant), Attention(errors, doubt)


def report(
    ask: Asker,
    model: Attention,
    errors: Attention,
    draft: Draft,
    bias: bool,
    heads: int | None,
) -> Hypothesis:
    """The hypothesis with its floor and what the reader should know."""
    width, outputs, found = model.width, model.outputs or 1, len(model.heads)
    value_ranks = tuple(map(find_value_rank, model.heads, errors.heads))
    unknowns = bias * outputs + sum(r * (width + outputs - r) for r in value_ranks)
    for rank, key_rank in zip(draft.ranks, draft.key_ranks, strict=True):
        unknowns += 2 * rank * width - rank * rank
        if bias:  # a key bias inside the range of the score has no more unknowns than that
            unknowns += rank if rank == key_rank else width
    notes = [*note_missing_heads(heads, found)]
    if draft.has_uniform:
        notes.append("one head attends to all tokens alike (score zero)")
    if draft.separator_norm > CLOSE_HEADS:
        notes.append(
            f"two heads attend almost alike (angle about {2 / draft.separator_norm:.1e}): their "
            "parameters are known only as well as the standard errors say"
        )
    diagnostics = MultiHeadDiagnostics(
        heads=found,
        ranks=draft.ranks,
        key_ranks=draft.key_ranks,
        value_ranks=value_ranks,
        separator_norm=draft.separator_norm,
        unit=ask.unit,
    )
    return Hypothesis(model, errors, unknowns / outputs, tuple(notes), diagnostics=diagnostics)


def find_value_rank(head: Head, error: Head) -> int:
    """Rank of a head's value map, as far as it is above its error."""
    if head.value.ndim == 1:
        return 1
    noise = 3 * float(np.linalg.norm(error.value))
    return max(1, count_above(np.linalg.svd(head.value, compute_uv=False), noise))
