"""keyhole.doctor from end to end, on small models that the doctor cannot look into."""

import numpy as np
import pytest
import torch

import keyhole
from keyhole.errors import BudgetExhausted, OracleError
from suspects import serve_bert, serve_llama, small_bert, small_llama, tables_of_bytes

BERT, LLAMA = small_bert(), small_llama()
BERT_FAULTS = [
    ({"no_mask": True}, "attention mask is ignored"),
    ({"activation": "tanh_gelu"}, "activation is gelu_pytorch_tanh"),
    ({"pooling": "cls"}, "pooling is cls"),
    ({"flip_normalize": True}, "not normalised"),
    ({"shift": 1}, "positions are shifted by 1"),
    ({"scale": 1.1}, "multiplied by 1.1"),
]
LLAMA_FAULTS = [
    ({"base": 5e5}, "base of rotary positions is 500000"),
    ({"equal_batches": True}, "causality is lost"),
    ({"order": [0, 2, 3]}, "layer 1 is skipped"),
    ({"truncate": 100}, "cut after 100"),
]


def examine(serve, model, faults, **options):
    suspect = serve(model, **faults)
    known = {"pooling": "mean", "normalize": True} if serve is serve_bert else {}
    return keyhole.doctor(model, suspect, **known, **options)


@pytest.mark.parametrize(("faults", "name"), BERT_FAULTS)
def test_a_fault_of_bert_is_named(faults, name) -> None:
    diagnosis = examine(serve_bert, BERT, faults)
    assert not diagnosis.same
    assert [name in cause.name for cause in diagnosis.causes] == [True]
    assert diagnosis.queries <= 20
    assert diagnosis.left_over <= diagnosis.tolerance
    assert name in str(diagnosis)


@pytest.mark.parametrize(("faults", "name"), LLAMA_FAULTS)
def test_a_fault_of_llama_is_named(faults, name) -> None:
    diagnosis = examine(serve_llama, LLAMA, faults)
    assert [name in cause.name for cause in diagnosis.causes] == [True]


@pytest.mark.parametrize(("serve", "model"), [(serve_bert, BERT), (serve_llama, LLAMA)])
def test_a_healthy_suspect_has_no_cause(serve, model) -> None:
    diagnosis = examine(serve, model, {})
    assert diagnosis.same
    assert not diagnosis.causes
    assert diagnosis.queries <= 15


def test_two_faults_are_named() -> None:
    diagnosis = examine(serve_bert, BERT, {"no_mask": True, "activation": "relu"})
    assert {c.module for c in diagnosis.causes} == {"input", "network"}


@pytest.mark.parametrize(
    ("serve", "model", "faults", "name"),
    [
        (serve_bert, BERT, {"activation": {1: "relu"}}, "activation is relu, in layer 1 alone"),
        (serve_bert, BERT, {"only": 2, "softmax1": True}, "below the line, in layer 2 alone"),
        (serve_bert, BERT, {"rms": 2}, "do not subtract the mean, in layer 2 alone"),
        (serve_llama, LLAMA, {"only": 3, "temperature": 1.37}, "by 1.37, in layer 3 alone"),
        (serve_llama, LLAMA, {"scale_layer": {0: 0.7}}, "adds is multiplied by 0.7, in layer 0"),
        (serve_llama, LLAMA, {"only": 2, "window": 9}, "looks only 9 tokens far, in layer 2"),
    ],
)
def test_a_fault_of_one_layer_is_named_with_it(serve, model, faults, name) -> None:
    diagnosis = examine(serve, model, faults)
    assert [name in cause.name for cause in diagnosis.causes] == [True], str(diagnosis)
    layer = name.partition("layer ")[2][0]
    assert f".{layer}" in diagnosis.causes[0].module


def test_int8_activations_are_named_although_they_are_chaotic() -> None:
    diagnosis = examine(serve_bert, BERT, {"dynamic": True, "edits": [tables_of_bytes]})
    assert [cause.name for cause in diagnosis.causes] == [
        "weights and activations are int8 (int8 per tensor), with one scale for all rows of a request"
    ]


def test_evidence_holds_both_answers() -> None:
    diagnosis = examine(serve_bert, BERT, {"no_mask": True})
    item = diagnosis.evidence[0]
    assert len(item.rows) > 1
    gap = np.linalg.norm(item.suspect - item.reference) / np.linalg.norm(item.suspect)
    assert gap == pytest.approx(item.residual)
    assert item.explained < 1e-5 < item.residual


def test_the_same_seed_asks_the_same_rows() -> None:
    asked: list[list] = [[], []]
    for rows in asked:
        suspect = serve_bert(BERT)

        def kept(tokens, attention_mask=None, rows=rows, suspect=suspect):
            rows.append(tokens.tolist())
            return suspect(tokens, attention_mask)

        keyhole.doctor(BERT, kept, pooling="mean", normalize=True, seed=4)
    assert asked[0] == asked[1]


def test_queries_are_what_the_suspect_saw() -> None:
    seen = []

    def counted(tokens, attention_mask=None):
        seen.append(len(tokens))
        return serve_bert(BERT)(tokens, attention_mask)

    assert keyhole.doctor(BERT, counted, pooling="mean", normalize=True).queries == sum(seen)


def test_a_budget_is_kept() -> None:
    with pytest.raises(BudgetExhausted, match="budget of 5"):
        examine(serve_bert, BERT, {}, budget=5)


def test_a_suspect_that_fails_is_said_so() -> None:
    def broken(tokens, attention_mask=None):
        raise RuntimeError("out of order")

    with pytest.raises(OracleError, match="out of order"):
        keyhole.doctor(BERT, broken, pooling="mean", normalize=True)


def test_progress_is_reported() -> None:
    steps: list = []
    examine(serve_bert, BERT, {"eps": 1e-3}, progress=steps.append)
    assert {"asking", "single faults", "confirming"} <= {step.stage for step in steps}
    assert steps[-1].asked > 0


def test_a_module_on_vectors() -> None:
    torch.manual_seed(0)
    module = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()

    def same(x):
        with torch.no_grad():
            return module(torch.from_numpy(x).float())[:, -1].numpy()

    assert keyhole.doctor(module, same).same
    scaled = keyhole.doctor(module, lambda x: 1.25 * same(x))
    assert [cause.name for cause in scaled.causes] == ["answers are multiplied by 1.25"]
