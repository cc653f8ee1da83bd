"""A linear map of the anchor beside attention is found, measured and told from the heads."""

from typing import Any

import numpy as np
import pytest

import keyhole
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.learners.multi_head.skip import (
    ANCHOR,
    Setup,
    collect_slopes,
    find_skip,
    learn_beside_skip,
    remove_jumps,
)
from keyhole.models.attention import Attention, Head
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.wrappers.count import QueryCounter


def layer(width: int, heads: int, seed: int, outputs: int | None, skip: Any = None) -> Attention:
    rng = np.random.default_rng(seed)
    shape = (width,) if outputs is None else (width, outputs)
    made = [
        Head(
            rng.standard_normal((width, width)) / width**0.5,
            0.3 * rng.standard_normal(width),
            rng.standard_normal(shape) / width**0.5,
        )
        for _ in range(heads)
    ]
    return Attention(made, rng.standard_normal(shape[1:]), skip)


def counted(box: Any, width: int, **spec: Any) -> QueryCounter:
    return QueryCounter(FunctionOracle(box, Spec(width, **spec)), None)


@pytest.mark.parametrize("outputs", [None, 6, 3])
def test_no_skip_costs_two_queries(outputs: int | None) -> None:
    box = counted(layer(6, 3, 1, outputs), 6)
    assert find_skip(box, np.random.default_rng(0)) is None
    assert box.paid == 2


