import numpy as np
import pytest

from keyhole.learners.block.box import NotThisBlock, open_block
from keyhole.learners.block.post_norm_attention import (
    Selected,
    ask_post_norm_attention,
    ask_singles,
    calibrate,
    fit_layer_norm,
    fit_rms_norm,
    group_columns,
    jumps,
    moved_rank,
    solve_epsilon,
    solve_moves,
    solve_post_norm_attention,
    solve_singles,
    unsplit_moves,
)
from keyhole.models.canonical import distance
from keyhole.models.random import block
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle


def box_of(secret):
    return open_block(FunctionOracle(secret, Spec(secret.width)))


@pytest.mark.parametrize(("kind", "fit"), [("layer", fit_layer_norm), ("rms", fit_rms_norm)])
def test_the_norm_from_answers_with_huge_tokens(kind, fit):
    secret = block(np.random.default_rng(0), 7, heads=2, kind=kind).norms[0]
    norm, off = fit(secret(1e7 * np.random.default_rng(1).standard_normal((11, 7))))
    assert off < 1e-12
    assert np.allclose(norm.gain, secret.gain, rtol=1e-12)
    assert np.allclose(norm.bias, secret.bias, atol=1e-12)


def test_answers_on_no_sphere_are_refused():
    rng = np.random.default_rng(0)
    assert fit_layer_norm(rng.standard_normal((11, 7)))[1] > 1e-3
    assert fit_layer_norm(np.ones((11, 7)))[1] == np.inf
    assert fit_rms_norm(np.tanh(rng.standard_normal((11, 7))))[1] > 1e-3


def test_lengths_of_moves_from_directions_alone():
    rng = np.random.default_rng(0)
    base = rng.standard_normal(6)
    moves, shares = 0.2 * rng.standard_normal((8, 6)), rng.standard_normal((4, 8))
    size = np.linalg.norm(base)
    unit = [v / np.linalg.norm(v, axis=-1, keepdims=True)
            for v in (base, base + moves, base + shares @ moves)]  # fmt: skip
    found, rest = calibrate(*unit, shares)
    assert rest < 1e-13
    assert np.allclose(found, moves / size, atol=1e-12)
    flat = base + rng.standard_normal((8, 2)) @ rng.standard_normal((2, 6))
    directions = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    assert moved_rank(unit[0], directions, 1e-16) == 2


def test_single_tokens_tell_the_sum_of_the_maps():
    secret = block(np.random.default_rng(2), 8, heads=2)
    known = solve_singles(ask_singles(box_of(secret), np.random.default_rng(0)), 1e-16)
    plane = secret.norms[0].plane
    whole = plane.T @ (np.eye(8) + sum(head.value.T for head in secret.attention.heads))
    factor = np.linalg.norm(whole) / np.linalg.norm(known.whole)
    assert np.allclose(factor * known.whole, whole, atol=1e-11)
    assert np.allclose(factor * known.offset, plane.T @ secret.attention.offset, atol=1e-11)


def test_a_network_behind_the_attention_is_noticed():
    secret = block(np.random.default_rng(2), 8, neurons=16)
    data = ask_singles(box_of(secret), np.random.default_rng(0))
    with pytest.raises(NotThisBlock, match="no affine function"):
        solve_singles(data, 1e-16)


def test_heads_that_share_a_range_need_more_moves():
    rng = np.random.default_rng(0)
    ranges = rng.standard_normal((2, 5, 2))
    own = [{k: ranges[h] @ rng.standard_normal(2) for k in range(3 * h, 3 * h + 3)}
           for h in range(2)]  # fmt: skip
    assert unsplit_moves(own, 6, 1e-16) == []
    both = [
        own[0],
        {k: ranges[0] @ rng.standard_normal(2) for k in (3, 4, 5)},
        {0: ranges[0][:, 0]},
    ]
    assert (2, 5) in unsplit_moves(both, 6, 1e-16)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_all_of_it(kind):
    secret = block(np.random.default_rng(5), 8, heads=2, kind=kind, epsilon=3e-4)
    data = ask_post_norm_attention(box_of(secret), np.random.default_rng(6))
    found = solve_post_norm_attention(data, 2.0**-53)
    assert found.kind == kind
    assert [head.rank_bound for head in found.attention.heads] == [4, 4]
    assert distance(found, secret) < 1e-8
    values = solve_moves(data.moves, solve_singles(data.singles, 2.0**-53), 2.0**-53)
    assert solve_epsilon(values, data.near) == pytest.approx(3e-4, rel=1e-9)


def test_gains_of_the_other_sign():
    secret = block(np.random.default_rng(5), 8, heads=2)
    secret = type(secret).from_arrays({**secret.to_arrays(), "gain": -secret.gain})
    data = ask_post_norm_attention(box_of(secret), np.random.default_rng(7))
    assert distance(solve_post_norm_attention(data, 2.0**-53), secret) < 1e-8


def test_columns_of_which_the_same_heads_are_unknown():
    responses = [{0: np.ones(3), 1: np.ones(3)}, {1: np.ones(3)}]
    assert dict(group_columns(responses, 4)) == {(1,): [0], (): [1], (0, 1): [2, 3]}


def test_long_moves_let_heads_jump_and_short_ones_do_not():
    rng = np.random.default_rng(2)
    secret = block(np.random.default_rng(5), 128, heads=2)
    box = box_of(secret)
    known = solve_singles(ask_singles(box, rng), 2.0**-53)
    anchor, size = rng.standard_normal(128), 1e6
    keys = [head.score @ anchor + head.key_bias for head in secret.attention.heads]
    tokens = size * np.array([key / np.linalg.norm(key) for key in keys])
    base = box(np.concatenate([tokens, anchor[None]])[None], "test")[0]
    selected = Selected(anchor, tokens, size)
    assert not jumps(box, selected, base, known, 0.1, rng)
    assert jumps(box, selected, base, known, 20.0, rng)
