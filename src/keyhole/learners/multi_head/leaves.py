"""Huge tokens that heads attend to, one per group of heads, and all that is known of their values.

At a fixed anchor x the box gets tokens s t_i with s enormous. Head h attends to the one with the
largest t_i . p_h(x) alone and answers with its value: f = sum_h s t_i(h) . v_h, exactly. Answers
to leaves that are moved a little are linear equations in the values.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import DomainError
from keyhole.linalg.linear_system import Equations
from keyhole.measurement.asking import Asker

BAG = 256  # tokens offered: two heads share one in about H²/512 of all cases
MOST_HEADS = 64  # unknown number of heads: where to stop looking
HARD = 1e10  # token size that makes attention hard for scores of ordinary scale
HARDER = 1e4  # factor for the next try
TRIES = 4
REACH = 3e-3  # relative move of a leaf that does not change who attends to it
MOMENT_DOUBT = 1e3  # misfit of moments, in units of their rounding error, that is not rounding
UNMOVED = 1e-12  # part of a move, relative, for which a leaf is not moved
NO_VALUE = "every answer is zero: no head has a value, so no score can be known"
NEVER_HARD = (
    "no number of heads explains the answers to huge tokens: attention never settles on single "
    "tokens as softmax attention does"
)


@dataclass
class Leaves:
    """One token per group of heads, and every equation in their values learned so far."""

    anchor: Float[Array, " d"]
    tokens: Float[Array, "h d"]  # of size one; hard when multiplied by `scale`
    reach: Float[Array, " h"]
    scale: float
    equations: Equations  # in units of `scale`; the last block is the uniform head, if any
    uniform: bool

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def blocks(self) -> int:
        return len(self) + int(self.uniform)

    def configuration(self, moves: Float[Array, "n b d"]) -> tuple[Array, Array]:
        """Sequences in which the leaves are moved, and the rows of their equations.

        A uniform head sees the mean of the sequence; a dummy token nobody else attends to moves
        it independently of the leaves.
        """
        count, heads = len(moves), len(self)
        leaves = self.tokens + moves[:, :heads]
        if not self.uniform:
            return leaves, leaves
        length = heads + 2  # leaves, dummy, anchor
        dummy = moves[:, heads] * length - moves[:, :heads].sum(axis=1)
        mean = (leaves.sum(axis=1) + dummy + self.anchor / self.scale) / length
        tokens = np.concatenate([leaves, dummy[:, None]], axis=1)
        return tokens, np.concatenate([leaves, mean[:, None]], axis=1).reshape(count, heads + 1, -1)

    def ask(self, ask: Asker, tokens: Float[Array, "n k d"], purpose: str) -> Array:
        return ask_hard(ask, tokens, self.anchor, self.scale, purpose)


def ask_hard(ask: Asker, tokens: Array, anchor: Array, scale: float, purpose: str) -> Array:
    """Answers, in units of `scale`, to sequences of scaled tokens with the anchor last."""
    last = np.broadcast_to(anchor, (len(tokens), 1, len(anchor)))
    return ask(np.concatenate([scale * tokens, last], axis=1), purpose) / scale


def bag_size(ask: Asker, heads: int | None = None) -> int:
    """How many tokens to offer, so that every head has its own in most cases."""
    limit = ask.oracle.spec.domain.max_length
    size = BAG if limit is None else min(BAG, limit - 1)
    if size < 2 or (heads is not None and size < heads + 2):
        raise DomainError(
            f"finding {heads or 'several'} heads needs sequences longer than max_length={limit}"
        )
    return size


def too_many(count: int, heads: int) -> str:
    """Why a box is refused that has more heads than were claimed."""
    return (
        f"{count} heads answer where {heads} were claimed: huge tokens are attended to in {count} "
        f"different ways. Pass heads={count}, or leave heads= out"
    )


def measure_values(ask: Asker, leaves: Leaves) -> None:
    """Asks the moves that are still missing to know every value; the leaves hold the answers."""
    missing = leaves.equations.unexplored()
    if not len(missing):
        return
    reach = leaves.reach if not leaves.uniform else np.append(leaves.reach, leaves.reach.min())
    sizes = np.linalg.norm(missing, axis=2)
    moves = missing * np.min(reach / np.maximum(sizes, UNMOVED), axis=1)[:, None, None]
    tokens, rows = leaves.configuration(moves)
    answers = leaves.ask(ask, tokens, "values")
    still = leaves.configuration(np.zeros((1, leaves.blocks, ask.width)))
    if leaves.uniform:  # the sequence is shorter than the bag: its own origin must be asked
        leaves.equations.add(still[1], leaves.ask(ask, still[0], "values"))
    leaves.equations.add(rows, answers, still[1][0])


def complete(ask: Asker, leaves: Leaves, base: Array) -> bool:
    """Whether every head still attends to its token when all others are left out."""
    answer = leaves.ask(ask, leaves.tokens[None], "leaves")[0]
    return bool(np.abs(answer - base).max() <= MOMENT_DOUBT * ask.unit * np.abs(base).max())
