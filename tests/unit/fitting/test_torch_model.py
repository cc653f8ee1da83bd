"""A torch function as a forward model: its derivatives, and a whole attention layer fitted."""

import numpy as np
import pytest

from keyhole.fitting.gauss_newton import Blocks, FitOptions, fit_least_squares, form_jacobian
from keyhole.fitting.torch_model import Batch, TorchModel
from keyhole.models.random import attention

torch = pytest.importorskip("torch")
WIDTH, OUTPUTS = 4, 3


def predict(p: dict, tokens: "torch.Tensor") -> "torch.Tensor":
    """One head read at the last token."""
    keys = p["score"] @ tokens[-1] + p["key_bias"]
    return torch.softmax(tokens @ keys, 0) @ tokens @ p["value"] + p["offset"]


def layer(seed: int, noise: float = 0.0) -> tuple[TorchModel, np.ndarray, Blocks]:
    rng = np.random.default_rng(seed)
    truth = attention(rng, WIDTH, outputs=OUTPUTS, bias=True)
    head = truth.heads[0]
    arrays = {
        "score": head.score,
        "key_bias": head.key_bias,
        "value": head.value,
        "offset": truth.offset,
    }
    blocks, data = Blocks.of(arrays), []
    for length, count in ((1, 10), (2, 20), (4, 25)):
        tokens = rng.standard_normal((count, length, WIDTH))
        answers = truth(tokens) + noise * rng.standard_normal((count, OUTPUTS))
        data.append(Batch(tokens, answers, np.full(count, noise or 1.0)))
    return TorchModel(predict, blocks, data), blocks.join(arrays), blocks


def test_products_and_jacobian_agree_with_differences() -> None:
    model, truth, _ = layer(0)
    rng = np.random.default_rng(1)
    point = truth + 0.1 * rng.standard_normal(len(truth))
    at = model.linearize(point)
    np.testing.assert_array_equal(at.residual, model.residual(point))
    step, other = rng.standard_normal(len(truth)), rng.standard_normal(len(at.residual))
    up, down = (model.residual(point + s * 1e-5 * step) for s in (1, -1))
    np.testing.assert_allclose(at.jvp(step), (up - down) / 2e-5, atol=1e-7)
    assert other @ at.jvp(step) == pytest.approx(at.vjp(other) @ step)
    np.testing.assert_allclose(form_jacobian(at) @ step, at.jvp(step), atol=1e-10)


@pytest.mark.parametrize("dense", [0, 1500])
def test_a_layer_is_fitted_to_the_last_digit(dense: int) -> None:
    model, truth, blocks = layer(2)
    start = truth * (1 + 0.05 * np.random.default_rng(3).standard_normal(len(truth)))
    fit = fit_least_squares(model, start, FitOptions(dense_unknowns=dense, probes=2), blocks=blocks)
    assert fit.ending == "settled"
    np.testing.assert_allclose(fit.point, truth, atol=1e-9)


def test_noise_gives_honest_errors() -> None:
    gaps = []
    for seed in range(6):
        model, truth, _ = layer(seed, noise=1e-4)
        fit = fit_least_squares(model, truth)
        assert fit.level == pytest.approx(1.0, abs=0.3)
        gaps.append((fit.point - truth) / fit.standard_errors)
    assert np.sqrt(np.mean(np.square(gaps))) == pytest.approx(1.0, abs=0.2)
