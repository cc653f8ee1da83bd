"""Layers in float16 and bfloat16: two or three digits, honest bars, never refused for rounding."""

import copy

import numpy as np
import pytest
import torch

import keyhole
from keyhole.fitting.layer_gauss_newton import multiply_out
from keyhole.learners.multi_head.half_precision import (
    MovedToken,
    SingleTokens,
    SoftSequences,
    fit_bilinear,
    shorten_moves,
    solve_scores,
    solve_weights,
)
from keyhole.linalg.softmax import softmax
from keyhole.measurement.asker import round_to_format


def make_layer(seed: int, width: int, heads: int, dtype: torch.dtype) -> torch.nn.Module:
    """nn.MultiheadAttention with weights 1/sqrt d and biases 0.3."""
    rng = np.random.default_rng(seed)
    layer = torch.nn.MultiheadAttention(width, heads, batch_first=True)
    with torch.no_grad():
        for part in layer.parameters():
            scale = 0.3 if part.ndim == 1 else width**-0.5
            part.copy_(torch.tensor(scale * rng.standard_normal(part.shape)))
    return layer.to(dtype).eval()


def ask(layer: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    asked = torch.tensor(tokens).to(next(layer.parameters()).dtype)
    with torch.no_grad():
        return layer(asked, asked, asked, need_weights=False)[0][:, -1].double().numpy()


def measure_excess(layer: torch.nn.Module, model: keyhole.Attention) -> float:
    """Error of the model's answers over the rounding of the box's own."""
    tokens = np.random.default_rng(9).standard_normal((100, 6, layer.embed_dim))
    tokens = round_to_format(tokens, 2.0**-8)
    exact = ask(copy.deepcopy(layer).double(), tokens)
    rounding = np.linalg.norm(ask(layer, tokens) - exact)
    return float(np.linalg.norm(model(tokens) - exact) / rounding)


def test_tokens_become_numbers_of_the_format() -> None:
    tokens = np.random.default_rng(0).standard_normal((3, 4, 5))
    same = round_to_format(tokens, 2.0**-11)
    assert np.array_equal(same, tokens.astype(np.float16).astype(np.float64))


def test_a_bilinear_form_from_products() -> None:
    rng = np.random.default_rng(0)
    tokens, anchors = rng.standard_normal((40, 3, 4)), rng.standard_normal((40, 5))
    matrix = rng.standard_normal((4, 5))
    products = np.einsum("nmd,de,ne->nm", tokens, matrix, anchors)
    found = fit_bilinear(tokens, anchors, products, rng.uniform(0.5, 1.0, products.shape))
    assert np.linalg.norm(found - matrix) < 1e-4 * np.linalg.norm(matrix)


def test_moves_show_a_value_map() -> None:
    rng = np.random.default_rng(0)
    value = rng.standard_normal((8, 3)) @ rng.standard_normal((3, 6))
    frame = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    found = MovedToken(frame, frame @ value + 1e-3 * rng.standard_normal((8, 6))).solve_map(3)
    assert np.linalg.matrix_rank(found) == 3
    assert np.abs(found - value).max() < 5e-3


def test_moves_are_shortened_until_a_head_stays() -> None:
    directions = np.eye(3)
    longest = np.array([1.0, 0.3, 0.01])

    def move(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return 2.0 * steps, np.linalg.norm(steps, axis=1) <= steps.astype(bool) @ longest

    found = shorten_moves(move, directions, 1.0)
    np.testing.assert_array_equal(found.directions, directions[:2])
    np.testing.assert_allclose(found.changes, 2.0 * directions[:2])


@pytest.mark.parametrize("size", [1.0, 1.5])
def test_weights_of_soft_answers_tell_the_scores(size: float) -> None:
    """Where attention is nearly hard the last token has hardly a weight: no ratio to it would tell
    anything, and most weights are small beside the largest."""
    rng = np.random.default_rng(4)
    width, heads, rank = 16, 2, 8

    def draw() -> np.ndarray:
        return rng.standard_normal((width, rank)) @ rng.standard_normal((rank, width)) / width

    model = keyhole.Attention(
        [keyhole.Head(0.5 * draw(), None, draw()) for _ in range(heads)], np.zeros(width)
    )
    maps = [head.value for head in model.heads]
    tokens = size * rng.standard_normal((200, 5, width))
    answers = model(tokens) + 1e-3 * rng.standard_normal((200, width))
    soft = SoftSequences(size, tokens, answers)
    single = SingleTokens(np.zeros(width), sum(maps))
    weights, errors = solve_weights(single, maps, soft)
    scores = [np.einsum("nld,nd->nl", tokens, head.keys(tokens[:, -1])) for head in model.heads]
    true = softmax(np.stack(scores, axis=1))
    assert 0.8 < np.sqrt(np.mean(((weights - true) / errors) ** 2)) < 1.3
    start = solve_scores(single, maps, soft)
    for head, score in zip(model.heads, start.scores, strict=True):
        off = multiply_out(score)[:, :-1] - head.score
        assert np.linalg.norm(off) < 0.1 * np.linalg.norm(head.score)


@pytest.mark.parametrize(("dtype", "heads"), [(torch.float16, 2), (torch.bfloat16, 4)])
def test_a_module_in_half_precision_is_recovered(dtype: torch.dtype, heads: int) -> None:
    layer = make_layer(heads, 16, heads, dtype)
    found = keyhole.recover(layer, seed=1, throw=False)
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert len(found.model.heads) == heads
    assert measure_excess(layer, found.model) < 2.0
    assert found.ledger.paid < 10.0 * found.ledger.floor


def test_a_function_that_computes_in_half_precision_is_noticed() -> None:
    layer = make_layer(3, 16, 2, torch.float16)
    box = keyhole.open_oracle(lambda tokens: ask(layer, tokens), width=16)
    found = keyhole.recover(box, seed=0, throw=False)
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert measure_excess(layer, found.model) < 2.0


def test_a_network_in_half_precision_is_no_layer_of_heads() -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    found = keyhole.recover(
        keyhole.open_oracle(network.to(torch.bfloat16), width=8), seed=0, throw=False
    )
    assert found.outcome is not keyhole.Outcome.RECOVERED
