"""Stages of the vector algorithm on exact inputs: responses in, maps out; soft answers in, scores out."""

from dataclasses import replace

import numpy as np
import pytest

import keyhole
from keyhole.learners.base import Hypothesis, Inconclusive, Refuted
from keyhole.learners.multi_head.hard_attention import Overcomplete
from keyhole.learners.multi_head.joint_heads import (
    FEWEST,
    STEADY,
    SoftAnswer,
    SoftAnswers,
    SoftQuerier,
    ValueMaps,
    ValueResponses,
    VectorProblem,
    build_reader,
    count_singular_values,
    drop_spurious_biases,
    find_key_rank,
    learn_joint_heads,
    match_marks,
    measure_responses,
    measure_soft_answers,
    read_log_odds,
    report_layer,
    seem_shared,
    spans_range,
    split_responses,
    tell_heads_apart,
)
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from multi_head_boxes import asker

WIDTH, HEADS, RANK = 12, 3, 4


def layer(seed: int = 0, **changes: object) -> Attention:
    """Heads that share out the width, scores and key biases of the same rank."""
    rng, heads = np.random.default_rng(seed), []
    for _ in range(HEADS):
        left, right = rng.standard_normal((WIDTH, RANK)), rng.standard_normal((RANK, WIDTH))
        value = rng.standard_normal((WIDTH, RANK)) @ rng.standard_normal((RANK, WIDTH)) / 4
        bias = left @ rng.standard_normal(RANK) / WIDTH
        heads.append(Head((left / WIDTH, right), bias, value))
    return Attention(heads)


def maps_of(model: Attention) -> ValueMaps:
    parts = [np.linalg.svd(h.value) for h in model.heads]
    ins = tuple(u[:, :RANK] * s[:RANK] for u, s, _ in parts)
    outs = tuple(vt[:RANK] for *_, vt in parts)
    total = sum(h.value for h in model.heads)
    return ValueMaps(ins, outs, total, float(np.linalg.cond(np.concatenate(outs))))  # type: ignore[arg-type]


def test_responses_and_single_tokens_are_the_value_maps() -> None:
    model, frame = (
        layer(),
        np.linalg.qr(np.random.default_rng(1).standard_normal((WIDTH, WIDTH)))[0],
    )
    shifted = tuple(frame[-5:] @ h.value for h in model.heads)
    singles = frame[:-5] @ sum(h.value for h in model.heads)
    responses = ValueResponses(frame, singles, shifted, (), ((0, 1, 2),), (RANK,) * 3, 0.03)
    maps = responses.solve_maps()
    for found, head in zip(maps.products, model.heads, strict=True):
        np.testing.assert_allclose(found, head.value, atol=1e-11)
    np.testing.assert_allclose(maps.total, maps.products.sum(axis=0), atol=1e-11)
    grouped = replace(
        responses,
        members=((0, 2), (1,)),
        grouped=(frame[:-5] @ (model.heads[0].value + model.heads[2].value),),
    )
    assert grouped.solve_maps().condition <= maps.condition  # groups are easier to tell apart
    np.testing.assert_allclose(grouped.solve_maps().products, maps.products, atol=1e-11)
    noisy = responses.perturb(1e-6, np.random.default_rng(2))
    assert 0 < np.abs(noisy.solve_maps().products - maps.products).max() < 1e-2
    with pytest.raises(Overcomplete):
        replace(responses, ranks=(5, 5, 5)).solve_maps()


def test_an_answer_is_read_as_the_weights_of_all_heads() -> None:
    model = layer(3)
    maps, rng = maps_of(model), np.random.default_rng(4)
    anchor, tokens, length = rng.standard_normal(WIDTH), rng.standard_normal((RANK, WIDTH)), 0.1
    sequence = np.concatenate([anchor + length * tokens, anchor[None]])[None]
    soft = SoftAnswer(anchor, 0, length, model(sequence)[0])
    odds = read_log_odds(soft, maps, build_reader(maps, tokens))
    for found, head in zip(odds, model.heads, strict=True):
        key = head.score @ anchor + head.key_bias
        np.testing.assert_allclose(found, length * tokens @ key, atol=1e-7)
    broken = soft._replace(answer=soft.answer + 1e3)
    assert np.isnan(read_log_odds(broken, maps, build_reader(maps, tokens))).all()


