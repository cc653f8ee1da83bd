import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.degrade import Noisy

BOX = open_oracle(lambda tokens: 100.0 * tokens[:, 0, 0], width=1)
QUERIES = QueryBatch.of(np.repeat([1.0, -2.0], 4000).reshape(-1, 1, 1), "")


def deviations(**noise: float) -> np.ndarray:
    return Noisy(BOX, **noise).ask(QUERIES) - BOX.ask(QUERIES)  # type: ignore[arg-type]


def test_noise_has_the_level_asked_for() -> None:
    small, large = np.split(deviations(additive=0.5), 2)
    assert np.std(small) == pytest.approx(0.5, rel=0.05)
    assert np.std(large) == pytest.approx(0.5, rel=0.05)
    small, large = np.split(deviations(relative=0.01), 2)
    assert np.std(small) == pytest.approx(1.0, rel=0.05)
    assert np.std(large) == pytest.approx(2.0, rel=0.05)
    assert abs(np.mean(deviations(additive=1.0))) < 0.05


def test_the_seed_names_the_noise() -> None:
    assert np.array_equal(deviations(additive=1.0, seed=3), deviations(additive=1.0, seed=3))
    assert not np.array_equal(deviations(additive=1.0, seed=3), deviations(additive=1.0, seed=4))
    noisy = Noisy(BOX, additive=1.0)
    assert not np.array_equal(noisy.ask(QUERIES), noisy.ask(QUERIES))


def test_noise_of_zero_changes_nothing_and_below_zero_is_refused() -> None:
    assert not deviations().any()
    for level in ({"additive": -1.0}, {"relative": -1.0}):
        with pytest.raises(InvalidArgument):
            Noisy(BOX, **level)  # type: ignore[arg-type]
