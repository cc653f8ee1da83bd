"""Kinds of positions, told apart by a dozen queries."""

from collections.abc import Callable

import numpy as np
import pytest

import keyhole
from keyhole.arrays import Array
from keyhole.learners.positions.kinds import describe_bounded, recognise_positions
from keyhole.linalg.softmax import softmax
from keyhole.measurement.asker import Asker
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.wrappers.count import QueryCounter
from placed_layers import placed_layer

NAMES = {
    "rotary": "rotary",
    "linear bias": "additive",
    "bias by distance": "additive",
    "position vectors": "vectors",
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", NAMES)
def test_the_kind_is_named(kind: str, seed: int) -> None:
    longest = 24 if kind == "position vectors" else None
    box = FunctionOracle(placed_layer(kind, 8, 2, seed), Spec(8, domain=Domain(max_length=longest)))
    counted = QueryCounter(box, None)
    found = recognise_positions(Asker(counted), np.random.default_rng(seed), longest)
    assert found.name == NAMES[kind]
    assert found.window is None
    assert counted.paid <= 12


@pytest.mark.parametrize("window", [5, 16, 100])
def test_the_length_of_a_window(window: int) -> None:
    box = FunctionOracle(placed_layer("linear bias", 8, 2, 1, window=window), Spec(8))
    found = recognise_positions(Asker(box), np.random.default_rng(0), None)
    assert found.window == window
    assert found.name == "additive"


@pytest.mark.parametrize("masked", [1, 4, 9])
def test_places_at_the_start_that_nobody_sees(masked: int) -> None:
    box = FunctionOracle(placed_layer("none", 8, 2, 1, masked=masked), Spec(8))
    found = recognise_positions(Asker(box), np.random.default_rng(0), None)
    assert (found.masked, found.window, found.name) == (masked, None, "additive")
    assert f"the first {masked} places are not seen" in found.sentence


def turn_pairs(keys: Array) -> Array:
    """Pairs of entries turned by one radian per place."""
    angles = np.arange(keys.shape[1])[::-1, None]
    pairs = keys[..., ::2] + 1j * keys[..., 1::2]
    turned = pairs * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=2)


def build_bounded_box(
    kind: str, seed: int, width: int = 8, heads: int = 2, turning: bool = False
) -> Callable[..., Array]:
    """Attention whose scores do not grow with the tokens; without places, or with turning keys."""
    rng = np.random.default_rng(seed)
    inner = width // heads
    keys, queries = rng.standard_normal((2, heads, width, inner)) / width**0.5
    values = rng.standard_normal((heads, width, width)) / width**0.5

    def answer(tokens: Array) -> Array:
        total = np.zeros((len(tokens), width))
        for key, query, value in zip(keys, queries, values, strict=True):
            seen, asked = tokens @ key + 0.3, tokens[:, -1] @ query
            if turning:
                seen = turn_pairs(seen)
            if kind == "normalised":
                seen = seen / np.sqrt((seen**2).mean(axis=2, keepdims=True))
                asked = asked / np.sqrt((asked**2).mean(axis=1, keepdims=True))
            scores = np.einsum("nlr,nr->nl", seen, asked) / inner**0.5
            if kind == "capped":
                scores = 20.0 * np.tanh(scores / 20.0)
            total += np.einsum("nl,nld->nd", softmax(scores), tokens) @ value
        return total

    return answer


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["capped", "normalised", "plain"])
def test_what_keeps_scores_bounded_is_named(kind: str, seed: int) -> None:
    counted = QueryCounter(FunctionOracle(build_bounded_box(kind, seed), Spec(8)), None)
    told = describe_bounded(Asker(counted), np.random.default_rng(seed))
    words = {"capped": "scores are capped", "normalised": "queries and keys are normalised"}
    assert told == words.get(kind)
    assert counted.paid <= 28


@pytest.mark.parametrize("kind", ["capped", "normalised"])
@pytest.mark.parametrize("seed", [0, 19, 27])
def test_bounded_scores_are_named_behind_turning_keys(kind: str, seed: int) -> None:
    box = FunctionOracle(build_bounded_box(kind, seed, 16, 8, turning=True), Spec(16))
    assert recognise_positions(Asker(box), np.random.default_rng(seed), None).name == kind


def test_a_refusal_says_that_scores_are_capped() -> None:
    box = keyhole.open_oracle(build_bounded_box("capped", 0), width=8)
    recovery = keyhole.recover(box, throw=False)
    assert recovery.outcome is keyhole.Outcome.UNSUPPORTED
    assert "scores are capped" in recovery.reason
