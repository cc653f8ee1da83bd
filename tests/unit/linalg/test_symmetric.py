"""Symmetric matrices as vectors: the way back, and inner products."""

import numpy as np

from keyhole.linalg.symmetric import flat, unflat


def test_vectors_have_the_inner_products_of_their_matrices() -> None:
    rng = np.random.default_rng(0)
    matrices = rng.standard_normal((3, 4, 4))
    matrices = matrices + matrices.transpose(0, 2, 1)
    vectors = flat(matrices)
    assert vectors.shape == (3, 10)
    np.testing.assert_allclose(unflat(vectors, 4), matrices, atol=1e-14)
    traces = np.einsum("aij,bij->ab", matrices, matrices)
    np.testing.assert_allclose(vectors @ vectors.T, traces, atol=1e-12)
