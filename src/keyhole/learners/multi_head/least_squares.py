"""What a budget buys where digits are few: more soft queries, and least squares over all answers.

Statement. A layer exact to a few digits, or to a few per cent, is fitted to every answer that was
paid for (fitting/layer_gauss_newton). With n times as many numbers as unknowns its error falls like
1/sqrt(n), and starts below that of the stepwise recovery, which uses each answer for one purpose.

Where vector answers in few digits belong to heads that they do not keep apart, the stepwise
recovery of one head at a time loses most digits; a fit to soft answers, 1.6 times as many numbers
as unknowns, gets them back, and decides about the draft before another anchor is paid for
(`polish_draft`). Without a budget 1.4 floors of soft queries follow the rough start, where the fit
takes seconds: what the stepwise recovery asks twice would cost nearly as many.

Queries. Vector answers: a rough start at 1.1 times the floor (joint_heads), then random tokens,
independent of each other, at which attention is soft: as many as a head has inner dimensions, so
that an answer shows as many score differences as it has numbers. Scalar answers: the whole
recovery, then short moves around random anchors, with a budget alone. Only on boxes with few digits
or noise, and of a budget only as much as verification does not need.

Algebra. Huge tokens, which told the start where each head looks, take no part in the fit of vector
answers: they say little beside the soft ones, and their sizes slow the solution down.

When it fails. A fit that leaves more than rounding, or does not pass the hypothesis' own test, is
dropped: the stepwise recovery follows, or stands.
"""

from dataclasses import replace

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.layer_gauss_newton import (
    OPTIONS,
    PATIENT,
    THOROUGH,
    FactoredLayer,
    LayerAnswers,
    Polished,
    fit_layer,
    fit_rough_layer,
)
from keyhole.learners.base import Hypothesis, Inconclusive, Result
from keyhole.learners.multi_head.joint_heads import drop_spurious_biases, start_with_vectors
from keyhole.learners.multi_head.validation import (
    MultiHeadDiagnostics,
    PriorKnowledge,
    find_counterexample,
)
from keyhole.linalg.low_rank_fit import Factored
from keyhole.linalg.softmax import softmax
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.oracles.noise import DETECTION

MISFIT = 1.5  # of a fit, in what rounding allows, from which it explains nothing
LONGEST_QUERY = 32  # tokens of a soft query, at most
RESERVE = 10  # queries that are left for verification
MOST_FLOORS = 20.0  # extra queries put to use at most, in floors
SOFT_FLOORS = 1.4  # extra queries without a budget: with fewer the fit is off by several times more


def affords_least_squares(ask: Asker) -> bool:
    """Whether a rough start and soft queries for a fit of vector answers are within the budget, or
    without one are worth their time."""
    left = ask.oracle.remaining
    if not ask.recording or ask.additive:
        return False
    floor = 4 * ask.width + 2
    if left is None:
        seconds_long = 10**7  # numbers in the tokens of a fit that takes seconds
        return SOFT_FLOORS * floor * LONGEST_QUERY * ask.width <= seconds_long
    return left >= 1.8 * floor


