"""Equations in several heads: what is still unexplored, splitting, and the solution."""

import numpy as np

from keyhole.linalg.linear_system import LinearSystem


def test_exploring_until_the_values_are_known() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 4, 2))
    origin = rng.standard_normal((3, 4))

    def answers(rows: np.ndarray) -> np.ndarray:
        return np.einsum("nhd,hdo->no", rows, values)

    shared = np.repeat(np.eye(4)[:, None], 3, axis=1)
    system = LinearSystem.of(shared, answers(shared)).add(origin[None], answers(origin[None]))
    missing = system.find_unexplored()
    assert len(missing) == 3 * 4 - 4 - 1
    rows = origin + 1e-3 * missing
    system = system.add(rows, answers(rows), origin)
    assert len(system.find_unexplored()) == 0
    found, inverse = system.solve()
    np.testing.assert_allclose(found, values, atol=1e-11)
    assert inverse.shape == (12, 12)


def test_a_split_head_inherits_its_rows() -> None:
    system = LinearSystem.of(np.arange(6.0).reshape(1, 2, 3), np.ones((1, 1)))
    split = system.split(0, 1)
    np.testing.assert_array_equal(split.rows[0], [[0, 1, 2], [0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(split.directions, split.rows)
    assert system.rows.shape == (1, 2, 3)  # the system it came from is unchanged
