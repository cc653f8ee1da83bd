"""What two pieces prove: one kink, two kinks, a jump, or nothing."""

import numpy as np

from keyhole.learners.mlp.kink_evidence import LineEvidence, crossing, generic
from keyhole.learners.mlp.pieces import Piece

EXACT = LineEvidence(1e-16)


def bent(kinks: list[float], seed: int = 0):
    """A line of vectors that bends at these times, by random jumps."""
    rng = np.random.default_rng(seed)
    start, slope = rng.standard_normal((2, 5))
    jumps = rng.standard_normal((len(kinks), 5))
    return lambda t: start + slope * t + np.maximum(t - np.array(kinks), 0.0) @ jumps


def piece(line, *times: float) -> Piece:
    return Piece(list(times), [line(t) for t in times])


def test_lines_that_meet_prove_one_kink() -> None:
    line = bent([0.3])
    left, right = piece(line, -1.0, -0.9), piece(line, 0.9, 1.0)
    t = crossing(left, right)
    assert t is not None
    assert abs(t - 0.3) < 1e-12
    assert EXACT.meet(left, right, t)
    assert EXACT.one_kink(left, right, t)
    assert not EXACT.agree(left, right)
    assert not LineEvidence(1e-6).one_kink(left, right, t)  # so few digits prove nothing


def test_two_kinks_do_not_meet_and_one_answer_between_fixes_both() -> None:
    line = bent([-0.2, 0.4])
    left, right = piece(line, -1.0, -0.9), piece(line, 0.9, 1.0)
    t = crossing(left, right)
    assert t is not None
    assert not EXACT.meet(left, right, t)
    between = EXACT.two_kinks(left, right, 0.1, line(0.1))
    assert between is not None
    np.testing.assert_allclose(between.slope, (line(0.2) - line(0.0)) / 0.2, atol=1e-12)


def test_three_kinks_are_not_taken_for_two() -> None:
    line = bent([-0.3, 0.0, 0.4])
    left, right = piece(line, -1.0, -0.9), piece(line, 0.9, 1.0)
    assert EXACT.two_kinks(left, right, 0.1, line(0.1)) is None


def test_a_step_is_a_jump_and_a_kink_is_none() -> None:
    for height, expected in ((0.0, None), (1e-3, 1e-3)):
        line = bent([0.0])
        left, right = piece(line, -1.0, -1e-12), piece(line, 1e-12, 1.0)
        right.values = [value + height * np.eye(5)[0] for value in right.values]
        seen = EXACT.jump(left, right)
        assert seen is None if expected is None else abs(seen - expected) < 1e-9


def test_jumps_in_a_plane_are_not_generic() -> None:
    line = bent([-0.7, -0.4, 0.3, 0.6])
    pieces = [piece(line, t, t + 0.1) for t in (-1.0, 0.0, 1.0)]
    assert generic(pieces)
    flat = [Piece(p.times, [value * [1, 1, 0, 0, 0] for value in p.values]) for p in pieces]
    assert not generic(flat)
