import numpy as np
import pytest

import keyhole
from keyhole.errors import IllConditioned
from keyhole.learners.block.box import Paid, Unclear, open_block
from keyhole.learners.block.direction_fit import Directed
from keyhole.learners.block.pre_norm_block import (
    BehindAttention,
    Frozen,
    PreNormOptions,
    ValuesOnSphere,
    bends,
    find_epsilons,
    find_maps,
    find_network,
    find_offset,
    find_relus,
    fit_network,
    has_kinks,
    seen_epsilon,
    token_of,
)
from keyhole.learners.block.pre_norm_mlp import lift_network
from keyhole.learners.block.wide_network import fit_wide, turn_neurons
from keyhole.learners.mlp import MlpLearner
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.canonical import canonical_block
from keyhole.models.mlp import Mlp, turned
from keyhole.models.norm import Norm, kept_plane
from keyhole.models.random import block
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch

OPTIONS = PreNormOptions()
SECRET = canonical_block(block(np.random.default_rng(3), 8, heads=2, neurons=8, norm="pre"))


def single(secret):
    """The block, computed in float64, with tokens and answers in single precision."""

    def box(tokens):
        return secret(tokens.astype(np.float32).astype(np.float64)).astype(np.float32)

    return FunctionOracle(box, Spec(secret.width))


def frozen_box(secret, coarse=False):
    box = open_block(single(secret) if coarse else FunctionOracle(secret, Spec(secret.width)))
    box(np.ones((1, 1, secret.width)) * np.pi, "format")
    return Frozen.measure(box, kept_plane(secret.width, "layer"), np.random.default_rng(9))


def test_the_error_that_kinks_leave_is_measured():
    relu = canonical_block(
        block(np.random.default_rng(3), 16, heads=2, neurons=64, norm="pre", activation="relu")
    )
    frozen = frozen_box(relu, coarse=True)
    context, rng = frozen.points(np.random.default_rng(1), 20), np.random.default_rng(2)
    anchor = frozen.points(rng, 1)
    alone = frozen.ask(context[:1, None][:, :0], anchor, "heads")
    change = frozen.ask(context[:, None], np.repeat(anchor, 20, axis=0), "heads") - alone
    layer, plane = relu.attention, frozen.plane
    tokens = np.stack([context, np.repeat(anchor, 20, axis=0)], axis=1) @ plane.T
    wanted = layer(tokens) - layer(anchor[:, None] @ plane.T)
    assert np.sqrt(np.mean((change - wanted) ** 2)) < 3.0 * frozen.unit


def attention_of(secret):
    return Block(secret.attention, None, norm="pre", epsilons=secret.epsilons[:1])


def closest(part, parts):
    return min(np.linalg.norm(part - one) / np.linalg.norm(one) for one in parts)


@pytest.mark.parametrize(("coarse", "error"), [(False, 1e-3), (True, 3e-3)])
def test_heads_and_their_maps_are_seen_past_the_network(coarse, error):
    frozen = frozen_box(SECRET, coarse)
    maps = find_maps(frozen, OPTIONS.attention, np.random.default_rng(0))
    assert len(maps) == 2
    values = [frozen.plane.T @ head.value for head in SECRET.attention.heads]
    assert max(closest(part.T, values) for part in maps) < error


@pytest.mark.parametrize(("coarse", "error"), [(False, 1e-3), (True, 2e-2)])
def test_the_offset_from_the_maps(coarse, error):
    rng = np.random.default_rng(1)
    frozen = frozen_box(SECRET, coarse)
    maps = np.array([head.value.T @ frozen.plane for head in SECRET.attention.heads])
    offset = find_offset(frozen, maps.sum(axis=0), rng)
    assert np.allclose(offset, SECRET.attention.offset, atol=error)


def test_the_network_and_the_epsilons_behind_a_known_attention():
    rng = np.random.default_rng(2)
    frozen = frozen_box(SECRET)
    network = find_network(frozen, attention_of(SECRET), OPTIONS, rng)
    assert network.neurons == 8
    assert not network.linear.any()
    inner = SECRET.mlp.inner @ frozen.plane
    assert max(closest(row, inner) for row in network.inner) < 1e-5
    wide = lift_network(network, frozen.plane, 1.0)
    found = find_epsilons(frozen, Block(SECRET.attention, wide, norm="pre"), rng)
    assert np.allclose(found, 1e-5, rtol=1e-3)


