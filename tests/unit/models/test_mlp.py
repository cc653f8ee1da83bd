import numpy as np
import pytest

import keyhole
from keyhole.errors import InvalidArgument
from keyhole.models.files import load_model, save_model
from keyhole.models.mlp import ACTIVATIONS, Mlp, only, representative, scaled, turned

POINTS = np.linspace(-6.0, 6.0, 49) + 0.013


def network(activation="gelu", *, gated=False, outputs=3, seed=0):
    rng = np.random.default_rng(seed)
    answer = () if outputs is None else (outputs,)
    return Mlp(
        rng.standard_normal((7, 5)),
        rng.standard_normal(7),
        rng.standard_normal((*answer, 7)),
        activation=activation,
        linear=rng.standard_normal((*answer, 5)),
        offset=rng.standard_normal(answer),
        gate=rng.standard_normal((7, 5)) if gated else None,
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_table_of_activations(name):
    kind, h = ACTIVATIONS[name], 1e-5
    first = (kind.value(POINTS + h) - kind.value(POINTS - h)) / (2 * h)
    second = (kind.first(POINTS + h) - kind.first(POINTS - h)) / (2 * h)
    assert np.allclose(first, kind.first(POINTS), atol=1e-9)
    assert np.allclose(second, kind.second(POINTS), atol=1e-9)
    turned_around = kind.sign * kind.value(POINTS) + kind.slope * POINTS + kind.constant
    assert np.allclose(kind.value(-POINTS), turned_around, atol=1e-14)
    if kind.alias is not None:
        other, inside, outside, added = kind.alias
        same = outside * ACTIVATIONS[other].value(inside * POINTS) + added
        assert np.allclose(same, kind.value(POINTS), atol=1e-14)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_distance_sees_through_every_symmetry(name, gated):
    rng = np.random.default_rng(1)
    model = network(name, gated=gated)
    other = only(model, rng.permutation(7))
    if not gated or ACTIVATIONS[name].slope == 0:
        other = turned(other, rng.random(7) < 0.5)
    other = representative(other)
    if gated:
        other = scaled(other, rng.standard_normal(7))
    x = rng.standard_normal((9, 5))
    assert np.allclose(other(x), model(x), atol=1e-12)
    assert keyhole.distance(other, model) < 1e-13
    moved = Mlp.from_arrays({**other.to_arrays(), "outer": other.outer * (1 + 1e-6)})
    assert keyhole.distance(moved, model) == pytest.approx(1e-6, rel=0.6)


def test_distance_is_infinite_between_structures():
    model = network()
    assert keyhole.distance(model, only(model, np.arange(6))) == np.inf
    assert keyhole.distance(model, network("silu")) == np.inf
    assert keyhole.distance(model, network(gated=True)) == np.inf
    assert keyhole.distance(model, network(outputs=2)) == np.inf
    with pytest.raises(InvalidArgument, match="cannot compare"):
        keyhole.distance(model, object())


@pytest.mark.parametrize("outputs", [None, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_files_and_sequences(tmp_path, outputs, gated):
    model = network("silu", gated=gated, outputs=outputs)
    again = load_model(save_model(model, tmp_path / "network.safetensors"))
    x = np.random.default_rng(2).standard_normal((4, 3, 5))
    assert np.array_equal(again(x), model(x[:, -1]))
    assert again.activation == "silu"
    assert again.gated == gated
    assert model.astype(np.float32)(x).dtype == np.float32


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InvalidArgument, match="activation must be one of"):
        network("swish")
    with pytest.raises(InvalidArgument, match="outer must have shape"):
        Mlp(np.ones((2, 3)), None, np.ones((4, 5)))
    with pytest.raises(InvalidArgument, match="without a gate"):
        Mlp(np.ones((2, 3)), None, np.ones((4, 2)), gate_bias=np.ones(2))
    with pytest.raises(InvalidArgument, match="expected points"):
        network()(np.ones((2, 4)))
