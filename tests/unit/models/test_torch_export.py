import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.models.torch_export import to_torch
from keyhole.models.transformer import TransformerModel
from networks import layer, network

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "model", [network(0, 4, 6), network(0, 4, 6, 3), layer(0, 4, 6, key_bias=True)]
)
def test_answers_like_the_model(model):
    tokens = np.random.default_rng(0).standard_normal((5, 3, 4))
    answers = to_torch(model)(torch.from_numpy(tokens)).detach().numpy()
    assert answers == pytest.approx(model(tokens), abs=1e-13)


def test_what_cannot_be_exported_is_refused():
    model = layer(0, 4, 6)
    with pytest.raises(InvalidArgument):
        to_torch(object())
    with pytest.raises(InvalidArgument):
        to_torch(TransformerModel(model.score, None, model.network, model.network.weight))
