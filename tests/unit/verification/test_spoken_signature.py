"""Signatures of language models: whole answers, the likeliest tokens, labels."""

import numpy as np
import pytest

import keyhole
from completions_server import served
from keyhole.errors import InvalidArgument
from keyhole.oracles.language_model.interface import Interface
from keyhole.verification.language_models import Spoken
from keyhole.verification.signature import load_signature
from keyhole.verification.spoken_signature import compare_one
from prompted_models import TOKENS, LastTokens

NAMES = [f"t{token}" for token in range(TOKENS)]


def heated(prompts):
    return LastTokens()(prompts) / 1.3


def opened(server):
    return keyhole.open_language_model(server.url, vocabulary=TOKENS, max_length=9, names=NAMES)


def test_a_function_is_signed_and_recognised(tmp_path):
    path = tmp_path / "a.keyhole"
    signature = keyhole.sign(keyhole.open_language_model(LastTokens(), max_length=9), path, seed=1)
    assert signature.plan.kind == "prompts"
    assert signature.talk is not None
    again = load_signature(path)
    assert np.array_equal(again.told, signature.told)
    box = keyhole.open_language_model(LastTokens(logprobs=True))  # normalised, and the same model
    verdict = keyhole.verify(box, path)
    assert verdict.agrees, verdict.bound
    assert "as the box that was signed answers them" in verdict.bound
    assert not keyhole.verify(keyhole.open_language_model(heated), path).agrees
    watch = keyhole.watch(keyhole.open_language_model(heated), str(path), tmp_path / "w.json")
    assert watch.bad > 0.9 * watch.asked


@pytest.mark.parametrize("top", [5, 0])
def test_an_interface_that_tells_little_is_signed_as_it_is(top, tmp_path):
    path = tmp_path / "a.keyhole"
    with served(LastTokens(), Interface(TOKENS, top), "ids") as server, opened(server) as box:
        keyhole.sign(box, path, queries=20, seed=1)
        assert keyhole.verify(box, path).agrees
    whole = keyhole.open_language_model(LastTokens())
    assert keyhole.verify(whole, path).agrees  # what both tell is compared
    other = LastTokens(table=np.random.default_rng(7).standard_normal((2, TOKENS, 6)))
    with served(other, Interface(TOKENS, top), "ids") as server, opened(server) as box:
        assert not keyhole.verify(box, path).agrees


def test_what_both_told_is_compared():
    one = Spoken(np.array([3]), np.array([[3, 5]]), np.array([[-1.0, -2.0]]))
    two = Spoken(np.array([5]), np.array([[5, -1]]), np.array([[-2.5, 1.0]]))
    assert compare_one(one, two, 0) == (0.5, 1)
    nothing = np.zeros((1, 0))
    labels = Spoken(np.array([5]), nothing.astype(int), nothing)
    assert compare_one(labels, one, 0) == (float("inf"), 1)


def test_another_kind_of_box_is_said(tmp_path):
    path = tmp_path / "a.keyhole"
    keyhole.sign(keyhole.open_language_model(LastTokens(), max_length=9), path)
    with pytest.raises(InvalidArgument, match="box is none"):
        keyhole.verify(keyhole.open_oracle(lambda tokens: tokens.sum((1, 2)), width=3), path)


def test_a_folder_that_predicts_no_token_is_no_language_model(tmp_path):
    path, folder = tmp_path / "a.keyhole", tmp_path / "encoder"
    keyhole.sign(keyhole.open_language_model(LastTokens(), max_length=9), path, queries=5, seed=1)
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    with pytest.raises(InvalidArgument, match="is no language model"):
        keyhole.verify(f"hf:{folder}", path)
