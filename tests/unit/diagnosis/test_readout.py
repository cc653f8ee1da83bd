"""Readouts agree with the poolings of keyhole.oracles.token_models, and differ where they should."""

import pytest
import torch

from keyhole.diagnosis.readout import Readout
from keyhole.oracles.token_models import TokenReading

STATES = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max", "sqrt", "weighted"])
@pytest.mark.parametrize("normalize", [True, False])
def test_poolings_are_those_of_token_models(pooling, normalize) -> None:
    expected = TokenReading(pooling, normalize=normalize).read(STATES, MASK.long())
    assert torch.allclose(Readout(pooling, normalize)(STATES, MASK), expected)


def test_specials_and_padding() -> None:
    without = Readout(specials=False)(STATES, MASK)
    assert torch.allclose(without[0], STATES[0, 1:4].mean(0))
    assert torch.allclose(without[1], STATES[1, 1])
    assert torch.allclose(Readout(padding=True)(STATES, MASK)[1], STATES[1].mean(0))


def test_places_factor_and_cut() -> None:
    assert torch.equal(Readout("last", shift=-1)(STATES, MASK)[1], STATES[1, 1])
    assert torch.allclose(Readout("cls", factor=2.0)(STATES, MASK), 2 * STATES[:, 0])
    assert Readout(dimensions=2)(STATES, MASK).shape == (2, 2)
    left = torch.flip(MASK, [1])
    assert torch.equal(Readout("cls")(STATES, left)[1], STATES[1, 2])
