"""Kinds of positions, told apart by a dozen queries."""

import numpy as np
import pytest

from keyhole.learners.positions.kinds import recognise_positions
from keyhole.measurement.asking import Asker
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
