"""The oracle as the block's algorithms see it: tokens in, rows of float64 out."""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
from keyhole.measurement.noise import noise_of_type, recognise_format
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch

ANSWER = {"answer": True}  # metadata of fields, in the record of a run, that hold answers


class NotThisBlock(Exception):
    """The answers contradict the form of block that an algorithm assumes."""


class OtherShape(NotThisBlock):
    """Answers of another shape than a block's: no choice of parameters helps."""


class Unclear(Exception):
    """An algorithm came to no result; the box may still be of the form it assumes."""


@dataclass
class Box:
    """An oracle with vector answers, and the noise that its number format has."""

    oracle: Oracle
    noise: NoiseModel = field(default_factory=NoiseModel)
    answered: bool = False

    @property
    def width(self) -> int:
        return self.oracle.spec.width

    @property
    def unit(self) -> float:
        """Relative error of an answer."""
        return max(self.noise.relative, self.noise.error_floor)

    @property
    def coarse(self) -> bool:
        """Whether the box computes in single precision, or less."""
        return self.unit >= 1e-12

    def representable(self, tokens: Array) -> Array:
        """Tokens as the box sees them: a box in single precision rounds what it is given."""
        if self.noise.relative > UNIT_ROUNDOFF:
            return np.asarray(tokens.astype(np.float32), dtype=np.float64)
        return tokens

    def ask(self, tokens: Float[Array, "n length d"], purpose: str) -> Float[Array, "n d"]:
        raw = np.asarray(self.oracle.ask(QueryBatch.of(self.representable(tokens), purpose)))
        if raw.ndim != 2 or raw.shape[1] != self.width:
            raise OtherShape(
                f"a block answers with a vector of its width {self.width}, got answers of shape "
                f"{raw.shape[1:]}"
            )
        if not self.answered:
            self.noise = recognise_format(noise_of_type(self.oracle.spec.precision, raw), raw)
            self.answered = True
        return raw.astype(np.float64)


@dataclass(eq=False)
class Paid(Wrapper):
    """Remembers all queries of up to so many tokens with their answers, those of attempts that
    failed among them: a refinement uses them again."""

    inner: Oracle
    longest: int
    batches: list[tuple[Array, Array]] = field(default_factory=list)

    def ask(self, queries: QueryBatch) -> Array:
        answers = np.asarray(self.inner.ask(queries))
        if queries.length <= self.longest:
            self.batches.append((queries.tokens(), answers.astype(np.float64)))
        return answers

    def pairs(self) -> list[tuple[Float[Array, "n length d"], Float[Array, "n d"]]]:
        """Queries and answers, by the length of the queries."""
        found = []
        for length in sorted({tokens.shape[1] for tokens, _ in self.batches}):
            alike = [pair for pair in self.batches if pair[0].shape[1] == length]
            tokens, answers = zip(*alike, strict=True)
            found.append((np.concatenate(tokens), np.concatenate(answers)))
        return found

    def singles_apart(self, largest: float) -> tuple[Float[Array, "n 1 d"], Float[Array, "n d"]]:
        """Single tokens up to this size that do not lie beside an earlier one."""
        tokens, answers = self.pairs()[0]
        points = tokens[:, 0]
        sizes = np.linalg.norm(points, axis=1)
        kept: list[int] = []
        for i in np.flatnonzero(np.abs(points).max(axis=1) < largest):
            gaps = np.linalg.norm(points[kept] - points[i], axis=1)
            if not kept or (gaps > 0.1 * sizes[i]).all():
                kept.append(int(i))
        return tokens[kept], answers[kept]