@pytest.mark.parametrize("seed", range(6))
def test_the_skip_of_a_vector_box_is_measured_at_its_floor(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal((12, 5))
    box = counted(layer(12, 3, seed, 5, truth), 12)
    found = find_skip(box, rng)
    assert found is not None
    assert np.linalg.norm(found.value - truth) < 1e-12 * np.linalg.norm(truth)
    assert (np.abs(found.value - truth) < 6 * found.value_errors).mean() > 0.9
    assert found.selected is not None
    naming = len(found.selected.marks) + 1  # queries that name the tokens, for whoever needs them
    assert box.paid <= 12 + 3 + naming + 3


def test_selected_tokens_are_handed_on() -> None:
    truth = layer(12, 3, 8, 12, np.eye(12))
    found = find_skip(counted(truth, 12), np.random.default_rng(3))
    assert found is not None
    assert found.selected is not None
    pattern, marks = found.selected.pattern, found.selected.marks
    values = [found.selected.shift @ head.value for head in truth.heads]
    assert np.allclose(
        sorted(np.linalg.norm(values, axis=1)), sorted(np.linalg.norm(marks, axis=1))
    )
    constant = pattern.anchor @ truth.skip + truth.offset
    base = found.selected.subtract(constant).pattern.system.answers[0]
    (answer,) = truth(np.concatenate([pattern.scale * pattern.tokens, pattern.anchor[None]])[None])
    assert np.allclose(base, (answer - constant) / pattern.scale, rtol=0, atol=1e-12)


def test_jumps_are_told_from_slopes_by_one_opposite_step() -> None:
    """A box whose answer jumps by the same on a third of the steps."""
    rng = np.random.default_rng(6)
    truth, jump, edge = rng.standard_normal((20, 20)), rng.standard_normal(20), np.ones(20)
    anchor = ANCHOR * np.eye(20)[0]

    def box(tokens: np.ndarray) -> np.ndarray:
        last = tokens[:, -1]
        left = (last - anchor) @ edge > 0.02 * ANCHOR
        return np.asarray(last @ truth + left[:, None] * jump * 4.0 * ANCHOR + ANCHOR)

    oracle = counted(box, 20)
    setup = Setup.ask_base(oracle, np.eye(20)[:4], anchor, 0)
    directions = np.linalg.qr(rng.standard_normal((20, 20)))[0]
    measured = setup.measure(directions, 0.1)
    assert not np.allclose(measured, directions @ truth, rtol=0, atol=1e-9)
    slopes = remove_jumps(setup, directions, measured, 0.1)
    assert slopes is not None
    assert np.allclose(slopes, directions @ truth, rtol=0, atol=1e-9)
    assert oracle.paid == 1 + 20 + 1


def test_a_jump_alone_is_no_skip() -> None:
    """Now and then two of many tokens have nearly the same score, and a step of the anchor makes
    a head change its choice: what follows shows that nothing else moves."""
    rng = np.random.default_rng(0)
    plain = layer(12, 3, 0, 5)
    narrow = [rng.standard_normal((12, 2)) @ rng.standard_normal((2, 12)) for _ in plain.heads]
    heads = [Head(w, h.key_bias, h.value) for w, h in zip(narrow, plain.heads, strict=True)]
    paid = []
    for seed in range(120):
        box = counted(plain.with_heads(heads), 12)
        assert find_skip(box, np.random.default_rng(seed)) is None
        paid.append(box.paid)
    assert 2 < max(paid) < 12


def test_the_skip_of_a_scalar_box_is_measured_twice() -> None:
    truth = np.random.default_rng(3).standard_normal(8)
    box = counted(layer(8, 2, 3, None, truth), 8)
    found = find_skip(box, np.random.default_rng(1))
    assert found is not None
    assert np.allclose(found.value, truth, rtol=0, atol=1e-12)
    assert box.paid >= 16


def test_a_head_that_attends_to_all_alike_is_no_skip() -> None:
    plain = layer(6, 2, 4, 6)
    even = Head(np.zeros((6, 6)), None, np.eye(6))
    assert (
        find_skip(counted(plain.with_heads([*plain.heads, even]), 6), np.random.default_rng(0))
        is None
    )


def test_a_skip_beside_a_head_that_attends_to_all_alike() -> None:
    truth = np.random.default_rng(5).standard_normal((6, 6))
    plain = layer(6, 2, 5, 6, truth)
    even = Head(np.zeros((6, 6)), None, np.eye(6))
    box = counted(plain.with_heads([*plain.heads, even]), 6)
    found = find_skip(box, np.random.default_rng(0))
    assert found is not None
    assert np.allclose(found.value, truth, rtol=0, atol=1e-11)


def test_bounded_tokens_are_not_asked() -> None:
    box = counted(layer(4, 2, 0, 4, np.eye(4)), 4, domain=Domain(max_norm=2.0))
    assert find_skip(box, np.random.default_rng(0)) is None
    assert box.paid == 0


def test_four_tokens_are_enough() -> None:
    box = counted(layer(5, 2, 2, 5, np.eye(5)), 5, domain=Domain(max_length=4))
    found = find_skip(box, np.random.default_rng(0))
    assert found is not None
    assert np.allclose(found.value, np.eye(5), rtol=0, atol=1e-12)
    assert "identity" in found.sentence


def test_a_jump_is_not_taken_for_a_slope() -> None:
    """A box whose answer jumps on a tenth of the steps, by the size of the answer itself."""
    truth = np.random.default_rng(6).standard_normal((20, 20))

    def box(tokens: np.ndarray) -> np.ndarray:
        last = tokens[:, -1]
        turned = np.sign(last @ np.sin(np.arange(20))) * np.sign(last @ np.cos(np.arange(20)))
        return np.asarray(last @ truth + turned[:, None] * tokens[:, 0, :] * 0.3)

    oracle = FunctionOracle(box, Spec(20))
    rng = np.random.default_rng(2)
    setup = Setup.draw(oracle, rng)
    directions = np.eye(20)
    slopes = collect_slopes(setup, directions, truth[:1], rng)
    assert slopes is not None
    assert np.allclose(slopes, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize("outputs", [None, 8])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_layer_with_a_skip_is_recovered(outputs: int | None, heads: int) -> None:
    rng = np.random.default_rng(heads)
    truth = layer(
        8, heads, heads, outputs, rng.standard_normal((8,) if outputs is None else (8, 8))
    )
    found = keyhole.recover(truth, seed=heads)
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert keyhole.distance(found.model, truth) < 1e-8
    assert any("skip" in note for note in found.notes)


def test_the_learner_itself_may_be_any() -> None:
    truth = layer(6, 2, 9, 6, np.eye(6))
    oracle = counted(truth, 6)
    learned = learn_beside_skip(oracle, np.random.default_rng(0), MultiHead(heads=2).learn_heads)
    assert keyhole.distance(learned.model, truth) < 1e-8
    assert learned.errors.skip.shape == (6, 6)
