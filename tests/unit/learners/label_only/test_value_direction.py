"""Labels of single tokens: the coding, and the direction of the value."""

import numpy as np
import pytest

import keyhole
from boxes import CountingBox
from keyhole.arrays import UNIT_ROUNDOFF
from keyhole.errors import DomainError, NotIdentifiable, WrongFamily
from keyhole.learners.label_only.value_direction import (
    find_radius,
    find_roundoff,
    measure_direction,
    open_reader,
)
from keyhole.models.attention import Attention
from keyhole.models.random import attention
from keyhole.oracles.base import Domain

WIDTH = 5


def label(model: Attention, low: float = -1.0, high: float = 1.0) -> CountingBox:
    return CountingBox(lambda tokens: np.where(model(tokens) > 0, high, low), WIDTH)


@pytest.mark.parametrize("bits", [8, 16, 30])
def test_the_direction_is_found_to_its_brackets(bits: int) -> None:
    model = attention(np.random.default_rng(0), WIDTH)
    box = label(model)
    reader = open_reader(keyhole.open_oracle(box), np.random.default_rng(1))
    before = box.seen
    found = measure_direction(reader, 2.0**-bits)
    value = model.heads[0].value / np.linalg.norm(model.heads[0].value)
    off = np.abs(found.value - value)
    assert off.max() <= 4.0 * found.error(0.0).max() <= 4.0 * 2.0**-bits
    assert box.seen - before <= 2 * WIDTH + (WIDTH - 1) * (bits + 1)
    finer = found.refine(2.0 ** -(bits + 4))
    assert finer.error(0.0).max() < found.error(0.0).max()


def test_the_coding_is_read_from_a_token_and_its_opposite() -> None:
    model = attention(np.random.default_rng(2), WIDTH)
    reader = open_reader(keyhole.open_oracle(label(model, 0.0, 1.0)), np.random.default_rng(1))
    assert (reader.coding.negative, reader.coding.positive) == (0.0, 1.0)


def test_an_offset_and_a_constant_are_told() -> None:
    drawn = attention(np.random.default_rng(3), WIDTH)
    rng = np.random.default_rng(1)
    with pytest.raises(WrongFamily, match="offset"):
        open_reader(keyhole.open_oracle(label(Attention(drawn.heads, 0.01))), rng)
    with pytest.raises(NotIdentifiable, match="every token"):
        open_reader(keyhole.open_oracle(label(Attention(drawn.heads, 1e9))), rng)


def test_the_roundoff_of_the_box_shows_beside_the_border() -> None:
    model = attention(np.random.default_rng(4), WIDTH)
    single = model.astype(np.float32)
    boxes = (label(model), CountingBox(lambda t: np.sign(single(t.astype(np.float32))), WIDTH))
    found = []
    for box in boxes:
        reader = open_reader(keyhole.open_oracle(box), np.random.default_rng(1))
        direction = measure_direction(reader, 2.0**-40)
        found.append(find_roundoff(direction, UNIT_ROUNDOFF, np.random.default_rng(2)))
    assert found[0] <= 16 * UNIT_ROUNDOFF
    assert found[1] >= 2.0**-24


def test_tokens_need_room_around_zero() -> None:
    assert find_radius(Domain(max_norm=2.0)) == pytest.approx(2.0)
    with pytest.raises(DomainError, match="no room"):
        find_radius(Domain(low=0.5, high=1.0))
    with pytest.raises(DomainError, match="vocabulary"):
        find_radius(Domain(vocabulary=np.eye(3)))
