import numpy as np
import pytest

from keyhole.learners.block.box import NotThisBlock
from keyhole.learners.block.refinement import (
    clear_rank,
    form_of,
    freedom_of,
    join_block,
    misfit_of,
    move_parts,
    multiplied,
    pooled_errors,
    refine_block,
    settle_block,
    split_block,
    with_attention,
)
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.canonical import canonical_block, distance
from keyhole.models.random import block


def secret(norm, width=6, **options):
    sizes = {"heads": 2, "neurons": 5, **options}
    return block(np.random.default_rng(0), width, norm=norm, **sizes)


def put_together(one):
    parts = split_block(one)
    return join_block(parts, form_of(one, parts))


def spoiled(one, off, rng):
    """The block with every part off by this share, in random directions."""
    parts = split_block(one)
    found = {}
    for name, part in parts.items():
        error = rng.standard_normal(part.shape)
        found[name] = part + off * np.linalg.norm(part) / np.linalg.norm(error) * error
    return join_block(found, form_of(one, parts))


def ask(one, floors, rng, dtype=np.float64):
    """Random queries of the network's own size with their answers."""
    parts = split_block(one)
    count = int(floors * freedom_of(parts, form_of(one, parts)) / one.width / 5) + 1
    lengths = (1, 2, 3, 5, 9) if one.attention is not None else (1,) * 5
    found = []
    for length, size in zip(lengths, (0.5, 1.0, 1.5, 1.0, 0.5), strict=True):
        tokens = (size * rng.standard_normal((count, length, one.width))).astype(dtype)
        answers = one.astype(dtype)(tokens)
        found.append((tokens.astype(float), answers.astype(float)))
    return found


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("sizes", [{}, {"neurons": 0}, {"heads": 0}, {"activation": "relu"}])
def test_parameters_make_the_block_again(norm, kind, sizes):
    one = secret(norm, kind=kind, **sizes)
    assert distance(put_together(one), one) < 1e-12


def test_a_gated_parallel_block_comes_back():
    one = secret("pre", kind="rms", gated=True, activation="silu", parallel=True)
    tokens = np.random.default_rng(1).standard_normal((5, 3, 6))
    assert np.allclose(put_together(one)(tokens), one(tokens), atol=1e-13)


def test_weak_directions_are_no_part_of_a_rank():
    assert clear_rank(np.array([1.0, 0.3, 0.1, 1e-5, 1e-5])) == 3
    assert clear_rank(np.array([1.0, 0.5, 0.2])) == 3
    assert clear_rank(np.array([1.0])) == 1


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("sizes", [{}, {"neurons": 0}, {"activation": "relu"}])
def test_from_a_rough_start_to_rounding(norm, sizes):
    rng = np.random.default_rng(2)
    one = canonical_block(secret(norm, **sizes))
    found = refine_block(spoiled(one, 0.01, rng), ask(one, 3.0, rng), 2.0**-53, rng)
    assert found.level < 1.0
    assert distance(found.block, one) < 1e-8
    errors, truth = found.errors.to_arrays(), multiplied(found.block)
    assert set(errors) == set(truth)
    for name in ("attention.heads.0.score", "attention.heads.0.value"):
        assert 0 < np.abs(errors[name]).max() < 1e-11


def test_single_precision_is_refined_to_its_rounding_with_standard_errors():
    rng = np.random.default_rng(3)
    one = canonical_block(secret("post", width=16, neurons=0))
    found = refine_block(spoiled(one, 0.01, rng), ask(one, 3.0, rng, np.float32), 2.0**-24, rng)
    assert found.level < 1.0
    assert distance(found.block.attention, one.attention) < 1e-5
    truth, model = multiplied(canonical_block(one)), multiplied(canonical_block(found.block))
    errors = found.errors.to_arrays()
    within = [np.abs(truth[name] - model[name]) < 3.0 * errors[name] for name in errors
              if "value" in name or "offset" in name]  # fmt: skip
    assert np.mean(np.concatenate([one.ravel() for one in within])) > 0.85


def test_heads_of_unequal_rank():
    rng = np.random.default_rng(4)
    heads = []
    for r, v in ((2, 3), (4, 1)):
        left, right = rng.standard_normal((8, r)) / 3, rng.standard_normal((r, 8)) / 3
        value = rng.standard_normal((8, v)) @ rng.standard_normal((v, 8)) / 4
        heads.append(Head((left, right), left @ rng.standard_normal(r), value))
    one = canonical_block(
        Block(Attention(heads, rng.standard_normal(8)), None, norm="post", epsilons=[1e-5])
    )
    # an answer shows one number of a head with values of rank one
    found = refine_block(spoiled(one, 1e-3, rng), ask(one, 6.0, rng), 2.0**-53, rng)
    assert [head.rank_bound for head in found.block.attention.heads] == [2, 4]
    assert distance(found.block, one) < 1e-8


def test_only_the_parameters_of_a_pattern_are_settled():
    rng = np.random.default_rng(11)
    truth = canonical_block(block(rng, 6, heads=2, neurons=6, norm="post", activation="relu"))
    heads = [
        Head((left, right * (1.0 + 1e-3)), head.key_bias, head.value)
        for head in truth.attention.heads
        for left, right in [(head.score_factors.left, head.score_factors.right)]
    ]
    near = with_attention(truth, Attention(heads, truth.attention.offset))
    pairs = []
    for length in (2, 3, 4):
        tokens = rng.standard_normal((60, length, 6))
        pairs.append((tokens, truth(tokens)))
    found = settle_block(near, pairs, "left|read", steps=6)
    assert misfit_of(near, pairs) > 1e-9
    assert misfit_of(found, pairs) < 1e-18
    assert np.allclose(found.mlp.inner, truth.mlp.inner, atol=1e-12)


def test_no_step_loses_an_epsilon():
    parts = split_block(secret("post"))
    moved = move_parts(parts, {name: np.full(part.shape, -300.0) for name, part in parts.items()})
    assert np.allclose(moved["epsilons"] - parts["epsilons"], -1.0)
    assert np.allclose(moved["inner"] - parts["inner"], -300.0)


def test_errors_of_a_matrix_are_pooled_over_rows_and_columns():
    squares = np.outer([1.0, 4.0], [1.0, 9.0, 1.0])
    assert np.allclose(pooled_errors(squares), np.sqrt(squares))
    assert not pooled_errors(np.zeros((2, 3))).any()
    assert np.allclose(pooled_errors(np.array([0.0, 4.0])), [np.sqrt(2.0), 2.0])


def test_a_block_that_explains_nothing_is_refused_before_it_has_standard_errors():
    rng = np.random.default_rng(3)
    tokens = rng.standard_normal((120, 2, 6))
    with pytest.raises(NotThisBlock, match="times the rounding"):
        refine_block(secret("pre"), [(tokens, np.sin(9.0 * tokens[:, 0]))], 2.0**-53, rng)
