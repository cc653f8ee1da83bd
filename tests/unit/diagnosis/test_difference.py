"""keyhole.diff: symmetries are removed, changes have a place, a size and a rank."""

import copy

import numpy as np
import pytest
import torch

import keyhole
from keyhole.errors import InvalidArgument
from keyhole.models.random import attention
from suspects import add_low_rank, randomize, small_bert, small_llama

BERT = small_bert()


def edited(model, change):
    other = copy.deepcopy(model)
    state = other.state_dict()
    change(state)
    other.load_state_dict(state)
    return other


def permute_neurons(state) -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for end in ("weight", "bias"):
        name = f"encoder.layer.1.intermediate.dense.{end}"
        state[name] = state[name][order]
    name = "encoder.layer.1.output.dense.weight"
    state[name] = state[name][:, order]


def permute_heads(state) -> None:
    rows = torch.arange(32).view(4, 8)[[2, 0, 3, 1]].ravel()
    for role in ("query", "key", "value"):
        for end in ("weight", "bias"):
            name = f"encoder.layer.0.attention.self.{role}.{end}"
            state[name] = state[name][rows]
    name = "encoder.layer.0.attention.output.dense.weight"
    state[name] = state[name][:, rows]


def turn_scores(state) -> None:
    turn = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))[0]
    for role in ("query", "key"):
        start = f"encoder.layer.2.attention.self.{role}"
        state[f"{start}.weight"][:8] = turn @ state[f"{start}.weight"][:8]
        state[f"{start}.bias"][:8] = turn @ state[f"{start}.bias"][:8]


def test_the_same_weights_are_the_same() -> None:
    found = keyhole.diff(BERT, copy.deepcopy(BERT))
    assert found.same
    assert found.distance == 0
    assert not found.symmetries


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (permute_neurons, "neurons of layer 1"),
        (permute_heads, "heads of layer 0"),
        (turn_scores, "scores of layer 2"),
    ],
)
def test_symmetries_do_not_matter(change, words) -> None:
    found = keyhole.diff(BERT, edited(BERT, change))
    assert found.same, found
    assert words in " ".join(found.symmetries)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_low_rank_update_has_a_name_a_size_and_a_rank(rank) -> None:
    name = "layers.2.self_attn.o_proj.weight"
    model = small_llama()
    found = keyhole.diff(model, edited(model, add_low_rank(name, rank, 1e-2)))
    assert not found.same
    assert [(part.name, part.rank) for part in found.parts] == [(name, rank)]
    assert found.parts[0].size == pytest.approx(1e-2, rel=1e-3)
    assert "o_proj" in str(found)


def test_a_change_behind_a_permutation_is_found() -> None:
    def both(state) -> None:
        permute_neurons(state)
        state["encoder.layer.1.output.dense.bias"] += 0.01

    found = keyhole.diff(BERT, edited(BERT, both))
    assert [part.name for part in found.parts] == ["encoder.layer.1.output.dense.bias"]


def test_heads_that_moved_are_numbered() -> None:
    def scale(state) -> None:
        state["encoder.layer.1.attention.self.value.weight"][8:16] *= 1.01

    (part,) = keyhole.diff(BERT, edited(BERT, scale)).parts
    assert part.where == "heads 1"


def test_keyhole_models() -> None:
    model = attention(np.random.default_rng(0), 6, heads=2)
    assert keyhole.diff(model, model).same
    other = attention(np.random.default_rng(1), 6, heads=2)
    assert not keyhole.diff(model, other).same


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not of one shape"):
        keyhole.diff(BERT, small_bert(hidden_size=16))
    with pytest.raises(InvalidArgument):
        keyhole.diff(BERT, attention(np.random.default_rng(0), 6))


def turn_stream(state, order, signs) -> None:
    """Another order, and other signs, of everything that reads or writes the residual stream."""
    for name, w in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            state[name] = w[order] * signs[:, None]
        elif "norm" in name:
            state[name] = w[order]
        else:
            state[name] = w[:, order] * signs


def small_decoder():
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=24, tie_word_embeddings=False,
    )  # fmt: skip
    return randomize(transformers.LlamaForCausalLM(config), 3)


def draw_turn(width, seed=5):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(width, generator=generator)
    return order, torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1


def test_a_residual_stream_in_another_order_is_the_same_function() -> None:
    model = small_decoder()
    order, signs = draw_turn(16)
    other = edited(model, lambda state: turn_stream(state, order, signs))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, other(ids).logits, atol=1e-5)
    found = keyhole.diff(model, other)
    assert found.same, str(found)
    assert "the residual stream stands in another order" in str(found)
    assert f"{int((signs < 0).sum())} signs flipped" in str(found)


def test_a_change_is_found_behind_a_stream_in_another_order() -> None:
    model = small_decoder()
    name = "model.layers.1.self_attn.v_proj.weight"

    def change(state) -> None:
        add_low_rank(name, 2, 1e-2)(state)
        turn_stream(state, *draw_turn(16))

    found = keyhole.diff(model, edited(model, change))
    assert not found.same
    assert [(part.name, part.rank) for part in found.parts] == [(name, 2)]


def test_without_a_head_the_answers_are_turned_with_the_stream() -> None:
    model = small_llama()
    found = keyhole.diff(model, edited(model, lambda state: turn_stream(state, *draw_turn(64))))
    assert not found.same
    assert [part.name for part in found.parts] == ["the answers"]
    assert "their numbers stand in another order" in str(found)


def test_layer_norms_allow_another_order_and_no_signs() -> None:
    order = draw_turn(32)[0]

    def change(state) -> None:
        for name, w in state.items():
            if name.endswith(("output.dense.weight", "output.dense.bias")) or "LayerNorm" in name:
                state[name] = w[order]
            elif w.ndim == 2:
                state[name] = w[:, order]

    found = keyhole.diff(BERT, edited(BERT, change))
    assert [part.name for part in found.parts] == ["the answers"]
    assert found.symmetries == ("the residual stream stands in another order",)
