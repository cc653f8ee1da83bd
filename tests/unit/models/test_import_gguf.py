"""GGUF files: the same model as in the transformers model that they were made from."""

from pathlib import Path

import numpy as np
import pytest

import keyhole
from keyhole.models.import_gguf import from_gguf
from keyhole.targets import check_target

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 30}  # fmt: skip
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
         "ffn_norm": "post_attention_layernorm"}  # fmt: skip


def side_by_side(array, heads):
    """As llama.cpp's converter keeps pairs that turn: entry j beside entry j + half."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write(model, path, architecture, kind=None):
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tensors = {"output_norm.weight": state["norm.weight"]}
    for number in range(config.num_hidden_layers):
        for name, theirs in NAMES.items():
            for end in ("weight", "bias"):
                tensor = state.get(f"layers.{number}.{theirs}.{end}")
                if tensor is not None:
                    tensors[f"blk.{number}.{name}.{end}"] = tensor
    for name, tensor in tensors.items():
        array = tensor.numpy().astype(np.float32)
        if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = config.num_attention_heads if "_q." in name else config.num_key_value_heads
            array = side_by_side(array, heads)
        if kind is not None and array.ndim == 2:
            data = gguf.quants.quantize(array, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make(kind, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    model = getattr(transformers, f"{kind}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return model


@pytest.mark.parametrize(("kind", "architecture"), [("Llama", "llama"), ("Qwen2", "qwen2")])
def test_parts_are_those_of_the_model_that_was_written(tmp_path, kind, architecture):
    model = make(kind)
    path = write(model, tmp_path / "model.gguf", architecture)
    for part, theirs in (("attn", "self_attn"), ("ffn", "mlp")):
        found = from_gguf(path, f"blk.1.{part}")
        # their frequencies are of single precision
        assert keyhole.distance(found, keyhole.from_hf(model, f"layers.1.{theirs}")) < 1e-7
    tokens = np.random.default_rng(1).standard_normal((5, 7, 16))
    with torch.no_grad():
        theirs = model.double()(inputs_embeds=torch.from_numpy(tokens)).last_hidden_state[:, -1]
    # their norm and their angles are of single precision whatever the model is
    np.testing.assert_allclose(from_gguf(path)(tokens), theirs.numpy(), atol=2e-5)


def test_attention_of_a_file_is_a_box_and_is_recovered(tmp_path):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = write(make("Llama", **sizes), tmp_path / "model.gguf", "llama")
    found = keyhole.recover(f"gguf:{path}#blk.0.attn")
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.model.position.kind == "rotary"
    assert keyhole.distance(found.model, keyhole.from_gguf(path, "blk.0.attn")) < 1e-6


def test_quantised_weights_are_the_numbers_that_they_stand_for(tmp_path):
    model = make("Llama", head_dim=16)
    kind = gguf.GGMLQuantizationType.F16
    exact = from_gguf(write(model, tmp_path / "a.gguf", "llama"), "blk.0.attn")
    rough = from_gguf(write(model, tmp_path / "b.gguf", "llama", kind), "blk.0.attn")
    assert 1e-6 < keyhole.distance(rough, exact) < 1e-3


def test_a_slip_of_the_pen_ends_in_a_sentence(tmp_path):
    path = write(make("Llama"), tmp_path / "model.gguf", "llama")
    with pytest.raises(keyhole.InvalidArgument, match=r"did you mean blk\.1\.attn"):
        from_gguf(path, "blk.1.atn")
    with pytest.raises(keyhole.InvalidArgument, match="llama, qwen2 can be read"):
        from_gguf(write(make("Llama"), tmp_path / "other.gguf", "mamba"))
    (tmp_path / "half.gguf").write_bytes(path.read_bytes()[:200])
    with pytest.raises(keyhole.FileFormatError, match="cannot be read as GGUF"):
        from_gguf(tmp_path / "half.gguf")
    with pytest.raises(keyhole.FileFormatError, match="No such file"):
        check_target("gguf:nowhere.gguf")
    Path(tmp_path / "text.gguf").write_text("no")
    with pytest.raises(keyhole.FileFormatError, match="does not begin with GGUF"):
        check_target(str(tmp_path / "text.gguf"))
    with pytest.raises(keyhole.InvalidArgument, match="no option device"):
        keyhole.open_oracle(str(path), device="cpu")
