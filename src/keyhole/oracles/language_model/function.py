"""A Python callable on token numbers as an oracle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array, Int
from keyhole.errors import OracleError
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.language_model.answers import check_sums
from keyhole.oracles.queries import QueryBatch


def token_numbers(queries: QueryBatch) -> Int[Array, "n length"]:
    """The queries as numbers of tokens."""
    return queries.tokens()[:, :, 0].astype(np.int64)


@dataclass(frozen=True, eq=False)
class TokenFunction(Oracle):
    """Asks `function(numbers)` of shape (batch, length); whatever it raises becomes an
    `OracleError`."""

    function: Callable[[Array], Any]
    spec: Spec
    asked: int = 0  # queries while it was opened

    @property
    def opening_queries(self) -> int:
        return self.asked

    def ask(self, queries: QueryBatch) -> Array:
        answers = call(self.function, token_numbers(queries))
        if self.spec.answers == "logprobs" and answers.ndim == 2 and answers.dtype.kind == "f":
            check_sums(answers)
        return answers


def call(function: Callable[[Array], Any], numbers: Int[Array, "n length"]) -> Array:
    """What the function answers to these prompts."""
    try:
        return np.asarray(function(numbers))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except Exception as error:
        raise OracleError(
            f"the box raised {type(error).__name__} on {len(numbers)} prompts of "
            f"{numbers.shape[1]} tokens: {str(error).strip() or 'without a word'}"
        ) from error
