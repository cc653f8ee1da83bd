"""Stages of the scalar algorithm on exact inputs: log-odds in, keys, values and parameters out."""

from dataclasses import replace

import numpy as np
import pytest

from keyhole.errors import IllConditioned, WrongFamily
from keyhole.learners.base import Hypothesis, Inconclusive, Refuted
from keyhole.learners.multi_head.isolated_heads import (
    Draft,
    KeyColumn,
    KeyTable,
    Progress,
    ScalarProblem,
    assemble,
    choose_distance,
    choose_lengths,
    compute_leakage,
    compute_parameters,
    conclude_failure,
    correct_leaks,
    draft_uniform,
    draw_conclusion,
    factor_score,
    find_bias,
    find_ranks,
    learn_isolated_heads,
    lies_in_range,
    measure_first_keys,
    measure_keys_at,
    measure_values_again,
    redesign_separators,
    report,
    rotate_known,
    separate_heads,
    solve_key,
    span_keys,
)
from keyhole.learners.multi_head.separators import design_separators
from keyhole.learners.multi_head.soft_probe import SeparatorIsolation, SoftProbes
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from multi_head_boxes import asker

WIDTH = 5


def pose(model: Attention, reach: float = 1e-2, **changes: object) -> ScalarProblem:
    """The problem of a scalar layer, with the exact sum of its values."""
    total = sum(h.value for h in model.heads)[:, None]  # type: ignore[index]
    anchor = reach * np.linalg.qr(np.random.default_rng(9).standard_normal((WIDTH, WIDTH)))[0][0]
    ask = asker(model, WIDTH)
    ask(np.zeros((1, 1, WIDTH)), "values")
    problem = ScalarProblem(
        ask.subtracting(np.array([float(model.offset)])), total, np.eye(WIDTH), total,
        None, None, bool(model.heads[0].key_bias.any()), reach, anchor, np.ones(1),
    )  # fmt: skip
    return replace(problem, **changes)  # type: ignore[arg-type]


def keys_at(model: Attention, anchor: np.ndarray) -> np.ndarray:
    return np.stack([h.score @ anchor + h.key_bias for h in model.heads])


def know(model: Attention, problem: ScalarProblem, margin: float = 100.0) -> Progress:
    """What is known once the first keys are: all of it exact, separators with this margin."""
    values = problem.build_values(
        np.stack([h.value[:, None] for h in model.heads]), np.zeros((WIDTH * len(model.heads), 0))
    )
    keys = keys_at(model, problem.anchor)
    separators = design_separators(keys) * margin / np.linalg.norm(keys, axis=1).min()
    isolation = problem.isolate(values, separators)
    rng = np.random.default_rng(3)
    tables = []
    for head, key in enumerate(keys):
        value = model.heads[head].value
        probes = rng.standard_normal((WIDTH, WIDTH)) / np.linalg.norm(key) + value
        probes /= np.maximum(1.0, np.abs(probes @ key))[:, None]
        tokens = isolation.build_sequences(np.full(WIDTH, head), probes)
        answers = problem.ask(tokens, "test")
        changes = isolation.measure_changes(answers, tokens, np.full(WIDTH, head))
        ratio = changes / (probes @ value)
        seen = np.linalg.solve(probes, np.log(ratio / (1 - ratio)))
        column = KeyColumn(problem.anchor, probes, changes, np.full(WIDTH, 1e-15), seen)
        tables.append(KeyTable((column,), None, True))
    return Progress(problem, values, isolation, tuple(tables))


# --- algebra --------------------------------------------------------------------------------------


def test_d_probes_give_the_key() -> None:
    rng = np.random.default_rng(0)
    key, probes = rng.standard_normal(WIDTH), rng.standard_normal((WIDTH, WIDTH))
    np.testing.assert_allclose(solve_key(probes, probes @ key, [], True), key, atol=1e-12)


