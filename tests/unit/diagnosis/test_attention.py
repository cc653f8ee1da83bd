"""The registered attention function: without changes it is transformers' own."""

import torch

from keyhole.diagnosis.attention import AttentionChange, attend, attending


class Module(torch.nn.Module):
    layer_idx = 1
    training = False


def inputs(heads=4, keys=4):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 5, 3), (2, keys, 5, 3), (2, keys, 5, 3)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def answer(*changes, keys=4, mask=None, padding=None):
    with attending(changes, padding):
        return attend(Module(), *inputs(keys=keys), mask)[0]


def test_without_changes_it_is_scaled_dot_product_attention() -> None:
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs()).transpose(1, 2)
    assert torch.allclose(answer(), expected)


def test_causal_agrees_with_torch() -> None:
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs(), is_causal=True)
    assert torch.allclose(answer(AttentionChange(causal=True)), expected.transpose(1, 2))


def test_a_window_of_one_sees_the_token_itself() -> None:
    value = inputs()[2].transpose(1, 2)
    assert torch.allclose(answer(AttentionChange(window=1)), value)


def test_changes_hold_in_their_layers_alone() -> None:
    assert torch.equal(answer(AttentionChange(factor=2.0, inside=frozenset())), answer())
    assert not torch.allclose(answer(AttentionChange(factor=2.0, inside=None)), answer())


def test_shared_keys_are_repeated_in_two_orders() -> None:
    plain, tiled = answer(keys=2), answer(AttentionChange(tiled=True), keys=2)
    query, key, value = inputs(keys=2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key[:, [0, 0, 1, 1]], value[:, [0, 0, 1, 1]]
    )
    assert torch.allclose(plain, expected.transpose(1, 2))
    assert not torch.allclose(plain, tiled)


def test_taking_causality_away_keeps_padding_out() -> None:
    mask = torch.full((5, 5), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)[
        None, None
    ]
    padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    changed = answer(AttentionChange(causal=False), mask=mask, padding=padding)
    query, key, value = inputs()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=padding[:, None, None, :]
    )
    assert torch.allclose(changed, expected.transpose(1, 2))


def test_a_sink_takes_weight_and_a_cap_bounds_scores() -> None:
    value = torch.ones(1, 1, 3, 2)
    zero = torch.zeros(1, 1, 3, 2)
    with attending((AttentionChange(sink=True),), None):
        shared = attend(Module(), zero, zero, value, None)[0]
    assert torch.allclose(shared, torch.full_like(shared, 3 / 4))
    assert torch.allclose(
        answer(AttentionChange(cap=1e-9)), inputs()[2].mean(2)[:, None].expand(2, 5, 4, 3)
    )
