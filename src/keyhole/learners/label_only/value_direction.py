"""Labels of sequences of one token: the coding of the labels, and the direction of the value.

With one token the softmax is 1, so the label is the sign of x · value. The labels of x and -x are
opposite at every length of x, unless there is an offset. Comparing multiples of two unit vectors
bisects the ratio of two components of the value; the largest component, found by a knock-out
tournament, is the common denominator, so that all ratios lie in [-1, 1].
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float, Int
from keyhole.errors import Counterexample, DomainError, NotIdentifiable, WrongFamily
from keyhole.learners.label_only.bisection import Brackets, bisect
from keyhole.measurement.asker import Asker
from keyhole.models.sign_attention import Coding
from keyhole.oracles.base import INSIDE, Domain, Oracle
from keyhole.oracles.noise import FORMATS, REJECTION
from keyhole.oracles.queries import QueryBatch

PURPOSE_CODING, PURPOSE_VALUE, PURPOSE_CHECK = "coding", "value", "value check"
NEAR_LENGTHS = (1.0, 2.0**-4, 2.0**-8, 4.0)  # beside the border: none may underflow in float16
CHECKS = 24  # labels that are checked beside the border: a multiple of the number of lengths


@dataclass(frozen=True, eq=False)
class Reader:
    """Translates labels into signs."""

    asker: Asker
    coding: Coding
    size: float  # norm up to which tokens may go, and infinity

    @property
    def length(self) -> float:
        """An ordinary length of a token."""
        return min(1.0, self.size)

    def ask(self, queries: QueryBatch) -> Float[Array, " n"]:
        labels = flatten_labels(self.asker.send(queries))
        signs = self.coding.signs(labels)
        if np.isnan(signs).any():
            k = int(np.argmax(np.isnan(signs)))
            error = WrongFamily(
                f"the box answered {labels[k]:.6g}, which is none of its labels "
                f"{self.coding.negative:g}, {self.coding.positive:g}",
                Counterexample(
                    queries[k : k + 1].tokens()[0], labels[k], self.coding.positive, "no label"
                ),
            )
            error.certain = True
            raise error
        return signs

    def tokens(self, tokens: Float[Array, "n d"], purpose: str) -> Float[Array, " n"]:
        return self.ask(QueryBatch.of(tokens[:, None, :], purpose))


def flatten_labels(answers: Float[Array, "n outputs"]) -> Float[Array, " n"]:
    """One label per query."""
    if answers.shape[1] != 1:
        raise WrongFamily(
            f"a label per query is expected, the box answers with {answers.shape[1]} numbers: "
            "learn one of them at a time"
        )
    return np.asarray(answers[:, 0])


def find_radius(domain: Domain) -> float:
    """Norm up to which every token is inside the domain."""
    if domain.vocabulary is not None:
        raise DomainError(
            "labels are bisected by moving tokens a little, which a finite vocabulary does not "
            "allow: LabelOnly needs tokens from a ball or a box around zero"
        )
    if domain.radius <= 0:
        raise DomainError(
            f"entries between {domain.low} and {domain.high} leave no room around zero: LabelOnly "
            "needs tokens and their opposites"
        )
    return float(INSIDE * domain.radius)


def open_reader(oracle: Oracle, rng: np.random.Generator) -> Reader:
    """Finds the coding; raises where the labels of x and -x show that this is no such head."""
    size = find_radius(oracle.spec.domain)
    lengths = (1.0, 2.0**-8, 2.0**-16, 4.0)  # of tokens: an offset shows when they are short
    unit = rng.standard_normal((len(lengths), oracle.spec.width))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    tokens = np.minimum(np.array(lengths) * min(1.0, size), size)[:, None] * unit
    batch = np.concatenate([np.zeros((1, oracle.spec.width)), tokens, -tokens])
    asker = Asker(oracle)
    labels = flatten_labels(asker.points(batch, PURPOSE_CODING))
    kinds, pairs = np.unique(labels), labels[1:].reshape(2, -1)
    if len(kinds) > 3:
        raise WrongFamily(
            f"the box answers with numbers ({labels[0]:.6g}, {labels[1]:.6g}, …), not with labels: "
            "use SingleHead, which needs far fewer queries",
            Counterexample(batch[1:2], labels[1], float(np.sign(labels[1])), "not a label"),
        )
    if len(np.unique(pairs)) == 1:
        raise NotIdentifiable(
            f"the box gives the label {pairs[0, 0]:g} to every token and its opposite: its value "
            "is zero, or an offset outweighs it, and the label tells nothing of the rest"
        )
    coding = _read_coding(labels[0], float(pairs.min()), float(pairs.max()))
    same = pairs[0] == pairs[1]
    if coding is None or same.any():
        k = int(np.argmax(same)) if same.any() else -1
        raise WrongFamily(
            "a head without offset gives opposite labels to a token and its opposite, however "
            "short they are; this box does not (it has an offset, or is something else)",
            Counterexample(
                batch[1 + len(lengths) + k : 2 + len(lengths) + k] if k >= 0 else batch[:1],
                labels[1 + len(lengths) + k] if k >= 0 else labels[0],
                float(pairs.min() + pairs.max() - pairs[0, k]) if k >= 0 else 0.0,
                "labels of a token and its opposite",
            ),
        )
    return Reader(asker, coding, size)


def _read_coding(tie: float, negative: float, positive: float) -> Coding | None:
    """At the zero token f is zero: its label is that of a tie."""
    return Coding(negative, float(tie), positive) if negative <= tie <= positive else None


@dataclass(frozen=True, eq=False)
class Direction:
    """The value's direction: signed ratios to its largest component, as brackets."""

    reader: Reader
    signs: Float[Array, " d"]
    pivot: int
    ratios: Brackets

    @property
    def _raw(self) -> Float[Array, " d"]:
        return self.signs * self.ratios.middle

    @property
    def value(self) -> Float[Array, " d"]:
        return self._raw / np.linalg.norm(self._raw)

    def error(self, roundoff: float) -> Float[Array, " d"]:
        """Standard errors: a number is uniform in its bracket; the box's rounding comes on top."""
        size = float(np.linalg.norm(self._raw))
        single = np.hypot(self.ratios.width / np.sqrt(12.0), roundoff)
        single[self.pivot] = 0.0
        tangent = np.eye(len(single)) - np.outer(self.value, self.value)
        return np.sqrt(tangent**2 @ single**2) / size

    def refine(self, width: float) -> "Direction":
        """Ratios known to `width`, continuing where they stand."""
        brackets = bisect(self._above, self.ratios, width)
        return Direction(self.reader, self.signs, self.pivot, brackets)

    def _above(self, index: Int[Array, " n"], at: Float[Array, " n"]) -> Float[Array, " n"]:
        return self.reader.tokens(self.tokens(index, at), PURPOSE_VALUE)

    def tokens(self, index: Int[Array, " n"], at: Float[Array, " n"]) -> Float[Array, "n d"]:
        """Positive exactly if the ratio of component `index` to the largest is above `at`."""
        tokens, row = np.zeros((len(index), len(self.signs))), np.arange(len(index))
        tokens[row, index] = np.where(self.signs[index] == 0, 1.0, self.signs[index])
        tokens[row, self.pivot] -= at * self.signs[self.pivot]
        tokens *= self.reader.length / np.linalg.norm(tokens, axis=1, keepdims=True)
        return tokens


