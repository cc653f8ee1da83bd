"""Labels that only this head gives: queries close to where its label changes.

A label of a random query is one bit that most boxes agree on. Beside the border a label depends
on every digit of the parameters, so a handful of them tells a head from a box that is nearly one.
"""

from itertools import islice
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample, WrongFamily
from keyhole.learners.label_only.score_thresholds import Thresholds
from keyhole.learners.label_only.value_direction import LabelReader
from keyhole.models.base import perturb_model
from keyhole.models.sign_attention import LabelledAttention
from keyhole.oracles.queries import QueryBatch

PURPOSE = "border check"


def refuse_other_pairs(
    asked: Thresholds,
    entries: Float[Array, " m"],
    errors: Float[Array, " m"],
    rng: np.random.Generator,
) -> None:
    """Sixteen entries again with reversed tokens at half the scale, from both sides: WrongFamily if
    they moved. Only a bilinear score has the same entries there."""
    chosen = rng.choice(len(entries), size=min(16, len(entries)), replace=False)
    index = np.concatenate([chosen, chosen]).astype(np.int64)
    side = np.repeat([1.0, -1.0], len(chosen))
    # An entry is uniform in a bracket of 3.5 standard errors: six of them are certain. At half the
    # scale an error of the value weighs up to twice as much.
    at = entries[index] - 2.0 * 6.0 * side * errors[index]
    queries = asked.queries(index, at, purpose=PURPOSE, shrink=0.5, mirror=True)
    wrong = asked.reader.ask(queries) != -side
    if wrong.any():
        _refuse(
            asked.reader,
            queries[int(np.argmax(wrong)) :].tokens()[0],
            float(-side[int(np.argmax(wrong))]),
            "the same score with reversed tokens at another scale: the box has a key bias, more "
            "than one head, or is something else",
        )


def refuse_other_sequences(
    reader: LabelReader,
    model: LabelledAttention,
    errors: LabelledAttention,
    rng: np.random.Generator,
) -> None:
    """Random sequences of several kinds, three of each, moved to both sides of the border."""
    longest = reader.asker.oracle.spec.domain.max_length
    kinds = ((3, 1.0), (7, 1.0), (7, 2.5), (24, 1.0), (64, 1.0), (16, 2.0))
    for length, size in 3 * kinds:  # tokens, and their length over the natural one
        count = length if longest is None else min(length, longest)
        pair = place_beside_border(model, errors, count, size, reader.size, rng)
        if pair is None:
            continue
        wrong = reader.ask(QueryBatch.of(pair, PURPOSE)) != np.array([-1.0, 1.0])
        if wrong.any():
            k = int(np.argmax(wrong))
            _refuse(reader, pair[k], (-1.0, 1.0)[k], f"a sequence of {count} tokens")


def place_beside_border(
    model: LabelledAttention,
    errors: LabelledAttention,
    length: int,
    size: float,
    radius: float,
    rng: np.random.Generator,
) -> Float[Array, "two length d"] | None:
    """Two sequences, certainly negative and certainly positive, as close as the errors allow;
    None where the border is out of reach."""
    d, value = model.width, model.heads[0].value
    norm = min(size * model.natural_length(), radius / (1.0 + 4.0 / np.sqrt(d)) / 2.0)
    tokens = norm * rng.standard_normal((length, d)) / np.sqrt(d)
    limit = min(8.0 * norm, radius - float(np.linalg.norm(tokens, axis=1).max()))

    def move(shift: Float[Array, " n"]) -> Float[Array, "n length d"]:
        many = np.repeat(tokens[None], len(shift), axis=0)
        many[:, :-1] += shift[:, None, None] * value
        return many

    def find_crossing(goal: Float[Array, " n"]) -> Float[Array, " n"]:
        low, high = np.full(len(goal), -limit), np.full(len(goal), limit)
        for _ in range(60):
            middle = 0.5 * (low + high)
            up = model.margin(move(middle)) > goal
            low, high = np.where(up, low, middle), np.where(up, middle, high)
        return 0.5 * (low + high)

    if limit <= 0 or length < 2:
        return None
    border = move(find_crossing(np.zeros(1)))
    copies = islice(perturb_model(model, errors, 0.0, rng), 8)
    spread = max(float(np.abs(c.margin(border) - model.margin(border))[0]) for c in copies)
    goal = 8.0 * spread * np.array([-1.0, 1.0])
    pair = move(find_crossing(goal))
    reached = model.margin(pair) * np.sign(goal)  # unless the border is out of reach, or a cliff
    return pair if ((reached > 0.5 * np.abs(goal)) & (reached < 2.0 * np.abs(goal))).all() else None


def _refuse(reader: LabelReader, tokens: Array, expected: float, reason: str) -> None:
    box, mine = (float(reader.coding.encode(np.array(s * expected))) for s in (-1.0, 1.0))
    example: Any = Counterexample(tokens, box, mine, reason)
    raise WrongFamily(f"the box's label is not that of the head fitted to it: {reason}", example)
