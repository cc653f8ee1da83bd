"""Labels beside the border: right for the head itself, wrong for what is only nearly it."""

import numpy as np
import pytest

import keyhole
from keyhole.errors import WrongFamily
from keyhole.learners.label_only.boundary_checks import (
    place_beside_border,
    refuse_other_pairs,
    refuse_other_sequences,
)
from keyhole.learners.label_only.score_thresholds import Thresholds
from keyhole.learners.label_only.value_direction import LabelReader
from keyhole.linalg.bases import equal_overlap
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.models.sign_attention import NO_ERROR, Coding, LabelledAttention
from keyhole.oracles.wrappers.degrade import Labels

WIDTH, ERROR = 6, 1e-6


def head(seed: int = 0) -> Head:
    (drawn,) = attention(np.random.default_rng(seed), WIDTH).heads
    return Head(drawn.score, None, drawn.value / np.linalg.norm(drawn.value))


def labelled(part: Head) -> LabelledAttention:
    return LabelledAttention(Attention([part], 0.0), Coding())


def errors() -> LabelledAttention:
    wrong = Head(np.full((WIDTH, WIDTH), ERROR), None, np.full(WIDTH, ERROR))
    return LabelledAttention(Attention([wrong], 0.0), NO_ERROR)


def reader(part: Head) -> LabelReader:
    return LabelReader(Asker(Labels(keyhole.open_oracle(Attention([part])))), Coding(), np.inf)


@pytest.mark.parametrize("length", [3, 7, 24])
def test_pairs_lie_on_both_sides_and_close(length: int) -> None:
    model = labelled(head())
    pair = place_beside_border(model, errors(), length, 1.0, np.inf, np.random.default_rng(1))
    assert pair is not None
    assert pair.shape == (2, length, WIDTH)
    low, high = model.margin(pair)
    assert low < 0 < high
    assert high - low < 1e-3


def test_a_domain_without_room_has_no_border_to_check() -> None:
    model, rng = labelled(head()), np.random.default_rng(1)
    assert place_beside_border(model, errors(), 1, 1.0, np.inf, rng) is None


def test_the_head_itself_passes_and_another_does_not() -> None:
    part = head()
    refuse_other_sequences(reader(part), labelled(part), errors(), np.random.default_rng(2))
    other = Head(part.score + 100 * ERROR, None, part.value)
    with pytest.raises(WrongFamily, match="a sequence of"):
        refuse_other_sequences(reader(other), labelled(part), errors(), np.random.default_rng(2))


def test_entries_that_move_with_the_scale_are_a_key_bias() -> None:
    part, rng = head(), np.random.default_rng(3)
    probes, anchors = (equal_overlap(rng, part.value[:, None]) for _ in range(2))
    overlaps = [basis.coordinates(part.value[None])[0] for basis in (probes, anchors)]
    index = np.arange(WIDTH)
    table = probes.rows(index) @ part.score @ anchors.rows(index).T
    wrong = np.full(WIDTH**2, ERROR)
    for bias in (None, np.full(WIDTH, 0.01)):
        box = reader(Head(part.score, bias, part.value))
        asked = Thresholds(box, probes, anchors, overlaps[0], overlaps[1], spread=0.4)
        entries = asked.flips * table.ravel()
        if bias is None:
            refuse_other_pairs(asked, entries, wrong, rng)
            continue
        with pytest.raises(WrongFamily, match="key bias"):
            refuse_other_pairs(asked, entries, wrong, rng)
