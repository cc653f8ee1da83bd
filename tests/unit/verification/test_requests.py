"""Fresh rows: the right number, within the limits, of every kind, and the same for one seed."""

import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.verification.requests import AGAIN, ALONE, BESIDE, EQUAL, MANY, RowDesigner


def drawn(seed=0, rows=59, **options):
    return list(RowDesigner(np.random.default_rng(seed), **options).stream(rows))


@pytest.mark.parametrize("rows", [1, 7, 59])
def test_there_are_as_many_rows_as_asked_for(rows):
    assert sum(len(request.rows) for request in drawn(rows=rows, tokens=50)) == rows


def test_rows_stay_within_vocabulary_and_length():
    requests = drawn(tokens=50, longest=20, reserved=frozenset({0, 7}))
    rows = [row for request in requests for row in request.rows]
    assert max(map(len, rows)) == 20
    assert min(map(len, rows)) == 1
    used = set(np.concatenate(rows).tolist())
    assert used <= set(range(50)) - {0, 7}


def test_every_kind_is_drawn_as_it_says():
    requests = drawn(tokens=500)
    kinds = {request.reason for request in requests}
    assert {ALONE, BESIDE, EQUAL, MANY, AGAIN} <= kinds
    for request in requests[:-1]:
        lengths = [len(row) for row in request.rows]
        if request.reason == BESIDE:
            assert lengths[0] < lengths[1]
        if request.reason == EQUAL:
            assert len(set(lengths)) == 1
        if request.reason == AGAIN:
            assert len(set(request.rows[0].tolist())) == 1


def test_texts_have_what_tokenizers_differ_in():
    texts = [row for request in drawn() for row in request.rows]
    assert all(isinstance(text, str) and text for text in texts)
    assert any(not text.isascii() for text in texts)
    assert any(text.isupper() for text in texts)


def test_the_same_seed_asks_the_same():
    one, two, other = (drawn(seed) for seed in (3, 3, 4))
    assert [r.rows for r in one] == [r.rows for r in two]
    assert [r.rows for r in one] != [r.rows for r in other]


def test_a_vocabulary_of_nothing_is_refused():
    with pytest.raises(InvalidArgument, match="fewer than two"):
        RowDesigner(np.random.default_rng(0), 3, reserved=frozenset({0, 1}))
