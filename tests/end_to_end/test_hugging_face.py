"""Models of `transformers` with random weights: read from their weights, asked through their parts."""

import numpy as np
import pytest

import keyhole
from lens import lens_attention

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}
HIDDEN = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, **SMALL}


def build(kind, seed=0, **settings):
    """A small model in double precision, with biases and gains that are not as they start."""
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}Model")(
        getattr(transformers, f"{kind}Config")(**settings)
    )
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ask(model, part, tokens):
    def run(batch, length):
        return model(input_ids=torch.zeros((batch, length), dtype=torch.long))

    box = keyhole.open_oracle(part, adapter=keyhole.inside(model, part, run))
    return box.ask(keyhole.QueryBatch.of(tokens, "test"))


@pytest.mark.parametrize(
    ("kind", "settings", "layer", "error"),
    [
        ("Bert", HIDDEN | {"intermediate_size": 24}, "encoder.layer.1.attention.self", 1e-14),
        ("Bert", HIDDEN | {"intermediate_size": 24}, "encoder.layer[1].attention", 1e-13),
        ("Bert", HIDDEN | {"intermediate_size": 24}, 1, 1e-13),
        ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 4, **SMALL}, "h.0.attn", 1e-14),
        ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 4, **SMALL}, 0, 1e-13),
        # Llama's norms and angles are computed in single precision, whatever its parameters are
        ("Llama", HIDDEN | {"num_key_value_heads": 2}, "layers.0.self_attn", 1e-7),
        ("Llama", HIDDEN | {"num_key_value_heads": 2, "intermediate_size": 24}, 1, 1e-6),
    ],
)
def test_the_model_in_the_weights_answers_like_the_part(kind, settings, layer, error):
    model = build(kind, **settings)
    found = keyhole.from_hf(model, layer)
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    part = blocks[layer] if isinstance(layer, int) else keyhole.submodule(model, layer)
    tokens = np.random.default_rng(0).standard_normal((3, 9, 16))
    np.testing.assert_allclose(ask(model, part, tokens), found(tokens), atol=error)


def test_llamas_attention_is_recovered_with_its_own_positions():
    settings = HIDDEN | {"num_key_value_heads": 2, "num_hidden_layers": 1, "attention_bias": True}
    model = build("Llama", seed=5, **settings, intermediate_size=8, max_position_embeddings=8192)
    part = model.layers[0].self_attn
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.copy_(0.35 * torch.randn_like(parameter))

    def run(batch, length):
        return model(input_ids=torch.zeros((batch, length), dtype=torch.long))

    box = keyhole.open_oracle(part, adapter=keyhole.inside(model, part, run), max_length=256)
    found = keyhole.recover(box, seed=2)
    truth = keyhole.from_hf(model, "layers.0.self_attn")
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert keyhole.distance(found.model, truth) < 1e-5  # angles have the digits of float32
    assert found.details["rotary_base"] == pytest.approx(1e4, rel=1e-6)
    assert found.details["key_value_groups"] == 2
    assert any("float32" in note for note in found.notes)


@pytest.fixture
def folder(tmp_path):
    build("Bert", **HIDDEN, intermediate_size=24, max_position_embeddings=64).save_pretrained(
        tmp_path / "bert"
    )
    return tmp_path / "bert"


def test_a_part_of_a_model_in_a_folder_is_recovered(folder):
    found = keyhole.recover(f"hf:{folder}#encoder.layer[0].attention.self", keyhole.MultiHead())
    model = transformers.AutoModel.from_pretrained(folder)
    truth = keyhole.from_hf(model, "encoder.layer.0.attention.self")
    assert len(found.model.heads) == 4
    assert keyhole.distance(found.model, truth) < 1e-8


def test_a_folder_tells_how_long_sequences_may_be(folder):
    box = keyhole.open_oracle(f"hf:{folder}#encoder.layer.0")
    assert (box.spec.width, box.spec.domain.max_length) == (16, 64)
    whole = keyhole.open_oracle(f"hf:{folder}", dtype="float32", max_length=8)
    tokens = np.random.default_rng(0).standard_normal((2, 8, 16))
    assert whole.ask(keyhole.QueryBatch.of(tokens, "test")).dtype == np.float32
    assert whole.spec.domain.max_length == 8


def test_what_is_no_folder_or_no_part(folder, tmp_path):
    with pytest.raises(keyhole.FileFormatError, match=r"no config\.json"):
        keyhole.open_oracle(f"hf:{tmp_path}")
    with pytest.raises(keyhole.InvalidArgument, match="did you mean encoder"):
        keyhole.open_oracle(f"hf:{folder}#encoder.layer.7")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(keyhole.FileFormatError, match="transformers cannot read"):
        keyhole.open_oracle(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 4, **SMALL}, "h.1.attn"),
        ("Bert", HIDDEN | {"intermediate_size": 24}, "encoder.layer.1.attention.self"),
    ],
)
def test_a_recovered_part_is_put_back_and_the_model_runs(kind, settings, name):
    model = build(kind, **settings)
    part = keyhole.submodule(model, name)

    def run(batch, length):
        return model(input_ids=torch.zeros((batch, length), dtype=torch.long))

    box = keyhole.open_oracle(part, adapter=keyhole.inside(model, part, run), max_length=64)
    found = keyhole.recover(box, keyhole.MultiHead()).model
    numbers = torch.arange(12)[None]
    with torch.no_grad():
        before = model(input_ids=numbers).last_hidden_state
        part.load_state_dict(keyhole.to_hf(found, part), strict=False)
        after = model(input_ids=numbers).last_hidden_state
    assert torch.abs(after - before).max() < 1e-8
    # the same part under the names of TransformerLens, at all positions
    tokens = torch.from_numpy(np.random.default_rng(3).standard_normal((2, 6, 16)))
    with torch.no_grad():
        answers = keyhole.inside(model, part, run)(part, tokens)[0].numpy()
    named = keyhole.to_transformer_lens(keyhole.from_hf(model, name))
    there = lens_attention(named, tokens.numpy(), causal=kind == "GPT2")
    assert np.abs(there - answers).max() < 1e-10
