import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.models.norm import Norm, kept_plane


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_it_computes_what_torch_computes(kind):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, gain, bias = rng.standard_normal((5, 7)), rng.standard_normal(7), rng.standard_normal(7)
    args = torch.tensor(x), (7,), torch.tensor(gain)
    if kind == "layer":
        wanted = torch.nn.functional.layer_norm(*args, torch.tensor(bias), 1e-2)
    else:
        wanted = torch.nn.functional.rms_norm(*args, 1e-2) + torch.tensor(bias)
    assert np.allclose(Norm(gain, bias, 1e-2, kind)(x), wanted.numpy(), atol=1e-14)


def test_the_plane_is_what_the_norm_keeps():
    x = np.random.default_rng(1).standard_normal((4, 6))
    layer = Norm(np.ones(6), None, 0.0)
    assert layer.plane.shape == (6, 5)
    assert np.allclose(layer(x @ layer.plane @ layer.plane.T), layer(x), atol=1e-13)
    assert np.array_equal(kept_plane(6, "rms"), np.eye(6))


def test_zero_stays_zero():
    assert not Norm(np.ones(3), None, 0.0)(np.zeros(3)).any()


def test_bad_arguments_are_refused():
    with pytest.raises(InvalidArgument, match="kind must be"):
        Norm(np.ones(3), None, 1e-5, "batch")
    with pytest.raises(InvalidArgument, match="epsilon must be"):
        Norm(np.ones(3), None, -1.0)
    with pytest.raises(InvalidArgument, match="one shape"):
        Norm(np.ones(3), np.ones(2))
