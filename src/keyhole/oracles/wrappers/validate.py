"""The border: no query leaves the domain, no malformed answer comes in."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.base import Oracle, Spec, Wrapper
from keyhole.oracles.queries import QueryBatch

LAST_ALONE = (
    "If it answers at every position, let it return the last one alone: "
    "lambda tokens: box(tokens)[:, -1]"
)


@dataclass(frozen=True, eq=False)
class Validator(Wrapper):
    """Checks every query against the domain and every answer for shape, kind and finiteness."""

    inner: Oracle
    _seen: dict[tuple[int, ...], int] = field(default_factory=dict, init=False, repr=False)

    def ask(self, queries: QueryBatch) -> Array:
        self._admit(queries)
        return self._checked(self.inner.ask(queries), len(queries), queries.length)

    def stream(self, queries: QueryBatch) -> Iterator[tuple[int, Array]]:
        """The same part by part, as they arrive, where the box answers in parts."""
        self._admit(queries)
        parts = getattr(self.inner, "stream", None)
        if parts is None:
            yield 0, self._checked(self.inner.ask(queries), len(queries), queries.length)
            return
        for start, answers in parts(queries):
            yield start, self._checked(answers, len(answers), queries.length)

    def _checked(self, answers: Any, count: int, length: int) -> Array:
        """The answers, of one shape for all lengths: a box that answers at every position of a
        sequence would otherwise pass for one with as many outputs."""
        if self._as_before(answers, count):
            return np.asarray(answers)
        checked = checked_answers(np.asarray(answers), count, self.spec)
        self._seen.setdefault(checked.shape[1:], length)
        if len(self._seen) > 1:
            before, after = list(self._seen.items())[:2]
            raise OracleError(
                f"the box answers sequences of length {before[1]} with {described(before[0])} and "
                f"of length {after[1]} with {described(after[0])}. {LAST_ALONE}"
            )
        return checked

    def _as_before(self, answers: Any, count: int) -> bool:
        """Whether these are numbers of the one shape that was seen: most requests need no more."""
        known = isinstance(answers, np.ndarray) and answers.dtype == np.float64
        same = known and len(self._seen) == 1 and answers.shape[1:] in self._seen
        return bool(same and len(answers) == count and np.isfinite(answers).all())

    def _admit(self, queries: QueryBatch) -> None:
        spec = self.spec
        if queries.width != spec.width:
            raise InvalidArgument(f"queries of width {queries.width}, box of {spec.width}")
        if not (spec.domain.unbounded and spec.domain.max_length is None):
            spec.domain.check(queries.tokens())


def described(shape: tuple[int, ...]) -> str:
    """The part of an answer's shape that belongs to one query, in words."""
    return f"{shape[0]} numbers" if shape else "one number"


def checked_answers(answers: Array, count: int, spec: Spec) -> Array:
    """The answers as floats, or an OracleError that says what is wrong with them."""
    if answers.dtype == object and answers.ndim == 0:
        raise OracleError(f"the box answered {answers.item()!r}: it must return its answers")
    if answers.dtype.kind not in "fiub":
        raise OracleError(
            f"the box answered with dtype {answers.dtype}; real numbers are needed "
            "(detach and convert inside the function)"
        )
    if answers.ndim not in (1, 2):
        raise OracleError(
            f"the box answered with shape {answers.shape}; expected ({count},) or ({count}, "
            f"outputs). {LAST_ALONE}"
        )
    if answers.shape[0] != count:
        raise OracleError(f"the box gave {answers.shape[0]} answers to {count} queries")
    outputs = answers.shape[1] if answers.ndim == 2 else None
    if outputs == 0:
        raise OracleError(f"the box answered with shape {answers.shape}: no number in an answer")
    if spec.outputs is not None and outputs != spec.outputs:
        raise OracleError(f"the box gave {outputs} outputs, its spec says {spec.outputs}")
    if answers.dtype.kind != "f":
        answers = answers.astype(np.float64)
    finite = np.isfinite(answers)
    if not finite.all():
        bad = int(np.argmin(finite.reshape(count, -1).all(axis=1)))
        raise OracleError(
            f"the box answered {answers[bad]} (not finite) to query {bad} of {count} in the "
            "batch; restrict the domain (max_norm=, max_length=) if inputs this large overflow"
        )
    return answers
