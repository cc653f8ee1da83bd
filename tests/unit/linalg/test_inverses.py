import numpy as np
import pytest

from keyhole.linalg.inverses import right_inverse


@pytest.mark.parametrize("seed", range(20))
def test_the_inverse_is_exact_and_of_least_norm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 7))
    columns = rows + int(rng.integers(0, 4))
    left, right = (np.linalg.qr(rng.standard_normal((n, n)))[0] for n in (rows, columns))
    singular = 1.0 + 1e-9 * rng.standard_normal(rows)  # nearly equal: hard for a decomposition
    matrix = (left * singular) @ right[:rows]
    inverse = right_inverse(matrix)
    assert np.abs(matrix @ inverse - np.eye(rows)).max() < 3e-15
    assert np.linalg.norm(inverse, 2) == pytest.approx(1.0, rel=1e-8)
