import numpy as np
import pytest

import keyhole
from keyhole.models.export import export
from keyhole.models.mlp import ACTIVATIONS, Mlp

torch = pytest.importorskip("torch")


def network(activation, gated, outputs=3):
    rng = np.random.default_rng(0)
    answer = () if outputs is None else (outputs,)
    return Mlp(
        rng.standard_normal((6, 4)),
        rng.standard_normal(6),
        rng.standard_normal((*answer, 6)),
        activation=activation,
        linear=rng.standard_normal((*answer, 4)),
        offset=rng.standard_normal(answer),
        gate=rng.standard_normal((6, 4)) if gated else None,
        gate_bias=rng.standard_normal(6) if gated else None,
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_modules_and_files_answer_like_the_network(tmp_path, activation, gated):
    pytest.importorskip("onnxruntime")
    tokens = np.random.default_rng(1).standard_normal((5, 3, 4))
    for model in (network(activation, gated), network(activation, gated, None)):
        answers = keyhole.to_torch(model)(torch.from_numpy(tokens)).detach().numpy()
        assert answers == pytest.approx(model(tokens), abs=1e-13)
        # onnxruntime has no erf of doubles
        file = export(model, tmp_path / "m.onnx", np.float32)
        answers = keyhole.open_oracle(str(file)).ask(keyhole.QueryBatch.of(tokens, "test"))
        assert answers == pytest.approx(model(tokens), abs=1e-5)
        state = torch.load(export(model, tmp_path / "m.pt"), weights_only=True)
        keyhole.to_torch(model).load_state_dict(state)
