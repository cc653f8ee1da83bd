"""Ask a box: tokens in, rows of float64 out, and what the answers show of its number format.

A scalar box is a box with one output. The noise is what is stated of the box, else the shortest
number format that holds its first answers. A box in few digits rounds the tokens that it is given:
a learner that computes with `representable` tokens computes with what the box saw.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
from keyhole.measurement.noise import A_FEW, TELLING_ANSWERS, noise_of_type, recognise_format
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import ACCURACY, DETECTION, NoiseModel
from keyhole.oracles.queries import QueryBatch

DOUBLE_PRECISION = 1e3 * UNIT_ROUNDOFF  # relative errors below this are those of float64 sums


def few_digits(spec: Spec) -> bool:
    """Whether the box is stated to answer with fewer digits than float64 sums have."""
    return spec.precision is not None and spec.precision.relative >= DOUBLE_PRECISION


@dataclass
class Transcript:
    """What was seen of the answers; the askers of one box share it and alone write into it."""

    scalar: bool | None = None  # whether answers are single numbers; known after the first one
    outputs: int = 1  # numbers in an answer, likewise
    spent: int = 0  # queries that were answered
    queries: list[tuple[Array, Array]] = field(default_factory=list)  # tokens and answers, if kept
    kind: NoiseModel = field(
        default_factory=lambda: NoiseModel(format="float64")
    )  # what the type of the answers allows
    numbers: Array = field(default_factory=lambda: np.zeros(0))  # the first that differ, not zero
    known: tuple[NoiseModel | None, NoiseModel] | None = None  # stated, and the noise by it

    def note(self, raw: Array) -> None:
        """Keeps the shape and the type of answers as they came, and the first few numbers."""
        self.scalar = raw.ndim == 1
        self.outputs = raw.size // len(raw)
        self.spent += len(raw)
        kind = noise_of_type(None, raw)
        if kind.relative > self.kind.relative:
            self.kind, self.known = kind, None
        if len(self.numbers) < A_FEW:
            numbers = np.append(self.numbers, raw.astype(np.float64))
            self.numbers, self.known = np.unique(numbers[numbers != 0]), None

    def recognise_noise(self, stated: NoiseModel | None) -> NoiseModel:
        """The noise of the answers, at least what is stated; of its number format the shortest
        that holds the first numbers (a few of them, for 16 bits), unless that was stated."""
        if self.known is None or self.known[0] is not stated:
            noise = self.kind if stated is None else stated
            if noise.relative < self.kind.relative:
                noise = replace(noise, relative=self.kind.relative)
            by_format = recognise_format(noise, self.numbers)
            telling = len(self.numbers) >= TELLING_ANSWERS or not by_format.half
            no_finer = stated is None or by_format.relative >= stated.relative
            self.known = stated, by_format if telling and no_finer else noise
        return self.known[1]


@dataclass(frozen=True, eq=False)
class Asker:
    """The one way in which learners ask a box.

    Args:
        oracle: The box.
        offset: What is subtracted from its answers, once that is known.
        rounding: Whether tokens are rounded to the number format of the box before they are sent.
        recording: Whether queries and answers are kept, for a fit to all of them.
        transcript: What was seen of the answers, shared by the askers of one box.

    Example:
        >>> from keyhole.oracles.function import FunctionOracle
        >>> ask = Asker(FunctionOracle(lambda tokens: tokens.sum(axis=(1, 2)), Spec(width=3)))
        >>> ask(np.ones((2, 4, 3)), "values"), ask.scalar
        (array([[12.],
               [12.]]), True)
    """

    oracle: Oracle
    offset: Float[Array, " outputs"] | float = 0.0
    rounding: bool = False
    recording: bool = False
    transcript: Transcript = field(default_factory=Transcript)

    def subtracting(self, offset: Float[Array, " outputs"] | float) -> "Asker":
        """The same box, answers less `offset`."""
        return replace(self, offset=offset)

    def recording_anew(self) -> "Asker":
        """The same box, whose queries and answers are kept from now on, apart from earlier ones."""
        return replace(self, recording=True, transcript=replace(self.transcript, queries=[]))

    @property
    def width(self) -> int:
        return self.oracle.spec.width

    @property
    def outputs(self) -> int:
        """Numbers in an answer; 1 before the first one."""
        return self.transcript.outputs

    @property
    def scalar(self) -> bool:
        """Whether answers are single numbers."""
        return bool(self.transcript.scalar)

    @property
    def spent(self) -> int:
        """Queries that were answered so far."""
        return self.transcript.spent

    def as_answered(self, row: Float[Array, " outputs"]) -> Array:
        """A row in the shape of the box's own answers: a number where these are numbers."""
        return np.asarray(row[0]) if self.scalar else row

    def __call__(
        self, tokens: Float[Array, "n length d"], purpose: str
    ) -> Float[Array, "n outputs"]:
        """Answers to these sequences, as rows of float64 less the offset."""
        if not len(tokens):
            return np.zeros((0, self.outputs))
        if self.rounding:
            tokens = self.representable(tokens)
        rows = self.send(QueryBatch.of(tokens, purpose))
        if self.recording:
            self.transcript.queries.append((tokens, rows))
        return rows - self.offset

    def send(self, queries: QueryBatch) -> Float[Array, "n outputs"]:
        """Answers to queries that were put together elsewhere, as rows of float64 as they came: not
        rounded, not recorded, no offset subtracted."""
        raw = np.asarray(self.oracle.ask(queries))
        self.transcript.note(raw)
        return raw.astype(np.float64).reshape(len(raw), -1)

    def points(self, points: Float[Array, "n d"], purpose: str) -> Float[Array, "n outputs"]:
        """Answers to sequences of one token each."""
        return self(points[:, None, :], purpose)

    def pairs(
        self, longest: float = np.inf
    ) -> list[tuple[Float[Array, "n length d"], Float[Array, "n outputs"]]]:
        """The recorded queries of up to so many tokens with their answers as they came (no offset
        is subtracted), joined where they are of one length, short ones first."""
        kept = [pair for pair in self.transcript.queries if pair[0].shape[1] <= longest]
        joined = []
        for length in sorted({tokens.shape[1] for tokens, _ in kept}):
            alike = [pair for pair in kept if pair[0].shape[1] == length]
            tokens, answers = zip(*alike, strict=True)
            joined.append((np.concatenate(tokens), np.concatenate(answers)))
        return joined

    @property
    def kind(self) -> NoiseModel:
        """What the type of the answers allows, before any number was looked at."""
        return self.transcript.kind

    @property
    def noise(self) -> NoiseModel:
        """How exact the answers are: as stated, or by the number format of the first ones."""
        stated = self.oracle.spec.precision
        if self.transcript.scalar is None:
            return stated or NoiseModel()
        return self.transcript.recognise_noise(stated)

    def representable(self, tokens: Array) -> Array:
        """Tokens as the box sees them, rounded to the numbers that it takes."""
        return round_to_format(tokens, self.noise.token_roundoff)

    @property
    def unit(self) -> float:
        """Relative rounding error of an answer."""
        return max(self.noise.relative, UNIT_ROUNDOFF)

    @property
    def additive(self) -> float:
        """Standard deviation of the error of an answer that does not scale with it."""
        return self.noise.error_floor

    @property
    def error(self) -> float:
        """Standard error of an answer of size one, as answers behind a norm are."""
        return max(self.unit, self.additive)

    def affords(self, amplification: float) -> bool:
        """Whether an algorithm leaves its parameters as exact as ACCURACY, or more queries are
        worth their price.

        Args:
            amplification: Relative errors of its parameters, in those of the answers.
        """
        return amplification * self.unit <= ACCURACY

    @property
    def undetected(self) -> float:
        """Answers up to this size may be nothing but noise that does not scale with them."""
        return DETECTION * self.additive


def round_to_format(numbers: Array, unit: float) -> Array:
    """The nearest numbers with so many bits that half their last one is `unit`, relatively."""
    if unit <= UNIT_ROUNDOFF:
        return numbers
    mantissa, exponent = np.frexp(numbers)
    bits = round(-np.log2(unit))
    return np.asarray(np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits))
