"""Threshold queries: the label says on which side of any number an entry of the score lies."""

import numpy as np
import pytest

import keyhole
from keyhole.learners.label_only.score_thresholds import Thresholds
from keyhole.learners.label_only.value_direction import LabelReader
from keyhole.linalg.bases import equal_overlap
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention
from keyhole.models.random import attention
from keyhole.models.sign_attention import Coding
from keyhole.oracles.wrappers.degrade import Labels

WIDTH = 7


def asked(model: Attention, radius: float) -> tuple[Thresholds, np.ndarray]:
    """The queries, and the entries they ask for."""
    rng, value = np.random.default_rng(1), model.heads[0].value
    value = value / np.linalg.norm(value)
    probes, anchors = (equal_overlap(rng, value[:, None]) for _ in range(2))
    overlaps = [b.coordinates(value[None])[0] for b in (probes, anchors)]
    reader = LabelReader(Asker(Labels(keyhole.open_oracle(model))), Coding(), radius)
    queries = Thresholds(reader, probes, anchors, overlaps[0], overlaps[1], spread=0.4)
    index = np.arange(WIDTH)
    table = probes.rows(index) @ model.heads[0].score @ anchors.rows(index).T
    return queries, queries.flips * table.ravel()


@pytest.mark.parametrize("radius", [np.inf, 3.0, 0.1])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
@pytest.mark.parametrize(("shrink", "mirror"), [(1.0, False), (0.5, True)])
def test_the_label_is_the_side(radius: float, scale: float, shrink: float, mirror: bool) -> None:
    queries, entries = asked(attention(np.random.default_rng(0), WIDTH, scale=scale), radius)
    index = np.arange(WIDTH * WIDTH)
    for gap in (1e-9, 1e-3, 1.0, 100.0):
        for side in (1.0, -1.0):
            at = entries - side * gap * scale
            batch = queries.queries(index, at, shrink=shrink, mirror=mirror)
            expected = np.full(len(index), -side if mirror else side)
            np.testing.assert_array_equal(queries.reader.ask(batch), expected)
            assert np.linalg.norm(batch.tokens(), axis=2).max() <= radius * (1 + 1e-12)


def test_an_error_of_the_value_is_amplified_as_foretold() -> None:
    queries, entries = asked(attention(np.random.default_rng(0), WIDTH), np.inf)
    index = np.arange(WIDTH * WIDTH)
    wrong = 1e-6  # relative error of every probe's overlap
    tilted = Thresholds(
        queries.reader,
        queries.probes,
        queries.anchors,
        queries.probe_overlap * (1.0 + wrong),
        queries.anchor_overlap,
        queries.spread,
    )
    moved = wrong * tilted.amplification(index, entries)
    for factor, side in ((0.9, -1.0), (1.1, 1.0)):
        # overlaps taken too large make probes too short: entries seem smaller, by what was foretold
        np.testing.assert_array_equal(tilted.above(index, entries - factor * moved), side)


def test_queries_are_described() -> None:
    queries, entries = asked(attention(np.random.default_rng(0), WIDTH), np.inf)
    batch = queries.queries(np.arange(10), entries[:10])
    again = queries.queries(np.arange(10), entries[:10])
    other = queries.queries(np.arange(10), entries[:10] + 1e-12)
    assert batch.digest() == again.digest() != other.digest()
    np.testing.assert_array_equal(batch[3:5].tokens(), batch.tokens()[3:5])
