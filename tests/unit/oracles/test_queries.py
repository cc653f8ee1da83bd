import numpy as np
import pytest

from keyhole.oracles.queries import (
    ArrayBank,
    ProbeAnchorBank,
    QueryBatch,
    ScaledBank,
    SumBank,
    TokenBank,
)

RNG = np.random.default_rng(0)
A, B = RNG.standard_normal((4, 3)), RNG.standard_normal((5, 3))


def banks() -> dict[str, tuple[TokenBank, np.ndarray]]:
    """Each bank with the plain table it describes."""
    a, b = ArrayBank(A), ArrayBank(B)
    sums = (A[:, None] + B[None]).reshape(-1, 3)
    return {
        "listed": (a, A),
        "scaled": (ScaledBank(a, -2.5), -2.5 * A),
        "summed": (SumBank(a, b, 5), sums),
        "against": (ProbeAnchorBank(a, b, 4, 5), np.concatenate([sums, B])),
        "nested": (
            ProbeAnchorBank(ScaledBank(a, 0.5), ScaledBank(b, 3.0), 4, 5),
            np.concatenate([(0.5 * A[:, None] + 3.0 * B).reshape(-1, 3), 3.0 * B]),
        ),
    }


@pytest.mark.parametrize("name", banks())
def test_a_bank_describes_its_table(name: str) -> None:
    bank, table = banks()[name]
    assert isinstance(bank, TokenBank)
    assert bank.width == 3
    index = RNG.integers(len(table), size=50)
    np.testing.assert_array_equal(bank.rows(index), table[index])
    assert bank.rows(np.zeros(0, dtype=np.int64)).shape == (0, 3)


@pytest.mark.parametrize("name", banks())
def test_rows_are_the_askers_own(name: str) -> None:
    bank, table = banks()[name]
    bank.rows(np.arange(len(table)))[:] = 7.0
    np.testing.assert_array_equal(bank.rows(np.arange(len(table))), table)


def test_digests_tell_banks_apart() -> None:
    a, b = ArrayBank(A), ArrayBank(B)
    different = [
        a,
        b,
        ScaledBank(a, 1.0),
        ScaledBank(a, 2.0),
        SumBank(a, b, 5),
        SumBank(b, a, 5),
        ProbeAnchorBank(a, b, 4, 5),
        ProbeAnchorBank(a, b, 3, 5),
    ]
    assert len({bank.digest() for bank in different}) == len(different)
    assert ArrayBank(A.copy()).digest() == a.digest()


@pytest.mark.parametrize("width", [3, 2**16])  # in one part, and token by token
@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("order", ["anchor by anchor", "probe by probe", "with gaps", "at random"])
def test_probes_against_anchors_are_their_tokens(width: int, places: int, order: str) -> None:
    rng, anchors, groups = np.random.default_rng(1), 3, 40 if width < 100 else 4
    probe_table = rng.standard_normal((groups * places, width))
    anchor_table = rng.standard_normal((anchors, width))
    anchor, group = np.divmod(np.arange(anchors * groups), groups)
    if order == "probe by probe":
        group, anchor = np.divmod(np.arange(anchors * groups), anchors)
    elif order == "with gaps":
        anchor, group = np.delete(anchor, [2, 5]), np.delete(group, [2, 5])
    elif order == "at random":
        mixed = rng.permutation(len(anchor))
        anchor, group = anchor[mixed], group[mixed]
    probe = group[:, None] * places + np.arange(places)
    last = groups * places * anchors + anchor
    index = np.column_stack([probe * anchors + anchor[:, None], last])
    bank = ProbeAnchorBank(
        ArrayBank(probe_table), ArrayBank(anchor_table), groups * places, anchors
    )
    own = anchor_table[anchor][:, None]
    expected = np.concatenate([probe_table[probe] + own, own], axis=1)
    np.testing.assert_array_equal(QueryBatch(bank, index, "score").tokens(), expected)
    np.testing.assert_array_equal(bank.rows(index.ravel()), expected.reshape(-1, width))


def test_queries_are_their_tokens() -> None:
    tokens = RNG.standard_normal((6, 2, 3))
    queries = QueryBatch.of(tokens, "value")
    assert (len(queries), queries.length, queries.width) == (6, 2, 3)
    np.testing.assert_array_equal(queries.tokens(), tokens)
    np.testing.assert_array_equal(queries[2:4].tokens(), tokens[2:4])
    assert queries[2:4].purpose == "value"
    assert len(queries[6:]) == 0
    assert queries[6:].tokens().shape == (0, 2, 3)


def test_a_transposed_array_of_tokens_is_read_right() -> None:
    tokens = RNG.standard_normal((3, 2, 6)).T
    np.testing.assert_array_equal(QueryBatch.of(tokens, "").tokens(), tokens)


def test_digests_name_queries_and_their_order() -> None:
    queries = QueryBatch.of(RNG.standard_normal((6, 2, 3)), "value")
    names = {
        queries.digest(),
        queries[:3].digest(),
        queries[3:].digest(),
        queries[::-1].digest(),
        QueryBatch(queries.bank, queries.index.reshape(4, 3), "value").digest(),
    }
    assert len(names) == 5
    again = QueryBatch(queries.bank, queries.index.astype(np.int32), "other purpose")
    assert again.digest() == queries.digest()


def test_shared_tokens_are_the_same_and_lie_where_they_lay() -> None:
    tokens = np.random.default_rng(0).standard_normal((6, 3, 4))
    queries = QueryBatch.of(tokens, "test")
    for part in (queries, queries[2:5], QueryBatch(queries.bank, queries.index[::2], "x")):
        np.testing.assert_array_equal(part.shared_tokens(), part.tokens())
    assert np.shares_memory(queries[2:5].shared_tokens(), tokens)
    assert not np.shares_memory(queries[2:5].tokens(), tokens)
    assert queries[:0].shared_tokens().shape == (0, 3, 4)