def test_soft_answers_are_the_scores_and_key_biases() -> None:
    """Five wide columns give the ranges, one query each does for the other anchors."""
    model = layer(5)
    maps, rng = maps_of(model), np.random.default_rng(6)
    groups = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0].reshape(3, RANK, WIDTH)

    def ask(anchor: np.ndarray, group: int) -> SoftAnswer:
        sequence = np.concatenate([anchor + 0.1 * groups[group], anchor[None]])[None]
        return SoftAnswer(anchor, group, 0.1, model(sequence)[0])

    anchors = [np.zeros(WIDTH), *np.eye(WIDTH)]
    columns = [tuple(ask(a, g) for g in range(3)) for a in anchors[:6]]
    columns += [(ask(a, 0),) for a in anchors[6:]]
    answers = SoftAnswers(tuple(groups), tuple(columns), 6, (RANK,) * 3)
    scores, biases = answers.solve_keys(maps)
    for score, bias, head in zip(scores, biases, model.heads, strict=True):
        assert np.linalg.norm(score - head.score) < 1e-5 * np.linalg.norm(head.score)
        np.testing.assert_allclose(bias, head.key_bias, atol=1e-5)
    other = answers.perturb(lambda size: 1e-9 * size, rng)
    assert other.columns[0][0].anchor is answers.columns[0][0].anchor
    assert 0 < np.abs(other.columns[0][0].answer - answers.columns[0][0].answer).max() < 1e-7


def test_soft_queries_find_their_own_length_and_the_ranks() -> None:
    model = layer(7)
    ask, rng = asker(model, WIDTH), np.random.default_rng(8)
    ask(np.zeros((1, 1, WIDTH)), "values")
    frame = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0]
    maps = maps_of(model)
    answers = measure_soft_answers(ask, maps, frame, FEWEST, rng)
    assert answers.score_ranks == (RANK,) * HEADS
    assert len(answers.columns) == WIDTH + 1
    scores, _ = answers.solve_keys(maps)
    for score, head in zip(scores, model.heads, strict=True):
        assert np.linalg.norm(score - head.score) < 1e-8 * np.linalg.norm(head.score)
    hypothesis = report_layer(maps, answers, model, model, 4)
    assert hypothesis.floor == (3 * (4 * 25 - 16) + 3 * (4 * 24 - 16) + 12) / 12
    assert "4 heads were claimed" in hypothesis.notes[0]


def test_a_soft_query_that_saturates_is_asked_again_shorter() -> None:
    model = layer(9)
    ask, maps = asker(model, WIDTH), maps_of(model)
    querier = SoftQuerier(ask, maps, FEWEST, radius=np.inf)
    (group,) = querier.add_groups(
        np.linalg.qr(np.random.default_rng(10).standard_normal((WIDTH, RANK)))[0].T[None]
    )
    soft = querier.query(np.ones(WIDTH), group, 1e6)
    assert soft.length < 1e4
    first = querier.query_first(np.ones(WIDTH), group)
    assert 0.3 <= querier.measure_peak(first) <= 5.0
    assert len(querier.peaks) == 1
    short = SoftQuerier(ask, maps, FEWEST, 0.1, querier.groups, querier.readers, [1e-9])
    assert short.query(0.01 * np.ones(WIDTH), group).length == 0.05  # tokens stay in the domain


def test_hard_attention_measures_the_responses() -> None:
    model = layer(11)
    ask, rng = asker(model, WIDTH), np.random.default_rng(12)
    frame = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0]
    first = ask(frame[:1, None], "values")
    for policy in (FEWEST, STEADY):
        problem = VectorProblem(ask, frame, first, 1.0, HEADS, None, policy)
        found = measure_responses(problem, rng.standard_normal(WIDTH), rng).solve_maps()
        assert sorted(found.ranks) == [RANK] * HEADS
        gaps = np.array(
            [[np.linalg.norm(a - h.value) for h in model.heads] for a in found.products]
        )
        assert gaps.min(axis=1).max() < 1e-8


def test_two_heads_that_shared_a_token_are_told_by_one_of_them() -> None:
    model, rng = layer(20), np.random.default_rng(21)
    ask = asker(model, WIDTH)
    ask = ask.subtracting(ask(np.zeros((1, 1, WIDTH)), "values")[0])
    frame = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0]
    first = ask(frame[:1, None], "values")
    problem = VectorProblem(ask, frame, first, 1.0, None, None, FEWEST, believe_marks=True)
    selected, shifted = tell_heads_apart(problem, rng.standard_normal(WIDTH), rng)
    count = min(len(part) for part in shifted[:2])
    joint = shifted[0][-count:] + shifted[1][-count:]
    mark = selected.marks[0] + selected.marks[1]
    found = split_responses(problem, selected, [0, 1], joint, mark)
    assert np.allclose(found[0][-count:], shifted[0][-count:], rtol=0, atol=1e-10)
    assert np.allclose(found[1], shifted[1][-count:], rtol=0, atol=1e-10)
    assert split_responses(problem, selected, [0, 1], joint, 2.0 * mark) == {}


def test_a_mark_is_a_spare_response() -> None:
    ask, rng = asker(layer(), WIDTH), np.random.default_rng(19)
    frame = np.eye(WIDTH)
    plain = VectorProblem(ask, frame, frame[:1], 1.0, None, None, FEWEST)
    problem = replace(plain, believe_marks=True)
    rows = np.linalg.qr(rng.standard_normal((WIDTH, 3)))[0].T
    inside, outside = rng.standard_normal(3) @ rows, rng.standard_normal(WIDTH)
    assert spans_range(problem, rows, inside, 0.1)
    assert not spans_range(problem, rows, outside, 0.1)
    assert not spans_range(problem, rows[:2], inside, 0.1)
    assert not spans_range(plain, rows, inside, 0.1)  # one more must be asked
    assert spans_range(plain, np.vstack([rows, inside]), inside, 0.1)
    nearly = rows * np.array([1.0, 1.0, 1e-3])[:, None]  # their range would have few digits
    assert not spans_range(problem, nearly, inside, 0.1)


