"""The network of a block from random tokens: a wide one, thinned out, and turned as the block is.

Statement.  Values of a network on a sphere, or directions of x + mlp(x), at random points tell its
            neurons (network/wide.py) up to which way each is turned, φ(u) = ± φ(-u) + u; which way
            follows from the linear part, which a block does not have, or has as the identity.
Queries.    Random points, as many as network/wide.py wants; for norm(x + mlp(x)) huge tokens before
            them, that tell gain and bias.
Algebra.    Behind a norm the linear part is zero: it is Σ s_j outer_j inner_jᵀ, s_j zero or one, by
            linear least squares. In front of one it is that and the identity times one factor, the
            scale of z (`post_norm_mlp.orient`).
Fails.      Where network/wide.py does.
"""

from dataclasses import replace

import numpy as np

from keyhole.arrays import Array
from keyhole.learners.block.arcs import bends_smoothly
from keyhole.learners.block.box import Paid, Unclear
from keyhole.learners.block.post_norm_mlp import find_norm, is_smooth, measure_last_epsilon, orient
from keyhole.learners.block.pre_norm_mlp import OnSphere, find_kind, lift_network, measure_epsilon
from keyhole.learners.block.refinement import Pairs
from keyhole.learners.mlp import room_for_neurons
from keyhole.measurement.asker import Asker
from keyhole.models.block import Block
from keyhole.models.mlp import ACTIVATIONS, Mlp, outer_table, turned, with_parts
from keyhole.models.norm import kept_plane
from keyhole.network.wide import Seen, search_wide
from keyhole.oracles.base import Oracle
from keyhole.oracles.queries import QueryBatch

BENT = ("gelu", "silu")  # smooth activations of one side, which a block may have
EXPECTED = 4  # neurons per number of a token that most layers have


def is_crowded(width: int) -> bool:
    """Whether second derivatives would tell the neurons that most layers have only just, or not at
    all: then random points take fewer queries."""
    return room_for_neurons(width) < 2 * EXPECTED * (width + 1)


def fit_wide(
    oracle: Oracle, activations: tuple[str, ...], unit: float, rng: np.random.Generator
) -> Mlp:
    """A network on the sphere from random points, with more neurons than it has at first: no answer
    needs many digits, as those beside kinks would. Its linear part is what it is. `unit`: relative
    rounding of the box. Raises Unclear."""
    width, radius = oracle.spec.width, float(oracle.spec.domain.sphere or 1.0)
    parts: list[tuple[Array, Array]] = []

    def look(count: int) -> Seen:
        fresh = rng.standard_normal((count - sum(len(points) for points, _ in parts), width))
        if len(fresh):
            fresh *= radius / np.linalg.norm(fresh, axis=1, keepdims=True)
            values = np.asarray(oracle.ask(QueryBatch.of(fresh[:, None], "network")))
            parts.append((fresh, values.astype(np.float64)))
        points, answers = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Seen(points, answers, direction=False)

    scale, noise = look(8).size, oracle.spec.precision
    level = max(unit, 0.0 if noise is None else noise.relative)
    doubt = 0.0 if noise is None else noise.additive / scale
    explained = max(30.0 * level, 3.0 * doubt)
    found, left = search_wide(look, activations, level, explained, rng)
    if left > explained:
        raise Unclear(f"no network explains random points of the sphere: {left:.1e} is left")
    return Mlp(
        found.inner[:, :-1], found.inner[:, -1], found.outer, activation=found.activation,
        linear=found.affine[:, :-1], offset=found.affine[:, -1],
    )  # fmt: skip


def turn_neurons(network: Mlp) -> Mlp:
    """The neurons turned so that no linear part is left: linear = -Σ s_j outer_j inner_jᵀ, s_j zero
    or one."""
    if ACTIVATIONS[network.activation].slope and network.gate is None:
        outer = outer_table(network)
        normal = (outer.T @ outer) * (network.inner @ network.inner.T)
        right = -np.einsum("kj,kd,jd->j", outer, network.linear, network.inner)
        share, *_ = np.linalg.lstsq(normal, right, rcond=None)
        if np.abs(share - np.round(share)).max() > 0.2:
            raise Unclear("which way the neurons are turned was not seen")
        network = turned(network, np.round(share) == 1.0)
    return with_parts(network, linear=np.zeros_like(network.linear))


