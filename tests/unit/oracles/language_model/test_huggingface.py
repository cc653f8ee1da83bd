"""Causal LMs of `transformers`, known by what they have."""

import numpy as np
import pytest
import torch
import transformers

import keyhole
from keyhole.oracles.queries import QueryBatch


def test_a_small_llama_is_opened_as_it_is_and_its_width_found():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=12, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    box = keyhole.open_language_model(model)
    spec = box.spec
    assert (spec.domain.tokens, spec.domain.max_length, spec.answers) == (60, 32, "logits")
    prompts = np.random.default_rng(0).integers(60, size=(3, 5))
    answers = box.ask(QueryBatch.of(prompts[:, :, None].astype(float), ""))
    with torch.inference_mode():
        truth = model(torch.tensor(prompts)).logits[:, -1].numpy()
    assert answers.dtype == np.float32
    assert np.array_equal(answers, truth)
    run = keyhole.recover(box, keyhole.OutputLayerLearner())
    assert run.model.width == 12


def test_the_dictionary_of_a_tied_llama_is_found_through_vectors():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32, initializer_range=0.5,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.mul_(torch.exp(0.2 * torch.randn(8)))
    tokens, vectors = keyhole.open_language_model(model), keyhole.open_embeddings(model)
    layer = keyhole.recover(tokens, keyhole.OutputLayerLearner()).model
    found = keyhole.recover_dictionary(vectors, tokens, layer, seed=1)
    truth = model.model.embed_tokens.weight.detach().numpy()
    assert np.abs(found.vectors - truth).max() < 1e-3 * np.abs(truth).max()


def test_what_is_no_causal_model_has_no_embeddings():
    with pytest.raises(keyhole.InvalidArgument, match="causal LM"):
        keyhole.open_embeddings(lambda x: x)
