from typing import Any

import numpy as np
import pytest

from keyhole.errors import OracleError
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.queries import QueryBatch

TOKENS = np.arange(12.0).reshape(3, 2, 2)


def test_the_function_is_asked_with_the_tokens() -> None:
    box = FunctionOracle(lambda tokens: tokens.sum(axis=(1, 2)), Spec(2))
    np.testing.assert_array_equal(box.ask(QueryBatch.of(TOKENS, "")), TOKENS.sum(axis=(1, 2)))


def test_lists_are_answers_too() -> None:
    box = FunctionOracle(lambda tokens: [[1, 2]] * len(tokens), Spec(2))
    assert box.ask(QueryBatch.of(TOKENS, "")).shape == (3, 2)


def test_what_the_function_raises_becomes_an_oracle_error() -> None:
    def broken(tokens: np.ndarray) -> Any:
        raise RuntimeError("out of ink")

    with pytest.raises(OracleError, match="RuntimeError on 3 queries of length 2: out of ink"):
        FunctionOracle(broken, Spec(2)).ask(QueryBatch.of(TOKENS, ""))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_not_the_boxs_fault_passes(kind: type[BaseException]) -> None:
    def stopped(tokens: np.ndarray) -> Any:
        raise kind

    with pytest.raises(kind):
        FunctionOracle(stopped, Spec(2)).ask(QueryBatch.of(TOKENS, ""))
