"""Ranks: noise is not counted, signals are, and every decision says how close it was."""

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keyhole
from keyhole.linalg.decisions import record_decisions
from keyhole.linalg.rank import (
    count_above,
    count_above_share,
    find_fall,
    find_first_fall,
    noise_edge,
)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(4, 40),
    columns=st.integers(4, 40),
    rank=st.integers(0, 3),
    scale=st.floats(-12, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_signals_are_counted_and_noise_is_not(
    rows: int, columns: int, rank: int, scale: float, seed: int
) -> None:
    rng, error = np.random.default_rng(seed), 10.0**scale
    noise = error * rng.standard_normal((rows, columns))
    left = np.linalg.qr(rng.standard_normal((rows, rank)))[0]
    right = np.linalg.qr(rng.standard_normal((columns, rank)))[0]
    edge = 2.0 * noise_edge(error, (rows, columns))  # noise alone stays below with room
    sizes = np.linalg.svd(noise + 10.0 * edge * left @ right.T, compute_uv=False)
    assert count_above(sizes, edge) == rank


def test_the_edge_of_errors_that_differ_holds() -> None:
    rng = np.random.default_rng(0)
    error = rng.uniform(0.0, 1.0, (30, 20)) ** 4
    largest = [np.linalg.norm(error * rng.standard_normal(error.shape), 2) for _ in range(50)]
    assert max(largest) < 1.2 * noise_edge(error, (30, 20))


def test_a_zero_matrix_has_rank_zero() -> None:
    assert count_above_share(np.zeros(4), 1e-6) == 0
    assert count_above_share(np.zeros(0), 1e-6) == 0


def test_a_fall_needs_small_values_behind_it() -> None:
    assert find_fall(np.array([1.0, 0.9, 1e-5, 9e-6])) == 2
    assert find_fall(np.array([1.0, 0.05, 0.04])) is None  # a fall, to no small part
    assert find_fall(np.array([1.0])) is None


def test_the_first_fall_not_the_largest() -> None:
    sizes = np.array([1.0, 1e-3, 1e-3, 1e-9])
    assert find_first_fall(sizes, 100.0, 0.0) == 1
    assert find_first_fall(sizes, 100.0, 0.5) == 4  # errors have no falls


def test_margins_are_reported_to_everybody_who_listens() -> None:
    with record_decisions() as outer, record_decisions() as inner:
        count_above(np.array([4.0, 1.1]), 1.0)
        count_above(np.array([4.0, 0.1]), 1.0)
    assert outer == inner
    assert outer.count == 2
    assert outer.closest is not None
    assert outer.closest.answer == 2
    assert outer.closest.margin == pytest.approx(1.1)
    with record_decisions() as nothing:
        pass
    assert nothing.closest is None


def test_no_other_file_of_the_algorithms_counts_singular_values() -> None:
    """A comparison of singular values that is summed up is a rank rule of its own."""
    root, rules = Path(keyhole.__file__).parent, []
    for folder in ("learners", "measurement", "fitting", "linalg"):
        for path in (root / folder).rglob("*.py"):
            if path.name == "rank.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and "sum" in ast.unparse(node.func):
                    text = ast.unparse(node)
                    if any(f"{name} >" in text for name in ("sizes", "singular", "spectrum")):
                        rules.append(f"{path.relative_to(root)}: {text}")
    # the doubts of neurons are no singular values
    assert [rule for rule in rules if "doubts.sizes" not in rule] == []
