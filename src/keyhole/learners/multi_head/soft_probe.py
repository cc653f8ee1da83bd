"""One head opened softly while all others stay shut.

Queries. The sequence holds a gate token z_h per head (separators), one competitor z_g +
eta, and the anchor x last. Every head but g attends to its own gate; head g weighs its gate
against the competitor: f = f_gate + (eta . v_g) sigma(eta . p_g(x)). A single head needs no
gate: the anchor itself takes its place, f = x . v + (eta . v) sigma(eta . p(x)).

Inversion. eta . p_g(x) = logit((f - f_gate) / (eta . v_g)).

When it fails. A ratio outside (0, 1) or too close to its ends carries no digits: the same
direction is asked again, shorter. A gate that does not hold shows in its margins once p is
known.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import Counterexample, IllConditioned
from keyhole.learners.multi_head.separators import margins
from keyhole.measurement.asking import Asker

SATURATED = 9.0  # log-odds beyond which the digits lost outweigh a query
SHORTER, SHORTEST = 0.25, 0.01
DEAF = 1e-9  # share of the answer below which an opening is too short to be heard
ROUNDS = 40  # shortenings: from 1e20 times too long to right
HOLDS = 14.0  # margin, in log-odds, from which on gates hold: what leaks can be computed


@dataclass(frozen=True, eq=False)
class Chamber:
    """An anchor with the gates that hold there; `values` of one output or of a mix of them."""

    anchor: Float[Array, " d"]
    gates: Float[Array, "h d"] | None  # None: one head, no gate
    base: Float[Array, " h"]  # the answer before each head is opened
    values: Float[Array, "h d"]
    uniform: Float[Array, " d"] | None  # value of a head that attends to all tokens alike
    mix: Float[Array, " outputs"]

    @property
    def alone(self) -> bool:
        """Whether there is one head only, which nothing need shut."""
        return self.gates is None

    @property
    def far(self) -> float:
        """Norm of the largest gate."""
        return 0.0 if self.gates is None else float(np.linalg.norm(self.gates, axis=1).max())

    def spread(self, head: int) -> float:
        """How far the tokens lie apart that a head must keep apart."""
        gates = np.zeros((1, 1)) if self.gates is None else self.gates - self.gates[head]
        return float(np.linalg.norm(gates, axis=1).max())

    def margins(self, keys: Float[Array, "h d"]) -> Float[Array, " h"]:
        """By how much each head keeps to its gate rather than to another."""
        return np.full(len(keys), np.inf) if self.gates is None else margins(self.gates, keys)

    def holds(self, keys: Float[Array, "h d"]) -> bool:
        """Whether all heads that should be shut are."""
        return bool(self.gates is None or margins(self.gates, keys, self.anchor).min() > HOLDS)

    def loudness(self, sizes: Float[Array, " h"]) -> float:
        """Size of an answer before the opening, from the sizes of the values."""
        if self.gates is None:
            return float(np.linalg.norm(self.anchor) * sizes.sum())
        return float(np.linalg.norm(self.gates, axis=1) @ sizes)

    def opened(self, heads: Int[Array, " n"], moves: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """The competitors, seen from what they compete with."""
        return moves

    def sequences(
        self, heads: Int[Array, " n"], moves: Float[Array, "n d"]
    ) -> Float[Array, "n length d"]:
        count, width = moves.shape
        last = np.broadcast_to(self.anchor, (count, 1, width))
        if self.gates is None:
            return np.concatenate([last + moves[:, None], last], axis=1)
        gates = np.broadcast_to(self.gates, (count, *self.gates.shape))
        return np.concatenate([gates, (self.gates[heads] + moves)[:, None], last], axis=1)

    def tilt(
        self, head: int, moves: Array, shares: Array, errors: Float[Array, "h d"]
    ) -> Float[Array, " n"]:
        """What errors of the values do to changes that give the competitors these shares."""
        return np.asarray(-(moves @ errors[head]) * shares)

    def changes(self, answers: Array, tokens: Array, heads: Array) -> Float[Array, " n"]:
        """What opening added to the answer."""
        return np.asarray(self.selective(answers, tokens) - self.base[heads])

    def selective(self, answers: Array, tokens: Array) -> Float[Array, " n"]:
        """The answers without the part of a uniform head."""
        mixed = answers @ self.mix
        if self.uniform is not None:
            mixed = mixed - tokens.mean(axis=1) @ self.uniform
        return np.asarray(mixed)


@dataclass
class Readings:
    """Log-odds of openings: direction asked, change of the answer, and the number they give."""

    moves: Float[Array, "n d"]
    changes: Float[Array, " n"]
    log_odds: Float[Array, " n"]


def log_odds(changes: Array, weights: Array) -> Array:
    """logit(changes / weights), NaN where the ratio is not a probability."""
    ratio = changes / weights
    good = (ratio > 0) & (ratio < 1)
    safe = np.where(good, ratio, 0.5)
    return np.where(good, np.log(safe) - np.log1p(-safe), np.nan)


def open_heads(
    ask: Asker,
    chamber: Chamber,
    heads: Int[Array, " n"],
    moves: Float[Array, "n d"],
    purpose: str,
    rounds: int = ROUNDS,
) -> Readings:
    """Opens head `heads[i]` along `moves[i]`, shortening the moves that saturate."""
    moves = moves.copy()
    changes, odds = np.zeros(len(moves)), np.full(len(moves), np.nan)
    todo = np.arange(len(moves))
    for _ in range(rounds):
        tokens = chamber.sequences(heads[todo], moves[todo])
        changes[todo] = chamber.changes(ask(tokens, purpose), tokens, heads[todo])
        opened = chamber.opened(heads[todo], moves[todo])
        weights = np.einsum("nd,nd->n", opened, chamber.values[heads[todo]])
        odds[todo] = log_odds(changes[todo], weights)
        todo = todo[~(np.abs(odds[todo]) <= SATURATED)]
        if not len(todo):
            return Readings(chamber.opened(heads, moves), changes, odds)
        spans = np.abs(np.einsum("nd,nd->n", moves[todo], chamber.values[heads[todo]]))
        if (spans < DEAF * np.abs(chamber.base[heads[todo]])).any():
            break
        seen = np.nan_to_num(np.abs(odds[todo]), nan=np.inf)
        moves[todo] *= np.maximum(SHORTEST, np.minimum(SHORTER, 2.0 / seen))[:, None]
    worst = int(todo[0])
    raise unexplained(chamber, int(heads[worst]), moves[worst], float(changes[worst]))


class Unexplained(IllConditioned):
    """An answer that no weight between two tokens gives; the caller may try another anchor."""

    def __init__(self, message: str, counterexample: Counterexample) -> None:
        super().__init__(message)
        self.counterexample = counterexample


def unexplained(chamber: Chamber, head: int, move: Array, change: float) -> Unexplained:
    """A competitor next to the gate itself must share its weight about evenly; it did not."""
    base = float(chamber.base[head])
    tokens = chamber.sequences(np.array([head]), move[None])[0]
    return Unexplained(
        "a head stays saturated however short the probe: its value is too small beside the "
        "others, or the box is not attention",
        Counterexample(
            input=tokens,
            box_answer=np.asarray(base + change),
            model_answer=np.asarray(base + 0.5 * float(move @ chamber.values[head])),
            reason="two tokens all but equal must share a head's weight evenly",
        ),
    )


def fan(
    known: Float[Array, "d k"], value: Float[Array, " d"], rng: np.random.Generator
) -> Float[Array, "d d"]:
    """Rows: the known directions first, then random ones, together an orthonormal basis; each
    turned towards the value so that opening along it is always seen."""
    width, count = known.shape
    basis = known
    if count < width:
        rest = rng.standard_normal((width, width - count))
        for _ in range(2):  # once more for orthogonality to rounding
            rest = rest - known @ (known.T @ rest)
        basis = np.concatenate([known, np.linalg.qr(rest)[0]], axis=1)
    overlap = basis.T @ value
    return np.asarray((basis * np.where(overlap < 0, -1.0, 1.0)).T)
