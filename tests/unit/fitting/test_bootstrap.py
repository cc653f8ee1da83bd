"""Standard errors by repetition."""

import numpy as np

from keyhole.fitting.bootstrap import bootstrap_errors, smooth_errors


def test_the_scatter_of_repetitions_is_the_standard_error() -> None:
    rng = np.random.default_rng(0)
    best = [np.ones((2, 40, 40)), np.zeros((1, 300))]
    levels = [np.array([1.0, 3.0])[:, None, None], 0.1]

    def repeat() -> list[np.ndarray]:
        return [b + s * rng.standard_normal(b.shape) for b, s in zip(best, levels, strict=True)]

    first, second = bootstrap_errors(best, repeat, 6)
    assert first.shape == (2, 40, 40)
    np.testing.assert_allclose([first[0].min(), first[1].min()], [1.0, 3.0], rtol=0.05)
    np.testing.assert_allclose(second.min(), 0.1, rtol=0.1)


def test_a_failed_repetition_leaves_nothing_known() -> None:
    (errors,) = bootstrap_errors([np.zeros((1, 2))], lambda: [np.array([[np.nan, 0.0]])], 3)
    assert np.isinf(errors).all()


def test_smoothing_raises_small_errors_to_their_block() -> None:
    smooth = smooth_errors(np.array([[0.0, 2.0], [5.0, 5.0]]))
    np.testing.assert_allclose(smooth, [[np.sqrt(2.0), 2.0], [5.0, 5.0]])