def learn_by_least_squares(
    ask: Asker,
    rng: np.random.Generator,
    prior: PriorKnowledge,
    frame: Float[Array, "d d"],
    first: Float[Array, "one outputs"],
) -> Result:
    """A layer with vector answers in few digits: a rough start, and all else into soft queries;
    `first` is the answer to the first row of `frame` alone."""
    found = start_with_vectors(ask, rng, prior, frame, first)
    if isinstance(found, Inconclusive):
        return found
    left = ask.oracle.remaining
    most = SOFT_FLOORS if left is None else MOST_FLOORS
    extra = int(min(np.inf if left is None else left - RESERVE, most * found.floor))
    if extra < 0.4 * found.floor:
        return Inconclusive("the start took too much of the budget")
    (tokens,) = draw_independent_tokens(found.model, extra, ask, rng)
    seen = ask(tokens[:8], "refinement") + ask.offset
    spread = seen - tokens[:8].mean(axis=1) @ sum_values(found.model) - found.model.offset
    off = found.model(tokens[:8]) - seen
    if not np.linalg.norm(off) < 0.5 * np.linalg.norm(spread):
        return Inconclusive("a rough start does not predict soft queries")
    ask(tokens[8:], "refinement")
    data = collect_answers(ask, found.model)
    numbers = sum(part.tokens.size for part in data)
    # a step takes as long as there are numbers in the tokens, and the first two gain most
    steps = int(np.clip(1.5e8 / numbers, 2, OPTIONS.steps))
    fit = fit_rough_layer(factor_layer(found), data, rng, replace(OPTIONS, steps=steps))
    if steps == OPTIONS.steps and not fit.misfit < MISFIT:  # the steps were too few, perhaps
        fit = fit_layer(fit.layer, data, rng, THOROUGH, working=np.float64)
    if not fit.misfit < MISFIT:
        return Inconclusive(f"least squares leave {fit.misfit:.2g} of what rounding allows")
    better = replace_layer(found, fit)
    model, errors = drop_spurious_biases(better.model, better.errors)
    better = replace(better, model=model, errors=errors)
    if find_counterexample(ask, better.model, better.errors, rng) is not None:
        return Inconclusive("a fit to all answers misses a fresh one")
    return better


def sum_values(model: Attention) -> Array:
    return np.asarray(np.sum([head.value for head in model.heads], axis=0))


def refine_by_least_squares(ask: Asker, found: Hypothesis, rng: np.random.Generator) -> Hypothesis:
    """The hypothesis fitted to all answers, where budget and box make it worthwhile."""
    left = ask.oracle.remaining
    if not ask.recording or left is None:
        return found
    assert isinstance(found.diagnostics, MultiHeadDiagnostics)
    if found.diagnostics.misfit is not None:  # fitted already
        return found
    start = factor_layer(found)
    extra = int(min(left - RESERVE, MOST_FLOORS * found.floor))
    if extra < 0.3 * found.floor:  # less would not pay for the fit
        return found
    for tokens in draw_soft_queries(found.model, extra, ask, rng):
        ask(tokens, "refinement")
    data = collect_answers(ask, found.model)
    numbers = sum(part.answers.size for part in data)
    size = sum(part.tokens.size for part in data)
    # with fewer numbers least squares would not know its own errors
    largest_fit = 10**8  # numbers in the tokens of all answers: beyond, a fit takes too long
    if numbers < 1.5 * start.unknowns or size > largest_fit:
        return found
    fit = fit_layer(start, data, rng, THOROUGH, working=np.float64)
    better = replace_layer(found, fit)
    if ask.oracle.remaining is None or ask.oracle.remaining < 2:
        return found
    if find_counterexample(ask, better.model, better.errors, rng) is not None:
        return found
    return better


# -- Without a budget: a draft of few digits -----------------------------------------------------


def polish_draft(ask: Asker, found: Hypothesis, rng: np.random.Generator) -> Result:
    """A draft that was read one head at a time, fitted to soft answers. Its ranks are believed
    first; where no layer of these ranks fits, all maps may have full rank. Maps are then cut to the
    ranks that are seen, and biases that are not seen dropped, as far as the fit allows it."""
    outputs = found.model.outputs or 1
    own = factor_layer(found)
    tokens = np.zeros((0, 2, own.scores[0].left.shape[0]))
    answers = np.zeros((0, outputs))
    misfit = np.inf
    for layer in (own, give_full_ranks(found)):
        redundancy = 1.6  # numbers per unknown: a fit then knows how well it fits
        count = int(np.ceil(redundancy * layer.unknowns / outputs)) + 1 - len(tokens)
        if count > 0:
            left = ask.oracle.remaining
            if left is not None and left < count + RESERVE:
                break
            (more,) = draw_independent_tokens(found.model, count, ask, rng)
            tokens = more if not len(tokens) else np.concatenate([tokens, more])
            answers = np.concatenate([answers, ask(more, "refinement") + ask.offset])
        data = [LayerAnswers(tokens, answers, estimate_answer_errors(ask, found.model, tokens))]
        fit = fit_layer(layer, data, rng, PATIENT, working=np.float64)
        misfit = min(misfit, fit.misfit)
        if fit.misfit < MISFIT:
            better = replace_layer(found, simplify(fit, data, rng))
            if find_counterexample(ask, better.model, better.errors, rng) is None:
                return better
            return Inconclusive("a fit to soft answers misses a fresh one")
    return Inconclusive(f"least squares leave {misfit:.2g} of what rounding allows")


