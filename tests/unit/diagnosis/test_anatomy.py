"""Parts of models are found by what they do, whatever their names are."""

import pytest
import torch
import transformers

from keyhole.diagnosis.anatomy import describe

TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
WIDER = {**TINY, "intermediate_size": 12}
BERT_ROLES = {"query", "key", "value", "output", "up", "down"}
LLAMA_ROLES = BERT_ROLES | {"gate"}
FAMILIES = [  # by name: a family is loaded where it is asked for
    ("Bert", WIDER, BERT_ROLES, False),
    ("Roberta", WIDER, BERT_ROLES, False),
    ("MPNet", WIDER, BERT_ROLES, False),
    ("ModernBert", {**WIDER, "pad_token_id": 0}, LLAMA_ROLES, False),
    ("Llama", WIDER, LLAMA_ROLES, True),
    ("Qwen2", {**WIDER, "num_key_value_heads": 1}, LLAMA_ROLES, True),
    ("Mistral", {**WIDER, "num_key_value_heads": 1}, LLAMA_ROLES, True),
    ("Gemma", {**WIDER, "num_key_value_heads": 1, "head_dim": 4}, LLAMA_ROLES, True),
    ("GPT2", {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 20}, BERT_ROLES, True),
]


@pytest.mark.parametrize(("kind", "settings", "roles", "causal"), FAMILIES)
def test_layers_and_projections_are_found(kind, settings, roles, causal) -> None:
    config = getattr(transformers, f"{kind}Config")(**settings)
    anatomy = describe(getattr(transformers, f"{kind}Model")(config))
    assert len(anatomy.layers) == 2
    for layer in anatomy.layers:
        assert set(layer.projections) == roles
    assert anatomy.activations
    assert anatomy.norms
    assert anatomy.causal == causal
    assert all(p.matrix.shape[0] == p.stop - p.start for p in anatomy.projections)


def test_albert_has_one_shared_layer() -> None:
    config = transformers.AlbertConfig(**WIDER, embedding_size=4)
    anatomy = describe(transformers.AlbertModel(config))
    assert len(anatomy.layers) == 1
    assert set(anatomy.layers[0].projections) == BERT_ROLES


def test_a_view_of_a_fused_weight_changes_the_model() -> None:
    model = transformers.GPT2Model(
        transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)
    )
    key = describe(model).layers[0].projections["key"]
    key.matrix.zero_()
    stored = model.h[0].attn.c_attn.weight
    assert torch.all(stored[:, 8:16] == 0)
    assert torch.all(stored[:, :8] != 0)
