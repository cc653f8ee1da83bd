import numpy as np
import pytest

from keyhole.learners.output_layer.space import (
    add_offset,
    basis_errors,
    centre,
    find_offset,
    find_plane,
    find_rank,
    make_space,
)
from keyhole.oracles.noise import NoiseModel
from token_models import round_to


def answers_of(rank: int, count: int, seed: int, tokens: int = 300) -> tuple:
    rng = np.random.default_rng(seed)
    columns = rng.standard_normal((tokens, rank))
    return rng.standard_normal((count, rank)) @ columns.T, columns


@pytest.mark.parametrize(
    ("format", "noise"),
    [
        ("float64", NoiseModel()),
        ("float32", NoiseModel(2.0**-24)),
        ("bfloat16", NoiseModel(2.0**-9)),
        ("2 decimals", NoiseModel(step=0.01)),
    ],
)
@pytest.mark.parametrize("rank", [5, 24, 40])
def test_the_rank_is_found_from_a_fifth_more_answers(format, noise, rank):
    exact, _ = answers_of(rank, int(1.2 * rank) + 2, rank)
    answers = round_to(exact, format)
    assert find_rank(answers, noise.sigma(answers), np.random.default_rng(0)) == rank


def test_answers_of_full_rank_have_none():
    exact, _ = answers_of(40, 30, 0)
    answers = round_to(exact, "bfloat16")
    pattern = NoiseModel(2.0**-9).sigma(answers)
    assert find_rank(answers, pattern, np.random.default_rng(0)) is None


def test_noise_beyond_the_number_format_is_told_apart_only_where_it_is_allowed():
    exact, _ = answers_of(10, 60, 1)
    answers = exact + 0.01 * np.random.default_rng(2).standard_normal(exact.shape)
    pattern = NoiseModel().sigma(answers)
    assert find_rank(answers, pattern, np.random.default_rng(0)) is None
    assert find_rank(answers, pattern, np.random.default_rng(0), explained=False) == 10


def test_errors_of_the_basis_are_those_seen():
    exact, columns = answers_of(12, 40, 3)
    answers = exact + 1e-3 * np.random.default_rng(4).standard_normal(exact.shape)
    space = make_space(answers, 12)
    truth = np.linalg.qr(columns)[0]
    seen = np.linalg.norm(space.basis - truth @ (truth.T @ space.basis))
    assert 0.9 < np.linalg.norm(basis_errors(space)) / seen < 1.1
    assert space.level == pytest.approx(1e-3, rel=0.05)


def test_an_offset_outside_the_space_makes_it_a_plane():
    exact, _ = answers_of(9, 30, 5)
    shift = np.random.default_rng(6).standard_normal(exact.shape[1])
    noise = 1e-4 * np.random.default_rng(7).standard_normal(exact.shape)
    _, off, moved = find_plane(make_space(exact + shift + noise, 10))
    assert off < 2.0 * moved
    _, off, moved = find_plane(make_space(exact + noise, 9))
    assert off > 100.0 * moved


def test_centring_takes_a_constant_off_every_answer():
    exact, _ = answers_of(4, 6, 8)
    assert np.allclose(centre(exact + np.arange(6.0)[:, None]), centre(exact))


def test_what_all_answers_have_in_common_is_seen_below_the_noise_of_each():
    exact, _ = answers_of(9, 40, 9)
    rng = np.random.default_rng(10)
    shift = 0.4 * rng.standard_normal(exact.shape[1])
    noise = 0.1 * rng.standard_normal(exact.shape)
    space = make_space(exact + noise + shift, 9)
    assert find_offset(exact + noise + shift, space).strength > 4.0
    whole = add_offset(exact + noise + shift, space)
    assert whole.rank == 10
    inside = whole.basis @ (whole.basis.T @ shift)
    assert np.linalg.norm(inside - shift) < 0.2 * np.linalg.norm(shift)
    assert find_offset(exact + noise, make_space(exact + noise, 9)).strength == 0.0