def give_full_ranks(found: Hypothesis) -> FactoredLayer:
    """The hypothesis in factors of full rank, with key biases and an offset."""
    model: Attention = found.model
    width, outputs = model.width, model.outputs or 1
    scores = [np.column_stack([head.score, head.key_bias]) for head in model.heads]
    values = [head.value.reshape(width, outputs) for head in model.heads]
    return FactoredLayer(
        tuple(Factored.of(np.eye(width), part, width) for part in scores),
        tuple(Factored.of(np.eye(width), part, min(width, outputs)) for part in values),
        np.array(model.offset).reshape(outputs),
    )


def simplify(fit: Polished, data: list[LayerAnswers], rng: np.random.Generator) -> Polished:
    """The fit without biases, and with maps of lower rank, where what is left out is no more than
    its error and the answers do not miss it."""
    layer, width = fit.layer, len(fit.layer.scores[0].left)
    if layer.scores[0].right.shape[1] > width:
        heads = zip(layer.scores, fit.score_errors, strict=True)
        seen = any(
            is_seen((part.left * part.singular) @ part.right[:, width], errors[:, width])
            for part, errors in heads
        )
        if not seen and not is_seen(layer.offset, fit.offset_errors):
            plain = [
                Factored.of(part.left * part.singular, part.right[:, :width], part.rank)
                for part in layer.scores
            ]
            fewer = replace(
                layer, scores=tuple(plain), offset=0.0 * layer.offset, free_offset=False
            )
            fit = fit_simpler(fit, fewer, data, rng)
    kept: set[tuple[int, int]] = set()  # maps, and ranks that the answers miss something below
    while True:
        doubtful = [
            (float(part.singular[-1]) / edge, place)
            for place, (part, errors) in enumerate(
                zip(
                    (*fit.layer.scores, *fit.layer.values),
                    (*fit.score_errors, *fit.value_errors),
                    strict=True,
                )
            )
            if part.rank > 1 and (place, part.rank) not in kept
            for edge in [estimate_edge(errors)]
            if part.singular[-1] < DETECTION * edge
        ]
        if not doubtful:
            return fit
        _, place = min(doubtful)
        shorter = fit_simpler(fit, cut_map(fit.layer, place), data, rng)
        if shorter is fit:
            kept.add((place, [*fit.layer.scores, *fit.layer.values][place].rank))
        fit = shorter


def cut_map(layer: FactoredLayer, place: int) -> FactoredLayer:
    """The layer with one map, scores before values, of a rank less by one."""
    maps = [*layer.scores, *layer.values]
    maps[place] = maps[place].cut(maps[place].rank - 1)
    heads = len(layer.scores)
    return replace(layer, scores=tuple(maps[:heads]), values=tuple(maps[heads:]))


def estimate_edge(errors: Array) -> float:
    """The largest singular value that errors of the entries explain."""
    rms = float(np.sqrt(np.mean(errors**2)))
    return max(rms * float(np.sqrt(errors.shape[0]) + np.sqrt(errors.shape[1])), TINY)