def test_second_derivatives_that_fail_are_asked_for_in_another_frame(monkeypatch):
    width = 24  # second derivatives have room, and come first
    secret = block(np.random.default_rng(4), width, heads=1, neurons=6, norm="pre")
    secret = canonical_block(secret)
    frozen = frozen_box(secret)
    learn, tried = MlpLearner.learn, []

    def fail_first(learner, oracle, rng):
        tried.append(learner.options.small)
        if len(tried) == 1:
            raise IllConditioned("a frame in which two neurons look alike")
        return learn(learner, oracle, rng)

    monkeypatch.setattr(MlpLearner, "learn", fail_first)
    network = find_network(frozen, attention_of(secret), OPTIONS, np.random.default_rng(5))
    assert tried == [0, 0]  # redundant neurons would take longer
    assert network.neurons == 6


def test_a_stream_is_made_of_a_token():
    known = attention_of(SECRET)
    seen = []

    def box(tokens):
        seen.append(tokens[:, 0] + known.attention(known.norms[0](tokens)))
        return SECRET(tokens)

    plane = kept_plane(8, "layer")
    oracle = BehindAttention(FunctionOracle(box, Spec(8)), known, plane, 50.0, 1e-9, NoiseModel())
    points = np.sqrt(8.0) * np.eye(7)[:3]
    answers = oracle.ask(QueryBatch.of(points[:, None], "test"))
    assert np.allclose(seen[0], 50.0 * points @ plane.T, atol=1e-11)
    norm = Norm(np.ones(8), None, SECRET.epsilons[1])
    assert np.allclose(answers, SECRET.mlp(norm(seen[0])), atol=1e-11)


def test_a_token_whose_stream_vanishes():
    rng = np.random.default_rng(0)
    for _ in range(20):
        whole, offset = rng.standard_normal((5, 5)) / 2.0, rng.standard_normal(5)
        token = token_of(whole, offset, 1e-5, 6)
        point = token / np.sqrt(token @ token / 6 + 1e-5)
        assert np.abs(token + whole @ point + offset).max() < 1e-9


def test_neurons_are_turned_until_no_linear_part_is_left():
    rng = np.random.default_rng(0)
    network = Mlp(rng.standard_normal((6, 4)), rng.standard_normal(6), rng.standard_normal((5, 6)))
    other = turned(network, np.arange(6) % 2 == 0)
    back = turn_neurons(other)
    assert np.allclose(back.inner, network.inner)
    with pytest.raises(Unclear, match="which way"):
        turn_neurons(Mlp(network.inner, None, network.outer, linear=np.ones((5, 4))))


def test_epsilon_out_of_sight():
    with pytest.raises(Unclear, match="epsilon"):
        seen_epsilon(lambda size: 0.0)


def test_single_tokens_are_kept_once():
    paid = Paid(FunctionOracle(SECRET, Spec(8)), longest=1)
    token = np.random.default_rng(0).standard_normal(8)
    for factor in (1.0, 1.0001, -1.0, 1e6):
        paid.ask(QueryBatch.of(factor * token[None, None], "test"))
    paid.ask(QueryBatch.of(np.ones((1, 2, 8)), "test"))
    tokens, answers = paid.singles_apart(1e3)
    assert np.array_equal(tokens[:, 0], [token, -token])
    assert np.allclose(answers, SECRET(tokens), atol=1e-12)


@pytest.mark.parametrize("neurons", [0, 8])
def test_a_network_behind_the_attention_is_seen(neurons):
    secret = block(np.random.default_rng(0), 8, heads=2, neurons=neurons, norm="pre")
    box = open_block(FunctionOracle(secret, Spec(8)))
    assert bends(box, np.random.default_rng(1)) == bool(neurons)


def test_heads_that_share_a_range_are_split():
    heads = [Head(h.score, h.key_bias, scale * SECRET.attention.heads[0].value)
             for h, scale in zip(SECRET.attention.heads, (1.0, 2.0), strict=True)]  # fmt: skip
    secret = Block(Attention(heads, np.zeros(8)), SECRET.mlp, norm="pre")
    frozen = frozen_box(secret)
    maps = find_maps(frozen, OPTIONS.attention, np.random.default_rng(0))
    assert len(maps) == 2
    assert (
        max(closest(part.T, [frozen.plane.T @ head.value for head in heads]) for part in maps)
        < 1e-3
    )


def test_attention_without_effect_has_no_heads():
    head = SECRET.attention.heads[0]
    dead = Head(head.score, head.key_bias, 0.0 * head.value)
    secret = Block(Attention([dead], np.zeros(8)), SECRET.mlp,
                   norm="pre")  # fmt: skip
    with pytest.raises(Unclear, match="no head"):
        find_maps(frozen_box(secret), OPTIONS.attention, np.random.default_rng(0))


