import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention, block, stack
from keyhole.report.blocks import FULL_SPECTRUM, LEADING, Matrix, ParameterBlock, blocks_of, reduced
from recoveries import recovery


def test_blocks_of_every_kind_of_model() -> None:
    def named(kind: str) -> list[tuple[str, str]]:
        found = recovery(kind)
        return [(block.part, block.name) for block in blocks_of(found.model, found.errors)]

    assert named("one head") == [
        ("Head", "score"),
        ("Head", "key bias"),
        ("Head", "value"),
        ("", "offset"),
    ]
    assert ("Head 1", "value") in named("several heads")
    assert named("network")[0] == ("", "weight")
    assert named("transformer")[:3] == [
        ("Attention", "score"),
        ("Attention", "key bias"),
        ("Network", "weight"),
    ]
    assert "labels" not in {name for _, name in named("labels")}


def test_blocks_of_transformer_blocks_and_stacks() -> None:
    rng = np.random.default_rng(0)
    whole = block(rng, 4, heads=2, neurons=3, norm="post")
    named = [(one.part, one.name) for one in blocks_of(whole, None)]
    assert ("Head 1", "score") in named
    assert ("Attention", "offset") in named
    assert ("Network", "inner bias") in named
    assert ("", "epsilons") in named
    assert len(set(named)) == len(named)
    two = stack(rng, 4, layers=2, heads=1, neurons=3)
    named = [(one.part, one.name) for one in blocks_of(two, None)]
    assert ("Block 1, head 0", "value") in named
    assert ("Block 0, network", "outer") in named
    assert len(set(named)) == len(named)


@given(
    rows=st.integers(1, 23),
    columns=st.integers(1, 23),
    side=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_a_cell_shows_its_largest_entry(rows: int, columns: int, side: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, errors = rng.standard_normal((2, rows, columns))
    cells = reduced(
        ParameterBlock("", "x", Matrix(None, values), Matrix(None, errors), False), side, side
    )
    assert max(cells.values.shape) <= side
    for i in range(cells.values.shape[0]):
        for j in range(cells.values.shape[1]):
            up, across = i * cells.height, j * cells.width
            block = values[up : up + cells.height, across : across + cells.width]
            place = int(np.argmax(np.abs(block)))
            assert cells.values[i, j] == block.flat[place]
            doubt = errors[up : up + cells.height, across : across + cells.width]
            assert cells.errors is not None
            assert cells.errors[i, j] == abs(doubt.flat[place])
    assert cells.largest == np.abs(values).max()
    assert abs(values[cells.place]) == cells.largest
    assert (cells.low, cells.high) == (values.min(), values.max())


def test_factors_look_like_their_product() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((40, 3)), rng.standard_normal((3, 40))
    factored, whole = Matrix(left, right), Matrix(None, left @ right)
    assert factored.norm() == pytest.approx(whole.norm())
    seen = [reduced(ParameterBlock("", "score", m, None, False), 16, 16) for m in (factored, whole)]
    np.testing.assert_allclose(seen[0].values, seen[1].values)
    values, complete = factored.singular_values()
    assert complete
    np.testing.assert_allclose(values, whole.singular_values()[0][:3])


def test_a_large_dense_matrix_shows_its_leading_singular_values() -> None:
    rng = np.random.default_rng(0)
    size = FULL_SPECTRUM + 6
    left, right = rng.standard_normal((size, 5)), rng.standard_normal((5, size))
    values, complete = Matrix(None, left @ right).singular_values()
    assert not complete
    assert len(values) == LEADING
    np.testing.assert_allclose(values[:5], Matrix(left, right).singular_values()[0])


def test_a_wide_score_in_factors_is_never_multiplied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    rows = Matrix.rows

    def watched(self: Matrix, start: int, stop: int) -> np.ndarray:
        nonlocal largest
        part = rows(self, start, stop)
        largest = max(largest, part.size)
        return part

    def forbidden(self: Head) -> np.ndarray:
        raise AssertionError("the product was formed")

    monkeypatch.setattr(Matrix, "rows", watched)
    monkeypatch.setattr(Head, "score", property(forbidden))
    model = attention(np.random.default_rng(0), 4096, rank=2)
    (score, *_) = blocks_of(model, None)
    cells = reduced(score, 256, 256)
    assert cells.values.shape == (256, 256)
    assert 0 < largest <= 2**20
    score.values.singular_values()


def test_errors_of_another_shape_are_left_out() -> None:
    model = Attention([Head(np.eye(3), None, np.ones(3))])
    errors = Attention([Head(np.eye(2), None, np.ones(2))])
    assert {block.errors for block in blocks_of(model, errors) if block.name != "offset"} == {None}
