"""The algebra of rotary positions on synthetic inputs."""

import numpy as np

from keyhole.learners.positions.rotary import (
    choose_distances,
    copy_levels,
    follow_base,
    query_equations,
    refine_frequencies,
    rotation_misfit,
    wave_table,
)
from keyhole.learners.positions.rotary_fit import Waves
from keyhole.models.position import pairs


def test_distances_mix_residues_and_reach_far() -> None:
    near, far = choose_distances(8, 2048, np.random.default_rng(0))
    every = np.concatenate([near, far])
    assert len(set(every.tolist())) == 16
    assert all(len(set(every % q)) == q for q in (2, 3, 4, 5))
    assert every.max() > 1000


def test_frequencies_are_where_waves_lie_in_the_span() -> None:
    rng = np.random.default_rng(1)
    true = np.array([1.0, 0.1, 0.01])
    near, far = choose_distances(6, 512, rng)
    distances = np.concatenate([near, far]).astype(float)
    signals = rng.standard_normal((9, 6)) @ wave_table(Waves(true), distances, 0).T
    outside = np.linalg.svd(signals)[2][6:]
    assert (rotation_misfit(true, distances, outside) < 1e-20).all()
    assert (rotation_misfit(np.array([0.5, 0.05]), distances, outside) > 1e-3).all()
    start, low, high = np.array([[0.1002, 0.0101], [0.09, 0.009], [0.11, 0.011]])
    found = refine_frequencies(start, distances, outside, low, high)
    assert np.abs(found - true[1:]).max() < 1e-12


def test_levels_of_copies_are_the_roots() -> None:
    rng = np.random.default_rng(2)
    fixed, growing = rng.standard_normal(50) - 8.0, 0.3 * rng.standard_normal(50)
    levels = copy_levels(fixed, growing)
    assert 1 <= len(levels) <= 2
    for level in levels:
        assert abs(np.log(np.exp(fixed + level * growing).sum()) - level) < 1e-9


def test_equations_of_queries_are_scores() -> None:
    rng = np.random.default_rng(3)
    frequencies, keys = np.array([1.0, 0.2]), rng.standard_normal((4, 6))
    anchor, tokens = rng.standard_normal(5), rng.standard_normal((3, 5))
    parts, distances = rng.standard_normal(4), np.arange(1, 4)
    query = parts[::2] + 1j * parts[1::2]
    scores = [
        (pairs(keys, token) * np.exp(1j * frequencies * distance) * query).real.sum()
        for token, distance in zip(tokens, distances, strict=True)
    ]
    own = (pairs(keys, anchor) * query).real.sum()
    rows = query_equations(Waves(frequencies), keys, anchor, tokens, distances)
    assert np.allclose(rows @ parts, np.array(scores) - own)


def test_waves_of_float32_are_those_of_the_rounded_angles() -> None:
    frequencies = np.float32([1.0, 0.1, 0.01]).astype(float)
    exact, rounded = Waves(frequencies), Waves(frequencies, single=True)
    distances = np.array([0, 1, 700, 3000])
    gap = np.abs(exact.turn(distances, 3000) - rounded.turn(distances, 3000))
    assert 1e-7 < gap.max() < 1e-4  # 3000 places at frequency 0.1
    assert gap[:, 0].max() < 3e-7  # angles that are whole numbers are exact
    angle = np.float32(3000) * np.float32(0.1)
    last = rounded.round_waves(np.array([3000]))[0, 1]
    assert last.real == np.float32(np.cos(float(angle)))


def test_slow_frequencies_follow_the_base_of_the_others() -> None:
    true = 5e5 ** (-np.arange(4) / 4)
    measured = true.astype(np.float32).astype(float) * (1.0 + np.array([0.0, 0.0, 0.0, 1e-4]))
    law = follow_base(measured, 4096)
    assert law is not None
    assert np.abs(law / true - 1.0).max() < 1e-12  # the base has few digits
    slower = follow_base(0.25 * measured, 4096)
    assert slower is not None
    assert np.abs(slower / (0.25 * true) - 1.0).max() < 1e-6  # interpolated: no base alone
    assert follow_base(measured, 4) is None  # two of them turn within so few places
