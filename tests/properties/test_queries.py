"""Slices of described queries are slices of their tokens, and digests tell them apart."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import ArrayBank, QueryBatch, ScaledBank, SumBank, TokenBank
from keyhole.oracles.wrappers.batch import Batcher

WIDTH = 2
SEEDS = st.integers(0, 99)
# a bank as plain data: a seed is a list of tokens, a pair or triple is made of others
plans = st.recursive(
    SEEDS,
    lambda inner: (
        st.tuples(inner, st.sampled_from([-2.0, 0.5])) | st.tuples(st.just("summed"), inner, inner)
    ),
    max_leaves=4,
)
batches = st.tuples(plans, st.integers(0, 9), st.integers(1, 3), SEEDS)


def built(plan: Any) -> tuple[TokenBank, np.ndarray]:
    """The bank, with the table it stands for."""
    if isinstance(plan, int):
        table = np.random.default_rng(plan).standard_normal((1 + plan % 4, WIDTH))
        return ArrayBank(table), table
    if len(plan) == 2:
        bank, table = built(plan[0])
        return ScaledBank(bank, plan[1]), table * plan[1]
    (bank, table), (other, rows) = built(plan[1]), built(plan[2])
    return SumBank(bank, other, len(rows)), (table[:, None] + rows).reshape(-1, WIDTH)


def asked(batch: Any) -> tuple[QueryBatch, np.ndarray]:
    plan, count, length, seed = batch
    bank, table = built(plan)
    index = np.random.default_rng(seed).integers(len(table), size=(count, length))
    return QueryBatch(bank, index, "value"), table[index]


@given(batches, st.slices(9))
def test_a_slice_of_queries_is_the_slice_of_their_tokens(batch: Any, part: slice) -> None:
    queries, tokens = asked(batch)
    np.testing.assert_array_equal(queries[part].tokens(), tokens[part])
    assert len(queries[part]) == len(tokens[part])


@given(batches, st.integers(1, 5))
def test_chunks_change_nothing(batch: Any, size: int) -> None:
    queries, tokens = asked(batch)
    box = open_oracle(lambda t: t.sum(axis=(1, 2)), width=WIDTH)
    answers = Batcher(box, chunk_queries=size).ask(queries)
    np.testing.assert_array_equal(answers, tokens.sum(axis=(1, 2)))


@given(batches, batches)
def test_equal_digests_mean_equal_tokens(one: Any, two: Any) -> None:
    first, second = asked(one), asked(two)
    if first[0].digest() == second[0].digest():
        np.testing.assert_array_equal(first[1], second[1])
    again = QueryBatch(first[0].bank, first[0].index.copy(), "another purpose")
    assert again.digest() == first[0].digest()