def fit_simpler(
    fit: Polished, fewer: FactoredLayer, data: list[LayerAnswers], rng: np.random.Generator
) -> Polished:
    """The layer of fewer unknowns fitted to the same answers, unless these miss what it lacks: of a
    right layer the cost grows by one unit of noise for each unknown that is gone, and by more where
    the roundings of one answer, which share its scores, act together."""
    numbers = sum(part.answers.size for part in data)
    other = fit_layer(fewer, data, rng, PATIENT, working=np.float64)
    gone = fit.layer.unknowns - other.layer.unknowns
    costs = [
        part.misfit**2 * max(1, numbers - part.layer.unknowns) / max(fit.misfit**2, TINY)
        for part in (fit, other)
    ]
    together = 4.0  # times the variance of roundings that act one by one
    allowed = together * (gone + DETECTION * np.sqrt(2.0 * gone))
    return other if costs[1] - costs[0] <= allowed else fit


def is_seen(block: Array, errors: Array) -> bool:
    """Whether a block is clearly more than its errors explain."""
    return float(np.linalg.norm(block)) > DETECTION * float(np.linalg.norm(errors))


# -- Layers and hypotheses -----------------------------------------------------------------------


def factor_layer(found: Hypothesis) -> FactoredLayer:
    """The hypothesis in factors of its own ranks."""
    model: Attention = found.model
    assert isinstance(found.diagnostics, MultiHeadDiagnostics)
    width, outputs, count = model.width, model.outputs or 1, len(model.heads)
    ranks = [*(found.diagnostics.key_ranks or ()), *([0] * count)]  # a head of score zero is last
    value_ranks = found.diagnostics.value_ranks or (min(width, outputs),) * count
    bias = bool(model.offset.any() or any(head.key_bias.any() for head in model.heads))
    scores, values = [], []
    for head, rank, value_rank in zip(model.heads, ranks[:count], value_ranks, strict=True):
        keys = np.column_stack([head.score, head.key_bias]) if bias else head.score
        scores.append(Factored.of(np.eye(width), keys, rank))
        values.append(Factored.of(np.eye(width), head.value.reshape(width, outputs), value_rank))
    offset = np.array(model.offset).reshape(outputs)
    # a token of zeros shows the offset alone: where it was answered by zero there is none
    return FactoredLayer(tuple(scores), tuple(values), offset, bool(offset.any()))


def draw_soft_queries(
    model: Attention, count: int, ask: Asker, rng: np.random.Generator
) -> list[Float[Array, "n length d"]]:
    """Soft queries for a layer that is known to a few digits, in batches of one length."""
    if model.outputs is None:
        return draw_short_moves(model, count, rng)
    return draw_independent_tokens(model, count, ask, rng)


