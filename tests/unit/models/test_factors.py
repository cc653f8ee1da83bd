"""Maps of a layer multiply back to it, and torch computes the same function with them."""

import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.models.attention import Attention, Head
from keyhole.models.export_torch import fit_torch_shape, to_multihead_attention
from keyhole.models.factors import find_groups, head_maps, head_width, layer_maps, tell_groups
from keyhole.models.random import attention
from multi_head_boxes import ask_all, layer_box, random_layer


def low_rank_layer(width: int, heads: int, rank: int, seed: int) -> Attention:
    rng = np.random.default_rng(seed)
    members = []
    for _ in range(heads):
        left, right = rng.standard_normal((width, rank)), rng.standard_normal((rank, width))
        value = rng.standard_normal((width, rank)) @ rng.standard_normal((rank, width)) / width
        bias = left @ rng.standard_normal(rank) / width
        members.append(Head((left / width, right), bias, value))
    return Attention(members, rng.standard_normal(width))


def test_maps_multiply_back() -> None:
    layer = low_rank_layer(8, 2, 3, 0)
    for head, maps in zip(layer.heads, layer_maps(layer), strict=True):
        assert maps.width == 3
        root = np.sqrt(maps.width)
        np.testing.assert_allclose(maps.key.T @ maps.query / root, head.score, atol=1e-13)
        np.testing.assert_allclose(maps.key.T @ maps.query_bias / root, head.key_bias, atol=1e-13)
        np.testing.assert_allclose(maps.into @ maps.out, head.value, atol=1e-13)
        sizes = [np.linalg.svd(part, compute_uv=False)[:3] for part in (maps.into, maps.out)]
        np.testing.assert_allclose(*sizes)


def test_scalar_heads_have_maps_too() -> None:
    head = attention(np.random.default_rng(1), 5, rank=2).heads[0]
    maps = head_maps(head)
    np.testing.assert_allclose((maps.into @ maps.out)[:, 0], head.value, atol=1e-14)
    assert head_width(head) == 2
    with pytest.raises(InvalidArgument, match="inner width of 2"):
        head_maps(head, 1)


@pytest.mark.parametrize(("heads", "rank"), [(4, 2), (2, 4), (3, 2), (1, 8)])
def test_torch_computes_the_same(heads: int, rank: int) -> None:
    layer = low_rank_layer(8, heads, rank, heads)
    module = to_multihead_attention(layer)
    rng = np.random.default_rng(2)
    for length in (1, 2, 13):
        tokens = rng.standard_normal((4, length, 8))
        np.testing.assert_allclose(layer_box(module)(tokens), layer(tokens), atol=1e-12)


def test_export_of_a_recovered_layer() -> None:
    secret = random_layer(16, 4, 0)
    learned, _ = ask_all(layer_box(secret), 16, MultiHead())
    module = to_multihead_attention(learned.model)
    assert module.num_heads == 4
    rng = np.random.default_rng(3)
    for length in range(1, 51):
        tokens = rng.standard_normal((2, length, 16))
        difference = layer_box(module)(tokens) - layer_box(secret)(tokens)
        assert np.abs(difference).max() < 1e-8


def test_what_torch_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="scalars"):
        to_multihead_attention(attention(np.random.default_rng(0), 4))
    with pytest.raises(InvalidArgument, match="do not fit"):
        to_multihead_attention(attention(np.random.default_rng(0), 4, heads=2, outputs=4))
    assert fit_torch_shape(low_rank_layer(12, 3, 2, 0)) == (3, 4)
    assert fit_torch_shape(low_rank_layer(10, 3, 2, 0)) == (5, 2)


def test_heads_that_share_keys_and_values_are_found() -> None:
    rng = np.random.default_rng(4)
    keys, into = rng.standard_normal((2, 2, 8, 2))
    heads = []
    for group in (0, 1, 0, 1):
        query, out = rng.standard_normal((2, 2, 8))
        heads.append(Head(keys[group] @ query, keys[group] @ query[:, 0], into[group] @ out))
    groups = find_groups(Attention(heads))
    assert groups == ((0, 2), (1, 3))
    assert "4 heads share 2 sets" in tell_groups(groups)[0]
    assert tell_groups(find_groups(low_rank_layer(8, 3, 2, 0))) == ()
    assert len(find_groups(attention(rng, 4, heads=3, outputs=4))) == 3  # full rank says nothing
