"""Scores that depend on where tokens stand, written out by hand beside the model."""

import numpy as np
import pytest

import keyhole
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head
from keyhole.models.files import load_model, save_model
from keyhole.models.position import Position

WIDTH, HEADS = 4, 2


def layer(position: Position, seed: int = 0) -> Attention:
    rng = np.random.default_rng(seed)
    heads = [
        Head(
            rng.standard_normal((WIDTH, WIDTH)),
            rng.standard_normal(WIDTH),
            rng.standard_normal((WIDTH, 3)),
        )
        for _ in range(HEADS)
    ]
    return Attention(heads, rng.standard_normal(3), None, position)


def every_kind(rng: np.random.Generator) -> dict[str, Position]:
    rows = (HEADS, 4, WIDTH + 1)
    return {
        "rotary": Position(
            np.array([1.0, 0.1]), rng.standard_normal(rows), rng.standard_normal(rows)
        ),
        "linear bias": Position(slopes=np.array([0.5, 0.25])),
        "bias by distance": Position(bias=rng.standard_normal((HEADS, 5))),
        "position vectors": Position(vectors=rng.standard_normal((9, WIDTH))),
        "window": Position(window=3),
        "masked start": Position(masked=2),
        "sink": Position(sinks=rng.standard_normal(HEADS)),
    }


KINDS = every_kind(np.random.default_rng(1))


def by_hand(model: Attention, tokens: np.ndarray) -> np.ndarray:
    """One sequence, token by token."""
    position = model.position
    assert position is not None
    if position.vectors is not None:
        tokens = tokens + position.vectors[: len(tokens)]
    answer = np.array(model.offset)
    last = np.append(tokens[-1], 1.0)
    for h, head in enumerate(model.heads):
        weights = []
        for i, token in enumerate(tokens):
            distance = len(tokens) - 1 - i
            score = np.append(token, 1.0) @ model.score_at(h, distance) @ last
            seen = position.window is None or distance < position.window
            seen = seen and (i >= (position.masked or 0) or distance == 0)
            weights.append(np.exp(score) if seen else 0.0)
        sink = 0.0
        if position.sinks is not None:
            row = position.sinks[h]
            sink = np.exp(row if row.ndim == 0 else row @ last)
        total = sum(weights) + sink
        answer = answer + np.array(weights) @ tokens @ head.value / total
        if position.sink_values is not None:
            answer = answer + sink / total * position.sink_values[h]
    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_by_hand(kind: str) -> None:
    model = layer(KINDS[kind])
    assert model.position is not None
    assert model.position.kind == kind
    tokens = np.random.default_rng(2).standard_normal((2, 7, WIDTH))
    assert np.allclose(model(tokens)[1], by_hand(model, tokens[1]), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_files_distance_and_torch(kind: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = layer(KINDS[kind])
    again = load_model(save_model(model, tmp_path / "model.safetensors"))
    tokens = np.random.default_rng(3).standard_normal((2, 6, WIDTH))
    assert np.array_equal(again(tokens), model(tokens))
    assert keyhole.distance(again, model) == 0.0
    assert keyhole.distance(layer(KINDS[kind], seed=5), model) > 0.1
    torch = pytest.importorskip("torch")
    from keyhole.models.export_torch import to_module

    module = to_module(model)
    assert np.allclose(module(torch.as_tensor(tokens)).detach().numpy(), model(tokens), rtol=1e-10)


def test_what_no_token_shows_is_no_distance() -> None:
    first = layer(Position(bias=np.zeros((HEADS, 3)) + np.arange(3.0)))
    second = layer(Position(bias=np.ones((HEADS, 3)) + np.arange(3.0)))
    assert keyhole.distance(first, second) < 1e-15
    vectors = np.random.default_rng(4).standard_normal((6, WIDTH))
    shift = np.ones(WIDTH)
    one = layer(Position(vectors=vectors))
    heads = [Head(h.score, h.key_bias - h.score @ shift, h.value) for h in one.heads]
    offset = one.offset - sum(shift @ h.value for h in one.heads)
    two = Attention(heads, offset, None, Position(vectors=vectors + shift))
    tokens = np.random.default_rng(6).standard_normal((2, 6, WIDTH))
    assert np.allclose(one(tokens), two(tokens))
    assert keyhole.distance(one, two) < 1e-12


def test_rotary_gauge_is_no_distance() -> None:
    position = KINDS["rotary"]
    assert position.keys is not None
    assert position.queries is not None
    factor = 2.0 * np.exp(0.7j)
    keys, queries = position.keys.copy(), position.queries.copy()
    turned = (keys[:, 0] + 1j * keys[:, 1]) * factor
    keys[:, 0], keys[:, 1] = turned.real, turned.imag
    turned = (queries[:, 0] + 1j * queries[:, 1]) / factor
    queries[:, 0], queries[:, 1] = turned.real, turned.imag
    other = layer(Position(position.frequencies, keys, queries))
    assert keyhole.distance(other, layer(position)) < 1e-13


def test_wrong_parts_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="come together"):
        Position(frequencies=np.ones(2))
    with pytest.raises(InvalidArgument, match="is for 3 heads"):
        layer(Position(slopes=np.ones(3)))
    with pytest.raises(InvalidArgument, match="places, the sequence"):
        layer(Position(vectors=np.zeros((2, WIDTH))))(np.zeros((1, 3, WIDTH)))


def test_a_sink_that_sees_the_anchor_and_has_a_value(tmp_path: object) -> None:
    rng = np.random.default_rng(7)
    position = Position(
        sinks=rng.standard_normal((HEADS, WIDTH + 1)), sink_values=rng.standard_normal((HEADS, 3))
    )
    model, tokens = layer(position), rng.standard_normal((2, 7, WIDTH))
    assert np.allclose(model(tokens)[0], by_hand(model, tokens[0]), rtol=1e-12)
    constant = layer(Position(sinks=position.sinks[:, -1]))
    spelled = np.zeros((HEADS, WIDTH + 1))
    spelled[:, -1] = position.sinks[:, -1]
    assert keyhole.distance(constant, layer(Position(sinks=spelled))) < 1e-12
    assert keyhole.distance(model, constant) == np.inf
    with pytest.raises(InvalidArgument, match="sink_values belong to sinks"):
        Position(sink_values=position.sink_values)
