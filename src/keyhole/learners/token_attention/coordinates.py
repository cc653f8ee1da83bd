"""Tokens as vectors: what each of them answers alone, in coordinates of the output space.

Statement.  A token alone is answered with y_t = U (1 + sum_h O_h) E_t, a vector of the space that
            U spans. Its coordinates e_t take the place of the embedding: all that can be known of
            it is relative to them.
Queries.    Single tokens: a fifth more than the width, then all others, unless the model is tied.
Algebra.    The rank of these answers is the width. Where input and output tokens share their
            embedding, e_t is a linear map of row t of the basis (affine, where answers are
            centred): fitted to the tokens that were asked, and tested by those beyond the needed.
When it fails. A vocabulary not larger than the width.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import NotIdentifiable
from keyhole.learners.output_layer import find_rank, make_space
from keyhole.learners.token_attention.contexts import CountedPrompts

ALONE = "tokens alone"  # purpose of queries


@dataclass(frozen=True, eq=False)
class Coordinates:
    """`basis` (V, d) of the answers, `tokens` (V, d) of what each token answers alone, and the
    standard deviation of an answer's entries."""

    basis: Float[Array, "V d"]
    tokens: Float[Array, "V d"]
    sigma: float
    tied: bool
    asked: Int[Array, " n"]  # tokens whose coordinates were measured
    errors: Float[Array, " V"]  # standard error of a token's coordinates

    @property
    def width(self) -> int:
        return int(self.basis.shape[1])


def find_coordinates(prompts: CountedPrompts, rng: np.random.Generator) -> Coordinates:
    """Asks single tokens, all of them unless the model is tied."""
    order = rng.permutation(prompts.tokens)
    first = min(16, prompts.tokens)
    answers = prompts.ask_sequences([order[k : k + 1] for k in range(first)], ALONE)
    while True:
        rank = find_rank(answers, prompts.noise.sigma(answers), rng)
        count = len(answers)
        wanted = 2 * count if rank is None else int(np.ceil(1.2 * rank)) + 3
        wanted = min(wanted, prompts.tokens)
        if rank is not None and count >= wanted:
            break
        if count >= prompts.tokens:
            raise NotIdentifiable(
                f"the answers to all {count} tokens alone fill as many dimensions: the width is "
                "not smaller than the vocabulary, or there is noise"
            )
        more = [order[k : k + 1] for k in range(count, wanted)]
        answers = np.concatenate([answers, prompts.ask_sequences(more, ALONE)])
    space = make_space(answers, rank)
    sigma = max(space.level, float(prompts.noise.sigma(np.sqrt(np.mean(answers**2)))) / 4.0)
    asked = order[: len(answers)]
    found, off, reach = fit_tied(space.basis, space.coordinates, asked, prompts.shifted)
    # roundings inside the space are more than those outside of it; untied tokens are far off
    if off <= min(1e4 * sigma, 1e-2 * float(np.std(space.coordinates))):
        errors = max(off, sigma) * reach
        return Coordinates(space.basis, found, sigma, True, asked, errors)
    rest = [order[k : k + 1] for k in range(len(answers), prompts.tokens)]
    if rest:
        answers = np.concatenate([answers, prompts.ask_sequences(rest, ALONE)])
        rank = find_rank(answers, prompts.noise.sigma(answers), rng) or rank
        space = make_space(answers, rank)
    tokens = np.zeros((prompts.tokens, rank))
    tokens[order] = space.coordinates
    sigma = max(space.level, float(prompts.noise.sigma(np.sqrt(np.mean(answers**2)))) / 4.0)
    return Coordinates(space.basis, tokens, sigma, False, order, np.full(prompts.tokens, sigma))


def fit_tied(
    basis: Float[Array, "V d"],
    coordinates: Float[Array, "n d"],
    asked: Int[Array, " n"],
    affine: bool,
) -> tuple[Float[Array, "V d"], float, Float[Array, " V"]]:
    """Coordinates of all tokens if input and output share their embedding; how far those that were
    asked are from that (root mean square, for the equations beyond the unknowns); and the error of
    every token's coordinates for a unit error of those that were asked."""
    rows = np.column_stack([basis, np.ones(len(basis))]) if affine else basis
    spare = len(asked) - rows.shape[1]
    if spare < 1:
        return np.zeros_like(basis), np.inf, np.ones(len(basis))
    tied, *_ = np.linalg.lstsq(rows[asked], coordinates, rcond=None)
    gaps = rows[asked] @ tied - coordinates
    off = float(np.sqrt(np.sum(gaps**2) / (spare * coordinates.shape[1])))
    reach = np.linalg.norm(rows @ np.linalg.pinv(rows[asked]), axis=1)
    return np.asarray(rows @ tied), off, np.asarray(reach)
