"""Layers in float16 and bfloat16: two or three digits, honest bars, never refused for rounding."""

import copy

import numpy as np
import pytest
import torch

import keyhole
from keyhole.learners.multi_head.half_precision import fit_bilinear, round_to_format


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
