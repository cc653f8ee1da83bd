import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.models.torch_export import to_torch
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
    answers = to_torch(model)(torch.from_numpy(tokens)).detach().numpy()
    assert answers == pytest.approx(model(tokens), abs=1e-13)


def test_what_cannot_be_exported_is_refused():
    with pytest.raises(InvalidArgument):
        to_torch(object())
