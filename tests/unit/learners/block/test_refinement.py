import numpy as np
import pytest

from keyhole.learners.block.box import NotThisBlock
from keyhole.learners.block.refinement import (
    clear_rank,
    form_of,
    join_block,
    misfit_of,
    multiplied,
    refine_block,
    settle_block,
    split_block,
    with_attention,
)
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import canonical_block, distance
from keyhole.models.random import block


def secret(norm, **options):
    return block(np.random.default_rng(0), 6, heads=2, neurons=5, norm=norm, **options)


def start_of(norm):
    """The block in the form that the algebra finds it."""
    one = secret(norm)
    return join_block(split_block(canonical_block(one)), form_of(one))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_parameters_make_the_block_again(norm, activation):
    one = canonical_block(secret(norm, activation=activation))
    assert distance(join_block(split_block(one), form_of(one)), one) < 1e-12


def test_weak_directions_are_no_part_of_a_rank():
    assert clear_rank(np.array([1.0, 0.3, 0.1, 1e-5, 1e-5])) == 3
    assert clear_rank(np.array([1.0, 0.5, 0.2])) == 3
    assert clear_rank(np.array([1.0])) == 1


def test_from_a_rough_start_to_rounding():
    norm = "pre"
    rng = np.random.default_rng(2)
    one = start_of(norm)
    tokens = [
        size * rng.standard_normal((number, length, 6))
        for length, size, number in ((1, 1.0, 30), (2, 1.0, 40), (3, 4.0, 30), (2, 0.02, 20))
    ]
    pairs = [(queries, secret(norm)(queries)) for queries in tokens]
    parts = split_block(one)
    rough = {name: part * (1.0 + 0.01 * rng.standard_normal(part.shape))
             for name, part in parts.items()}  # fmt: skip
    found = refine_block(join_block(rough, form_of(one)), pairs, 2.0**-53, rng)
    assert found.level < 3.0
    assert distance(found.block, secret(norm)) < 1e-9
    errors, truth = found.errors.to_arrays(), multiplied(found.block)
    assert set(errors) == set(truth)
    assert 0 < np.abs(errors["mlp.inner"]).max() < 1e-9


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
    found = settle_block(near, pairs, "left|right|key", steps=6)
    assert misfit_of(near, pairs) > 1e-9
    assert misfit_of(found, pairs) < 1e-18
    assert np.allclose(found.mlp.inner, truth.mlp.inner, atol=1e-12)


def test_a_block_that_explains_nothing_is_refused_before_it_has_standard_errors():
    rng = np.random.default_rng(3)
    tokens = rng.standard_normal((120, 2, 6))
    with pytest.raises(NotThisBlock, match="times the rounding"):
        refine_block(start_of("pre"), [(tokens, np.sin(9.0 * tokens[:, 0]))], 2.0**-53, rng)
