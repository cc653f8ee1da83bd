"""A real attention layer through its vector answers, heads and head width unknown.

Statement. out = offset + sum_h softmax_i(x_i . (W_h x_N + c_h)) X M_h with M_h = V_h O_h of
rank r and [W_h | c_h] of rank r is recovered from about 4d + 2 - 2r answers of D = d numbers,
the number of unknowns per answer, and a few percent more.

Queries. (1) Huge tokens name the heads (hard_attention). (2) Each head's token moved
along r + r/8 common directions: answers span the rows of O_h. (3) Length one: offset and M =
sum M_h, along the directions that (2) has not summed already. (4) Soft queries with r tokens
around an anchor: all attention weights of all heads at once, because the O_h keep the heads
apart. At r + r/8 anchors the tokens cover all directions, which gives the ranges U_h of the
scores; at the others r tokens suffice.

Algebra. V = M O⁺. Tokens are designed so that every head sees every block well conditioned
(algebra/ procrustes). Log-ratios of weights are linear in W_h x + c_h.

When it fails. More inner dimensions than outputs (sum of r over D): then heads are opened one
at a time (learners/multi_head/scalar_outputs). Nearly dependent O_h cost digits: error bars, by
repetition of the algebra on perturbed answers.

Source. Keyhole's own; docs/learners/multi_head/learner.md.
"""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned, WrongFamily
from keyhole.learners.base import Hypothesis
from keyhole.learners.multi_head.hypothesis import Claims, fewer_than_claimed, validated
from keyhole.learners.multi_head.vector_attempt import Vector
from keyhole.learners.multi_head.vector_leaves import Overcomplete
from keyhole.measurement.asking import Asker
from keyhole.models.attention import Attention, Head

REPLICATES = 6  # repetitions of the algebra on perturbed answers for the error bars
NOTHING = 10.0  # size of a key bias, in its standard errors, that may be error alone
BARS = 1.0  # error bars, in units of the spread of the replicates


def learn_vector(
    ask: Asker,
    rng: np.random.Generator,
    claims: Claims,
    frame: Float[Array, "d d"],
    first: Float[Array, "one outputs"],
) -> Hypothesis:
    """The whole recovery; `first` is the answer to the first row of `frame` alone. Raises
    Overcomplete where the answers cannot keep the heads apart."""
    offset = ask(np.zeros((1, 1, ask.width)), "values")[0]
    size = float(np.linalg.norm(frame[0]))
    first, ask.offset = (first - offset) / size, offset
    frame = frame / size
    trouble: Exception | None = None
    for number in range(claims.attempts):
        attempt = Vector(ask, rng, frame, first, claims.heads, claims.rank, size)
        attempt.alike = ask.coarse and number == 0
        try:
            attempt.run()
            scores, biases = attempt.parameters()
            model = assembled(attempt, scores, biases, offset)
            errors = error_bars(attempt, scores, biases, offset, rng)
        except Overcomplete as error:  # ranks read off few digits are believed the second time
            if not attempt.alike:
                raise
            trouble = error
            continue
        except (IllConditioned, WrongFamily, np.linalg.LinAlgError) as error:
            trouble = trouble if isinstance(trouble, WrongFamily) else error
            continue
        model, errors = without_noise(model, errors)
        counterexample = validated(ask, model, errors, rng)
        if counterexample is None:
            return finished(attempt, model, errors, claims.heads)
        trouble = WrongFamily(
            "the hypothesis disagrees with the box on a fresh query: it is not a layer of "
            "softmax attention heads",
            counterexample,
        )
    if isinstance(trouble, WrongFamily):
        raise trouble
    raise IllConditioned(f"no anchor led to a model: {trouble}")


def assembled(attempt: Vector, scores: Array, biases: Array, offset: Array) -> Attention:
    """The model, scores of low rank in factors."""
    heads = []
    for h, rank in enumerate(attempt.score_ranks):
        score: Array | tuple[Array, Array] = scores[h]
        if rank < attempt.width:
            u, s, vt = np.linalg.svd(scores[h])
            root = np.sqrt(s[:rank])
            score = (u[:, :rank] * root, root[:, None] * vt[:rank])
        heads.append(Head(score, biases[h], attempt.ins[h] @ attempt.outs[h]))
    return Attention(heads, offset)


def error_bars(
    attempt: Vector, scores: Array, biases: Array, offset: Array, rng: np.random.Generator
) -> Attention:
    """Spread of the parameters over replicates of the algebra."""
    values = np.stack([a @ b for a, b in zip(attempt.ins, attempt.outs, strict=True)])
    best = (scores, biases, values)
    spread = [np.zeros_like(part) for part in best]
    for _ in range(REPLICATES):
        other = attempt.replica(rng)
        maps = np.stack([a @ b for a, b in zip(other.ins, other.outs, strict=True)])
        for total, a, b in zip(spread, (*other.parameters(), maps), best, strict=True):
            total += np.nan_to_num((a - b) ** 2, nan=np.inf)
    bars = [BARS * np.sqrt(part / REPLICATES) for part in spread]
    bars = [np.maximum(part, rms(part)) for part in bars]
    doubt = attempt.ask.unit * np.abs(offset) + attempt.ask.additive
    return Attention([Head(s, c, m) for s, c, m in zip(*bars, strict=True)], doubt)


def without_noise(model: Attention, errors: Attention) -> tuple[Attention, Attention]:
    """The model with key biases that may be nothing but error set to zero, and error bars that
    cover what was found: most layers without biases would otherwise be said to have some, each of
    them wrong by all of its size. (Six replicates may see a third of the spread.)"""
    heads, bars = [], []
    for head, bar in zip(model.heads, errors.heads, strict=True):
        if np.linalg.norm(head.key_bias) <= NOTHING * np.linalg.norm(bar.key_bias):
            score = head.score if head.score_factors is None else tuple(head.score_factors)
            bar = Head(bar.score, np.hypot(bar.key_bias, head.key_bias), bar.value)
            head = Head(score, None, head.value)
        heads.append(head)
        bars.append(bar)
    return Attention(heads, model.offset), Attention(bars, errors.offset)


def rms(part: Array) -> Array:
    """Root mean square over each head's block, shaped to broadcast."""
    axes = tuple(range(1, part.ndim))
    return np.asarray(np.sqrt((part**2).mean(axis=axes, keepdims=True)))


def finished(attempt: Vector, model: Attention, errors: Attention, heads: int | None) -> Hypothesis:
    """The result with its floor and what the reader should know."""
    width, outputs = attempt.width, model.outputs or 1
    unknowns = outputs
    for value_rank, score_rank in zip(attempt.ranks, attempt.score_ranks, strict=True):
        unknowns += value_rank * (width + outputs) - value_rank**2
        unknowns += score_rank * (2 * width + 1) - score_rank**2
    found = len(model.heads)
    details = {
        "heads": found,
        "value_ranks": tuple(attempt.ranks),
        "ranks": tuple(attempt.score_ranks),
        "condition": attempt.condition,
    }
    return Hypothesis(model, errors, unknowns / outputs, fewer_than_claimed(heads, found), details)
