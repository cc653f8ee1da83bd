"""Two tokens in changing proportions: how many heads there are, and what each of them does.

Statement.  The prompt of x copies of token s per copy of the anchor t is answered with
            y_t + sum_h w_h R_h, w_h = x e_h / (1 + x e_h), where e_h = exp(score of s - score of t)
            and R_h is what head h adds when it moves from t to s.
Queries.    H + 1 or more proportions x for one pair of tokens.
Algebra.    With u = x / (1 + x) the answers are rational functions of u with common poles: a
            linear problem for their denominator, or a search over a grid of log e_h, refined by
            variable projection over log e_h. The number of heads is the rank of the answers over
            the proportions.
When it fails. Heads with nearly equal e_h look like one: other pairs tell them apart. Answers that
            no number of heads explains are less smooth than all w; `exceeds_attention` tells.
Source.     Antoulas, Anderson (1986) for rational interpolation by linear algebra; Golub, Pereyra
            (1973) for variable projection.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.special import expit

from keyhole.arrays import TINY, Array, Float
from keyhole.linalg.rank import count_above, noise_edge


@dataclass(frozen=True, eq=False)
class ProportionPair:
    """What two tokens in changing proportions tell: `odds` log e_h and `moves` R_h of each head,
    with the standard errors of both for unit noise, and the root mean square residual."""

    odds: Float[Array, " H"]
    moves: Float[Array, "H d"]
    odds_errors: Float[Array, " H"]
    move_errors: Float[Array, " H"]
    residual: float


def choose_proportions(count: int, longest: int) -> list[tuple[int, int]]:
    """Copies of the token and of the anchor, proportions evenly spread over the decades."""
    found = []
    for ratio in np.exp(np.linspace(-1.0, 1.0, count) * np.log(max(longest - 1, 1))):
        one = max(1, int(np.floor(longest / (1.0 + max(ratio, 1.0 / ratio)))))
        both = (
            (max(1, round(ratio * one)), one) if ratio >= 1 else (one, max(1, round(one / ratio)))
        )
        found.append(both)
    return sorted(set(found), key=lambda both: both[0] / both[1])


def weights_of(proportions: Float[Array, " n"], odds: Float[Array, " H"]) -> Float[Array, "n H"]:
    """Weights w_h of the token, for each proportion and head."""
    return np.asarray(expit(np.log(proportions)[:, None] + odds))


def count_heads(answers: Float[Array, "n d"], noise: float) -> int:
    """Rank of answers (less that of the anchor alone) whose entries have this noise."""
    singular = np.linalg.svd(answers, compute_uv=False)
    return count_above(singular, noise_edge(noise, (answers.shape[0], answers.shape[1])))


def solve_pair(
    proportions: Float[Array, " n"],
    answers: Float[Array, "n d"],
    heads: int,
    rng: np.random.Generator,
    starts: int = 8,
) -> ProportionPair:
    """The heads behind answers (less that of the anchor alone) to these proportions."""
    left, singular, _ = np.linalg.svd(answers, full_matrices=False)
    few = left * singular  # the same problem in as many columns as there are proportions

    def rest(odds: Array) -> Array:
        basis, _ = np.linalg.qr(weights_of(proportions, odds))
        return np.asarray((few - basis @ (basis.T @ few)).ravel())

    guesses = [guess_odds(proportions, few, heads), search_odds(proportions, few, heads)]
    guesses += [2.0 * rng.standard_normal(heads) for _ in range(starts - 1)]
    best, found = np.inf, guesses[0]
    for guess in guesses:
        fit = least_squares(rest, guess, method="lm", xtol=1e-15, ftol=1e-15, gtol=1e-15)
        if fit.cost < best:
            best, found = fit.cost, fit.x
        if np.sqrt(2.0 * best) < 1e-11 * singular[0]:
            break
    weights = weights_of(proportions, found)
    moves = np.linalg.lstsq(weights, answers, rcond=None)[0]
    odds_errors, move_errors = _unit_errors(weights, moves)
    size = float(np.sqrt(2.0 * best / max(answers.size - moves.size - heads, 1)))
    return ProportionPair(found, moves, odds_errors, move_errors, size)


def guess_odds(
    proportions: Float[Array, " n"], answers: Float[Array, "n q"], heads: int
) -> Float[Array, " H"]:
    """Poles from the linear problem answers * (1 + sum c_l u^l) = polynomial without constant."""
    u = proportions / (1.0 + proportions)
    powers = u[:, None] ** np.arange(1, heads + 1)
    outside = np.linalg.svd(powers)[0][:, heads:]  # what no such polynomial explains
    columns = [(outside.T @ (powers[:, [k]] * answers)).ravel() for k in range(heads)]
    design, target = np.stack(columns, axis=1), -(outside.T @ answers).ravel()
    coefficients = np.linalg.lstsq(design, target, rcond=None)[0]
    roots = np.roots([*coefficients[::-1], 1.0])
    roots = np.append(roots, np.full(heads - len(roots), 1e6))  # a pole at infinity: e = 1
    odds = np.log(np.maximum(np.abs(1.0 - 1.0 / np.where(roots == 0, 1e-6, roots)), 1e-6))
    return np.asarray(np.clip(odds.real, -12.0, 12.0))


def search_odds(
    proportions: Float[Array, " n"], answers: Float[Array, "n q"], heads: int
) -> Float[Array, " H"]:
    """Of a grid, the odds whose weights explain the answers best: one head after the other, and
    then each of them once more beside the others. Large odds, which polynomials miss, are found."""
    grid = np.linspace(-16.0, 16.0, 129)
    table = weights_of(proportions, grid)
    table = table / np.linalg.norm(table, axis=0)
    chosen: list[int] = []
    for _ in range(3 * heads):
        others = chosen if len(chosen) < heads else chosen[1:]
        basis, _ = np.linalg.qr(table[:, others]) if others else (np.zeros((len(table), 0)), None)
        rest = answers - basis @ (basis.T @ answers)
        columns = table - basis @ (basis.T @ table)
        sizes = np.linalg.norm(columns, axis=0)
        gains = np.linalg.norm(columns.T @ rest, axis=1) / np.maximum(sizes, 1e-6)
        gains[sizes < 1e-6] = 0.0
        chosen = [*others, int(np.argmax(gains))]
    return np.asarray(grid[chosen])


def _unit_errors(
    weights: Float[Array, "n H"], moves: Float[Array, "H d"]
) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
    """Standard errors of odds and (root mean square over its entries) of each head's move."""
    slopes = weights * (1.0 - weights)
    heads, width = moves.shape
    # odds are common to all columns: eliminate the moves, column by column
    basis, _ = np.linalg.qr(weights)
    bent = slopes - basis @ (basis.T @ slopes)
    information = (bent.T @ bent) * (moves @ moves.T)
    covariance = np.linalg.pinv(information, rcond=1e-14, hermitian=True)
    inverse = np.linalg.pinv(weights.T @ weights, rcond=1e-14, hermitian=True)
    shift = np.linalg.pinv(weights, rcond=1e-14) @ slopes  # moves follow odds by this
    total = np.zeros(heads)
    for column in range(width):
        follow = shift * moves[:, column]
        total += np.diag(inverse) + np.diag(follow @ covariance @ follow.T)
    return np.sqrt(np.maximum(np.diag(covariance), TINY)), np.sqrt(total / width)


def exceeds_attention(
    proportions: Float[Array, " n"], answers: Float[Array, "n d"], noise: float
) -> int | None:
    """The proportion at which answers are further than any number of heads can be from smooth
    functions of it; None where heads may explain them.

    Weights are analytic in log x up to the distance pi from the real axis, so that their parts
    along higher singular vectors of the table of all weights vanish geometrically. A network
    behind the attention has kinks, or poles that are nearer."""
    table = weights_of(proportions, np.linspace(-18.0, 18.0, 361))
    left, _, _ = np.linalg.svd(table)
    most = np.abs(left.T @ table).max(axis=1)  # of any head with a move of size one
    size = float(np.linalg.norm(answers, axis=1).max())
    parts = np.linalg.norm(left.T @ answers, axis=1)
    # moves of many heads may be larger than their sum by some factor, but not by so much
    allowed = 300.0 * size * most + 64.0 * noise * np.sqrt(answers.shape[1])
    if not (parts > allowed).any():
        return None
    odd = parts > allowed
    return int(np.argmax(np.linalg.norm(left[:, odd] @ (left[:, odd].T @ answers), axis=1)))
