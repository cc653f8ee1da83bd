"""One head probed while the others are isolated: log-odds in, keys out."""

import numpy as np
import pytest

from keyhole.learners.multi_head.separators import design_separators
from keyhole.learners.multi_head.soft_probe import (
    SATURATED,
    Isolation,
    SeparatorIsolation,
    SoftProbes,
    Unexplained,
    build_probe_basis,
    probe_heads,
)
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from multi_head_boxes import asker

WIDTH = 5


def isolate(model: Attention, anchor: np.ndarray, margin: float = 100.0) -> SeparatorIsolation:
    keys = np.stack([h.score @ anchor + h.key_bias for h in model.heads])
    separators = design_separators(keys) * margin / np.linalg.norm(keys, axis=1).min()
    values = np.stack([h.value for h in model.heads])
    base = float(model(np.concatenate([separators, anchor[None]])[None])[0])
    return SeparatorIsolation(
        anchor, np.full(len(keys), base), values, None, np.ones(1), values.sum(axis=0), separators
    )


def test_a_head_alone_is_weighed_against_the_anchor() -> None:
    model = attention(np.random.default_rng(0), WIDTH, heads=1)
    anchor, value = np.full(WIDTH, 0.3), model.heads[0].value
    setup = Isolation(anchor, np.array([anchor @ value]), value[None], None, np.ones(1), value)
    probes = np.random.default_rng(1).standard_normal((WIDTH, WIDTH)) + value
    got = probe_heads(asker(model, WIDTH), setup, np.zeros(WIDTH, int), probes, "test")
    key = np.linalg.solve(got.probes, got.log_odds)
    np.testing.assert_allclose(key, model.heads[0].score @ anchor, atol=1e-12)
    assert setup.alone
    assert setup.holds(key[None])
    moved = setup.move(2 * anchor)
    assert moved.base[0] == pytest.approx(2 * anchor @ value)


def test_separators_isolate_all_heads_but_one() -> None:
    model = attention(np.random.default_rng(2), WIDTH, heads=3, bias=True)
    anchor = np.full(WIDTH, 0.3)
    setup, truth = isolate(model, anchor), [h.score @ anchor + h.key_bias for h in model.heads]
    rng = np.random.default_rng(3)
    for head, key in enumerate(truth):
        probes = 0.5 * build_probe_basis(np.zeros((WIDTH, 0)), model.heads[head].value, rng)
        probes += 0.3 * model.heads[head].value / np.linalg.norm(model.heads[head].value)
        got = probe_heads(asker(model, WIDTH), setup, np.full(WIDTH, head), probes, "test")
        np.testing.assert_allclose(np.linalg.solve(got.probes, got.log_odds), key, atol=1e-9)
    assert setup.holds(np.stack(truth))
    assert not setup.holds(-np.stack(truth))
    assert setup.move(2 * anchor).base is setup.base  # the separators' answer stays


def test_a_probe_that_saturates_is_shortened() -> None:
    model = attention(np.random.default_rng(4), WIDTH, heads=1, scale=1e6)
    anchor, value = np.ones(WIDTH), model.heads[0].value
    setup = Isolation(anchor, np.array([anchor @ value]), value[None], None, np.ones(1), value)
    probe = (model.heads[0].score @ anchor)[None]
    got = probe_heads(asker(model, WIDTH), setup, np.array([0]), probe, "test")
    assert abs(got.log_odds[0]) <= SATURATED
    expected = got.probes[0] @ model.heads[0].score @ anchor
    assert got.log_odds[0] == pytest.approx(expected, rel=1e-6)


def test_what_no_weight_explains_comes_with_a_counterexample() -> None:
    value = np.ones(WIDTH)
    setup = Isolation(value, np.array([5.0]), value[None], None, np.ones(1), value)
    outside = asker(lambda tokens: tokens[:, 0].sum(axis=1) + 10.0, WIDTH)
    with pytest.raises(Unexplained) as caught:
        probe_heads(outside, setup, np.array([0]), value[None], "test")
    assert caught.value.counterexample.input.shape == (2, WIDTH)


def test_a_uniform_head_is_taken_out_of_the_answers() -> None:
    base = attention(np.random.default_rng(5), WIDTH, heads=1).heads[0]
    flat = Head(np.zeros((WIDTH, WIDTH)), None, np.arange(5.0))
    model, anchor = Attention([base, flat]), np.full(WIDTH, 0.2)
    setup = Isolation(
        anchor,
        np.array([anchor @ base.value]),
        base.value[None],
        flat.value,
        np.ones(1),
        base.value,
    )
    probes = 0.5 * np.eye(WIDTH) + 0.3 * base.value / np.linalg.norm(base.value)
    got = probe_heads(asker(model, WIDTH), setup, np.zeros(WIDTH, int), probes, "test")
    key = np.linalg.solve(got.probes, got.log_odds)
    np.testing.assert_allclose(key, base.score @ anchor, atol=1e-12)


def test_output_scale_counts_the_mean_that_a_uniform_head_sees() -> None:
    separators, values = np.diag([3.0, 4.0]), np.eye(2)
    plain = SeparatorIsolation(
        np.zeros(2), np.zeros(2), values, None, np.ones(1), np.ones(2), separators
    )
    beside = SeparatorIsolation(
        np.zeros(2), np.zeros(2), values, np.array([0.0, 2.0]), np.ones(1), np.ones(2), separators
    )
    sizes = np.array([1.0, 10.0])
    assert plain.output_scale(sizes) == pytest.approx(3 + 40)
    assert beside.output_scale(sizes) == pytest.approx(3 + 40 + 2 * 7 / 4)
    assert plain.longest == 4.0
    assert plain.measure_span(0) == pytest.approx(5.0)


def test_the_probe_basis_keeps_known_directions_and_sees_the_value() -> None:
    rng = np.random.default_rng(6)
    known, value = np.linalg.qr(rng.standard_normal((8, 3)))[0], rng.standard_normal(8)
    rows = build_probe_basis(known, value, rng)
    np.testing.assert_allclose(rows @ rows.T, np.eye(8), atol=1e-14)
    np.testing.assert_allclose(np.abs(rows[:3] @ known), np.eye(3), atol=1e-14)
    assert (rows @ value >= 0).all()


def test_probes_join_and_split() -> None:
    probes = SoftProbes(np.arange(10.0).reshape(5, 2), np.arange(5.0), np.arange(5.0))
    parts = probes.split([2, 0, 3])
    assert [len(part.probes) for part in parts] == [2, 0, 3]
    joined = parts[0].join(parts[2])
    np.testing.assert_array_equal(joined.probes, probes.probes)
