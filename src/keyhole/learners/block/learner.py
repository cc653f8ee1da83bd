"""Transformer blocks and their sublayers, recovered exactly.

Statement.  A block is one of the forms in models/block.py. Which one it is, the heads and their
            ranks and epsilon are found, not given.
Queries.    Three single tokens tell where the norm is: behind the residual (answers stay bounded),
            in front (answer minus token stays bounded), or nowhere; two queries whether there is
            attention, four beside it whether there is a network. Then the algorithm of that form.
Algebra.    One file per form, and three ways through them. Attention alone: its equations are
            solved, then all parameters are fitted to all answers (`solve_then_fit`). norm(x +
            mlp(x)), or a whole block: a start good to a few digits is found, then the same fit
            (`find_then_fit`). x + mlp(norm(x)): so where it has ReLUs, else by the learner of the
            network on a sphere; no norm: by the learners of the parts (`delegate`). Standard
            errors: from the fit where there is one, else by the same algebra on answers perturbed
            by as much as the box rounds. Where none of these finds single neurons, as where a
            network is nearly linear, a block that predicts is offered instead (`prediction`); at
            once where the network bends so nearly alike at all tokens that they cannot find them.
Fails.      A box that is none of the forms that are solved may still be a block: it is then said
            to be ill-conditioned, not rejected. Answers that are no vectors of the box's width, and
            a promised place of the norm that is not borne out, are WrongFamily; tokens of limited
            size leave the parameters open.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned, InvalidArgument, NotIdentifiable, WrongFamily
from keyhole.fitting.bootstrap import bootstrap_errors
from keyhole.learners.base import (
    USELESS,
    Diagnostics,
    Hypothesis,
    Inconclusive,
    Refuted,
    Result,
    run_strategies,
)
from keyhole.learners.block.box import (
    ANSWER,
    NotThisBlock,
    OtherShape,
    Paid,
    SearchLimit,
    Unclear,
    open_block,
)
from keyhole.learners.block.no_norm import learn_without_norm
from keyhole.learners.block.post_norm_attention import (
    ask_post_norm_attention,
    solve_post_norm_attention,
)
from keyhole.learners.block.post_norm_block import bends as bends_behind_post_norm
from keyhole.learners.block.post_norm_block import find_post_norm_block
from keyhole.learners.block.post_norm_mlp import find_post_norm_mlp
from keyhole.learners.block.pre_norm_attention import (
    ask_pre_norm_attention,
    solve_pre_norm_attention,
)
from keyhole.learners.block.pre_norm_block import bends as bends_behind_pre_norm
from keyhole.learners.block.pre_norm_block import find_pre_norm_block
from keyhole.learners.block.pre_norm_mlp import learn_pre_norm_mlp
from keyhole.learners.block.prediction import bends_alike, predict_block
from keyhole.learners.block.refinement import (
    Pairs,
    Refined,
    misfit_of,
    refine_block,
    settle_block,
    with_attention,
)
from keyhole.learners.block.wide_network import (
    find_post_norm_network,
    find_pre_norm_network,
    find_pre_norm_relus,
)
from keyhole.measurement.asker import Asker
from keyhole.measurement.families import Family
from keyhole.models.attention import Attention, Head
from keyhole.models.base import perturb_model
from keyhole.models.block import ORDERS, Block
from keyhole.oracles.base import Oracle, Spec

# of a norm at this place
ATTENTION = {"pre": Family.PRE_NORM_ATTENTION, "post": Family.POST_NORM_ATTENTION}
NETWORK = {"pre": Family.PRE_NORM_NETWORK, "post": Family.POST_NORM_NETWORK}
WHOLE = {"pre": Family.PRE_NORM_BLOCK, "post": Family.POST_NORM_BLOCK}
BIASES = ("bias", "offset")  # ends of the names of what may be zero
SETTLED = (
    1e-6  # share of the answers' spread that algebra may leave: more is worth a floor of queries
)
SEARCH_FLOORS = 60.0  # of a usual block: queries after which the search for a start ends
LENGTHS = (2, 3, 4, 6, 8, 10, 12)  # of random queries
UNEXPLAINED = 1e5  # units of what its errors explain, from which an answer is not explained


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockDiagnostics(Diagnostics):
    """What was found."""

    norm: str
    kind: str
    heads: int
    score_ranks: tuple[int, ...]
    value_ranks: tuple[int, ...]
    misfit: float  # what is left of the answers, in units of what errors and rounding explain


@dataclass(frozen=True)
class BlockLearner:
    """Learner for a Transformer block, or one sublayer of it, read at the last position.

    Args:
        norm: "pre", "post" or "none": a promise, not needed: where the norm is, is found.

    Example:
        >>> import numpy as np, keyhole
        >>> from keyhole.models.random import block
        >>> secret = block(np.random.default_rng(0), 8, heads=2)
        >>> found = keyhole.recover(secret, BlockLearner())
        >>> found.outcome, found.model, keyhole.distance(found.model, secret) < 1e-9
        (Outcome.RECOVERED, Block(width=8, 2 heads, post-norm (layer)), True)
    """

    norm: str | None = None

    def __post_init__(self) -> None:
        if self.norm is not None and self.norm not in ORDERS:
            raise InvalidArgument(
                f"norm must be None or one of {', '.join(ORDERS)}, got {self.norm!r}"
            )

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        if not oracle.spec.domain.unbounded:
            raise NotIdentifiable(
                "a block is recovered with tokens of any size; this box limits its tokens"
            )
        box = open_block(oracle)
        try:
            place = find_norm_place(box, rng)
        except NotThisBlock as refused:
            refuted = Refuted(str(refused), stated=isinstance(refused, OtherShape))
            return run_strategies([("a block", lambda: refuted)])
        if self.norm is not None and self.norm != place:
            wrong = f"the box looks like a {place}-norm block, not {self.norm}-norm as promised"
            return run_strategies([("the promise", lambda: Refuted(wrong, stated=True))])
        attention, network = recognise_parts(box, place, rng)
        if place == "none":
            return run_strategies(
                [
                    (
                        "a sublayer without norm",
                        lambda: delegate(lambda: learn_without_norm(box, attention, rng)),
                    )
                ]
            )
        if not network:
            oracle.expect(count_block_queries(ATTENTION[place], box.width))
        return run_strategies(list_strategies(place, attention, network, box, rng))

    def expected_queries(self, spec: Spec) -> int | None:
        return None  # whether there is a network is found first; then `learn` tells


def list_strategies(
    place: str, attention: bool, network: bool, box: Asker, rng: np.random.Generator
) -> list[tuple[str, Callable[[], Result]]]:
    """The ways for a norm at this place, with these parts, and their names."""
    # heads that share out the width, and four neurons for each number of a token
    expected = 12 * box.width
    limited = replace(box, oracle=SearchLimit(box.oracle, int(SEARCH_FLOORS * expected)))

    def fit(find: Callable[[Asker, np.random.Generator], Any], draws: int) -> Callable[[], Result]:
        return lambda: find_then_fit(lambda: find(limited, rng), box, rng, draws)

    def solve(form: AttentionForm) -> Callable[[], Result]:
        return lambda: solve_then_fit(form, box, rng)

    ways: dict[tuple[str, bool, bool], list[tuple[str, Callable[[], Result]]]] = {
        ("post", True, True): [("a whole post-norm block", fit(find_post_norm_block, 2))],
        ("post", True, False): [("post-norm attention", solve(POST_ATTENTION))],
        ("post", False, True): [
            ("a network and a norm", fit(find_post_norm_mlp, 3)),
            ("a wide network and a norm", fit(find_post_norm_network, 2)),
        ],
        ("pre", True, True): [("a whole pre-norm block", fit(find_pre_norm_block, 3))],
        ("pre", True, False): [("pre-norm attention", solve(PRE_ATTENTION))],
        ("pre", False, True): [
            ("ReLUs behind a norm", fit(find_pre_norm_relus, 1)),
            ("a network behind a norm", lambda: delegate(lambda: learn_pre_norm_mlp(box, rng))),
            ("a wide network behind a norm", fit(find_pre_norm_network, 2)),
        ],
    }

    def is_alike() -> bool:
        return bends_alike(box, place, rng.spawn(1)[0])

    def predict(alike: bool) -> tuple[str, Callable[[], Result]]:
        return "a block that predicts", lambda: predict_block(
            box, place, attention, alike or (not network and is_alike()), rng
        )

    others = ways[place, attention, network]
    return [predict(True), *others] if network and is_alike() else [*others, predict(False)]


# --- what the box is ------------------------------------------------------------------------------


def find_norm_place(box: Asker, rng: np.random.Generator) -> str:
    """Where the norm is, "pre", "post" or "none", from single tokens of very different size. The
    largest is asked with both signs: on one side of zero all neurons of a small network may be
    off."""
    direction = rng.standard_normal(box.width)
    direction /= np.linalg.norm(direction)
    near, large = 1e3, 1e6
    tokens = np.array([near, large, -large])[:, None] * direction
    answers = box(tokens[:, None], "order of norms")
    far = np.linalg.norm(answers, axis=1)
    if far[1:].max() < far[0] * large**0.25 + 1.0:
        return "post"
    beside = np.linalg.norm(answers - box.representable(tokens), axis=1)
    # in single precision the token itself hides all but its leading digits
    if beside[1:].max() < beside[0] * large**0.25 + 1.0 + 1e2 * box.error * large:
        return "pre"
    return "none"


def sees_context(box: Asker, rng: np.random.Generator) -> bool:
    """Whether tokens before the last change the answer."""
    longest = box.oracle.spec.domain.max_length or 3
    tokens = box.representable(rng.standard_normal((3, box.width)))[-longest:]
    alone, among = box(tokens[None, -1:], "context"), box(tokens[None], "context")
    return bool(np.linalg.norm(among - alone) > 1e4 * box.error * np.linalg.norm(alone))


def recognise_parts(box: Asker, place: str, rng: np.random.Generator) -> tuple[bool, bool]:
    """Whether there is attention, and whether there is a network: without a norm, only the first is
    asked for; without attention, there is one."""
    attention = sees_context(box, rng)
    if place == "none" or not attention:
        return attention, not attention
    bends = bends_behind_post_norm if place == "post" else bends_behind_pre_norm
    return True, bends(box, rng)


def name_block(oracle: Oracle, rng: np.random.Generator) -> Family | None:
    """What a box with a norm looks like from a few single tokens; None where it has none."""
    box = open_block(oracle)
    try:
        place = find_norm_place(box, rng)
        if place == "none":
            return None
        attention, network = recognise_parts(box, place, rng)
    except NotThisBlock:
        return None
    if not attention:
        return NETWORK[place]
    return WHOLE[place] if network else ATTENTION[place]


def count_block_queries(family: Family | None, width: int) -> int | None:
    """Queries that a box of this family (`name_block`) takes, as measured (benchmarks/forecast.py);
    None where they depend on neurons."""
    beyond = {Family.POST_NORM_ATTENTION: 60, Family.PRE_NORM_ATTENTION: 75}
    return 5 * width + beyond[family] if family in beyond else None


def delegate(learn: Callable[[], Hypothesis]) -> Result:
    """A sublayer that the learner of its part recovers: what that refuses may still be a block."""
    try:
        return learn()
    except (Unclear, WrongFamily, IllConditioned, NotIdentifiable, np.linalg.LinAlgError) as failed:
        return Inconclusive(str(failed))


def find_then_fit(
    find: Callable[[], tuple[list[Block], Pairs]],
    box: Asker,
    rng: np.random.Generator,
    draws: int = 3,
) -> Result:
    """Algebra to a few digits, then all parameters on all answers together; this many sets of
    queries are drawn before a block is given up."""
    reason = ""
    for _ in range(draws):
        try:
            starts, pairs = find()
            starts.sort(key=lambda start: misfit_of(start, pairs))
            if starts[0].attention is not None:
                pairs = [*pairs, *ask_random(box, starts[0], rng, floors=2.0)]
            refined = refine_best(starts, pairs, box.error, rng)
        except (NotThisBlock, Unclear, np.linalg.LinAlgError, ArithmeticError) as failed:
            reason = str(failed)
            continue
        model, errors = refined.block, refined.errors
        fresh = box.representable(fresh_sequences(box.width, rng))
        misfit = compare(model, errors, [(fresh, box(fresh, "refinement"))], box, rng)
        if misfit < UNEXPLAINED:  # what the fit hardly saw may be off by more than it tells
            errors = scale_errors(errors, max(misfit, 1.0))
            return describe(*set_zeros(model, errors), refined.level, box)
        reason = f"fresh answers are {misfit:.1e} times what errors explain from the best block"
    return Inconclusive(reason)


def refine_best(
    starts: Iterable[Block], pairs: Pairs, unit: float, rng: np.random.Generator
) -> Refined:
    """The refined block of the first start, likeliest first, that leaves no more of the answers
    than their rounding; without one, that which leaves the least."""
    found, reason = [], "nothing to start from"
    for start in starts:
        try:
            found.append(refine_start(start, pairs, unit, rng))
        except NotThisBlock as failed:
            reason = str(failed)
            continue
        if found[-1].level <= 1.0:
            return found[-1]
    if not found:
        raise NotThisBlock(reason)
    return min(found, key=lambda one: one.level)


def refine_start(start: Block, pairs: Pairs, unit: float, rng: np.random.Generator) -> Refined:
    """The refined block. The start may hold more neurons than there are: some that hardly bend are
    left out where the fit fails, and those that the answers show no part of, after it."""
    try:
        refined = refine_block(start, pairs, unit, rng)
    except NotThisBlock:
        fewer = drop_neurons(start, find_straight_neurons(start))
        if fewer is None:
            raise
        refined = refine_block(fewer, pairs, unit, rng)
    fewer = drop_neurons(refined.block, find_idle_neurons(refined))
    return refined if fewer is None else refine_block(fewer, pairs, unit, rng)


def find_straight_neurons(model: Block, straight: float = 0.02) -> Array:
    """Neurons whose second derivatives are this small, relative to those of most."""
    parts = model.to_arrays()
    rows, columns = (
        np.linalg.norm(parts["mlp.inner"], axis=1),
        np.linalg.norm(parts["mlp.outer"], axis=0),
    )
    curvatures = rows**2 * columns
    return np.asarray(curvatures < straight * np.median(curvatures))


def find_idle_neurons(refined: Refined, zero: float = 12.0) -> Array:
    """Neurons whose weights in the answers are zero within so many standard errors."""
    parts, doubts = refined.block.to_arrays(), refined.errors.to_arrays()
    outer, doubt = (np.linalg.norm(each["mlp.outer"], axis=0) for each in (parts, doubts))
    return np.asarray(outer <= zero * doubt)


def drop_neurons(model: Block, which: Array) -> Block | None:
    """The block without these neurons; None where that changes nothing or leaves none."""
    if not which.any() or which.all():
        return None
    parts = model.to_arrays()
    for name in parts:
        if name.startswith(("mlp.inner", "mlp.gate")):
            parts[name] = parts[name][~which]
    parts["mlp.outer"] = parts["mlp.outer"][:, ~which]
    return Block.from_arrays(parts)


def fresh_sequences(width: int, rng: np.random.Generator) -> Float[Array, "n length d"]:
    """Queries that no fit has seen, of several sizes."""
    sizes = np.repeat([1.0, 4.0, 16.0], 4)[:, None, None]
    return np.asarray(sizes * rng.standard_normal((12, 3, width)))


@dataclass(frozen=True)
class AttentionForm:
    """A sublayer of attention: how it is asked, and how it is solved for from answers alone."""

    ask: Callable[[Asker, np.random.Generator], Any]
    solve: Callable[[Any, float], Block]


POST_ATTENTION = AttentionForm(ask_post_norm_attention, solve_post_norm_attention)
PRE_ATTENTION = AttentionForm(ask_pre_norm_attention, solve_pre_norm_attention)


def solve_then_fit(
    form: AttentionForm, box: Asker, rng: np.random.Generator, draws: int = 2
) -> Result:
    """The block of this form that explains the answers. Where the algebra came to few digits and no
    fit to the rest, as after a misreading, everything is asked anew; so many draws."""
    result: Result = Inconclusive("nothing was asked")
    for _ in range(draws):
        result, final = solve_once(form, box, rng)
        if final:
            break
    return result


def solve_once(
    form: AttentionForm, box: Asker, rng: np.random.Generator, longest: int = 64, widest: int = 96
) -> tuple[Result, bool]:
    """By algebra, then all parameters on all answers to queries of up to `longest` tokens together,
    up to the width `widest`. Also whether another draw would come to the same."""
    paid = Paid(box.oracle, longest)
    try:
        data = form.ask(replace(box, oracle=paid), rng)
        model = form.solve(data, box.error)
    except (NotThisBlock, Unclear, np.linalg.LinAlgError) as failed:
        return Inconclusive(str(failed)), True  # it looks for better draws itself
    errors, final = None, True
    if box.width <= widest:
        pairs, random = paid.pairs(), list[tuple[Array, Array]]()
        if misfit_of(model, pairs) > SETTLED**2 * spread_of(pairs):
            random = ask_random(box, model, rng)
            final = False
        try:
            refined = refine_attention(model, pairs, random, box.error, rng)
        except (NotThisBlock, ArithmeticError, np.linalg.LinAlgError):
            pass  # what the algebra found may be right, all the same
        else:
            model, errors, final = refined.block, refined.errors, True
    if errors is None:
        errors = bootstrap_block(form, data, model, box, rng)
    if errors is None:
        return Inconclusive("rounding of the answers is enough to change what is found"), final
    misfit = compare(model, errors, data.pairs(), box, rng)
    if misfit > UNEXPLAINED:
        return Inconclusive("no block of this form explains the answers"), final
    if misfit > 1.0:
        errors = scale_errors(errors, misfit)
    return describe(*set_zeros(model, errors), misfit, box), final


def refine_attention(
    model: Block, asked: Pairs, random: Pairs, unit: float, rng: np.random.Generator
) -> Refined:
    """The refined sublayer, from queries that were asked for the algebra, and random ones. Where
    the fit fails, scores were read badly, a rank too small among them: then random queries tell
    them first."""
    try:
        return refine_block(model, [*asked, *random], unit, rng)
    except NotThisBlock:
        if not random:
            raise
    model = settle_block(widen_scores(model, rng), random, "left|read", steps=12)
    return refine_block(settle_block(model, random, steps=12), [*asked, *random], unit, rng)


def widen_scores(model: Block, rng: np.random.Generator) -> Block:
    """The same sublayer, its scores in factors of one rank, the largest of any head."""
    assert model.attention is not None
    heads, most = [], max(head.rank_bound for head in model.attention.heads)
    for head in model.attention.heads:
        left, right = head.score_factors or (head.score, np.eye(model.width))
        more = most - right.shape[0]
        rows = rng.standard_normal((more, model.width)) * np.sqrt(np.mean(right**2))
        factors = np.pad(left, ((0, 0), (0, more))), np.concatenate([right, rows])
        heads.append(Head(factors, head.key_bias, head.value))
    return with_attention(model, Attention(heads, model.attention.offset))


def spread_of(pairs: Pairs) -> float:
    """Mean square of the answers around their means."""
    return float(np.mean([np.mean((seen - seen.mean(axis=0)) ** 2) for _, seen in pairs]))


def ask_random(
    box: Asker, model: Block, rng: np.random.Generator, floors: float = 1.0
) -> list[tuple[Array, Array]]:
    """As many queries as the model has unknowns per number in an answer, of independent tokens at
    which scores are of order one, of several lengths: what was asked for the algebra is
    ill-conditioned for a fit."""
    longest = min(box.oracle.spec.domain.max_length or LENGTHS[-1], LENGTHS[-1])
    lengths = [length for length in LENGTHS if length <= longest]
    count = int(floors * unknowns(model) / numbers(model) / len(lengths)) + 1
    size = model.natural_length() / np.sqrt(model.width)
    found = []
    for length in lengths:
        shares = rng.choice([0.5, 1.0, 1.5], count)[:, None, None]
        tokens = size * shares * rng.standard_normal((count, length, model.width))
        tokens = box.representable(tokens)
        found.append((tokens, box(tokens, "refinement")))
    return found


def bootstrap_block(
    form: AttentionForm, data: Any, model: Block, box: Asker, rng: np.random.Generator
) -> Block | None:
    """Standard errors of every parameter, scores multiplied out; None where the algebra fails on
    perturbed answers."""
    template = multiply_out(model)
    names = [name for name, part in template.to_arrays().items() if part.size]

    def repeat() -> Sequence[Array]:
        other = multiply_out(form.solve(perturb_answers(data, box.error, rng), box.error))
        return [other.to_arrays()[name][None] for name in names]

    best = template.to_arrays()
    count = 5 if model.width <= 128 else 2  # repetitions of the algebra
    try:
        found = bootstrap_errors([best[name][None] for name in names], repeat, count)
    except (NotThisBlock, Unclear, ValueError, KeyError, np.linalg.LinAlgError):
        return None
    errors = {name: part[0] for name, part in zip(names, found, strict=True)}
    if not all(np.isfinite(part).all() for part in errors.values()):
        return None
    return Block.from_arrays({**best, **errors})


def multiply_out(block: Block) -> Block:
    """The block with scores as matrices: their factors are not unique."""
    if block.attention is None:
        return block
    heads = [Head(head.score, head.key_bias, head.value) for head in block.attention.heads]
    return with_attention(block, Attention(heads, block.attention.offset))


def perturb_answers(data: Any, unit: float, rng: np.random.Generator) -> Any:
    """The same record of a run with all answers off by their rounding."""
    if isinstance(data, tuple):
        return tuple(perturb_answers(part, unit, rng) for part in data)
    if not is_dataclass(data) or isinstance(data, type):
        return data
    changed = {}
    for part in fields(data):
        value = getattr(data, part.name)
        if is_dataclass(value) or isinstance(value, tuple):
            changed[part.name] = perturb_answers(value, unit, rng)
        elif part.metadata == ANSWER:
            largest = np.abs(value).max(axis=-1, keepdims=True)
            changed[part.name] = value + 4.0 * unit * largest * rng.standard_normal(value.shape)
    return replace(data, **changed)


def scale_errors(errors: Block, factor: float) -> Block:
    return Block.from_arrays({name: factor * part for name, part in errors.to_arrays().items()})


def compare(
    model: Block,
    errors: Block,
    pairs: Iterable[tuple[Array, Array]],
    box: Asker,
    rng: np.random.Generator,
) -> float:
    """Largest deviation from an answer in units of what standard errors and rounding explain."""
    worst = 0.0
    for tokens, answers in pairs:
        predicted = model(tokens)
        spread = np.zeros_like(predicted)
        copies = perturb_model(model, errors, box.error, rng)
        for _ in range(6):
            near = tokens * (1.0 + box.error * rng.standard_normal(tokens.shape))
            spread = np.maximum(spread, np.abs(next(copies)(near) - predicted))
        largest = np.abs(answers).max(axis=1)
        allowed = 2.0 * np.linalg.norm(spread, axis=1) + 16.0 * box.error * largest
        worst = max(worst, float(np.max(np.linalg.norm(predicted - answers, axis=1) / allowed)))
    return worst


def set_zeros(model: Block, errors: Block, zero: float = 12.0) -> tuple[Block, Block]:
    """Biases that are zero within small standard errors become zero: many layers have none; and so
    does an epsilon that is too small to be seen.
    `zero`: standard errors within which such a block of parameters counts as zero."""
    parts, doubts = model.to_arrays(), errors.to_arrays()
    for name in list(parts):
        if not name.endswith(BIASES) or not np.linalg.norm(doubts[name]) < 1e-4:
            continue
        if np.linalg.norm(parts[name]) <= zero * np.linalg.norm(doubts[name]):
            parts[name], doubts[name] = np.zeros_like(parts[name]), np.zeros_like(doubts[name])
    if "epsilons" in parts:  # one that no answer shows is none
        unseen = USELESS * parts["epsilons"] < doubts["epsilons"]
        for each in (parts, doubts):
            each["epsilons"] = np.where(unseen, 0.0, each["epsilons"])
    return Block.from_arrays(parts), Block.from_arrays(doubts)


def describe(model: Block, errors: Block, misfit: float, box: Asker) -> Hypothesis:
    """The hypothesis with what a reader wants to know."""
    attention = model.attention
    heads = () if attention is None else attention.heads
    diagnostics = BlockDiagnostics(
        norm=model.norm,
        kind=model.kind,
        heads=len(heads),
        score_ranks=tuple(head.rank_bound for head in heads),
        value_ranks=tuple(int(np.linalg.matrix_rank(head.value, tol=None)) for head in heads),
        misfit=misfit,
    )
    notes = [f"The box is {model}."]
    if model.kind == "layer" and model.norm == "post":
        notes.append(
            "The mean of what is added to the residual is invisible behind a LayerNorm: it is zero "
            "here."
        )
    if not all(norm.epsilon for norm in model.norms):
        notes.append("An epsilon is too small to be seen in these answers: it is zero here.")
    return Hypothesis(
        model,
        errors,
        unknowns(model) / numbers(model),
        tuple(notes),
        noise=box.noise,
        diagnostics=diagnostics,
    )


def unknowns(model: Block) -> float:
    """Parameters of a generic block of these ranks, symmetries taken off."""
    width, total = model.width, 0.0
    kept = model.norms[0].plane.shape[1] if model.norms else width
    inside, outside = (width, kept) if model.norm == "post" else (kept, width)
    if model.attention is not None:
        for head in model.attention.heads:
            r = head.rank_bound
            v = min(int(np.linalg.matrix_rank(head.value)), inside, outside)
            total += 2 * r * inside - r * r + r + v * (inside + outside) - v * v
        total += outside if model.mlp is None else kept
    if model.mlp is not None:
        seen = kept if model.norm == "pre" or model.attention is not None else width
        total += model.mlp.neurons * (seen + 1 + outside) + outside
    if model.norm == "post":
        total += 2 * width
    return total + len(model.norms)


def numbers(model: Block) -> int:
    """Numbers in an answer that are independent."""
    return model.norms[-1].plane.shape[1] if model.norm == "post" else model.width
