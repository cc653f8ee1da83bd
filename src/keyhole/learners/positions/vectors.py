"""Vectors that are added to the tokens by their places: learned or sinusoidal positions.

Statement.  e_p - e_1 of all P places, from one query per place behind the value maps, kept for a
            fit to all answers; without the vectors the box is attention without positions.
Queries.    [u, ..., u, x]: u is a token that no head likes, so that every head attends to x alone.
Algebra.    y = offset + (x + e_P) M, M the sum of the value maps, which must be injective.
            u is minus a sum of the tokens that the heads liked before the same anchor; a head that
            takes it all the same shows in the answer, and its part of the sum grows.
When it fails.  Fewer inner dimensions than the width: e_p is then not determined by the values.
Source.     Keyhole's own; docs/methods/positions.md.
"""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.base import Inconclusive
from keyhole.learners.positions.forward import Answered
from keyhole.learners.positions.values import ValueMaps
from keyhole.measurement.asker import Asker

PURPOSE = "places"


def measure_vectors(
    ask: Asker, values: ValueMaps, places: int
) -> tuple[Float[Array, "places d"], tuple[Answered, ...]] | Inconclusive:
    """The vectors of all places, the first of them zero, and what told them: every head attends to
    the anchor, wherever that stands."""
    total = values.total
    sizes = np.linalg.svd(total, compute_uv=False)
    if len(sizes) < ask.width or sizes[-1] < 1e-9 * sizes[0]:
        return Inconclusive("the value maps do not determine the vectors of the places")
    inverse = np.linalg.pinv(total)
    shares = np.ones(values.heads)
    vectors = np.zeros((places, ask.width))
    answers = np.zeros((places, ask.outputs))
    tries = 0
    push = 1.7  # factor on the part of a head that still likes the token
    for place in range(1, places):
        while True:
            silent = -(shares @ values.liked)
            tokens = np.concatenate([np.tile(silent, (place, 1)), values.anchor[None]])
            answers[place] = ask(tokens[None], PURPOSE)[0]
            answer = answers[place][None] - values.offset - values.anchor @ total
            took = find_takers(values, answer, silent)
            if not took.any():
                break
            shares = np.where(took, push * shares, shares)
            tries += 1
            if tries > 16:  # tokens tried until no head likes one: another anchor costs less
                return Inconclusive("no token was found that every head leaves alone")
        vectors[place] = (answer @ inverse)[0]
    alone = np.tile(ask.representable(values.anchor), (places, 1, 1))
    alone[0], answers[0] = 0.0, values.offset  # what was asked of the first place
    errors = ask.unit * np.abs(answers).max(axis=1)
    zeros = np.zeros(values.heads, dtype=int)
    told = Answered(alone, zeros[:1], answers, errors, np.arange(places), zeros)
    return vectors, (told,)


def find_takers(values: ValueMaps, answer: Float[Array, "one D"], silent: Array) -> Array:
    """Which heads attend to the token that they should leave alone."""
    parts = values.split(answer)
    large = 0.1  # share of a head in what it would add if it took the token, from which it did
    return np.array(
        [
            np.linalg.norm(part) > large * np.linalg.norm(silent @ ins)
            for part, ins in zip(parts, values.ins, strict=True)
        ]
    )
