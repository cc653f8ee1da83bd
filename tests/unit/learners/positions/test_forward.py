"""The forward model of layers with positions: its answers, and products with its derivative."""

from dataclasses import replace

import numpy as np
import pytest

from keyhole.learners.positions.forward import (
    Answered,
    PlacedLayer,
    compute,
    count_freedom,
    differentiate_scores,
    gather,
    join_alike,
    pull,
    push,
    to_layer,
    to_model,
)
from placed_layers import placed_layer

KINDS = ["rotary", "linear bias", "bias by distance", "position vectors"]


def make_layer(kind: str) -> PlacedLayer:
    truth = placed_layer(kind, 8, 2, 3)
    factors = [np.linalg.svd(head.value) for head in truth.heads]
    ins = [u[:, :4] * s[:4] for u, s, _ in factors]
    return to_layer(truth, ins, [vt[:4] for _, _, vt in factors])


def make_group(layer: PlacedLayer, count: int = 5) -> Answered:
    rng = np.random.default_rng(0)
    tokens, distances = rng.standard_normal((count, 6, 8)), np.arange(6)[::-1].copy()
    empty = Answered(tokens, distances, np.zeros((count, 8)), np.ones(count), np.full(count, 5))
    return replace(empty, answers=compute(layer, empty).answers)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_model(kind: str) -> None:
    layer = make_layer(kind)
    truth = placed_layer(kind, 8, 2, 3)
    group = make_group(layer)
    assert np.allclose(group.answers, truth(group.tokens), atol=1e-12)
    found = to_model(layer, truth.position)
    assert np.allclose(found(group.tokens), group.answers, atol=1e-12)
    if found.position is not None and found.position.vectors is not None:
        assert not found.position.vectors[0].any()
    assert 0 < count_freedom(layer) < sum(part.size for part in layer.parts.values())


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_the_derivative_and_its_adjoint(kind: str) -> None:
    rng, layer = np.random.default_rng(1), make_layer(kind)
    seen = compute(layer, make_group(layer))
    step = {name: rng.standard_normal(part.shape) for name, part in layer.parts.items()}
    h = 1e-6
    ends = [
        layer.with_parts({name: part + sign * h * step[name] for name, part in layer.parts.items()})
        for sign in (1.0, -1.0)
    ]
    one, other = (compute(end, seen.group).answers for end in ends)
    along = push(layer, seen, step)
    assert np.allclose(along, (one - other) / (2.0 * h), atol=1e-6 * np.abs(along).max())
    vector = rng.standard_normal(along.shape)
    back = gather(layer, seen, pull(layer, seen, vector), list(layer.parts))
    product = sum(float((back[name] * step[name]).sum()) for name in step)
    assert product == pytest.approx(float((vector * along).sum()), rel=1e-9)


def test_the_derivative_of_a_head_has_the_norms_of_its_products() -> None:
    layer = make_layer("rotary")
    seen = compute(layer, make_group(layer))
    rows = differentiate_scores(layer, seen, 1)
    step = {name: np.zeros(layer.parts[name].shape) for name in ("keys", "queries", "turns")}
    rng = np.random.default_rng(2)
    for part in step.values():
        part[1] = rng.standard_normal(part[1].shape)
    flat = np.concatenate([part[1].ravel() for part in step.values()])
    assert np.linalg.norm(rows @ flat) == pytest.approx(
        float(np.linalg.norm(push(layer, seen, step)))
    )


def test_hard_answers_tell_values_alone() -> None:
    layer = make_layer("rotary")
    group = replace(make_group(layer), liked=np.array([2, 0]))
    seen = compute(layer, group)
    expected = layer.parts["offset"] + sum(
        group.tokens[:, token] @ layer.parts["ins"][h] @ layer.parts["outs"][h]
        for h, token in enumerate((2, 0))
    )
    assert np.allclose(seen.answers, expected)
    pulled = pull(layer, seen, np.ones(seen.answers.shape))
    assert not np.abs(gather(layer, seen, pulled, ["keys"])["keys"]).max() > 1e-12


def test_queries_of_the_same_distances_are_joined() -> None:
    layer = make_layer("rotary")
    one, other = make_group(layer, 2), make_group(layer, 3)
    (both,) = join_alike([one, other])
    assert len(both.tokens) == 5
    (placed,) = join_alike([one, replace(other, lasts=np.full(3, 9))])
    assert placed.places[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert placed.places[-1].tolist() == [4, 5, 6, 7, 8, 9]
    assert len(join_alike([one, replace(other, distances=other.distances + 1)])) == 2
    assert (both.take(np.array([0, 4])).tokens[1] == other.tokens[2]).all()
