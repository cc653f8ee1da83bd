import numpy as np
import pytest

import keyhole

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from keyhole.models.import_torch import from_hf, from_torch  # noqa: E402

TOKENS = np.random.default_rng(0).standard_normal((3, 7, 16))


def shaken(module, seed=0):
    """In double precision, with every parameter moved: biases and gains are not as they start."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).double())
    return module


def answer(module, tokens=TOKENS):
    with torch.no_grad():
        return module(torch.from_numpy(tokens))[:, -1].numpy()


@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention(bias):
    module = shaken(nn.MultiheadAttention(16, 4, bias=bias, batch_first=True))
    found = from_torch(module)
    expected = answer(lambda tokens: module(tokens, tokens, tokens)[0])
    np.testing.assert_allclose(found(TOKENS), expected, atol=1e-14)
    assert [head.rank_bound for head in found.heads] == [4] * 4


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.functional.silu])
def test_encoder_layers(norm_first, activation):
    module = shaken(
        nn.TransformerEncoderLayer(
            16, 4, 24, activation=activation, norm_first=norm_first, batch_first=True
        )
    )
    found = from_torch(module)
    assert (found.norm, found.mlp.neurons) == ("pre" if norm_first else "post", 24)
    np.testing.assert_allclose(found(TOKENS), answer(module), atol=1e-13)


def test_a_recovered_layer_is_compared_with_its_weights():
    module = shaken(nn.MultiheadAttention(8, 2, batch_first=True))
    found = keyhole.recover(module, keyhole.MultiHead())
    assert keyhole.distance(found.model, keyhole.from_torch(module)) < 1e-8


class Gated(nn.Module):
    """A network as in Llama."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 24), nn.Linear(16, 24)
        self.down_proj = nn.Linear(24, 16)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_gated_networks():
    module = shaken(Gated())
    found = from_torch(module)
    assert (found.gated, found.activation) == (True, "silu")
    np.testing.assert_allclose(found(TOKENS[:, -1]), answer(module), atol=1e-14)


def test_what_cannot_be_read_is_said():
    with pytest.raises(keyhole.InvalidArgument, match="LSTM cannot be read"):
        from_torch(nn.LSTM(4, 4))
    with pytest.raises(keyhole.InvalidArgument, match=r"that can be: 0, 0\.self_attn"):
        from_torch(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)))
    with pytest.raises(keyhole.InvalidArgument, match="expected a torch module"):
        from_torch(np.zeros(3))
    with pytest.raises(keyhole.InvalidArgument, match="bias_k"):
        from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    odd = nn.TransformerEncoderLayer(8, 2, 8, activation=torch.sin, batch_first=True)
    with pytest.raises(keyhole.InvalidArgument, match="the activation sin"):
        from_torch(odd)


def test_blocks_by_number():
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    model = shaken(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    np.testing.assert_allclose(from_hf(model, -1)(TOKENS), answer(model.layers[2]), atol=1e-13)
    np.testing.assert_allclose(
        from_hf(model, "layers[1]")(TOKENS), answer(model.layers[1]), atol=1e-13
    )
    with pytest.raises(keyhole.InvalidArgument, match="3 blocks"):
        from_hf(model, 3)
    with pytest.raises(keyhole.InvalidArgument, match=r"did you mean layers\.2"):
        from_hf(model, "layers.5")


def test_an_audit_reads_the_weights_of_a_module(tmp_path, monkeypatch):
    from keyhole.cli.audit import owned_model

    (tmp_path / "owned_layer.py").write_text(
        "import torch\n\nlayer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert len(owned_model("owned_layer:layer").heads) == 2
    with pytest.raises(keyhole.InvalidArgument, match="is a module"):
        owned_model("owned_layer:torch")