def draw_independent_tokens(
    model: Attention, count: int, ask: Asker, rng: np.random.Generator
) -> list[Float[Array, "n length d"]]:
    """Random tokens a little shorter than those at which scores are of order one. All queries are
    of one size: a few that tell more than the others would slow the fit down."""
    length = max(2, min(LONGEST_QUERY, (model.outputs or 1) // len(model.heads)))
    length = min(length, ask.oracle.spec.domain.max_length or length)
    size = 0.8 * model.natural_length() / np.sqrt(model.width)
    return [size * rng.standard_normal((count, length, model.width))]


def draw_short_moves(
    model: Attention, count: int, rng: np.random.Generator
) -> list[Float[Array, "n length d"]]:
    """Queries whose largest log-odds is about `peak`, around random anchors."""
    width, natural, most = model.width, model.natural_length(), 2
    lengths = rng.integers(1, most + 1, count)
    batches = []
    peak = 1.5  # largest log-odds of a soft query
    for length in range(1, most + 1):
        n = int((lengths == length).sum())
        # anchors are up to twice as long or half as long as is natural to the model
        sizes = natural * 2.0 ** rng.uniform(-1, 1, n) / np.sqrt(width)
        anchor = sizes[:, None] * rng.standard_normal((n, width))
        moves = rng.standard_normal((n, length, width))
        keys = np.stack([head.keys(anchor) for head in model.heads], axis=2)
        peaks = np.abs(moves @ keys).max(axis=(1, 2))
        moves *= (peak / np.maximum(peaks, TINY))[:, None, None]
        batches.append(np.concatenate([anchor[:, None] + moves, anchor[:, None]], axis=1))
    return [batch for batch in batches if len(batch)]


def collect_answers(ask: Asker, model: Attention) -> list[LayerAnswers]:
    """All recorded answers by length, with their standard errors."""
    data = []
    longest_sequence = 64  # tokens in a query that takes part in the fit
    for tokens, answers in ask.pairs(longest_sequence):
        errors = estimate_answer_errors(ask, model, tokens)
        telling = errors > 0  # zero tokens without an offset have no error, and say nothing
        if model.outputs is not None and tokens.shape[1] > 1:
            huge = 1e3 * model.natural_length()
            telling &= np.linalg.norm(tokens, axis=2).max(axis=1) < huge
        if telling.any():
            data.append(LayerAnswers(tokens[telling], answers[telling], errors[telling]))
    return data


def estimate_answer_errors(
    ask: Asker, model: Attention, tokens: Float[Array, "n length d"]
) -> Float[Array, " n"]:
    """Rounding of values and of scores, at the size they have in each query, and noise."""
    outputs = model.outputs or 1
    norms = np.linalg.norm(tokens, axis=2)
    total = np.full(len(tokens), float(np.linalg.norm(model.offset)))
    for head in model.heads:
        value = head.value.reshape(model.width, outputs)
        scores = np.einsum("nld,nd->nl", tokens, head.keys(tokens[:, -1]))
        weights = softmax(scores)
        total += np.einsum("nl,nl->n", weights, norms) * float(np.linalg.norm(value))
        seen = tokens @ value
        apart = np.linalg.norm(seen - np.einsum("nl,nlo->no", weights, seen)[:, None], axis=2)
        total += np.abs(scores).max(axis=1) * np.einsum("nl,nl->n", weights, apart)
    return np.hypot(ask.unit * total / np.sqrt(outputs), ask.additive)


def replace_layer(found: Hypothesis, fit: Polished) -> Hypothesis:
    """The fitted layer in place of the hypothesis."""
    old: Attention = found.model
    width = old.width
    heads, errors = [], []
    for h, (keys, value) in enumerate(zip(fit.layer.scores, fit.layer.values, strict=True)):
        shape = old.heads[h].value.shape
        root = np.sqrt(keys.singular)
        right = root[:, None] * keys.right
        score: Array | tuple[Array, Array] = (keys.left * root, right[:, :width])
        if keys.rank in (0, width):
            score = (keys.left * keys.singular) @ keys.right[:, :width]
        biased = right.shape[1] > width
        bias = (keys.left * root) @ right[:, width] if biased else None
        dense = ((value.left * value.singular) @ value.right).reshape(shape)
        heads.append(Head(score, bias, dense))
        key_errors = fit.score_errors[h]
        bias_errors = key_errors[:, width] if biased else None
        errors.append(Head(key_errors[:, :width], bias_errors, fit.value_errors[h].reshape(shape)))
    misfit = f"(misfit {fit.misfit:.2g} of what rounding allows)"
    assert isinstance(found.diagnostics, MultiHeadDiagnostics)
    return replace(
        found,
        model=Attention(heads, fit.layer.offset.reshape(old.offset.shape)),
        errors=Attention(errors, fit.offset_errors.reshape(old.offset.shape)),
        notes=(*found.notes, f"fitted to all answers by least squares {misfit}"),
        diagnostics=replace(
            found.diagnostics,
            misfit=fit.misfit,
            ranks=tuple(keys.rank for keys in fit.layer.scores),
            key_ranks=tuple(keys.rank for keys in fit.layer.scores),
            value_ranks=tuple(value.rank for value in fit.layer.values),
        ),
    )
