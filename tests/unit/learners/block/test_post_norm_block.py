import numpy as np
import pytest

import keyhole
from keyhole.learners.block import post_norm_block
from keyhole.learners.block.box import Unclear, open_block
from keyhole.learners.block.direction_fit import Directed, lengths
from keyhole.learners.block.post_norm_block import (
    Behind,
    PostNormOptions,
    SphereAnswers,
    assemble,
    bends,
    cut_maps,
    find_epsilon,
    find_maps,
    find_offset,
    find_relus,
    find_smooth,
    find_values,
    gain_of,
    is_smooth,
    polish_offset,
    select_tokens,
)
from keyhole.models.block import Block
from keyhole.models.canonical import canonical_block
from keyhole.models.mlp import outer_table
from keyhole.models.norm import kept_plane
from keyhole.models.random import block
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle

PLANE = kept_plane(8, "layer")


def secret(activation="relu"):
    one = block(np.random.default_rng(4), 8, heads=2, neurons=8, activation=activation)
    return canonical_block(one)


def box_of(model):
    return open_block(FunctionOracle(model, Spec(model.width)))


def maps_of(model):
    return np.array([PLANE.T @ head.value.T for head in model.attention.heads])


def directed(model):
    """The network as the sphere sees it."""
    gain, plane = model.gain[0], PLANE
    affine = np.column_stack([plane.T @ (gain[:, None] * plane), plane.T @ model.mlp.offset])
    rows = np.column_stack([(model.mlp.inner * gain) @ plane, model.mlp.inner_bias])
    return Directed(affine, plane.T @ outer_table(model.mlp), rows, model.mlp.activation)


def sphere_of(model, count=60):
    whole = PLANE.T + maps_of(model).sum(axis=0)
    sphere = SphereAnswers.begin(box_of(model), whole, np.random.default_rng(1))
    sphere.grow(count)
    sphere.read(None)
    return sphere, whole


def test_the_value_maps_are_seen_through_the_network():
    model, rng = secret(), np.random.default_rng(0)
    maps = find_values(box_of(model), PLANE, PostNormOptions(), rng)
    truth = maps_of(model)
    gaps = np.linalg.norm(maps[:, None] - truth[None], axis=(2, 3))
    assert maps.shape == truth.shape
    assert gaps.min(axis=0).max() < 1e-5


def test_value_maps_in_single_precision_have_their_rank():
    model, rng = secret("gelu"), np.random.default_rng(0)
    box = box_of(model.astype(np.float32))
    box(np.ones((1, 1, 8)), "format")
    assert box.noise.format == "float32"
    maps, truth = find_values(box, PLANE, PostNormOptions(), rng), maps_of(model)
    gaps = np.linalg.norm(maps[:, None] - truth[None], axis=(2, 3))
    assert gaps.min(axis=0).max() < 1e-3
    assert [np.linalg.matrix_rank(one) for one in maps] == [4, 4]


def test_weak_singular_values_are_cut():
    axes = np.linalg.qr(np.random.default_rng(0).standard_normal((5, 5)))[0]
    maps = np.array([axes @ np.diag([2.0, 1.0, 0.5, 1e-5, 1e-6]) @ axes.T])
    assert np.linalg.matrix_rank(cut_maps(maps, 1e-3)[0]) == 3
    assert np.abs(cut_maps(maps, 1e-3) - maps).max() < 2e-5


def test_smooth_neurons_by_second_derivatives():
    model = secret("gelu")
    sphere, _ = sphere_of(model)
    net = find_smooth(sphere, ("gelu", "silu"), 3e-7, np.random.default_rng(5))
    truth = directed(model).rows
    gaps = [np.abs(np.concatenate([net.rows - row, net.rows + row])).max(axis=1).min()
            for row in truth]  # fmt: skip
    assert (net.neurons, net.activation) == (8, "gelu")
    assert max(gaps) < 1e-3


def test_a_head_that_takes_the_anchor_is_noticed():
    model, rng = secret(), np.random.default_rng(0)
    chosen = select_tokens(box_of(model), PostNormOptions(), rng)
    assert chosen is not None
    assert find_maps(box_of(model), chosen, PLANE, PostNormOptions()) is not None
    # an anchor a thousand times as long scores higher with itself than all others
    assert find_maps(box_of(model), chosen, PLANE, PostNormOptions(anchors=(1e3, 3e3))) is None


