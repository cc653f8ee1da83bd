"""The stages of learning a stack, each on what the true stages before it would give."""

import numpy as np
import pytest

import keyhole
from keyhole.arrays import Array
from keyhole.learners.block import Unclear, open_block
from keyhole.learners.stack import neurons
from keyhole.learners.stack.biases import find_offsets
from keyhole.learners.stack.epsilons import (
    find_epsilons,
    follow_path,
    stream_before,
    token_with,
    with_epsilons,
)
from keyhole.learners.stack.heads import find_heads
from keyhole.learners.stack.neurons import (
    NeuronOptions,
    NoNetwork,
    Union,
    find_neurons,
    list_attempts,
    slopes_of,
)
from keyhole.learners.stack.order import Order, OrderOptions, decide_order, find_order
from keyhole.learners.stack.refinement import (
    AnsweredSequences,
    form_of,
    forward,
    join_stack,
    refine_stack,
    split_stack,
)
from keyhole.learners.stack.scores import WideHead, WideScores, find_scores, split_score
from keyhole.learners.stack.shallow import Shallow, measure_doubt, repeat_terms
from keyhole.models.canonical import canonical_stack
from keyhole.models.mlp import Mlp, outer_table, turned
from keyhole.models.norm import kept_plane
from keyhole.models.random import block, stack
from keyhole.models.stack import Stack
from keyhole.network.redundancy import Attempt

WIDTH = 6


def make(seed: int = 0, layers: int = 2) -> tuple[Stack, Shallow]:
    """A small stack in canonical form, and its box with huge tokens."""
    secret = stack(np.random.default_rng(seed), WIDTH, layers=layers, heads=1, neurons=4)
    secret = canonical_stack(secret)
    box = open_block(keyhole.open_oracle(secret))
    return secret, Shallow(box, kept_plane(WIDTH, "layer"))


def wide_parts(secret: Stack, plane: Array) -> tuple[tuple[WideHead, ...], Mlp]:
    """All heads and all neurons, side by side, in coordinates of the plane."""
    heads, networks = [], []
    for each in secret.blocks:
        assert each.attention is not None
        assert each.mlp is not None
        for head in each.attention.heads:
            assert head.score_factors is not None
            left, right = head.score_factors
            heads.append(
                WideHead(plane.T @ left, right @ plane, plane.T @ head.key_bias,
                         head.value.T @ plane)
            )  # fmt: skip
        networks.append(each.mlp)
    network = Mlp(
        np.concatenate([each.inner for each in networks]) @ plane,
        np.concatenate([each.inner_bias for each in networks]),
        np.concatenate([outer_table(each) for each in networks], axis=1),
        offset=sum(
            each.attention.offset + each.mlp.offset
            for each in secret.blocks
            if each.attention is not None and each.mlp is not None
        ),
    )
    return tuple(heads), network


def test_the_limit_is_the_wide_layer() -> None:
    secret, shallow = make()
    rng = np.random.default_rng(1)
    heads, network = wide_parts(secret, shallow.plane)
    points = shallow.points(rng, 5)
    terms = shallow.ask_alone(points, "test")
    layer = sum((points @ head.map.T for head in heads), network(points))
    assert np.abs(terms.limit - layer).max() < 1e-10
    assert 0 < measure_doubt(shallow, rng) < 1e-10


def test_answers_without_a_limit_are_unclear() -> None:
    grows = lambda tokens: tokens[:, -1] + np.sqrt(np.abs(tokens[:, -1]))  # noqa: E731
    box = open_block(keyhole.open_oracle(grows, width=WIDTH))
    with pytest.raises(Unclear, match="no limit"):
        measure_doubt(Shallow(box, kept_plane(WIDTH, "layer")), np.random.default_rng(0))


def test_heads_and_scores_of_all_blocks_are_found() -> None:
    secret, shallow = make()
    rng = np.random.default_rng(2)
    true, _ = wide_parts(secret, shallow.plane)
    found = find_heads(shallow, 1e-11, rng)
    assert len(found.maps) == len(true)
    scores = find_scores(shallow, found, 1e-11, rng)
    for head in true:
        own = min(scores.heads, key=lambda other: float(np.abs(other.map - head.map).max()))
        assert np.abs(own.map - head.map).max() < 1e-8
        assert np.abs(own.left @ own.right - head.left @ head.right).max() < 1e-7
        assert np.abs(own.key_bias - head.key_bias).max() < 1e-7


