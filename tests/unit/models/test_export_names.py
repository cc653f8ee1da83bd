import numpy as np
import pytest

import keyhole
from keyhole.models.attention import Attention, every_position
from keyhole.models.export_names import to_hf, to_transformer_lens
from keyhole.models.mlp import Mlp
from keyhole.models.position import Position
from keyhole.models.random import attention
from lens import lens_attention

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
LAYER = attention(RNG, 8, heads=2, outputs=8, bias=True)
TOKENS = RNG.standard_normal((2, 5, 8))


def test_attention_under_the_names_of_transformer_lens():
    named = to_transformer_lens(LAYER)
    assert named["W_Q"].shape[:2] == (2, 8)
    expected = every_position(LAYER, TOKENS)
    np.testing.assert_allclose(lens_attention(named, TOKENS), expected, atol=1e-12)


def test_networks_and_blocks_under_the_names_of_transformer_lens():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True).double()
    block = keyhole.from_torch(layer)
    named = to_transformer_lens(block, head_width=4)
    assert named["attn.W_Q"].shape == (2, 8, 4)
    assert (named["mlp.W_in"].shape, named["ln2.w"].shape) == ((8, 12), (8,))
    x = TOKENS[0]
    hidden = np.maximum(x @ named["mlp.W_in"] + named["mlp.b_in"], 0.0)
    answer = hidden @ named["mlp.W_out"] + named["mlp.b_out"]
    np.testing.assert_allclose(answer, block.mlp(x), atol=1e-13)


def test_a_layer_goes_back_into_torchs_own():
    like = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    truth = keyhole.from_torch(like)
    other = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    other.load_state_dict(to_hf(truth, other))
    assert keyhole.distance(keyhole.from_torch(other), truth) < 1e-12


def test_what_has_no_such_weights_is_refused():
    like = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    scalar = attention(RNG, 8, heads=2)
    for refused in (
        lambda: to_transformer_lens(scalar),
        lambda: to_transformer_lens(3),
        lambda: to_transformer_lens(Mlp(np.eye(8), None, np.eye(8), linear=np.eye(8))),
        lambda: to_hf(scalar, like),
        lambda: to_hf(attention(RNG, 8, heads=3, outputs=8), like),
        lambda: to_hf(LAYER, torch.nn.Linear(8, 8)),
    ):
        with pytest.raises(keyhole.InvalidArgument):
            refused()


@pytest.mark.parametrize("causal", [False, True])
def test_a_module_at_all_positions(causal):
    module = keyhole.to_torch(LAYER, positions="all", causal=causal)
    with torch.no_grad():
        answers = module(torch.from_numpy(TOKENS)).numpy()
    named = to_transformer_lens(LAYER)
    np.testing.assert_allclose(answers, lens_attention(named, TOKENS, causal), atol=1e-12)
    np.testing.assert_allclose(answers[:, -1], LAYER(TOKENS), atol=1e-13)


def test_rotary_positions_at_all_places():
    rows = RNG.standard_normal((2, 2, 4, 9))
    position = Position(np.array([1.0, 0.1]), rows[0], rows[1])
    layer = Attention(LAYER.heads, LAYER.offset, position=position)
    module = keyhole.to_torch(layer, positions="all", causal=True)
    with torch.no_grad():
        answers = module(torch.from_numpy(TOKENS)).numpy()
    for place in range(TOKENS.shape[1]):
        np.testing.assert_allclose(answers[:, place], layer(TOKENS[:, : place + 1]), atol=1e-12)
    with pytest.raises(keyhole.InvalidArgument, match="must be causal"):
        keyhole.to_torch(layer, positions="all")