def test_a_network_behind_the_attention_is_noticed():
    rng = np.random.default_rng(0)
    assert bends(box_of(secret()), rng)
    assert not bends(box_of(block(rng, 8, heads=2, norm="post")), rng)


@pytest.mark.parametrize(("activation", "smooth"), [("relu", False), ("gelu", True)])
def test_smooth_networks_are_told_from_relus(activation, smooth):
    sphere, _ = sphere_of(secret(activation))
    assert is_smooth(sphere, np.random.default_rng(2)) == smooth


@pytest.mark.parametrize(("activation", "smooth"), [("relu", False), ("gelu", True)])
def test_many_relus_are_told_though_most_arcs_hold_a_kink(activation, smooth):
    many = block(np.random.default_rng(4), 8, heads=2, neurons=300, activation=activation)
    sphere, _ = sphere_of(canonical_block(many))
    assert [is_smooth(sphere, np.random.default_rng(k)) for k in range(4)] == 4 * [smooth]


def test_the_network_corrects_the_norm():
    model = secret()
    sphere, _ = sphere_of(model)
    before = np.abs(sphere.norm.bias - model.bias[1]).max()
    for _ in range(2):
        epsilon = sphere.correct_norm(directed(model))
    assert before > 1e-7
    assert np.allclose(sphere.norm.bias, model.bias[1], atol=1e-9)
    assert np.allclose(np.abs(sphere.norm.gain), np.abs(model.gain[1]), atol=1e-9)
    assert np.isclose(epsilon, model.epsilons[1], rtol=1e-4)


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_turned_neurons_are_turned_back(activation):
    model = secret(activation)
    sphere, _ = sphere_of(model)
    net = directed(model)
    phi_slope = {"tanh": 0.0}.get(activation, -1.0)
    sign = -1.0 if activation == "tanh" else 1.0
    way = np.where(np.arange(8) < 3, -1.0, 1.0)
    # φ(a) = sign (φ(-a) - slope a): the same function with three neurons turned around
    outer = net.outer * np.where(way < 0, sign, 1.0)
    affine = net.affine - phi_slope * net.outer[:, :3] @ net.rows[:3]
    turned = Directed(-2.0 * affine, -2.0 * outer, way[:, None] * net.rows, activation)
    network, first, last = assemble(turned, sphere)
    found = Block(model.attention, network, norm="post", epsilons=model.epsilons,
                  gain=np.array([first.gain, model.gain[1]]),
                  bias=np.array([first.bias, model.bias[1]]))  # fmt: skip
    assert np.sign(last.gain[0]) == -np.sign(sphere.norm.gain[0])
    assert keyhole.distance(found, model) < 1e-9


def test_a_network_without_a_residual_has_no_gain():
    net = directed(secret())
    other = Directed(np.random.default_rng(0).standard_normal(net.affine.shape), net.outer,
                     net.rows, "tanh")  # fmt: skip
    with pytest.raises(Unclear, match="residual connection"):
        gain_of(other, PLANE)


def test_offset_and_epsilon_through_the_network():
    model = secret()
    sphere, whole = sphere_of(model)
    sphere.correct_norm(directed(model))
    behind = Behind(directed(model), sphere.directions, 8)
    offset, pairs = find_offset(box_of(model), behind, whole, np.random.default_rng(0))
    truth = PLANE.T @ model.attention.offset
    assert np.allclose(offset, truth, atol=1e-3)

    def build(place, epsilon):
        parts = model.to_arrays() | {"epsilons": np.array([epsilon, model.epsilons[1]])}
        parts["attention.offset"] = PLANE @ place
        return Block.from_arrays(parts)

    epsilon, near = find_epsilon(
        box_of(model), whole, offset, lambda e: build(offset, e), np.random.default_rng(1)
    )
    assert np.isclose(epsilon, 1e-5, rtol=0.3)
    offset, epsilon = polish_offset(build, offset, epsilon, [*pairs, near])
    assert np.allclose(offset, truth, atol=1e-9)
    assert np.isclose(epsilon, 1e-5, rtol=1e-6)


