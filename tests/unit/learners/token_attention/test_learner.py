import numpy as np
import pytest

import keyhole
from keyhole import Outcome
from keyhole.learners.token_attention.learner import TokenAttentionLearner
from keyhole.models.random import token_attention
from token_models import attention_on_tokens, open_tokens


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 1, "head_width": 8},
        {"heads": 2, "head_width": 4},
        {"heads": 2, "head_width": 4, "tied": True, "tokens": 200},
        {"heads": 2, "head_width": 3, "logprobs": True},
    ],
    ids=str,
)
def test_the_tables_are_recovered_and_the_heads_found(shape):
    model = attention_on_tokens(3, **shape)
    found = keyhole.recover(open_tokens(model), TokenAttentionLearner())
    assert found.outcome is Outcome.RECOVERED
    assert len(found.model.heads) == len(model.heads)
    assert found.details["width"] == 8
    assert found.details["value_ranks"] == (shape["head_width"],) * shape["heads"]
    if not shape.get("tied"):
        assert found.ledger.learning < 2.5 * found.ledger.floor
    else:
        assert found.ledger.learning < 140
    tokens = np.random.default_rng(0).integers(model.tokens, size=(50, 7, 1)).astype(float)
    answers = model(tokens)
    assert np.abs(found.model(tokens) - answers).max() < 1e-9 * np.abs(answers).max()
    if not shape.get("logprobs"):  # logits are then known up to a constant
        assert keyhole.distance(found.model, model) < 1e-6


def test_float32_answers_are_predicted():
    model = attention_on_tokens(4)

    def single(prompts: np.ndarray) -> np.ndarray:
        return model(prompts[:, :, None]).astype(np.float32)

    box = keyhole.open_language_model(single, max_length=64)
    found = keyhole.recover(box, TokenAttentionLearner(), throw=False)
    assert found.outcome is Outcome.RECOVERED
    prompts = np.random.default_rng(0).integers(40, size=(50, 7))
    answers = model(prompts[:, :, None])
    gap = np.abs(found.model(prompts[:, :, None].astype(float)) - answers).max()
    assert gap < 1e-4 * np.abs(answers).max()


def test_positions_are_rejected_with_a_counterexample():
    model = attention_on_tokens(5)

    def placed(prompts: np.ndarray) -> np.ndarray:
        return model(prompts[:, :, None]) * (1.0 + 0.01 * np.cos(prompts[:, :1]))

    box = keyhole.open_language_model(placed, max_length=64)
    found = keyhole.recover(box, TokenAttentionLearner(), throw=False)
    assert found.outcome is Outcome.REJECTED
    assert "positions" in found.reason
    assert found.verdict.counterexample is not None


@pytest.mark.parametrize("kind", ["tanh", "relu", "norm"])
def test_a_network_or_norm_behind_is_rejected_with_a_counterexample(kind):
    model = attention_on_tokens(6)
    output = np.asarray(model.direct.right)
    inverse = np.linalg.pinv(output)
    inner, outer = np.random.default_rng(7).standard_normal((2, 8, 8)) / 3.0

    def behind(prompts: np.ndarray) -> np.ndarray:
        state = model(prompts[:, :, None]) @ inverse
        if kind == "norm":
            state = state / np.sqrt(np.mean(state**2, axis=1, keepdims=True))
        else:
            bend = np.tanh if kind == "tanh" else lambda x: np.maximum(x, 0.0)
            state = state + bend(state @ inner) @ outer
        return state @ output

    box = keyhole.open_language_model(behind, max_length=64)
    found = keyhole.recover(box, TokenAttentionLearner(), throw=False)
    assert found.outcome is Outcome.REJECTED
    assert found.verdict.counterexample is not None


def test_wrong_arguments_end_in_a_sentence():
    with pytest.raises(keyhole.InvalidArgument, match="heads"):
        TokenAttentionLearner(heads=0)
    box = keyhole.open_oracle(lambda tokens: tokens[:, -1], width=3)
    with pytest.raises(keyhole.InvalidArgument, match="open_language_model"):
        keyhole.recover(box, TokenAttentionLearner())


def test_a_head_too_many_leaves():
    secret = token_attention(np.random.default_rng(3), 40, 8, 1, 4)
    box = keyhole.open_language_model(secret, max_length=64)
    found = keyhole.recover(box, keyhole.TokenAttentionLearner(heads=2))
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert len(found.model.heads) == 1
    assert keyhole.distance(found.model, secret) < 1e-6
