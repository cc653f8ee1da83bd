"""Whole models on token numbers: folders as people have them, read without further packages."""

import json

import numpy as np
import pytest
import torch
import transformers

from keyhole.errors import FileFormatError, InvalidArgument
from keyhole.oracles.token_models import (
    POOLINGS,
    TokenReading,
    has_classifier,
    has_decoder,
    list_readings,
    open_token_model,
    pool,
)
from sentence_folders import TOKENS, WIDTH, write_classifier, write_plain, write_sentence

ROWS = [np.array([5, 9, 7]), np.array([30]), np.array([8, 8, 11, 12, 40])]


def states_of(folder, row):
    """Last hidden states of one row, by transformers itself."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor(row)[None]).last_hidden_state[0].numpy()


def test_a_sentence_folder_is_read_as_it_says(tmp_path):
    box = open_token_model(f"hf:{write_sentence(tmp_path)}")
    assert str(box.reading) == "mean pooling, normalised"
    assert box.reading.stated
    assert (box.spec.tokens, box.spec.max_length) == (TOKENS, 48)
    answers = box.ask(ROWS)
    for row, answer in zip(ROWS, answers, strict=True):
        mean = states_of(tmp_path, row).mean(axis=0)
        np.testing.assert_allclose(answer, mean / np.linalg.norm(mean), atol=2e-6)


def test_a_dense_layer_and_cls_pooling(tmp_path):
    folder = write_sentence(tmp_path, pooling="cls_token", dense=True, normalize=False)
    box = open_token_model(folder)
    assert box.reading.pooling == "cls"
    layer = box.reading.dense[0][0]
    first = states_of(tmp_path, ROWS[0])[0]
    expected = np.tanh(first @ layer.weight.detach().numpy().T + layer.bias.detach().numpy())
    np.testing.assert_allclose(box.ask(ROWS)[0], expected, atol=2e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_does_not_reach_the_pooled_vector(pooling):
    states = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0))
    longer = torch.cat([states, torch.full((1, 2, 3), 99.0)], dim=1)
    mask, longer_mask = torch.ones(1, 4, dtype=int), torch.tensor([[1, 1, 1, 1, 0, 0]])
    torch.testing.assert_close(
        pool(states, mask, pooling), pool(longer, longer_mask, pooling), atol=1e-6, rtol=1e-6
    )


def test_texts_are_encoded_by_the_folder_and_cut(tmp_path):
    box = open_token_model(write_sentence(tmp_path))
    assert box.encode("aB").tolist() == [2, 4, 5, 3]
    assert len(box.encode("a" * 100)) == 48
    np.testing.assert_allclose(box.ask(["ab"]), box.ask([np.array([2, 4, 5, 3])]))
    assert {0, 2, 3} <= box.reserved


def test_a_classifier_answers_with_logits(tmp_path):
    folder = write_classifier(tmp_path)
    assert has_classifier(folder)
    assert not has_decoder(folder)
    box = open_token_model(f"hf:{folder}")
    assert box.reading.pooling is None
    assert box.ask(ROWS).shape == (3, 3)


def test_a_plain_folder_says_nothing_of_pooling(tmp_path):
    box = open_token_model(write_plain(tmp_path))
    assert not box.reading.stated
    assert len({str(one) for one in list_readings(box.reading)}) == 8
    stated = open_token_model(tmp_path, pooling="cls", normalize=True)
    assert stated.reading.stated
    np.testing.assert_allclose(np.linalg.norm(stated.ask(ROWS), axis=1), 1.0, rtol=1e-6)


def test_formats(tmp_path):
    box = open_token_model(write_sentence(tmp_path))
    exact, half = box.in_format("float64").ask(ROWS), box.in_format("bfloat16").ask(ROWS)
    assert exact.dtype == np.float64
    assert 1e-9 < np.abs(box.ask(ROWS) - exact).max() < 1e-5
    assert 1e-4 < np.abs(half - exact).max() < 0.2
    weights = box.in_format("bfloat16", compute="float32")
    assert weights.dtype == torch.float32


def test_what_is_not_understood_is_said(tmp_path):
    write_sentence(tmp_path)
    listed = json.loads((tmp_path / "modules.json").read_text())
    listed[-1]["type"] = "sentence_transformers.models.WeightedLayerPooling"
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(InvalidArgument, match="WeightedLayerPooling"):
        open_token_model(tmp_path)
    (tmp_path / "modules.json").write_text("[3]")
    with pytest.raises(FileFormatError, match="no list of modules"):
        open_token_model(tmp_path)
    with pytest.raises(InvalidArgument, match="pooling must be one of"):
        TokenReading("median")


def test_a_module_of_torch(tmp_path):
    write_plain(tmp_path)
    module = transformers.AutoModel.from_pretrained(tmp_path)
    box = open_token_model(module, pooling="last")
    np.testing.assert_allclose(box.ask(ROWS)[2], states_of(tmp_path, ROWS[2])[-1], atol=2e-6)
    assert box.ask(ROWS).shape == (3, WIDTH)