def test_a_score_keeps_the_rank_that_stands_out() -> None:
    rng = np.random.default_rng(0)
    score = rng.standard_normal((5, 2)) @ rng.standard_normal((2, 5))
    noisy = score + 1e-11 * rng.standard_normal((5, 5))
    head = split_score(noisy, score[:, 0], np.eye(5), 0.5, 1e-11)
    assert head.left.shape == (5, 2)
    assert np.abs(head.left @ head.right - score).max() < 1e-9


def test_all_neurons_and_their_activation_are_found() -> None:
    secret, shallow = make()
    heads, network = wide_parts(secret, shallow.plane)
    whole = np.sum([head.map for head in heads], axis=0)
    found = find_neurons(shallow, whole, 1e-11, np.random.default_rng(3)).network
    assert (found.neurons, found.activation) == (network.neurons, "gelu")
    points = shallow.points(np.random.default_rng(4), 20)
    assert np.abs(found(points) - network(points)).max() < 1e-8


def test_the_first_activation_is_tried_with_more_neurons_before_others_are() -> None:
    options = NeuronOptions()
    attempts = list_attempts(options, 7)
    assert len(set(attempts)) == len(attempts)
    plain = [(size, names) for size, gated, names in attempts if not gated]
    gelu, silu, _ = options.activations
    assert plain[:2] == [(16, gelu), (25, gelu)]
    assert plain.index((16, silu)) < plain.index((40, gelu)) < plain.index((25, silu))
    assert {names for _, gated, names in attempts if gated} == set(options.gates)


def test_slopes_are_derivatives_of_the_hidden_layer() -> None:
    rng = np.random.default_rng(0)
    plain = Mlp(rng.standard_normal((3, 4)), np.ones(3), rng.standard_normal((4, 3)))
    gated = Mlp(plain.inner, np.ones(3), plain.outer, activation="silu",
                gate=rng.standard_normal((3, 4)), gate_bias=np.ones(3))  # fmt: skip
    point, step = rng.standard_normal((2, 1, 4))
    for network in (plain, gated):
        ahead, behind = (network.hidden(point + sign * 1e-6 * step) for sign in (1, -1))
        assert np.abs(slopes_of(network, point) @ step[0] - (ahead - behind) / 2e-6).max() < 1e-8


def order_of(secret: Stack, shallow: Shallow) -> tuple[Order, tuple[WideHead, ...], Union]:
    """The order from the true parts, half of the neurons turned the wrong way."""
    rng = np.random.default_rng(5)
    heads, network = wide_parts(secret, shallow.plane)
    network = turned(network, np.arange(network.neurons) % 2 == 1)
    anchors = shallow.points(rng, 4)
    alone = repeat_terms(shallow.ask_alone(anchors, "test"), 3)
    asked = shallow.ask(shallow.points(rng, 12, 2), np.repeat(anchors, 3, axis=0), "test")
    order, single = find_order(shallow, WideScores(heads, asked, alone), network, rng)
    return order, heads, Union(network, single)


def test_the_order_and_the_sides_come_out_as_zero_and_one() -> None:
    secret, shallow = make(layers=3)
    order, heads, union = order_of(secret, shallow)
    assert order.heads.tolist() == [0, 1, 2]
    assert order.neurons.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert order.certificate < 1e-3
    assert np.abs(order.network.linear).max() < 1e-8
    more = shallow.ask_alone(shallow.points(np.random.default_rng(6), 20), "test")
    attention, networks, _ = find_offsets(shallow, heads, order, union.asked + more)
    for layer, each in enumerate(secret.blocks):
        assert each.attention is not None
        assert each.mlp is not None
        assert np.abs(attention[layer] - each.attention.offset).max() < 1e-5
        assert np.abs(networks[layer] - each.mlp.offset).max() < 1e-5


def test_one_block_passed_twice_is_told_as_such() -> None:
    network = Mlp(np.eye(3), np.zeros(3), np.eye(3))
    twice = decide_order(np.full((3, 2), 0.75), np.full((2, 2), 0.25), np.zeros((2, 3, 3)),
                         network, OrderOptions())  # fmt: skip
    assert (twice.repeated, twice.layers) == (2, 1)


