"""The doctor on every family of models that it says it knows: healthy, and with faults made by hand."""

import copy

import numpy as np
import pytest
import torch
import transformers

import keyhole
from suspects import randomize

SMALL = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 96, "initializer_range": 0.25,
}  # fmt: skip
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SMALL, **MARKS, "num_key_value_heads": 2}
ENCODERS = {
    "Bert": SMALL,
    "Roberta": {**SMALL, "pad_token_id": 1},
    "Albert": {**SMALL, "embedding_size": 16},
    "MPNet": SMALL,
    "ModernBert": {**SMALL, **MARKS, "global_attn_every_n_layers": 2, "local_attention": 8},
}
DECODERS = {
    "Llama": DECODER,
    "Qwen2": DECODER,
    "Mistral": {**DECODER, "sliding_window": None},
    "Gemma": {**DECODER, "head_dim": 8},
    "GPT2": {**MARKS, "vocab_size": 120, "n_positions": 96, "n_embd": 32, "n_layer": 3,
             "n_head": 4, "initializer_range": 0.25},
}  # fmt: skip
FAMILIES = {**ENCODERS, **DECODERS}


def make(family):
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    kind = getattr(transformers, f"{family}Model")
    takes_pooler = family in ("Bert", "Roberta", "Albert", "MPNet")
    return randomize(kind(config, **({"add_pooling_layer": False} if takes_pooler else {})), 3)


def widen_epsilon(model):
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 3e-3)


def use_relu(model):
    for module in list(model.modules()):
        for name in ("intermediate_act_fn", "act_fn", "act", "activation"):
            if name in {**module.__dict__, **module._modules}:
                module._modules.pop(name, None)
                module.__dict__[name] = torch.nn.functional.relu


def serve(model, pooling, ignore_mask=False):
    def answer(tokens, attention_mask=None):
        ids, mask = torch.from_numpy(tokens), torch.from_numpy(attention_mask)
        given = torch.ones_like(mask) if ignore_mask else mask
        with torch.no_grad():
            states = model(input_ids=ids, attention_mask=given).last_hidden_state
        if pooling == "last":
            return states[torch.arange(len(ids)), mask.sum(1) - 1].numpy()
        return ((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).numpy()

    return answer


def examine(family, fault=None, said="", **more):
    model = make(family)
    served = copy.deepcopy(model)
    if fault is not None:
        fault(served)
    pooling = "last" if family in DECODERS else "mean"
    diagnosis = keyhole.doctor(
        model, serve(served, said or pooling, **more), pooling=pooling, normalize=False
    )
    return diagnosis, [cause.name for cause in diagnosis.causes]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_healthy_model_is_the_same(family) -> None:
    assert examine(family)[0].same


@pytest.mark.parametrize("family", FAMILIES)
def test_faults_of_the_model_are_named(family) -> None:
    assert examine(family, widen_epsilon)[1] == ["the norms' epsilon is 0.003"]
    assert examine(family, use_relu)[1] == ["the activation is relu"]


@pytest.mark.parametrize("family", DECODERS)
def test_another_pooling_is_named(family) -> None:
    assert examine(family, said="mean")[1] == ["pooling is mean"]


@pytest.mark.parametrize("family", ENCODERS)
def test_an_ignored_mask_is_named(family) -> None:
    assert examine(family, ignore_mask=True)[1] == ["the attention mask is ignored"]


def stack():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return randomize(torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), 1)


def asked(module):
    def answer(rows):
        with torch.no_grad():
            return module(torch.from_numpy(rows).float())[:, -1].numpy()

    return answer


def skip_a_layer(module):
    del module.layers[1]


def forget_a_bias(module):
    module.layers[2].linear1.bias.data.zero_()


def round_to_bytes(module):
    for layer in module.layers:
        for linear in (layer.linear1, layer.linear2, layer.self_attn.out_proj):
            weight = linear.weight.data
            unit = weight.abs().max() / 127
            linear.weight.data = (weight / unit).round() * unit


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (lambda module: None, None),
        (skip_a_layer, "layer 1 is skipped"),
        (widen_epsilon, "the norms' epsilon is 0.003"),
        (forget_a_bias, "the bias of the up projection in layer 2 is missing"),
        (round_to_bytes, "weights are quantised: int8 per tensor, embeddings not"),
    ],
)
def test_a_stack_of_torch(fault, name) -> None:
    module = stack()
    served = copy.deepcopy(module)
    fault(served)
    diagnosis = keyhole.doctor(module, asked(served))
    assert diagnosis.same == (name is None)
    assert [cause.name for cause in diagnosis.causes] == ([] if name is None else [name])


def test_any_module_has_the_generic_part() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))

    def answer(rows):
        with torch.no_grad():
            return module(torch.from_numpy(rows).float())[:, -1].numpy()

    assert keyhole.doctor(module.eval(), answer).same
    scaled = keyhole.doctor(module, lambda rows: 0.5 * answer(rows))
    assert [cause.name for cause in scaled.causes] == ["answers are multiplied by 0.5"]
    rng = np.random.default_rng(0)

    def unsteady(rows):
        answers = answer(rows)
        return answers + 0.1 * rng.standard_normal(answers.shape)

    assert "differently each time" in str(keyhole.doctor(module, unsteady))
