import numpy as np
import pytest

from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.batch import CHUNK_BYTES, CHUNK_QUERIES, Batcher

WIDTH = 4


def box(sizes: list[int]) -> FunctionOracle:
    def first_entries(tokens: np.ndarray) -> np.ndarray:
        sizes.append(len(tokens))
        return tokens[:, 0, 0]

    return FunctionOracle(first_entries, Spec(WIDTH))


def queries(count: int, length: int = 1) -> QueryBatch:
    return QueryBatch.of(
        np.arange(1.0 * count * length * WIDTH).reshape(count, length, WIDTH), "value"
    )


def test_answers_come_back_whole_and_in_order() -> None:
    sizes: list[int] = []
    answers = Batcher(box(sizes), chunk_queries=3).ask(queries(10))
    np.testing.assert_array_equal(answers, WIDTH * np.arange(10.0))
    assert sizes == [3, 3, 3, 1]


def test_a_chunk_fits_the_memory_and_holds_one_query_at_least() -> None:
    sizes: list[int] = []
    Batcher(box(sizes), chunk_bytes=2 * 8 * 5 * WIDTH).ask(queries(7, length=5))
    assert sizes == [2, 2, 2, 1]
    assert Batcher(box([]), chunk_bytes=1).chunk(queries(2)) == 1
    plain = Batcher(box([]))
    assert plain.chunk(queries(1)) == CHUNK_QUERIES
    long = plain.chunk(queries(1, length=5000))
    assert long * 8 * 5000 * WIDTH <= CHUNK_BYTES < (long + 1) * 8 * 5000 * WIDTH


def test_no_queries_no_answers() -> None:
    sizes: list[int] = []
    assert len(Batcher(box(sizes)).ask(queries(0))) == 0
    assert sizes == []


def test_a_box_that_changes_the_shape_of_its_answers_is_caught() -> None:
    def moody(tokens: np.ndarray) -> np.ndarray:
        return tokens[:, 0] if tokens[0, 0, 0] else tokens[:, 0, 0]

    with pytest.raises(OracleError, match="changed the shape"):
        Batcher(FunctionOracle(moody, Spec(WIDTH)), chunk_queries=2).ask(queries(4))


def test_chunks_must_hold_something() -> None:
    with pytest.raises(InvalidArgument):
        Batcher(box([]), chunk_queries=0)
    with pytest.raises(InvalidArgument):
        Batcher(box([]), chunk_bytes=0)
