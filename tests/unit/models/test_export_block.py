import numpy as np
import pytest

from keyhole.models.export import to_onnx, to_torch
from keyhole.models.random import block

FORMS = [
    {"heads": 2, "neurons": 5, "norm": "post"},
    {"heads": 2, "neurons": 5, "norm": "pre", "activation": "relu"},
    {"heads": 2, "neurons": 5, "norm": "pre", "parallel": True, "kind": "rms"},
    {"heads": 2, "norm": "post"},
    {"neurons": 5, "norm": "pre", "activation": "silu"},
    {"heads": 2, "neurons": 5, "norm": "none"},
]


@pytest.mark.parametrize("form", FORMS)
def test_a_block_in_torch(form):
    torch = pytest.importorskip("torch")
    model = block(np.random.default_rng(0), 6, **form)
    tokens = np.random.default_rng(1).standard_normal((3, 4, 6))
    module = to_torch(model)
    with torch.no_grad():
        answers = module(torch.tensor(tokens)).numpy()
    assert np.allclose(answers, model(tokens), atol=1e-13)
    assert all(part.requires_grad for part in module.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_a_block_in_onnx(form):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = block(np.random.default_rng(0), 6, **form)
    tokens = np.random.default_rng(1).standard_normal((3, 4, 6))
    # the runtime has no error function in float64
    session = runtime.InferenceSession(to_onnx(model, np.float32).SerializeToString())
    (answers,) = session.run(None, {"tokens": tokens.astype(np.float32)})
    assert np.allclose(answers, model(tokens), atol=1e-5)
