"""A whole model, block by block, stopped half way and continued."""

import numpy as np
import pytest

import keyhole
from keyhole.layers import name_parts, recover_layers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8,
        vocab_size=20, max_position_embeddings=300,
    )  # fmt: skip
    model = transformers.BertModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_every_block_is_recovered_and_no_query_paid_twice(folder, tmp_path):
    options = {"part": "attention.self", "learner": "multi-head", "dtype": "float64"}
    told = []

    def stop_after_the_first(name, run):
        told.append(name)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recover_layers(f"hf:{folder}", tmp_path / "runs", progress=stop_after_the_first, **options)
    assert told == ["encoder.layer.0.attention.self"]

    found = recover_layers(f"hf:{folder}", tmp_path / "runs", **options)
    assert found.recovered
    model = transformers.AutoModel.from_pretrained(folder)
    for name, run in zip(found.names, found.runs, strict=True):
        assert keyhole.distance(run.model, keyhole.from_hf(model, name)) < 1e-8
    page = (tmp_path / "runs" / "index.html").read_text()
    assert page.count(">recovered<") == 3
    assert (tmp_path / "runs" / found.names[2] / "report.html").is_file()

    # all is saved: nothing is asked, and in two processes nothing changes
    again = recover_layers(f"hf:{folder}", tmp_path / "runs", processes=2, **options)
    assert [run.ledger.paid for run in again.runs] == [run.ledger.paid for run in found.runs]
    x = np.random.default_rng(0).standard_normal((2, 4, 8))
    np.testing.assert_array_equal(again.runs[1].model(x), found.runs[1].model(x))
    with pytest.raises(keyhole.InvalidArgument, match="whole blocks"):
        again.to_stack()


def test_names_of_the_parts():
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 2, enable_nested_tensor=False
    )
    assert name_parts(encoder, "self_attn") == ["layers.0.self_attn", "layers.1.self_attn"]
    with pytest.raises(keyhole.InvalidArgument, match="no list of blocks"):
        name_parts(torch.nn.Linear(2, 2), "")


def test_only_folders_have_blocks(tmp_path):
    with pytest.raises(keyhole.InvalidArgument, match="hf:FOLDER"):
        recover_layers("package:model", tmp_path)


def test_blocks_as_initialised_predict_and_go_back_into_the_model(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=64, vocab_size=50, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).eval().save_pretrained(tmp_path / "gpt2")
    found = recover_layers(f"hf:{tmp_path / 'gpt2'}", tmp_path / "runs")
    assert found.complete
    assert not found.recovered
    assert all("not determined" in run.reason for run in found.runs)
    assert found.agreement.largest < 0.05 * found.agreement.spread
    assert "2 more have a model that predicts" in (tmp_path / "runs" / "index.html").read_text()
