"""From answers to maps: which head is which, what each of them adds, and what it looks at.

Statement.  In the coordinates e of tokens, the answer to anchor t with tokens s_j is
            e_t + sum_h A_h sum_j a_hj (e_sj - e_t), a_h = softmax_j(e_t W_h e_sj + log count_j).
Queries.    One anchor with d + 1 other tokens, each in H + 1 proportions; a prompt with two or
            three of these tokens for each of them; then random anchors with d / H tokens each, as
            many as W_h has unknowns per number of an answer, and a seventh more.
Algebra.    Pairs of tokens give the heads in an unknown order each (`multiplicities`). Of all
            orders, the one is right that predicts the mixed prompt. Then A_h (e_s - e_t) = R_h is
            linear in A_h. With A_h known, weights are linear in an answer; their logarithms are
            linear in W_h, weighted by their errors.
When it fails. Weights below the noise tell nothing about scores: they weigh nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.learners.token_attention.contexts import Contexts
from keyhole.learners.token_attention.multiplicities import ProportionPair


@dataclass(frozen=True, eq=False)
class Maps:
    """Values A_h and scores W_h of all heads, on coordinates of tokens."""

    values: Float[Array, "H d d"]
    scores: Float[Array, "H d d"]

    @property
    def heads(self) -> int:
        return len(self.values)


def predict_mixture(pairs: Sequence[ProportionPair], counts: Sequence[int], anchors: int) -> Array:
    """Answer (less that of the anchor alone) to several tokens of pairs with one anchor."""
    weights = np.array(
        [np.log(count) + pair.odds for pair, count in zip(pairs, counts, strict=True)]
    )
    weights = np.vstack([np.full(weights.shape[1], np.log(anchors)), weights])
    weights = np.exp(weights - weights.max(axis=0))
    weights /= weights.sum(axis=0)
    moves = np.array([pair.moves for pair in pairs])
    return np.einsum("ph,phd->d", weights[1:], moves)


def order_heads(pair: ProportionPair, order: Sequence[int]) -> ProportionPair:
    """The pair with its heads in another order."""
    chosen = list(order)
    return ProportionPair(
        pair.odds[chosen],
        pair.moves[chosen],
        pair.odds_errors[chosen],
        pair.move_errors[chosen],
        pair.residual,
    )


def match_heads(
    reference: ProportionPair, others: Sequence[ProportionPair], answer: Float[Array, " d"]
) -> list[ProportionPair]:
    """The others with their heads in the order of the reference: the one that predicts the answer
    to a prompt with each of the tokens once."""
    orders = list(permutations(range(len(reference.odds))))
    best, found = np.inf, list(others)
    for choice in product(orders, repeat=len(others)):
        ordered = [order_heads(pair, order) for pair, order in zip(others, choice, strict=True)]
        predicted = predict_mixture([reference, *ordered], [1] * (1 + len(ordered)), 1)
        gap = float(np.linalg.norm(predicted - answer))
        if gap < best:
            best, found = gap, ordered
    return found


def solve_values(
    steps: Float[Array, "p d"], pairs: Sequence[ProportionPair]
) -> Float[Array, "H d d"]:
    """A_h from A_h step = move over all pairs, weighted by the errors of the moves."""
    found = []
    for head in range(len(pairs[0].odds)):
        moves = np.array([pair.moves[head] for pair in pairs])
        errors = np.array([pair.move_errors[head] for pair in pairs])
        weights = 1.0 / np.maximum(errors, TINY)
        weights = np.minimum(weights, 1e6 * np.median(weights))[:, None]
        found.append(np.linalg.lstsq(weights * steps, weights * moves, rcond=None)[0].T)
    return np.array(found)


def choose_contexts(
    values: Float[Array, "H d d"],
    tokens: Float[Array, "V d"],
    known: Int[Array, " k"],
    count: int,
    others: int,
    rng: np.random.Generator,
) -> Contexts:
    """Random anchors with so many other tokens each, of some draws those whose weights an answer
    tells best."""
    rows = []
    for _ in range(count):
        best, chosen = np.inf, None
        for _ in range(12):
            drawn = rng.choice(known, others + 1, replace=False)
            design = weight_design(values, tokens, drawn)
            condition = 1.0 / max(float(np.linalg.svd(design, compute_uv=False)[-1]), TINY)
            if condition < best:
                best, chosen = condition, drawn
        rows.append([(int(token), 1) for token in (known[:1] if chosen is None else chosen)])
    return Contexts.of(rows)


def weight_design(
    values: Float[Array, "H d d"], tokens: Float[Array, "V d"], context: Int[Array, " m"]
) -> Float[Array, "d Hm"]:
    """What unit weights of every head on every token but the anchor add to an answer."""
    steps = tokens[context[1:]] - tokens[context[0]]
    return np.asarray(np.einsum("hij,mj->ihm", values, steps).reshape(values.shape[1], -1))


def solve_scores(
    values: Float[Array, "H d d"],
    tokens: Float[Array, "V d"],
    contexts: Contexts,
    answers: Float[Array, "n d"],
    sigma: float,
) -> Float[Array, "H d d"]:
    """W_h from the weights in every answer (less that of the anchor alone)."""
    heads, width = values.shape[:2]
    design: list[list[Array]] = [[] for _ in range(heads)]
    target: list[list[float]] = [[] for _ in range(heads)]
    for context, counts, answer in zip(contexts.tokens, contexts.counts, answers, strict=True):
        system = weight_design(values, tokens, context)
        inverse = np.linalg.pinv(system, rcond=1e-12)
        weights = (inverse @ answer).reshape(heads, -1)
        covariance = (inverse @ inverse.T).reshape(heads, len(weights[0]), heads, -1)
        steps = tokens[context[1:]] - tokens[context[0]]
        for head in range(heads):
            own = 1.0 - weights[head].sum()
            block = covariance[head, :, head, :]
            for k, weight in enumerate(weights[head]):
                if weight <= 0.0 or own <= 0.0:
                    continue
                # error of log(weight / own), own = 1 - sum of weights
                slope = np.full(len(block), 1.0 / own)
                slope[k] += 1.0 / weight
                error = sigma * float(np.sqrt(slope @ block @ slope))
                if error > 0.5:
                    continue
                odds = np.log(weight / counts[1 + k]) - np.log(own / counts[0])
                design[head].append(np.outer(tokens[context[0]], steps[k]).ravel() / error)
                target[head].append(odds / error)
    found = np.zeros((heads, width, width))
    for head in range(heads):
        if design[head]:
            solution = np.linalg.lstsq(np.array(design[head]), np.array(target[head]), rcond=None)
            found[head] = solution[0].reshape(width, width)
    return found
