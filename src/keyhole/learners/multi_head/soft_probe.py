"""One head probed softly while all others are isolated.

Queries. The sequence holds a separating token z_h per head (separators), the probe's token z_g + u,
and the anchor x last. Every head but g attends to its own separator; head g weighs its separator
against the probe's token: f = f_0 + (u . v_g) sigma(u . k_g(x)). A head that is alone needs no
separator: the anchor itself takes its place, f = x . v + (u . v) sigma(u . k(x)).

Algebra. u . k_g(x) = logit((f - f_0) / (u . v_g)).

When it fails. A ratio outside (0, 1) or too close to its ends carries no digits: the same direction
is asked again, shorter. A separator that does not hold shows in its margins once keys are known.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import Counterexample, IllConditioned
from keyhole.learners.multi_head.separators import measure_margins
from keyhole.linalg.softmax import logit
from keyhole.measurement.asker import Asker

SATURATED = 9.0  # log-odds beyond which the digits lost outweigh a query
SHORTENINGS = 40  # of a probe, at most: from 1e20 times too long to right


@dataclass(frozen=True, eq=False)
class Isolation:
    """An anchor at which heads can be probed one at a time; this one is of a single head, which
    nothing need isolate."""

    anchor: Float[Array, " d"]
    base: Float[Array, " h"]  # the answer before each head is probed
    values: Float[Array, "h d"]  # of one output or of a mix of them
    uniform: Float[Array, " d"] | None  # value of a head that attends to all tokens alike
    mix: Float[Array, " outputs"]
    total: Float[Array, " d"]  # sum of the values of the heads that choose, mixed

    @property
    def alone(self) -> bool:
        """Whether there is one head only."""
        return True

    @property
    def longest(self) -> float:
        """Norm of the longest token that isolates heads."""
        return 0.0

    def measure_span(self, head: int) -> float:
        """How far the tokens lie apart that a head must keep apart."""
        return 0.0

    def measure_margins(self, keys: Float[Array, "h d"]) -> Float[Array, " h"]:
        """By how much, in log-odds, each head keeps to its separator."""
        return np.full(len(keys), np.inf)

    def holds(self, keys: Float[Array, "h d"]) -> bool:
        """Whether all heads that should be isolated are."""
        return True

    def output_scale(self, sizes: Float[Array, " h"]) -> float:
        """Size of the terms of an answer, from the sizes of the values."""
        return float(np.linalg.norm(self.anchor) * sizes.sum())

    def displace(self, heads: Int[Array, " n"], probes: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """The probes' tokens, seen from what they compete with."""
        return probes

    def build_sequences(
        self, heads: Int[Array, " n"], probes: Float[Array, "n d"]
    ) -> Float[Array, "n length d"]:
        last = np.broadcast_to(self.anchor, (len(probes), 1, len(self.anchor)))
        return np.concatenate([last + self.displace(heads, probes)[:, None], last], axis=1)

    def propagate_value_errors(
        self, head: int, probes: Array, shares: Array, errors: Float[Array, "h d"]
    ) -> Float[Array, " n"]:
        """What errors of the values do to changes that give the probes' tokens these shares."""
        return np.asarray(-(probes @ errors[head]) * shares)

    def measure_changes(self, answers: Array, tokens: Array, heads: Array) -> Float[Array, " n"]:
        """What the probes added to the answers."""
        return np.asarray(self.select_choosing(answers, tokens) - self.base[heads])

    def select_choosing(self, answers: Array, tokens: Array) -> Float[Array, " n"]:
        """The answers, mixed, without the part of a uniform head."""
        mixed = answers @ self.mix
        if self.uniform is not None:
            mixed = mixed - tokens.mean(axis=1) @ self.uniform
        return np.asarray(mixed)

    def move(self, anchor: Float[Array, " d"]) -> "Isolation":
        """What isolates the heads here, at another anchor."""
        base = np.full(len(self.values), float(anchor @ self.total))
        return replace(self, anchor=anchor, base=base)


@dataclass(frozen=True, eq=False)
class SeparatorIsolation(Isolation):
    """Heads isolated by one separating token each."""

    separators: Float[Array, "h d"]

    @property
    def alone(self) -> bool:
        return False

    @property
    def longest(self) -> float:
        return float(np.linalg.norm(self.separators, axis=1).max())

    def measure_span(self, head: int) -> float:
        apart = self.separators - self.separators[head]
        return float(np.linalg.norm(apart, axis=1).max())

    def measure_margins(self, keys: Float[Array, "h d"]) -> Float[Array, " h"]:
        return measure_margins(self.separators, keys)

    def holds(self, keys: Float[Array, "h d"]) -> bool:
        margins = measure_margins(self.separators, keys, self.anchor)
        holding_margin = 14.0  # log-odds from which on separators hold: what leaks can be computed
        return bool(margins.min() > holding_margin)

    def output_scale(self, sizes: Float[Array, " h"]) -> float:
        lengths = np.linalg.norm(self.separators, axis=1)
        scale = float(lengths @ sizes)
        if self.uniform is not None:  # it sees the mean of the sequence
            mean = float(lengths.sum()) / (len(self.values) + 2)
            scale += mean * float(np.linalg.norm(self.uniform))
        return scale

    def build_sequences(
        self, heads: Int[Array, " n"], probes: Float[Array, "n d"]
    ) -> Float[Array, "n length d"]:
        count, width = probes.shape
        last = np.broadcast_to(self.anchor, (count, 1, width))
        every = np.broadcast_to(self.separators, (count, *self.separators.shape))
        probed = (self.separators[heads] + probes)[:, None]
        return np.concatenate([every, probed, last], axis=1)

    def move(self, anchor: Float[Array, " d"]) -> "SeparatorIsolation":
        return replace(self, anchor=anchor)