@pytest.mark.parametrize("alone", [True, False])
def test_fewer_probes_suffice_inside_a_known_range(alone: bool) -> None:
    rng = np.random.default_rng(1)
    score, start = rng.standard_normal((8, 2)) @ rng.standard_normal((2, 8)), rng.standard_normal(8)
    anchors = [start, *(start + 0.1 * rng.standard_normal((2, 8)))]
    keys = [score @ anchor for anchor in anchors[: 2 if alone else 3]]
    key, probes = score @ rng.standard_normal(8), rng.standard_normal((3, 8))
    assert span_keys(keys, alone).shape == (8, len(keys))
    np.testing.assert_allclose(solve_key(probes, probes @ key, keys, alone), key, atol=1e-6)


def test_keys_at_all_anchors_are_the_parameters() -> None:
    model = attention(np.random.default_rng(2), WIDTH, heads=2, bias=True)
    problem = pose(model, 1.0)
    progress, tables = know(model, problem), []
    rng = np.random.default_rng(4)
    for table, head in zip(progress.tables, model.heads, strict=True):
        for step in 0.1 * np.eye(WIDTH):
            anchor = problem.anchor + step
            probes = rng.standard_normal((WIDTH, WIDTH))
            key = head.score @ anchor + head.key_bias
            table = table.add(
                KeyColumn(anchor, probes, np.zeros(WIDTH), np.full(WIDTH, 1e-16), key)
            )
        tables.append(table.correct_key(0, head.score @ problem.anchor + head.key_bias))
    progress = replace(progress, tables=tuple(tables))
    scores, biases = compute_parameters(progress, progress.values.choosing, None)
    for found, bias, head in zip(scores, biases, model.heads, strict=True):
        np.testing.assert_allclose(found, head.score, atol=1e-11)
        np.testing.assert_allclose(bias, head.key_bias, atol=1e-11)
    draft = draw_conclusion(progress, rng)
    assert draft.ranks == draft.key_ranks == (WIDTH, WIDTH)
    assert 0 < draft.score_errors.max() < 1e-8


def test_a_key_bias_outside_the_range_is_not_of_the_score() -> None:
    rng = np.random.default_rng(5)
    score = rng.standard_normal((6, 3)) @ rng.standard_normal((3, 6))
    error, small = np.full((6, 6), 1e-12), np.full(6, 1e-12)
    assert find_ranks(score, rng.standard_normal(6), error, small, 4) == (3, 4)
    assert find_ranks(score, score @ np.ones(6), error, small, 4) == (3, 3)
    # where errors hid the range for a while, more keys were measured than it has dimensions
    assert find_ranks(score, rng.standard_normal(6), error, small, 6) == (3, 4)
    # errors as large as the smaller singular values say nothing about the rank
    assert find_ranks(score, np.zeros(6), 0.02 * np.ones((6, 6)), small, 5) == (5, 5)
    left, right = factor_score(score, 3)
    np.testing.assert_allclose(left @ right, score, atol=1e-13)
    assert factor_score(score, 6) is score


def test_what_leaks_through_tight_separators_is_removed() -> None:
    model = attention(np.random.default_rng(6), WIDTH, heads=2)
    problem = pose(model)
    tight, truth = know(model, problem, margin=16.0), keys_at(model, problem.anchor)
    off = np.abs(tight.first_keys - truth).max() / np.abs(truth).max()
    corrected = correct_leaks(tight, 0)
    left = np.abs(corrected.first_keys - truth).max() / np.abs(truth).max()
    assert 1e-9 < off < 1e-2
    assert left < 1e-3 * off
    wide = know(model, problem, margin=200.0)
    assert correct_leaks(wide, 0).tables[0].first is wide.tables[0].first  # nothing leaks


def test_nothing_leaks_where_every_head_keeps_to_its_separator() -> None:
    keys, values = np.diag([50.0, 50.0]), np.ones((2, 2))
    separators = np.eye(2)
    tokens = np.concatenate([separators, np.zeros((1, 2))])[None]
    assert abs(compute_leakage(tokens, keys, values, separators)[0]) < 1e-15
    soft = compute_leakage(tokens, 0.0 * keys, values, separators)[0]
    assert soft == pytest.approx(2 * (2 / 3 - 1))  # both attend to all three tokens alike


