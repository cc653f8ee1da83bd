import numpy as np
import pytest
import torch
from tests.templates import AttentionHeads, Encoder, randomise

from keyhole.errors import InvalidArgument
from keyhole.learners.template.forward import Answered, Forward, Residuals, check_module


@pytest.mark.parametrize("module", [AttentionHeads(4), Encoder(3, 4, 2, 5, 2)])
def test_jacobian_is_that_of_the_residuals(module: torch.nn.Module) -> None:
    rng = np.random.default_rng(0)
    forward = Forward.of(randomise(module, 0))
    weights, width = forward.weights, 4 if isinstance(module, AttentionHeads) else 3
    tokens = rng.standard_normal((5, 3, width))
    answers = forward.predict(weights, tokens)
    residuals = Residuals(forward, [Answered(tokens, answers + 1.0, np.full(answers.shape, 2.0))])
    assert np.allclose(residuals(weights), -0.5, atol=1e-14)
    step = rng.standard_normal(len(weights))
    slope = (residuals(weights + 1e-6 * step) - residuals(weights - 1e-6 * step)) / 2e-6
    assert np.allclose(residuals.jacobian(weights) @ step, slope, atol=1e-7)


def test_the_template_itself_stays_as_it_is() -> None:
    module = AttentionHeads(4).train()
    before = module.q.weight.detach().clone()
    forward = Forward.of(module)
    forward.predict(forward.draw(np.random.default_rng(0)), np.zeros((1, 2, 4)))
    assert module.training
    assert module.q.weight.dtype == torch.float32
    assert torch.equal(module.q.weight, before)
    assert module.q.weight.requires_grad


def test_the_fast_path_is_as_before() -> None:
    enabled = torch.backends.mha.get_fastpath_enabled()
    forward = Forward.of(Encoder())
    forward.predict(forward.weights, np.zeros((1, 2, 6)))
    assert torch.backends.mha.get_fastpath_enabled() == enabled


def test_what_is_no_template() -> None:
    with pytest.raises(InvalidArgument, match=r"torch\.nn\.Module"):
        check_module(AttentionHeads)
    with pytest.raises(InvalidArgument, match="no parameters"):
        check_module(torch.nn.Identity())
