"""What a budget buys where digits are few: more soft queries, and least squares over all answers.

Statement. A recovered layer, exact to a few digits, is fitted to every answer that was paid for
(fitting/layer_gauss_newton). With n times as many numbers as unknowns its error falls like
1/sqrt(n), and starts below that of the stepwise recovery, which uses each answer for one purpose.

Queries. Random soft ones around random anchors; the hypothesis tells how long tokens must be for
the largest log-odds to be about one. Only on boxes with few digits or noise, only with a budget,
and only as much of it as verification does not need.

When it fails. A fit that does not pass the hypothesis' own test is dropped: the stepwise result
stands.
"""

from dataclasses import replace

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.layer_gauss_newton import Answered, Layer, Polished, fit_layer
from keyhole.learners.base import Hypothesis
from keyhole.learners.multi_head.validation import MultiHeadDiagnostics, find_counterexample
from keyhole.linalg.low_rank_fit import Factored
from keyhole.linalg.softmax import softmax
from keyhole.measurement.asking import Asker
from keyhole.models.attention import Attention, Head


def refine_by_least_squares(ask: Asker, found: Hypothesis, rng: np.random.Generator) -> Hypothesis:
    """The hypothesis fitted to all answers, where budget and box make it worthwhile."""
    left = ask.oracle.remaining
    if not ask.recording or left is None:
        return found
    start = factor_layer(found)
    most_floors = 20.0  # extra queries put to use at most, in floors
    extra = int(min(left - 10, most_floors * found.floor))  # ten are left for verification
    if extra < 0.3 * found.floor:  # less would not pay for the fit
        return found
    for tokens in draw_soft_queries(found.model, extra, rng):
        ask(tokens, "refinement")
    data = collect_answers(ask, found.model)
    numbers = sum(part.answers.size for part in data)
    size = sum(part.tokens.size for part in data)
    # with fewer numbers least squares would not know its own errors
    largest_fit = 10**8  # numbers in the tokens of all answers: beyond, a fit takes too long
    if numbers < 1.5 * start.unknowns or size > largest_fit:
        return found
    better = replace_layer(found, fit_layer(start, data, rng))
    if ask.oracle.remaining is None or ask.oracle.remaining < 2:
        return found
    if find_counterexample(ask, better.model, better.errors, rng) is not None:
        return found
    return better


def factor_layer(found: Hypothesis) -> Layer:
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
    return Layer(tuple(scores), tuple(values), offset, bias)


def draw_soft_queries(
    model: Attention, count: int, rng: np.random.Generator
) -> list[Float[Array, "n length d"]]:
    """Queries whose largest log-odds is about `peak`, in batches of one length."""
    width, natural = model.width, model.natural_length()
    most = 2 if model.outputs is None else max(2, min(8, model.outputs // len(model.heads)))
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


def collect_answers(ask: Asker, model: Attention) -> list[Answered]:
    """All recorded answers by length, with their standard errors."""
    lengths = sorted({tokens.shape[1] for tokens, _ in ask.transcript.queries})
    data = []
    longest_sequence = 64  # tokens in a query that takes part in the fit
    for length in lengths:
        if length > longest_sequence:
            continue
        parts = [(t, a) for t, a in ask.transcript.queries if t.shape[1] == length]
        tokens = np.concatenate([t for t, _ in parts])
        answers = np.concatenate([a for _, a in parts])
        errors = estimate_answer_errors(ask, model, tokens)
        telling = errors > 0  # zero tokens without an offset have no error, and say nothing
        if telling.any():
            data.append(Answered(tokens[telling], answers[telling], errors[telling]))
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
        diagnostics=replace(found.diagnostics, misfit=fit.misfit),
    )