def measure_direction(reader: Reader, width: float) -> Direction:
    """2 d - 1 queries for signs and the largest component, then one bit per query."""
    d = reader.asker.width
    signs = reader.tokens(reader.length * np.eye(d), PURPOSE_VALUE)
    alive = np.flatnonzero(signs)
    if not len(alive):
        raise NotIdentifiable(
            "the box gives the label of a tie to every unit vector: its value is zero, so nothing "
            "of its score matrix can be seen"
        )
    pivot = _find_largest(reader, signs, alive)
    high = np.abs(signs)
    low = np.where(np.arange(d) == pivot, 1.0, 0.0)
    flat = np.full(d, 1e3)  # a spread far above the brackets: nothing else is known
    return Direction(reader, signs, pivot, Brackets(low, high, np.zeros(d), flat)).refine(width)


def _find_largest(reader: Reader, signs: Float[Array, " d"], alive: Int[Array, " n"]) -> int:
    """The component of largest size, by knock-out: half of those left go in each round."""
    while len(alive) > 1:
        half = len(alive) // 2
        first, second = alive[:half], alive[half : 2 * half]
        tokens, row = np.zeros((half, len(signs))), np.arange(half)
        tokens[row, first], tokens[row, second] = signs[first], -signs[second]
        won = reader.tokens(reader.length / np.sqrt(2.0) * tokens, PURPOSE_VALUE) >= 0
        alive = np.concatenate([np.where(won, first, second), alive[2 * half :]])
    return int(alive[0])