def test_an_answer_tells_the_point_of_the_sphere():
    model, rng = secret("gelu"), np.random.default_rng(5)
    net = directed(model)
    sphere, _ = sphere_of(model)
    for _ in range(2):
        sphere.correct_norm(net)
    points, radius = sphere.points[:5], np.full(5, np.sqrt(8.0))
    start = points + 0.2 * rng.standard_normal(points.shape)
    behind = Behind(net, sphere.directions, 8)
    found, rest = behind.read(sphere.answers[:5], start, radius)
    assert rest.max() < 1e-7
    assert np.abs(found - points * (np.sqrt(8.0) / lengths(points))).max() < 1e-6


def test_torchs_default_encoder_layer():
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    module = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0).double()
    found = keyhole.recover(keyhole.open_oracle(module, width=8), keyhole.BlockLearner())
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.model.mlp.neurons == 8
    assert found.model.mlp.activation == "relu"
    fresh = np.random.default_rng(0).standard_normal((40, 5, 8))
    with torch.no_grad():
        answers = module(torch.tensor(fresh))[:, -1].numpy()
    assert np.abs(found.model(fresh) - answers).max() < 1e-11
    assert found.ledger.paid < 16 * found.ledger.floor


def test_arcs_without_kinks_tell_the_centre_of_the_second_norm():
    model = secret()
    sphere, _ = sphere_of(model)
    before = np.abs(sphere.norm.bias - model.bias[1]).max()
    doubt = sphere.find_centre()
    assert np.abs(sphere.norm.bias - model.bias[1]).max() < min(1e-3 * before, 1e2 * doubt)
    assert doubt < 1e-6


def test_relus_by_the_kinks_of_a_circle():
    model = secret()
    sphere, _ = sphere_of(model)
    net = find_relus(sphere, np.random.default_rng(2))
    truth = directed(model)
    assert net.neurons == truth.neurons
    points = sphere.points[:20]
    ahead, wanted = net(points), truth(points)
    off = ahead / lengths(ahead) - wanted / lengths(wanted)
    assert np.abs(off).max() < 1e-5


@pytest.mark.parametrize("pre", [True, False])
def test_wider_encoder_layers_of_relus(pre):
    torch = pytest.importorskip("torch")
    torch.manual_seed(2)
    module = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, norm_first=pre)
    module = module.double().eval()
    found = keyhole.recover(keyhole.open_oracle(module, width=16), keyhole.BlockLearner())
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.model.mlp.neurons == 16
    fresh = np.random.default_rng(0).standard_normal((40, 5, 16))
    with torch.no_grad():
        answers = module(torch.tensor(fresh))[:, -1].numpy()
    assert np.abs(found.model(fresh) - answers).max() < 1e-10
    assert found.ledger.paid < 20 * found.ledger.floor


def test_two_heads_on_one_token_are_looked_for_again(monkeypatch):
    rng = np.random.default_rng(4)
    maps = [rng.standard_normal((8, 3)) @ rng.standard_normal((3, 9)) for _ in range(3)]
    together = [maps[0] + maps[1], maps[2]]
    drawn = iter([2, 2, 2, 3])

    def select(box, options, rng):
        return post_norm_block.Chosen(np.zeros((next(drawn), 9)), np.zeros(9))

    def find(box, chosen, plane, options):
        return np.array(maps if len(chosen.tokens) == 3 else together)

    monkeypatch.setattr(post_norm_block, "select_tokens", select)
    monkeypatch.setattr(post_norm_block, "find_maps", find)
    box = open_block(FunctionOracle(lambda x: x[:, -1], Spec(9)))
    found = find_values(box, kept_plane(9, "layer"), PostNormOptions(), rng)
    assert np.array_equal(found, maps)


def test_a_whole_block_of_relus_in_single_precision():
    torch = pytest.importorskip("torch")
    torch.manual_seed(2)
    module = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    found = keyhole.recover(keyhole.open_oracle(module, width=16), keyhole.BlockLearner())
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert repr(found.model) == "Block(width=16, 2 heads, 16 relu neurons, post-norm (layer))"
    fresh = np.random.default_rng(0).standard_normal((20, 5, 16)).astype(np.float32)
    with torch.no_grad():
        answers = module(torch.tensor(fresh))[:, -1].double().numpy()
    assert np.abs(found.model(fresh.astype(np.float64)) - answers).max() < 2e-5
