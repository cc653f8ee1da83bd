import numpy as np
import pytest

from keyhole.fitting.kronecker import Probed, equal_leverage, find_units, leverages


def draw(rng, count=400):
    """What reaches a matrix of 3 by 4 and a vector, and what the matrix reads, both correlated."""
    mix, blend = rng.standard_normal((3, 3)), rng.standard_normal((4, 4)) * [1.0, 0.3, 0.1, 3.0]
    reads = rng.standard_normal((count, 4)) @ blend
    pulled = [{"matrix": rng.standard_normal((count, 3)) @ mix,
               "vector": rng.standard_normal((count, 2)) * [1.0, 100.0]} for _ in range(2)]  # fmt: skip
    return Probed(pulled, {"matrix": reads})


def test_columns_are_orthonormal_where_both_sides_are_independent():
    rng = np.random.default_rng(0)
    one = draw(rng, 20000)
    units = find_units([one], [np.ones(20000)])
    columns = []
    for unit in np.eye(12):
        step = units["matrix"].apply(unit.reshape(3, 4))
        columns.append([(g["matrix"] @ step * one.reads["matrix"]).sum(axis=1) for g in one.pulled])
    gram = np.einsum("apn,bpn->ab", columns, columns) / 2
    assert np.abs(gram - np.eye(12)).max() < 0.1
    sizes = sum((g["vector"] ** 2).sum(axis=0) for g in one.pulled) / 2
    assert np.allclose(units["vector"].apply(np.ones(2)) ** 2 * sizes, 1.0)


def test_units_have_their_own_adjoint():
    rng = np.random.default_rng(1)
    units = find_units([draw(rng)], [np.ones(400)])
    for name, shape in (("matrix", (3, 4)), ("vector", (2,))):
        z, step = rng.standard_normal(shape), rng.standard_normal(shape)
        assert np.isclose(
            np.sum(units[name].apply(z) * step), np.sum(z * units[name].adjoint(step))
        )


def test_what_no_answer_shows_does_not_move():
    one = Probed([{"matrix": np.zeros((5, 3))}], {"matrix": np.ones((5, 4))})
    units = find_units([one], [np.ones(5)])
    assert not units["matrix"].apply(np.ones((3, 4))).any()


@pytest.mark.parametrize("loud", [1e3, 1e-3])
def test_rows_of_unequal_size_come_to_equal_leverage(loud):
    rng = np.random.default_rng(2)
    one = draw(rng)
    sizes = np.where(np.arange(400) < 20, loud, 1.0)
    weights = equal_leverage([one], [sizes])
    assert np.isclose(np.mean(weights[0] ** 2), 1.0)
    before = leverages(find_units([one], [sizes]), [one], [sizes])[0]
    after = leverages(find_units([one], weights), [one], weights)[0]
    assert np.std(after) / np.mean(after) < 0.5
    assert np.std(before) / np.mean(before) > np.std(after) / np.mean(after)
