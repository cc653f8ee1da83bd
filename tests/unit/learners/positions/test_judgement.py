"""What is read from a fit to all answers before it is judged."""

import numpy as np

from keyhole.learners.positions.judgement import name_frequencies
from keyhole.oracles.noise import NoiseModel


def disturbed(frequencies: np.ndarray, size: float, seed: int) -> np.ndarray:
    """Rates of four heads, each off by this much."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((2, 4, len(frequencies)))
    return np.asarray(1j * frequencies + size * (noise[0] + 1j * noise[1]))


def test_a_law_is_named_with_the_fewest_digits_that_explain_all_heads() -> None:
    for seed, base in enumerate((1e4, 5e5, 1e6, 1.23e4)):
        law = base ** (-np.arange(8) / 8)
        found = name_frequencies(disturbed(law, 1e-9, seed), NoiseModel())
        assert np.allclose(found, law, rtol=1e-12)


def test_another_list_is_the_mean_over_heads() -> None:
    free = np.array([0.9, 0.5, 0.4, 0.1])
    found = name_frequencies(disturbed(free, 1e-7, 0), NoiseModel())
    assert np.allclose(found, free, atol=1e-6)
    assert not np.allclose(found, free, rtol=1e-12)
