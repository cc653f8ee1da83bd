"""As many crosses as the rank are the matrix."""

import numpy as np
import pytest

from keyhole.learners.single_head.cross import Crosses

WIDTH = 9


@pytest.mark.parametrize("rank", [1, 3, WIDTH])
def test_as_many_crosses_as_the_rank_explain_everything(rank: int) -> None:
    rng = np.random.default_rng(rank)
    matrix = rng.standard_normal((WIDTH, rank)) @ rng.standard_normal((rank, WIDTH))
    t, omega = (np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0][:rank] for _ in range(2))
    crosses = Crosses(WIDTH)
    assert not crosses.explain(np.eye(WIDTH)).any()
    for start in range(0, rank, 2):  # in blocks
        part = slice(start, start + 2)
        columns, rows = matrix @ omega[part].T, t[part] @ matrix
        all_omega, all_t = (
            np.vstack([a[part], b]) for a, b in ((omega, crosses.omega), (t, crosses.t))
        )
        crosses.add_columns(all_omega, columns, np.zeros(len(rows)))
        crosses.add_rows(all_t, rows, np.zeros(len(rows)))
    np.testing.assert_allclose(crosses.explain(np.eye(WIDTH)), matrix, atol=1e-11)
    through, lifted = crosses.weights()
    np.testing.assert_allclose(crosses.columns @ through, matrix, atol=1e-11)
    np.testing.assert_allclose(lifted @ crosses.rows, matrix, atol=1e-11)
    assert crosses.explain_error(t, omega) == 0.0


def test_errors_of_columns_and_rows_are_those_of_what_they_explain() -> None:
    rng, rank, level = np.random.default_rng(0), 3, 1e-6
    matrix = rng.standard_normal((WIDTH, rank)) @ rng.standard_normal((rank, WIDTH))
    t, omega = (np.linalg.qr(rng.standard_normal((WIDTH, rank)))[0].T for _ in range(2))
    u, x = (np.linalg.qr(rng.standard_normal((WIDTH, 1)))[0].T for _ in range(2))
    off = []
    for _ in range(400):
        crosses, error = Crosses(WIDTH), np.full(rank, level)
        columns = matrix @ omega.T
        columns = columns + level * (np.eye(WIDTH) - t.T @ t) @ rng.standard_normal(columns.shape)
        rows = t @ matrix
        rows = rows + level * rng.standard_normal(rows.shape) @ (np.eye(WIDTH) - omega.T @ omega)
        crosses.add_columns(omega, columns, error)
        crosses.add_rows(t, rows, error)
        off.append(float((u @ (crosses.explain(x) - matrix @ x.T)).item()))
    assert np.std(off) <= crosses.explain_error(u, x) <= 3 * np.std(off)
