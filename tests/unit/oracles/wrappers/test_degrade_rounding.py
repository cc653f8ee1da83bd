from typing import Any

import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.degrade import Rounded, round_bits

BOX = open_oracle(lambda tokens: tokens[:, 0, 0], width=1)


def rounded(numbers: list[float], **how: Any) -> np.ndarray:
    return Rounded(BOX, **how).ask(QueryBatch.of(np.array(numbers).reshape(-1, 1, 1), ""))


def test_decimals() -> None:
    np.testing.assert_array_equal(rounded([1.234, -0.056, 7.0], decimals=1), [1.2, -0.1, 7.0])
    np.testing.assert_array_equal(rounded([1234.0], decimals=-2), [1200.0])


def test_24_bits_are_float32() -> None:
    numbers = (
        np.random.default_rng(0).standard_normal(1000)
        * 10.0 ** np.arange(-15, 15).repeat(34)[:1000]
    )
    expected = numbers.astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(rounded(list(numbers), bits=24), expected)
    np.testing.assert_array_equal(round_bits(numbers, 53), numbers)


def test_bits_round_ties_to_even_and_keep_zero() -> None:
    np.testing.assert_array_equal(round_bits(np.array([0.0, 5.0, 7.0, -9.0]), 2), [0, 4, 8, -8])


@pytest.mark.parametrize("how", [{}, {"decimals": 1, "bits": 2}, {"bits": 0}, {"bits": 54}])
def test_nonsense_is_refused(how: Any) -> None:
    with pytest.raises(InvalidArgument):
        Rounded(BOX, **how)