def test_ranks_of_spectra() -> None:
    assert count_singular_values(np.array([3.0, 1.0, 1e-9, 1e-10]), 1e-15) == 2
    assert count_singular_values(np.array([3.0, 1.0, 0.5]), 0.02) == 2  # the rest drowns in noise
    assert count_singular_values(np.array([1e-3, 1e-4]), 1.0) == 1
    ask, maps = asker(layer(), WIDTH), maps_of(layer())
    rng = np.random.default_rng(13)
    keys = rng.standard_normal((WIDTH, 3)) @ rng.standard_normal((3, 8))
    assert find_key_rank(ask, maps, keys, None) == 3
    assert find_key_rank(ask, maps, keys + 1e-3 * rng.standard_normal((WIDTH, 8)), 3) == 3


def test_shared_tokens_and_marks() -> None:
    assert seem_shared((4, 4, 8), None)
    assert not seem_shared((4, 4, 5), None)
    assert seem_shared((4, 4), 3)
    assert not seem_shared((8,), None)
    ask = asker(layer(), WIDTH)
    marks = np.random.default_rng(14).standard_normal((3, WIDTH))
    assert match_marks(ask, marks[[2, 0]], marks, 1.0) == {0: 2, 1: 0}
    assert match_marks(ask, marks + 1e-2, marks, 1.0) == {}


def test_key_biases_within_their_errors_are_dropped() -> None:
    model = layer(15)
    errors = Attention([Head(h.score * 0, np.full(WIDTH, 10.0), h.value * 0) for h in model.heads])
    plain, bars = drop_spurious_biases(model, errors)
    assert not any(head.key_bias.any() for head in plain.heads)
    assert all((bar.key_bias >= 10.0).all() for bar in bars.heads)
    sharp = Attention([Head(h.score * 0, np.full(WIDTH, 1e-9), h.value * 0) for h in model.heads])
    kept, _ = drop_spurious_biases(model, sharp)
    np.testing.assert_array_equal(kept.heads[0].key_bias, model.heads[0].key_bias)


def test_the_strategy_returns_and_does_not_throw() -> None:
    class Prior:
        heads, rank, bias, attempts = None, None, None, 2

    frame, rng = np.eye(6), np.random.default_rng(16)
    good = asker(attention(np.random.default_rng(17), 6, heads=2, outputs=12), 6)
    assert isinstance(
        learn_joint_heads(good, rng, Prior(), frame, good(frame[:1, None], "values")), Hypothesis
    )
    crowded = asker(attention(np.random.default_rng(18), 6, heads=3, outputs=2), 6)
    given_up = learn_joint_heads(crowded, rng, Prior(), frame, crowded(frame[:1, None], "values"))
    assert isinstance(given_up, Inconclusive)
    assert "do not keep the heads apart" in given_up.reason
    other = asker(lambda tokens: np.tanh(tokens.mean(axis=1)), 6)
    refuted = learn_joint_heads(other, rng, Prior(), frame, other(frame[:1, None], "values"))
    assert isinstance(refuted, Refuted | Inconclusive)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_a_plain_answer_with_few_decimals_is_no_pattern(seed: int) -> None:
    """Answers to huge tokens have all their digits; what all heads answer to a plain one has six.
    Taken for exact, it hid which tokens the heads select, and no value map was measured."""

    class Prior:
        heads, rank, bias, attempts = None, None, None, 1

    rng, frame = np.random.default_rng(seed), np.eye(6)
    heads = [
        Head(
            (rng.standard_normal((6, 2)) / np.sqrt(6), rng.standard_normal((2, 6))),
            None,
            rng.standard_normal((6, 3)) @ rng.standard_normal((3, 6)) / 4,
        )
        for _ in range(2)
    ]
    model = Attention(heads)
    box = asker(lambda tokens: np.round(model(tokens), 6), 6)
    found = learn_joint_heads(
        box, np.random.default_rng(seed), Prior(), frame, box(frame[:1, None], "values")
    )
    assert "no anchor led to a model" not in (getattr(found, "reason", ""))


def test_heads_with_one_value_are_recovered_one_at_a_time() -> None:
    """Every number of an answer is the same sum of both heads: huge tokens hide who chose what."""
    rng = np.random.default_rng(3)
    heads = [Head(rng.standard_normal((5, 5)), None, np.ones((5, 5))) for _ in range(2)]
    found = keyhole.recover(Attention(heads))
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert keyhole.distance(found.model, Attention(heads)) < 1e-8