def find_pre_norm_relus(box: Asker, rng: np.random.Generator) -> tuple[list[Block], Pairs]:
    """x + mlp(norm(x)) with kinks; raises Unclear where there are none."""
    return find_pre_norm_network(box, rng, smooth=False)


def find_pre_norm_network(
    box: Asker, rng: np.random.Generator, smooth: bool = True
) -> tuple[list[Block], Pairs]:
    """x + mlp(norm(x)) to a few digits, and the queries and answers that refine it. Raises Unclear
    where the network is smooth, and that is not wanted."""
    kind = find_kind(box, rng)
    plane = kept_plane(box.width, kind)
    paid = Paid(box.oracle, longest=1)
    oracle = OnSphere(paid, plane)

    def along(points: Array) -> Array:
        points = np.sqrt(len(plane)) * points / np.linalg.norm(points, axis=1, keepdims=True)
        return np.asarray(oracle.ask(QueryBatch.of(points[:, None], "network")), dtype=np.float64)

    bent = bends_smoothly(along, plane.shape[1], box.error, rng)
    if bent and not smooth:
        raise Unclear("the network is smooth")
    size = np.sqrt(np.mean(along(rng.standard_normal((8, plane.shape[1]))) ** 2))
    level = box.error * (1.0 + 1.0 / float(size))  # tokens of size one are beside the answers
    network = turn_neurons(fit_wide(oracle, BENT if bent else ("relu",), level, rng))
    epsilon = measure_epsilon(replace(box, oracle=paid), network, plane, rng)
    wide = lift_network(network, plane, np.sqrt(1.0 + epsilon))
    start = Block(None, wide, norm="pre", kind=kind, epsilons=[epsilon])
    return [start], [(box.representable(tokens), answers) for tokens, answers in paid.pairs()]


def find_post_norm_network(box: Asker, rng: np.random.Generator) -> tuple[list[Block], Pairs]:
    """norm(x + mlp(x)) to a few digits, and the queries and answers that refine it."""
    norm = find_norm(box, rng)
    plane, paid = norm.plane, Paid(box.oracle, longest=1)
    box = replace(box, oracle=paid)

    def directions(answers: Array) -> Array:
        seen = ((answers - norm.bias) / norm.gain) @ plane
        return np.asarray(seen / np.linalg.norm(seen, axis=1, keepdims=True))

    def ask(points: Array) -> Array:
        return directions(box(points[:, None], "network"))

    smooth = is_smooth(ask, box.width, box.error, rng)
    tokens, answers = np.zeros((0, box.width)), np.zeros((0, box.width))

    def look(count: int) -> Seen:
        nonlocal tokens, answers
        fresh = rng.standard_normal((max(0, count - len(tokens)), box.width))
        if len(fresh):
            fresh = box.representable(fresh)
            tokens = np.concatenate([tokens, fresh])
            answers = np.concatenate([answers, box(fresh[:, None], "network")])
        return Seen(tokens, directions(answers), direction=True)

    root = float(np.sqrt(plane.shape[1]))  # of numbers in a unit vector
    explained = 30.0 * box.error * root
    names = BENT if smooth else ("relu",)
    found, left = search_wide(look, names, box.error * root, explained, rng)
    if left > explained:
        raise Unclear(f"no network explains random directions: {left:.1e} is left")
    known = orient(found.affine[:, :-1], found.affine[:, -1], found.inner, found.outer.T, plane)
    network = Mlp(
        known.inner, known.bias, plane @ known.outer.T, activation=found.activation,
        offset=plane @ known.offset,
    )  # fmt: skip
    gain = known.sign * norm.gain

    def block(epsilon: float) -> Block:
        return Block(None, network, norm="post", kind=norm.kind, epsilons=[epsilon], gain=gain,
                     bias=norm.bias)  # fmt: skip

    pairs = [(tokens[:, None], answers)]
    return [block(measure_last_epsilon(block(1e-5), *pairs[0]))], pairs