@pytest.mark.parametrize(
    ("reads", "before"),
    [
        ([[1.0, 0.5]], [[0.0, 0.0], [1.0, 0.0]]),  # neither zero nor one
        ([[1.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]),  # each head reads the other
        ([[0.0, 1.0]], [[0.0, 0.0], [1.0, 0.0]]),  # a neuron that skips an earlier head
        ([[0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]]),  # a neuron before all heads
    ],
)
def test_what_is_no_order_is_unclear(reads: list[list[float]], before: list[list[float]]) -> None:
    network = Mlp(np.eye(3)[:1], np.zeros(1), np.eye(3)[:, :1])
    with pytest.raises(Unclear, match="order"):
        decide_order(np.array(reads), np.array(before), np.zeros((2, 3, 3)), network,
                     OrderOptions())  # fmt: skip


def test_a_token_with_a_small_stream_before_any_norm_shows_its_epsilon() -> None:
    secret, shallow = make()
    rng = np.random.default_rng(7)
    true = np.array([1e-5, 3e-5, 2e-6, 1e-4])
    secret = with_epsilons(secret, true)
    wanted = 1e-3 * rng.standard_normal(WIDTH - 1)
    token = token_with(secret, 3, wanted, shallow.plane, rng)
    assert token is not None
    stream = stream_before(secret, 3, token[None])[0]
    assert np.abs(shallow.plane.T @ stream - wanted).max() < 1e-9
    start = with_epsilons(secret, np.full(4, 1e-5))
    found, small = find_epsilons(
        open_block(keyhole.open_oracle(secret)), start, shallow.plane, 1, rng
    )
    told = np.concatenate([each.epsilons for each in found.blocks])
    assert np.abs(told / true - 1.0).max() < 1e-2
    for each, epsilon in zip(small, true, strict=True):  # at least as much as one norm does
        assert each.enlarged.min() > 0.9 / np.sqrt(epsilon)


def test_paths_pass_every_length_though_they_turn_back() -> None:
    bend = np.array([1.0, -2.0])

    def read(points: Array) -> Array:
        return np.asarray(points - 4.0 * np.tanh(points @ bend)[:, None] * bend)

    way = np.array([0.6, 0.8])
    found = list(follow_path(read, way, 0.5))
    assert len(found) == 3
    assert max(np.abs(read(near[None])[0] - 0.5 * way).max() for near in found) < 1.0


@pytest.mark.parametrize("causal", [True, False])
def test_the_torch_function_is_the_stack(causal: bool) -> None:
    import torch

    blocks = canonical_stack(
        Stack([block(np.random.default_rng(s), WIDTH, heads=2, neurons=3, norm="pre")
               for s in (0, 1)], causal=causal)
    )  # fmt: skip
    form = form_of(blocks, 1)
    parts = split_stack(blocks, form)
    tokens = np.random.default_rng(2).standard_normal((3, WIDTH))
    told = forward(form)({n: torch.tensor(p) for n, p in parts.items()}, torch.tensor(tokens))
    assert np.abs(np.asarray(told) - blocks(tokens[None])[0]).max() < 1e-12
    assert keyhole.distance(join_stack(parts, form), blocks) < 1e-12


def test_refinement_reaches_rounding() -> None:
    secret, _ = make()
    rng = np.random.default_rng(8)
    data = []
    for length, size in ((1, 1.0), (2, 1.0), (3, 3.0), (1, 1e-2)):
        tokens = size * rng.standard_normal((40, length, WIDTH))
        data.append(AnsweredSequences(tokens, secret(tokens), np.ones(40)))
    parts = split_stack(secret, form_of(secret, 1))
    near = {n: p * (1.0 + 1e-4 * rng.standard_normal(p.shape)) for n, p in parts.items()}
    start = join_stack(near, form_of(secret, 1))
    refined = refine_stack(start, 1, data, 1.1e-16, rng)
    fresh = rng.standard_normal((20, 3, WIDTH))
    assert np.abs(refined.stack(fresh) - secret(fresh)).max() < 1e-10
    assert refined.level < 8.0


def test_gated_neurons_are_tried_again_where_more_plain_ones_help_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = stack(np.random.default_rng(0), 6, layers=1, heads=1, neurons=3, kind="rms",
                   activation="silu", gated=True)  # fmt: skip
    shallow = Shallow(open_block(keyhole.open_oracle(secret)), np.eye(6))
    tried: list[tuple[int, bool]] = []

    def attempt(_points: Array, _answers: Array, size: int, names: tuple[str, ...], gated: bool,
                *_: object) -> Attempt:  # fmt: skip
        """Few gated neurons leave more than many plain ones, of which more help little."""
        tried.append((size, gated))
        return Attempt(None, 0.08 if gated else 0.02 / len(tried) ** 0.1)

    monkeypatch.setattr(neurons, "fit_network", attempt)
    with pytest.raises(NoNetwork):
        find_neurons(shallow, np.zeros((6, 6)), 1e-9, np.random.default_rng(1))
    gated = [place for place, (size, kind) in enumerate(tried) if kind and size > 14]
    largest = max(size for size, kind in tried if not kind)
    assert gated[0] < tried.index((largest, False))