# --- stages that ask ------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [2, 4])
def test_heads_are_separated_and_their_first_keys_measured(heads: int) -> None:
    model = attention(np.random.default_rng(heads), WIDTH, heads=heads)
    problem, rng = pose(model, 1e-4), np.random.default_rng(7)
    found = separate_heads(problem, rng)
    assert found is not None
    progress = measure_first_keys(found, rng)
    truth = keys_at(model, problem.anchor)
    gaps = np.linalg.norm(progress.first_keys[:, None] - truth[None], axis=2)
    order = gaps.argmin(axis=1)
    assert sorted(order) == list(range(heads))
    assert gaps.min(axis=1).max() < 1e-6 * np.linalg.norm(truth)
    for place, head in enumerate(order):
        np.testing.assert_allclose(
            progress.values.choosing[place], model.heads[head].value, atol=1e-7
        )
    redesigned = redesign_separators(progress)
    assert isinstance(redesigned.isolation, SeparatorIsolation)
    assert redesigned.isolation.holds(truth[order])
    assert redesigned.isolation.longest < progress.isolation.longest


def test_one_more_anchor_gives_one_more_key() -> None:
    model = attention(np.random.default_rng(8), WIDTH, heads=2)
    problem, rng = pose(model), np.random.default_rng(9)
    progress = redesign_separators(know(model, problem))
    anchor = problem.anchor * 1.1
    more = measure_keys_at(progress, anchor, rng)
    assert isinstance(more, Progress)
    assert [len(table.columns) for table in more.tables] == [2, 2]
    assert [len(table.columns) for table in progress.tables] == [1, 1]
    found = np.stack([table.columns[1].key for table in more.tables])
    np.testing.assert_allclose(found, keys_at(model, anchor), rtol=1e-7)
    assert choose_distance(progress) == 0.3  # cautious as long as no key has moved
    assert 0.02 <= choose_distance(more) <= 2.0


def test_separators_give_way_far_from_their_anchor() -> None:
    model = attention(np.random.default_rng(10), WIDTH, heads=3)
    problem, rng = pose(model), np.random.default_rng(11)
    progress = redesign_separators(know(model, problem))
    other = problem.anchor + np.linalg.norm(problem.anchor) * 20 * rng.standard_normal(WIDTH)
    assert not isinstance(measure_keys_at(progress, other, rng), Progress)


def test_a_key_inside_the_range_ends_the_search_for_the_rank() -> None:
    model = attention(np.random.default_rng(12), WIDTH, heads=2, rank=1)
    problem, rng = pose(model), np.random.default_rng(13)
    progress = redesign_separators(know(model, problem))
    probes = rng.standard_normal((3, WIDTH)) / np.linalg.norm(progress.tables[0].first)
    for key, inside in (
        (1.7 * progress.tables[0].first, True),
        (rng.standard_normal(WIDTH), False),
    ):
        got = SoftProbes(probes, np.zeros(3), probes @ key)
        assert lies_in_range(progress, 0, got) is inside
    lengths = choose_lengths(progress, 0, np.eye(WIDTH), 2 * problem.anchor)
    assert (lengths > 0).all()


def test_values_are_measured_again_with_short_separators() -> None:
    model = attention(np.random.default_rng(14), WIDTH, heads=3)
    problem, rng = pose(model), np.random.default_rng(15)
    progress = redesign_separators(know(model, problem))
    rough = replace(progress.values, blocks=progress.values.blocks * 1.01)
    again = measure_values_again(replace(progress, values=rough), rng)
    np.testing.assert_allclose(again.values.blocks, progress.values.blocks, atol=1e-11)
    np.testing.assert_array_equal(again.isolation.values, again.values.choosing)


def test_rotation_keeps_the_first_key_and_the_range() -> None:
    rng = np.random.default_rng(16)
    known = np.linalg.qr(rng.standard_normal((6, 4)))[0]
    turned = rotate_known(known, False, rng)
    np.testing.assert_array_equal(turned[:, 0], known[:, 0])
    np.testing.assert_allclose(turned @ turned.T, known @ known.T, atol=1e-14)