@dataclass(frozen=True, eq=False)
class SoftProbes:
    """Probes as they were asked, the changes of the answers, and the log-odds these give."""

    probes: Float[Array, "n d"]
    changes: Float[Array, " n"]
    log_odds: Float[Array, " n"]

    def join(self, more: "SoftProbes") -> "SoftProbes":
        return SoftProbes(
            np.concatenate([self.probes, more.probes]),
            np.concatenate([self.changes, more.changes]),
            np.concatenate([self.log_odds, more.log_odds]),
        )

    def split(self, counts: list[int]) -> "list[SoftProbes]":
        """The first so many probes, the next so many, and so on."""
        cuts = np.cumsum(counts)[:-1]
        parts = (np.split(part, cuts) for part in (self.probes, self.changes, self.log_odds))
        return [SoftProbes(*part) for part in zip(*parts, strict=True)]


def probe_heads(
    ask: Asker,
    isolation: Isolation,
    heads: Int[Array, " n"],
    probes: Float[Array, "n d"],
    purpose: str,
    rounds: int = SHORTENINGS,
) -> SoftProbes:
    """Probes head `heads[i]` along `probes[i]`, shortening the probes that saturate."""
    probes = probes.copy()
    changes, odds = np.zeros(len(probes)), np.full(len(probes), np.nan)
    todo = np.arange(len(probes))
    for _ in range(rounds):
        tokens = isolation.build_sequences(heads[todo], probes[todo])
        changes[todo] = isolation.measure_changes(ask(tokens, purpose), tokens, heads[todo])
        displaced = isolation.displace(heads[todo], probes[todo])
        weights = np.einsum("nd,nd->n", displaced, isolation.values[heads[todo]])
        odds[todo] = logit(changes[todo] / weights)
        todo = todo[~(np.abs(odds[todo]) <= SATURATED)]
        if not len(todo):
            return SoftProbes(isolation.displace(heads, probes), changes, odds)
        signal = np.abs(np.einsum("nd,nd->n", probes[todo], isolation.values[heads[todo]]))
        if (signal < 1e-9 * np.abs(isolation.base[heads[todo]])).any():  # too short to be seen
            break
        seen = np.nan_to_num(np.abs(odds[todo]), nan=np.inf)
        probes[todo] *= np.maximum(0.01, np.minimum(0.25, 2.0 / seen))[:, None]
    worst = int(todo[0])
    raise explain_saturation(isolation, int(heads[worst]), probes[worst], float(changes[worst]))


class Unexplained(IllConditioned):
    """An answer that no weight between two tokens gives; the caller may try another anchor."""

    def __init__(self, message: str, counterexample: Counterexample) -> None:
        super().__init__(message)
        self.counterexample = counterexample


def explain_saturation(
    isolation: Isolation, head: int, probe: Float[Array, " d"], change: float
) -> Unexplained:
    """The error for a probe next to the separator itself, which must share its weight about
    evenly, and did not."""
    base = float(isolation.base[head])
    tokens = isolation.build_sequences(np.array([head]), probe[None])[0]
    return Unexplained(
        "a head stays saturated however short the probe: its value is too small beside the "
        "others, or the box is not attention",
        Counterexample(
            input=tokens,
            box_answer=np.asarray(base + change),
            model_answer=np.asarray(base + 0.5 * float(probe @ isolation.values[head])),
            reason="two tokens all but equal must share a head's weight evenly",
        ),
    )


def build_probe_basis(
    known: Float[Array, "d k"], value: Float[Array, " d"], rng: np.random.Generator
) -> Float[Array, "d d"]:
    """Rows: the known directions first, then random ones, together an orthonormal basis; each
    turned towards the value so that a probe along it is always seen."""
    width, count = known.shape
    basis = known
    if count < width:
        rest = rng.standard_normal((width, width - count))
        for _ in range(2):  # once more for orthogonality to rounding
            rest = rest - known @ (known.T @ rest)
        basis = np.concatenate([known, np.linalg.qr(rest)[0]], axis=1)
    overlap = basis.T @ value
    return np.asarray((basis * np.where(overlap < 0, -1.0, 1.0)).T)
