import numpy as np
import pytest

import keyhole
from keyhole.errors import InvalidArgument
from keyhole.models.export import export
from networks import layer, network, residual_layer

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "model",
    [
        network(0, 4, 6),
        network(0, 4, 6, 3),
        layer(0, 4, 6, key_bias=True),
        residual_layer(0, 4, 6, "before"),
        residual_layer(1, 4, 6, "after", 3),
    ],
)
def test_answers_like_the_model(model):
    tokens = np.random.default_rng(0).standard_normal((5, 3, 4))
    answers = keyhole.to_torch(model)(torch.from_numpy(tokens)).detach().numpy()
    assert answers == pytest.approx(model(tokens), abs=1e-13)


@pytest.mark.parametrize(
    "model",
    [
        network(0, 4, 6),
        network(0, 4, 6, 3),
        layer(0, 4, 6, key_bias=True),
        residual_layer(0, 4, 6, "before"),
    ],
    ids=["network", "vector", "layer", "residual"],
)
@pytest.mark.parametrize(("dtype", "close"), [(np.float64, 1e-13), (np.float32, 1e-5)])
def test_torch_and_onnx_files_answer_like_the_model(tmp_path, model, dtype, close):
    pytest.importorskip("onnxruntime")
    tokens = np.random.default_rng(0).standard_normal((5, 3, 4))
    for target in (keyhole.to_torch(model, dtype), str(export(model, tmp_path / "m.onnx", dtype))):
        box = keyhole.open_oracle(target)
        answers = box.ask(keyhole.QueryBatch.of(tokens, "test"))
        assert answers.dtype == dtype
        assert answers == pytest.approx(model(tokens), abs=close)
    state = torch.load(export(model, tmp_path / "m.pt", dtype), weights_only=True)
    keyhole.to_torch(model, dtype).load_state_dict(state)


def test_what_cannot_be_exported_is_refused(tmp_path):
    for attempt in (keyhole.to_torch, keyhole.to_onnx):
        with pytest.raises(InvalidArgument, match="object"):
            attempt(object())
    for attempt in (keyhole.to_torch, keyhole.to_onnx):
        with pytest.raises(InvalidArgument, match="float16, float32 or float64"):
            attempt(layer(0, 4, 6), np.int32)
    with pytest.raises(InvalidArgument, match="suffix"):
        export(layer(0, 4, 6), tmp_path / "model.pkl")