@pytest.mark.parametrize("bias", [True, False])
def test_the_bias_is_found_with_one_pair(bias: bool) -> None:
    model = attention(np.random.default_rng(17), WIDTH, heads=2, bias=bias)
    ask = asker(model, WIDTH)
    answers = ask(np.eye(WIDTH)[:, None], "values")
    offset, found = find_bias(ask, np.eye(WIDTH), answers, None, np.random.default_rng(0))
    assert found is bias
    np.testing.assert_allclose(offset, [float(model.offset)], atol=1e-14)
    assert find_bias(ask, np.eye(WIDTH), answers, False, np.random.default_rng(0))[1] is False


# --- the hypothesis -------------------------------------------------------------------------------


def draft(model: Attention, ranks: tuple[int, ...], key_ranks: tuple[int, ...]) -> Draft:
    stacked = [
        np.stack([np.asarray(getattr(h, name)) for h in model.heads])
        for name in ("score", "key_bias", "value")
    ]
    scores, biases, values = stacked
    errors = [1e-12 * np.ones_like(part) for part in (scores, biases, values[:, :, None])]
    return Draft(scores, biases, values[:, :, None], *errors, False, ranks, key_ranks, 2.0)  # type: ignore[misc]


def test_the_floor_counts_unknowns() -> None:
    model = attention(np.random.default_rng(18), 8, heads=2, rank=3, bias=True)
    ask = asker(model, 8)
    ask(np.zeros((1, 1, 8)), "values")
    built, errors = assemble(draft(model, (3, 3), (4, 4)), np.asarray([float(model.offset)]), ask)
    outside = report(ask, built, errors, draft(model, (3, 3), (4, 4)), True, None)
    inside = report(ask, built, errors, draft(model, (3, 3), (3, 3)), True, 5)
    plain = report(ask, built, errors, draft(model, (3, 3), (3, 3)), False, None)
    each = 2 * 3 * 8 - 9 + 8
    assert outside.floor == 2 * (each + 8) + 1 == 111
    assert inside.floor == 2 * (each + 3) + 1
    assert plain.floor == 2 * each
    assert "5 heads were claimed" in inside.notes[0]


def test_a_layer_without_choices_is_one_uniform_head() -> None:
    problem = pose(attention(np.random.default_rng(19), WIDTH, heads=1))
    model, errors = assemble(draft_uniform(problem), np.zeros(1), problem.ask)
    assert not model.heads[0].score.any()
    np.testing.assert_array_equal(model.heads[0].value, problem.total[:, 0])
    assert len(errors.heads) == 1


def test_how_failures_are_reported() -> None:
    wrong = conclude_failure(WrongFamily("no"))
    assert isinstance(wrong, Refuted)
    poor = conclude_failure(IllConditioned("alike"))
    assert isinstance(poor, Inconclusive)
    assert "no anchor led to a model: alike" in poor.reason


def test_the_strategy_returns_and_does_not_throw() -> None:
    class Prior:
        heads, rank, bias, attempts = 2, None, None, 2

    model = attention(np.random.default_rng(20), WIDTH, heads=2)
    frame, rng = np.eye(WIDTH), np.random.default_rng(21)
    ask = asker(model, WIDTH)
    found = learn_isolated_heads(ask, rng, Prior(), frame, ask(frame[:1, None], "values"))
    assert isinstance(found, Hypothesis)
    assert ask.offset == 0.0  # what was handed in is unchanged
    three = asker(attention(np.random.default_rng(22), WIDTH, heads=3), WIDTH)
    refused = learn_isolated_heads(three, rng, Prior(), frame, three(frame[:1, None], "values"))
    assert isinstance(refused, Refuted)
    assert refused.counterexample is not None


def test_a_head_of_score_zero_beside_a_choosing_one() -> None:
    base = attention(np.random.default_rng(25), WIDTH, heads=1).heads[0]
    model = Attention([base, Head(np.zeros((WIDTH, WIDTH)), None, np.ones(WIDTH))])
    found = separate_heads(pose(model, 1e-4, heads=2), np.random.default_rng(24))
    assert found is not None
    assert found.values.has_uniform
    np.testing.assert_allclose(found.values.uniform, np.ones(WIDTH), atol=1e-6)
    assert not found.isolation.alone
