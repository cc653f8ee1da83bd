"""Boxes of rows: functions with and without a mask, oracles of vectors."""

import numpy as np
import pytest

from keyhole.errors import InvalidArgument, OracleError
from keyhole.models.random import attention
from keyhole.oracles.open import open_oracle
from keyhole.oracles.rows import CallableRows, OracleRows, check_row_answers, kind_of_row, pad_rows

TABLE = np.random.default_rng(0).standard_normal((20, 3))
ROWS = [np.array([4, 2]), np.array([1, 2, 3]), np.array([9, 9])]


def test_rows_are_padded_at_the_end():
    tokens, mask = pad_rows(ROWS, padding=7)
    assert tokens.tolist() == [[4, 2, 7], [1, 2, 3], [9, 9, 7]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 0]]


def test_a_function_with_a_mask_is_asked_once():
    shapes = []

    def embed(tokens, attention_mask=None):
        shapes.append(tokens.shape)
        return (TABLE[tokens] * attention_mask[:, :, None]).sum(axis=1)

    answers = CallableRows(embed).ask(ROWS)
    assert shapes == [(3, 3)]
    np.testing.assert_allclose(answers, [TABLE[row].sum(axis=0) for row in ROWS])


def test_a_function_without_a_mask_is_asked_by_length():
    shapes = []

    def embed(tokens):
        shapes.append(tokens.shape)
        return TABLE[tokens].sum(axis=1)

    answers = CallableRows(embed).ask(ROWS)
    assert shapes == [(2, 2), (1, 3)]
    np.testing.assert_allclose(answers, [TABLE[row].sum(axis=0) for row in ROWS])


def test_an_oracle_of_vectors_answers_rows_of_different_lengths():
    rng = np.random.default_rng(1)
    model = attention(rng, 5)
    rows = [rng.standard_normal((length, 5)) for length in (2, 4, 2)]
    box = OracleRows(open_oracle(model))
    assert box.spec.takes == ("vectors",)
    expected = [model(row[None])[0] for row in rows]
    np.testing.assert_allclose(box.ask(rows)[:, 0], expected, rtol=1e-12)


def test_what_a_box_raises_and_answers_wrongly_is_said():
    def broken(tokens, attention_mask):
        raise RuntimeError("index out of range")

    with pytest.raises(OracleError, match="RuntimeError on token numbers of shape"):
        CallableRows(broken).ask(ROWS)
    with pytest.raises(OracleError, match="expected"):
        check_row_answers(np.zeros((2, 3, 4)), 2, "box")
    with pytest.raises(OracleError, match="not finite"):
        check_row_answers(np.array([[np.nan]]), 1, "box")
    with pytest.raises(InvalidArgument, match="a row is"):
        kind_of_row(np.zeros(3))
