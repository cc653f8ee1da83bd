import numpy as np
import pytest

import keyhole
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.files import load_model, save_model
from keyhole.models.mlp import with_parts
from keyhole.models.norm import Norm
from keyhole.models.position import Position
from keyhole.models.stack import Stack, answer_everywhere, answer_one_by_one

torch = pytest.importorskip("torch")

TOKENS = np.random.default_rng(0).standard_normal((2, 5, 8))


def encoder(seed=0, causal=False):
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
    norm = torch.nn.LayerNorm(8)
    module = torch.nn.TransformerEncoder(layer, 3, norm=norm, enable_nested_tensor=False)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    blocks = [keyhole.from_torch(part) for part in module.layers]
    final = Norm(norm.weight.detach().numpy(), norm.bias.detach().numpy(), norm.eps)
    return module, Stack(blocks, final, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_a_stack_answers_like_torchs(causal):
    module, stack = encoder(causal=causal)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5).double() if causal else None
    with torch.no_grad():
        expected = module(torch.from_numpy(TOKENS), mask=mask)[:, -1].numpy()
    np.testing.assert_allclose(stack(TOKENS), expected, atol=1e-13)


def test_files_and_distance(tmp_path):
    _, stack = encoder(causal=True)
    again = load_model(save_model(stack, tmp_path / "stack.safetensors"))
    assert again.causal
    np.testing.assert_array_equal(again(TOKENS), stack(TOKENS))
    assert keyhole.distance(again, stack) < 1e-15
    swapped = Stack(stack.blocks[::-1], stack.final_norm, causal=True)
    assert keyhole.distance(swapped, stack) > 0.1
    assert keyhole.distance(Stack(stack.blocks, None, causal=True), stack) == np.inf


def test_positions_are_added_to_the_tokens(tmp_path):
    _, stack = encoder(causal=True)
    places = np.random.default_rng(1).standard_normal((6, 8))
    placed = stack.replace(positions=places)
    np.testing.assert_allclose(placed(TOKENS), stack(TOKENS + places[:5]), atol=1e-14)
    again = load_model(save_model(placed, tmp_path / "placed.safetensors"))
    np.testing.assert_array_equal(again(TOKENS), placed(TOKENS))
    assert placed.astype(np.float32)(TOKENS).dtype == np.float32
    assert "6 positions" in repr(placed)
    assert keyhole.distance(again, placed) < 1e-15
    assert keyhole.distance(stack, placed) == np.inf
    # no mean shows behind a LayerNorm
    assert keyhole.distance(stack.replace(positions=places + 1.0), placed) < 1e-12
    assert keyhole.distance(stack.replace(positions=places[::-1]), placed) > 0.1
    with pytest.raises(keyhole.InvalidArgument, match="6 places"):
        placed(np.zeros((1, 7, 8)))


def test_of_the_means_of_constants_only_the_sum_shows():
    _, stack = encoder(causal=True)
    open_ = stack.replace(final_norm=None)
    places = np.random.default_rng(1).standard_normal((6, 8))
    placed, last = open_.replace(positions=places), open_.blocks[-1]
    network = with_parts(last.mlp, offset=last.mlp.offset - 1.0)
    blocks = [*open_.blocks[:-1], Block(last.attention, network, norm="pre", gain=last.gain,
                                        bias=last.bias, epsilons=last.epsilons)]  # fmt: skip
    other = open_.replace(blocks=blocks, positions=places + 1.0)
    np.testing.assert_allclose(other(TOKENS), placed(TOKENS), atol=1e-12)
    assert keyhole.distance(other, placed) < 1e-12


def test_every_position_is_the_last_once():
    block = encoder()[1].blocks[0]
    causal = answer_everywhere(block, TOKENS, causal=True)
    np.testing.assert_allclose(causal[:, 2], block(TOKENS[:, :3]), atol=1e-14)
    both = answer_everywhere(block, TOKENS, causal=False)
    np.testing.assert_allclose(both[:, -1], block(TOKENS), atol=1e-14)
    for mask, told in ((True, causal), (False, both)):
        np.testing.assert_allclose(answer_one_by_one(block, TOKENS, mask), told, atol=1e-13)


def test_what_is_no_stack_is_refused():
    _, stack = encoder()
    placed = Attention(
        [Head(np.eye(8), None, np.eye(8))], np.zeros(8), position=Position(slopes=np.array([0.5]))
    )
    for parts in (
        ([],),
        (stack.blocks, Norm(np.ones(3))),
        ([Block(placed, None, norm="none")],),
    ):
        with pytest.raises(keyhole.InvalidArgument):
            Stack(*parts)
    with pytest.raises(keyhole.InvalidArgument, match="causal is needed once"):
        Stack.from_arrays({})
