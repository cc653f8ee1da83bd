"""Leaving one answer out: variances of a linear fit, and errors that an answer's numbers share."""

import numpy as np

from keyhole.fitting.jackknife import list_jackknife_steps, solve_leverage


def test_steps_are_what_leaving_an_answer_out_does() -> None:
    rng = np.random.default_rng(0)
    columns, data = rng.standard_normal((30, 4)), rng.standard_normal(30)
    fit = np.linalg.lstsq(columns, data, rcond=None)[0]
    steps = list(list_jackknife_steps(columns, columns @ fit - data, [3] * 10, 4))
    for number, step in enumerate(steps):
        kept = np.delete(np.arange(30), range(3 * number, 3 * number + 3))
        other = np.linalg.lstsq(columns[kept], data[kept], rcond=None)[0]
        np.testing.assert_allclose(step, other - fit, atol=1e-12)


def test_errors_that_the_numbers_of_an_answer_share_are_not_averaged() -> None:
    rng = np.random.default_rng(1)
    within = []
    for _ in range(60):
        columns = np.repeat(rng.standard_normal((40, 3)), 5, axis=0)
        data = np.repeat(rng.standard_normal(40), 5)  # of a truth that is zero
        fit = np.linalg.lstsq(columns, data, rcond=None)[0]
        steps = list_jackknife_steps(columns, columns @ fit - data, [5] * 40, 3)
        within.append(np.abs(fit) <= 2.0 * np.sqrt(sum(step**2 for step in steps)))
    assert 0.9 < np.mean(within) < 0.99


def test_what_an_answer_alone_decides_about_is_left_out() -> None:
    found = solve_leverage(np.diag([0.0, 0.5]), np.array([1e-17, 1.0]))
    np.testing.assert_allclose(found, [0.0, 2.0])
