"""What a budget buys on a coarse box: more soft queries, and least squares over all answers.

Statement. A recovered layer, exact to a few digits, is fitted to every answer that was paid for
(layer_gauss_newton). With n times as many numbers as unknowns its error falls like 1/sqrt(n), and
starts below that of the stepwise recovery, which uses each answer for one purpose.

Queries. Random soft ones around random anchors; the hypothesis tells how long tokens must be for
the largest log-odds to be about one. Only on boxes with few digits or noise, only with a budget,
and only as much of it as verification does not need.

When it fails. A fit that does not pass the hypothesis' own test is dropped: the stepwise result
stands.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.layer_gauss_newton import Answered, Layer, Polished, fit_layer
from keyhole.learners.base import Hypothesis
from keyhole.learners.multi_head.hypothesis import validated
from keyhole.linalg.low_rank_fit import Factored
from keyhole.measurement.asking import Asker
from keyhole.models.attention import Attention, Head

RESERVE = 10  # queries left for validation and verification
MOST = 20.0  # floors' worth of extra queries that are put to use at most
LEAST = 0.3  # and at least: less would not pay for the fit
REDUNDANT = 1.5  # numbers over unknowns from which least squares knows its own errors
PEAK = 1.5  # largest log-odds of a soft query
TOKENS = 8  # in a soft query with vector answers, at most
SPREAD = 2.0  # anchors are up to so many times longer or shorter than the natural length
LONGEST = 64  # tokens in a query that takes part in the fit
LARGEST = 10**8  # numbers in the tokens of all answers: beyond, a fit takes too long


def polished(ask: Asker, learned: Hypothesis, rng: np.random.Generator) -> Hypothesis:
    """The hypothesis fitted to all answers, where budget and box make it worthwhile."""
    left = ask.oracle.remaining
    if not ask.recording or left is None:
        return learned
    start = layer_of(learned)
    extra = int(min(left - RESERVE, MOST * learned.floor))
    if extra < LEAST * learned.floor:
        return learned
    for tokens in soft_queries(learned.model, extra, rng):
        ask(tokens, "polish")
    data = answered(ask, learned.model)
    numbers = sum(part.answers.size for part in data)
    size = sum(part.tokens.size for part in data)
    if numbers < REDUNDANT * start.unknowns or size > LARGEST:
        return learned
    fit = fit_layer(start, data, rng)
    better = assembled(learned, fit)
    if ask.oracle.remaining is None or ask.oracle.remaining < 2:
        return learned
    if validated(ask, better.model, better.errors, rng) is not None:
        return learned
    return better


def layer_of(learned: Hypothesis) -> Layer:
    """The hypothesis in factors of its own ranks."""
    model: Attention = learned.model
    width, outputs = model.width, model.outputs or 1
    count = len(model.heads)
    ranks = [*learned.details["ranks"], *([0] * count)][:count]  # a head with score zero comes last
    value_ranks = learned.details.get("value_ranks", (min(width, outputs),) * count)
    bias = bool(model.offset.any() or any(head.key_bias.any() for head in model.heads))
    scores, values = [], []
    for head, rank, value_rank in zip(model.heads, ranks, value_ranks, strict=True):
        keys = np.column_stack([head.score, head.key_bias]) if bias else head.score
        scores.append(Factored.of(np.eye(width), keys, rank))
        values.append(Factored.of(np.eye(width), head.value.reshape(width, outputs), value_rank))
    offset = np.array(model.offset).reshape(outputs)
    return Layer(tuple(scores), tuple(values), offset, bias)


def soft_queries(
    model: Attention, count: int, rng: np.random.Generator
) -> list[Float[Array, "n length d"]]:
    """Queries whose largest log-odds is about PEAK, in batches of one length."""
    width, natural = model.width, model.natural_length()
    most = 2 if model.outputs is None else max(2, min(TOKENS, model.outputs // len(model.heads)))
    lengths = rng.integers(1, most + 1, count)
    batches = []
    for length in range(1, most + 1):
        n = int((lengths == length).sum())
        sizes = natural * SPREAD ** rng.uniform(-1, 1, n) / np.sqrt(width)
        anchor = sizes[:, None] * rng.standard_normal((n, width))
        moves = rng.standard_normal((n, length, width))
        keys = np.stack([head.keys(anchor) for head in model.heads], axis=2)
        peaks = np.abs(moves @ keys).max(axis=(1, 2))
        moves *= (PEAK / np.maximum(peaks, TINY))[:, None, None]
        batches.append(np.concatenate([anchor[:, None] + moves, anchor[:, None]], axis=1))
    return [batch for batch in batches if len(batch)]


def answered(ask: Asker, model: Attention) -> list[Answered]:
    """All recorded answers by length, with their standard errors."""
    lengths = sorted({tokens.shape[1] for tokens, _ in ask.recorded})
    data = []
    for length in lengths:
        if length > LONGEST:
            continue
        parts = [(t, a) for t, a in ask.recorded if t.shape[1] == length]
        tokens = np.concatenate([t for t, _ in parts])
        answers = np.concatenate([a for _, a in parts])
        errors = standard_errors(ask, model, tokens)
        telling = errors > 0  # zero tokens without an offset have no error, and say nothing
        if telling.any():
            data.append(Answered(tokens[telling], answers[telling], errors[telling]))
    return data


def standard_errors(
    ask: Asker, model: Attention, tokens: Float[Array, "n length d"]
) -> Float[Array, " n"]:
    """Rounding of values and of scores, at the size they have in each query, and noise."""
    outputs = model.outputs or 1
    norms = np.linalg.norm(tokens, axis=2)
    total = np.full(len(tokens), float(np.linalg.norm(model.offset)))
    for head in model.heads:
        value = head.value.reshape(model.width, outputs)
        scores = np.einsum("nld,nd->nl", tokens, head.keys(tokens[:, -1]))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        total += np.einsum("nl,nl->n", weights, norms) * float(np.linalg.norm(value))
        seen = tokens @ value
        apart = np.linalg.norm(seen - np.einsum("nl,nlo->no", weights, seen)[:, None], axis=2)
        total += np.abs(scores).max(axis=1) * np.einsum("nl,nl->n", weights, apart)
    return np.hypot(ask.unit * total / np.sqrt(outputs), ask.additive)


def assembled(learned: Hypothesis, fit: Polished) -> Hypothesis:
    """The fitted layer in place of the hypothesis."""
    old: Attention = learned.model
    width = old.width
    bars = Bars(old, fit)
    heads, errors = [], []
    for h, (keys, value) in enumerate(zip(fit.layer.scores, fit.layer.values, strict=True)):
        root = np.sqrt(keys.singular)
        right = root[:, None] * keys.right
        score: Array | tuple[Array, Array] = (keys.left * root, right[:, :width])
        if keys.rank in (0, width):
            score = (keys.left * keys.singular) @ keys.right[:, :width]
        bias = (keys.left * root) @ right[:, width] if right.shape[1] > width else None
        dense = ((value.left * value.singular) @ value.right).reshape(old.heads[h].value.shape)
        heads.append(Head(score, bias, dense))
        errors.append(bars.head(h))
    offset = fit.layer.offset.reshape(old.offset.shape)
    model = Attention(heads, offset)
    notes = (
        *learned.notes,
        f"fitted to all answers by least squares (misfit {fit.misfit:.2g} of what rounding allows)",
    )
    details = {**learned.details, "misfit": fit.misfit}
    spread = Attention(errors, fit.offset_errors.reshape(old.offset.shape))
    return replace(learned, model=model, errors=spread, notes=notes, details=details)


@dataclass(frozen=True, eq=False)
class Bars:
    """Standard errors of a fit in the structure of heads."""

    old: Attention
    fit: Polished

    def head(self, h: int) -> Head:
        width = self.old.width
        keys = self.fit.score_errors[h]
        bias = keys[:, width] if keys.shape[1] > width else None
        value = self.fit.value_errors[h].reshape(self.old.heads[h].value.shape)
        return Head(keys[:, :width], bias, value)
