"""What faults do to weights and rows."""

import numpy as np
import torch

from keyhole.diagnosis.reference import open_reference
from keyhole.diagnosis.simulate import Bench, Inputs
from keyhole.diagnosis.transformations import (
    ROUNDINGS,
    cut_rows,
    put_around,
    round_asymmetric,
    round_symmetric,
    take_off,
)
from suspects import small_llama

MATRIX = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def test_roundings_keep_few_values_and_are_close() -> None:
    for name, rounding in ROUNDINGS.items():
        rounded = rounding(MATRIX)
        assert rounded.shape == MATRIX.shape
        gap = float((rounded - MATRIX).norm() / MATRIX.norm())
        assert 1e-4 < gap < (0.2 if "4" in name else 0.05), name
        assert torch.allclose(rounding(rounded), rounded, atol=0.02), name


def test_levels_are_counted() -> None:
    assert len(round_symmetric(MATRIX, 4, None, False).unique()) <= 16
    assert len(round_asymmetric(MATRIX, 4, None).unique()) <= 16
    row = round_symmetric(MATRIX, 8, None, True)[0]
    assert len(row.unique()) <= 256


def fed(change, rows):
    bench = Bench(open_reference(small_llama()))
    change(bench)
    inputs = Inputs([np.array(row) for row in rows])
    for each in bench._inputs:
        each(inputs)
    return [row.tolist() for row in inputs.rows]


def test_rows_are_framed_stripped_and_cut() -> None:
    assert fed(lambda b: put_around(b, (1,), (2, 3)), [[7, 8]]) == [[1, 7, 8, 2, 3]]
    assert fed(lambda b: take_off(b, 1, 1), [[7, 8, 9], [5]]) == [[8], [5]]
    assert fed(lambda b: cut_rows(b, 2), [[7, 8, 9]]) == [[7, 8]]
    assert fed(lambda b: cut_rows(b, 2, left=True), [[7, 8, 9]]) == [[8, 9]]
    assert fed(lambda b: cut_rows(b, 3, (1, 1)), [[1, 7, 8, 9, 2]]) == [[1, 7, 2]]
