"""Rows of a visit."""

import numpy as np

from keyhole.diagnosis.probes import RowMaker, first_calls, fresh_calls, long_lengths
from keyhole.diagnosis.reference import open_reference
from sentence_folders import write_sentence
from suspects import small_llama


def test_a_visit_begins_with_thirteen_rows(tmp_path) -> None:
    reference = open_reference(f"hf:{write_sentence(tmp_path / 'm')}")
    maker = RowMaker(reference, np.random.default_rng(0))
    calls = first_calls(maker)
    assert sum(len(call.rows) for call in calls) == 13
    rows = [row for call in calls for row in call.rows]
    assert np.array_equal(calls[0].rows[0], calls[1].rows[0])
    for row in rows:
        inner = row[1:-1] if len(row) >= 3 else row
        assert not set(inner.tolist()) & reference.forbidden
        if len(row) >= 3:
            assert (row[0], row[-1]) == (2, 3)
    assert sum(len(call.rows) for call in fresh_calls(maker)) == 3
    assert all(length <= 48 for length in long_lengths(reference))


def test_texts_are_never_shorter_than_their_frame(tmp_path) -> None:
    reference = open_reference(f"hf:{write_sentence(tmp_path / 'm')}")
    row = RowMaker(reference, np.random.default_rng(0), {7: "d"}).make(1)
    assert row.tolist() == [2, 7, 3]


def test_the_same_generator_makes_the_same_rows() -> None:
    reference = open_reference(small_llama())
    rows = [RowMaker(reference, np.random.default_rng(3)).make(9).tolist() for _ in range(2)]
    assert rows[0] == rows[1]
    assert long_lengths(reference) == [140, 254]