def test_a_whole_torch_block():
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    module = torch.nn.TransformerEncoderLayer(
        8, 2, 8, activation="gelu", norm_first=True, batch_first=True
    )
    module = module.double().eval()
    found = keyhole.recover(keyhole.open_oracle(module, width=8), keyhole.BlockLearner())
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert repr(found.model) == "Block(width=8, 2 heads, 8 gelu neurons, pre-norm (layer))"
    fresh = np.random.default_rng(0).standard_normal((20, 5, 8))
    with torch.no_grad():
        answers = module(torch.tensor(fresh))[:, -1].numpy()
    assert np.abs(found.model(fresh) - answers).max() < 1e-11


def sharp_box(activation, neurons=4):
    one = block(np.random.default_rng(5), 8, heads=2, neurons=neurons, activation=activation,
                norm="pre")  # fmt: skip
    secret = canonical_block(one)
    oracle = FunctionOracle(secret, Spec(8))
    known, plane = attention_of(secret), kept_plane(8, "layer")
    return secret, BehindAttention(oracle, known, plane, 1e4, 1e-9, NoiseModel())


@pytest.mark.parametrize(("activation", "kinks"), [("relu", True), ("gelu", False)])
def test_relus_are_told_from_smooth_networks(activation, kinks):
    _, oracle = sharp_box(activation)
    assert has_kinks(oracle, np.random.default_rng(0)) == kinks


@pytest.mark.parametrize(("activation", "kinks"), [("relu", True), ("gelu", False)])
def test_few_digits_tell_relus_too(activation, kinks):
    secret, _ = sharp_box(activation, neurons=8)
    plane = kept_plane(8, "layer")
    noise = NoiseModel(2.0**-24, format="float32")
    coarse = BehindAttention(single(secret), attention_of(secret), plane, 10.0, 1e-4, noise)
    rng = np.random.default_rng(0)
    assert has_kinks(coarse, rng) == kinks
    network = turn_neurons(fit_wide(coarse, (activation,), coarse.unit, rng))
    assert network.neurons == 8
    points = rng.standard_normal((5, 7))
    points *= np.sqrt(8.0) / np.linalg.norm(points, axis=1, keepdims=True)
    assert np.allclose(network(points), secret.mlp(points @ plane.T), atol=1e-4)


@pytest.mark.parametrize("find", ["fit", "circle"])
def test_relus_behind_the_attention(find):
    secret, oracle = sharp_box("relu")
    rng = np.random.default_rng(0)
    found = find_relus(oracle, 1e-16, rng) if find == "circle" else None
    found = fit_network(oracle, ("relu",), rng) if found is None else found
    network = turn_neurons(found)
    assert network.neurons == 4
    points = np.random.default_rng(1).standard_normal((5, 7))
    points *= np.sqrt(8.0) / np.linalg.norm(points, axis=1, keepdims=True)
    truth = secret.mlp(points @ kept_plane(8, "layer").T)
    assert np.allclose(network(points), truth, atol=1e-6)


def test_values_become_directions_and_points_beside_are_added():
    _, oracle = sharp_box("relu")
    source = ValuesOnSphere(oracle, np.random.default_rng(0), np.zeros((0, 7)), np.zeros((0, 8)))
    source.grow(5)
    source.grow(3)
    points, seen = source.read(None)
    assert points.shape == (5, 7)
    assert np.allclose(seen[:, :-1] / seen[:, -1:], source.values)
    rare = Directed(np.zeros((9, 8)), np.zeros((9, 1)), np.append(np.eye(7)[0], -2.5)[None], "relu")
    source.grow(40)
    source.grow_beside(rare)
    assert (source.points[40:, 0] > 2.5).all()
    assert len(source.points) > 45


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_whole_block_in_single_precision(activation):
    torch = pytest.importorskip("torch")
    torch.manual_seed(2)
    module = torch.nn.TransformerEncoderLayer(
        16, 2, 16, activation=activation, norm_first=True, batch_first=True
    ).eval()
    found = keyhole.recover(keyhole.open_oracle(module, width=16), keyhole.BlockLearner())
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert repr(found.model) == (
        f"Block(width=16, 2 heads, 16 {activation} neurons, pre-norm (layer))"
    )
    fresh = np.random.default_rng(0).standard_normal((20, 5, 16)).astype(np.float32)
    with torch.no_grad():
        answers = module(torch.tensor(fresh))[:, -1].double().numpy()
    assert np.abs(found.model(fresh.astype(np.float64)) - answers).max() < 2e-5