def find_roundoff(found: Direction, roundoff: float, rng: np.random.Generator) -> float:
    """The roundoff of the box's number format; raises WrongFamily where no format explains it.

    Both ends of every bracket again, with tokens of other lengths, then random tokens of several
    lengths beside the border: a box that computes coarsely contradicts itself there, one that is
    not linear in a token or has an offset gives itself away.
    """
    if len(found.signs) == 1:
        return roundoff  # the border is the zero token alone
    while True:
        margin, example = _check_ends(found, roundoff, rng)
        if example is None:
            margin, example = _check_beside(found, roundoff, rng)
        if example is None:
            return roundoff
        further = _choose_further(roundoff, margin)
        if further is None or _has_offset(found, further, rng):
            raise WrongFamily(
                "the label of one token is the side of a plane through zero on which it lies, for "
                "an attention head without offset; for this box it is not",
                example,
            )
        roundoff = further


def _choose_further(roundoff: float, margin: float) -> float | None:
    """The next roundoff that explains wrong labels at this margin: float64 with rounding errors
    that add up, else a shorter format."""
    roundings = 16.0  # rounding errors of one answer, in units of the roundoff, at the most
    steps = sorted({roundings * UNIT_ROUNDOFF, *(2.0**-bits for _, bits in FORMATS)})
    enough = (r for r in steps if r > roundoff and roundings * REJECTION * r > margin)
    return next(enough, None)


def _has_offset(found: Direction, roundoff: float, rng: np.random.Generator) -> bool:
    """Whether short tokens beside the border have the label of their opposites. Rounding treats
    both alike, and at this roundoff it cannot make a tie of them."""
    lengths = np.full(CHECKS // 3, min(NEAR_LENGTHS) * found.reader.length)
    tokens, _ = _place_beside(found, roundoff, lengths, rng)
    signs = found.reader.tokens(np.concatenate([tokens, -tokens]), PURPOSE_CHECK)
    first, second = signs.reshape(2, -1)
    return float(np.mean(first * second > 0)) > 0.6  # more than rounding explains


def _check_ends(
    found: Direction, roundoff: float, rng: np.random.Generator
) -> tuple[float, Counterexample | None]:
    """Ends of the brackets, asked again: the slack given, and a label that has changed."""
    ratios = found.ratios
    others = np.delete(np.arange(len(ratios)), found.pivot)
    others = np.tile(others, -(-CHECKS // (2 * len(others))))  # few brackets: several times
    index, side = np.concatenate([others, others]), np.repeat([1.0, -1.0], len(others))
    slack = np.maximum(ratios.width, REJECTION * roundoff)[index]
    ends = np.where(side > 0, ratios.low[index], ratios.high[index]) - side * slack
    factor = 1.0 - 0.5 * rng.random((len(index), 1))  # another length rounds differently
    tokens = factor * found.tokens(index, ends)
    return float(slack.max()), _find_wrong(found.reader, tokens, side)


def _check_beside(
    found: Direction, roundoff: float, rng: np.random.Generator
) -> tuple[float, Counterexample | None]:
    """Random tokens beside the border: their margin, and a wrong label."""
    reader = found.reader
    lengths = np.minimum(np.array(NEAR_LENGTHS) * reader.length, reader.size)
    lengths = np.repeat(lengths, CHECKS // len(NEAR_LENGTHS))
    lengths = lengths * (1.0 - 0.5 * rng.random(len(lengths)))  # powers of two round all alike
    tokens, side = _place_beside(found, roundoff, lengths, rng)
    return _margin(found, roundoff), _find_wrong(reader, tokens, side)


def _find_wrong(
    reader: Reader, tokens: Float[Array, "n d"], side: Float[Array, " n"]
) -> Counterexample | None:
    wrong = reader.tokens(tokens, PURPOSE_CHECK) == -side
    if not wrong.any():
        return None
    k = int(np.argmax(wrong))
    box, mine = (float(reader.coding.encode(np.array(s * side[k]))) for s in (-1.0, 1.0))
    return Counterexample(tokens[k : k + 1], box, mine, "a token beside the border")


def _margin(found: Direction, roundoff: float) -> float:
    error = found.error(roundoff)
    return REJECTION * float(np.linalg.norm(error)) / float(np.sqrt(len(error)))


def _place_beside(
    found: Direction, roundoff: float, lengths: Float[Array, " n"], rng: np.random.Generator
) -> tuple[Float[Array, "n d"], Float[Array, " n"]]:
    """Random tokens on alternating sides of the border, a few standard errors from it."""
    value = found.value
    margin = _margin(found, roundoff)
    unit = rng.standard_normal((len(lengths), len(value)))
    unit -= np.outer(unit @ value, value)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    side = np.where(np.arange(len(lengths)) % 2, 1.0, -1.0)
    tokens = unit + margin * side[:, None] * value
    return lengths[:, None] * tokens / np.hypot(1.0, margin), side
