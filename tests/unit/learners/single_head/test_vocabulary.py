"""A head through a finite vocabulary: exact, at the floor, inside the vocabulary."""

import numpy as np
import pytest

import keyhole
from boxes import CountingBox, in_float32
from keyhole.learners.single_head.vocabulary import (
    Column,
    TokenPairs,
    choose_anchors,
    choose_pool,
    measure_token_values,
    sample_vocabulary,
)
from keyhole.models.attention import Attention
from keyhole.models.random import attention
from keyhole.oracles.base import Domain
from keyhole.oracles.wrappers.degrade import Noisy


def recovered(secret, words, **kwargs):
    box = CountingBox(secret, secret.width)
    recovery = keyhole.recover(
        keyhole.open_oracle(box, vocabulary=words), keyhole.SingleHead(), **kwargs
    )
    assert box.seen == recovery.ledger.paid
    return recovery


@pytest.mark.parametrize("seed", range(3))
def test_thousand_random_tokens_of_width_48(seed):
    rng = np.random.default_rng(seed)
    secret, words = attention(rng, 48), rng.standard_normal((1000, 48))
    recovery = recovered(secret, words)
    asked = recovery.ledger.learning
    assert keyhole.distance(recovery.model, secret) <= 1e-9
    assert asked <= 1.05 * (48**2 + 48)


def test_key_bias_and_offset_are_found():
    rng = np.random.default_rng(5)
    secret, words = attention(rng, 12, bias=True), 0.7 * rng.standard_normal((200, 12))
    recovery = recovered(secret, words)
    assert keyhole.distance(recovery.model, secret) <= 1e-11
    assert recovery.ledger.floor == 12**2 + 12 + 12 + 1
    asked = recovery.ledger.learning - recovery.ledger.by_purpose["precision"]
    assert asked <= 1.05 * recovery.ledger.floor + 2


def test_vector_answers():
    rng = np.random.default_rng(6)
    secret, words = attention(rng, 8, outputs=3, bias=True), rng.standard_normal((60, 8))
    recovery = recovered(secret, words)
    assert recovery.model.heads[0].value.shape == (8, 3)
    assert keyhole.distance(recovery.model, secret) <= 1e-11


def test_the_smallest_vocabulary_that_suffices():
    rng = np.random.default_rng(7)
    secret, words = attention(rng, 6, bias=True), 0.5 * rng.standard_normal((7, 6))
    assert keyhole.distance(recovered(secret, words).model, secret) <= 1e-9


def test_tokens_in_a_flat_do_not_identify_the_head():
    rng = np.random.default_rng(8)
    with pytest.raises(keyhole.NotIdentifiable, match="dimension 5 of 6"):
        recovered(attention(rng, 6), np.eye(6))  # one-hot tokens: differences span d − 1
    flat = rng.standard_normal((40, 3)) @ rng.standard_normal((3, 6))
    with pytest.raises(keyhole.NotIdentifiable, match="dimension 3 of 6"):
        recovered(attention(rng, 6), flat)


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_scale_of_the_tokens_does_not_matter_much(scale):
    rng = np.random.default_rng(9)
    secret, words = attention(rng, 16), scale * rng.standard_normal((300, 16))
    recovery = recovered(secret, words)
    assert keyhole.distance(recovery.model, secret) <= 1e-7


def test_scores_too_large_for_any_pair_are_ill_conditioned():
    rng = np.random.default_rng(10)
    secret, words = attention(rng, 8, scale=1e4), rng.standard_normal((50, 8))
    recovery = recovered(secret, words, throw=False)
    assert recovery.outcome is keyhole.Outcome.ILL_CONDITIONED


def test_another_family_is_rejected():
    rng = np.random.default_rng(11)
    words = rng.standard_normal((100, 6))
    box = keyhole.open_oracle(lambda x: np.tanh(x.sum(axis=(1, 2))), vocabulary=words)
    recovery = keyhole.recover(box, keyhole.SingleHead(), throw=False)
    assert recovery.outcome is keyhole.Outcome.REJECTED
    assert recovery.verdict.counterexample is not None


def test_two_heads_are_rejected():
    rng = np.random.default_rng(12)
    box = keyhole.open_oracle(
        attention(rng, 6, heads=2), vocabulary=0.5 * rng.standard_normal((100, 6))
    )
    assert (
        keyhole.recover(box, keyhole.SingleHead(), throw=False).outcome is keyhole.Outcome.REJECTED
    )


@pytest.mark.parametrize("kind", ["float64", "float32", "noise"])
def test_standard_errors_are_honest(kind):
    inside, blocks = [], 12
    for seed in range(blocks):
        rng = np.random.default_rng([13, seed])
        secret, words = attention(rng, 10, bias=True), 0.6 * rng.standard_normal((120, 10))
        function = in_float32(secret) if kind == "float32" else secret
        stated = keyhole.NoiseModel(additive=1e-5) if kind == "noise" else None
        box = keyhole.open_oracle(function, width=10, vocabulary=words, precision=stated)
        if kind == "noise":
            box = Noisy(box, additive=1e-5, seed=seed)
        recovery = keyhole.recover(box, keyhole.SingleHead(), throw=False)
        found, true = recovery.model.heads[0].score, secret.heads[0].score
        inside.append(np.mean(np.abs(found - true) < 2 * recovery.errors.heads[0].score))
    # one badly conditioned direction may carry all the error of one box
    assert np.mean(inside) >= 0.9


@pytest.mark.parametrize(
    "limits",
    [{"low": 0.1, "high": 1.0}, {"low": 1.0}, {"high": -1.0}, {"low": 3.0, "high": 5.0}],
)
def test_a_box_without_zero_through_sampled_tokens(limits):
    secret = attention(np.random.default_rng(14), 8, bias=True)
    recovery = keyhole.recover(keyhole.open_oracle(secret, **limits), keyhole.SingleHead())
    assert keyhole.distance(recovery.model, secret) <= 1e-8


@pytest.mark.parametrize("seed", range(5))
def test_sampled_tokens_stay_in_the_domain(seed):
    for limits in ({"low": 0.05, "high": 0.5, "max_norm": 1.2}, {"max_norm": 2.0}, {"low": 0.0}):
        domain = Domain(**limits)
        tokens = sample_vocabulary(domain, 12, np.random.default_rng(seed), 300)
        domain.check(tokens[:, None, :])
        assert np.linalg.matrix_rank(tokens - tokens.mean(axis=0)) == 12


def test_same_seed_same_queries():
    rng = np.random.default_rng(15)
    secret, words = attention(rng, 8), rng.standard_normal((80, 8))
    asked = [[], []]
    for log in asked:

        def box(tokens, log=log):
            log.append(tokens.tobytes())
            return secret(tokens)

        keyhole.recover(keyhole.open_oracle(box, vocabulary=words), keyhole.SingleHead(), seed=3)
    assert asked[0] == asked[1]


def test_foreign_tokens_are_refused_and_minus_zero_is_zero():
    domain = Domain(vocabulary=np.array([[0.0, 1.0], [2.0, 3.0]]))
    domain.check(np.array([[[-0.0, 1.0], [2.0, 3.0]]]))
    with pytest.raises(keyhole.DomainError):
        domain.check(np.array([[[0.0, 1.0], [2.0, 3.0 + 1e-15]]]))


# -- stages ------------------------------------------------------------------------------------


def tokens_and_values(bias=True):
    rng = np.random.default_rng(5)
    model = attention(rng, 5, bias=bias)
    tokens = choose_pool(rng.standard_normal((40, 5)), rng)
    anchors = choose_anchors(tokens, 1.0 / np.sqrt(5))
    oracle = keyhole.open_oracle(model)
    return model, tokens, anchors, oracle, measure_token_values(oracle, tokens, anchors)


def test_anchors_are_independent_and_the_last_affinely_so():
    _, tokens, anchors, _, _ = tokens_and_values()
    assert len(np.unique(anchors)) == 6
    assert np.linalg.matrix_rank(tokens[anchors[:5]]) == 5
    assert np.linalg.matrix_rank(np.hstack([tokens[anchors], np.ones((6, 1))])) == 6


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_single_tokens_tell_value_offset_and_all_other_answers(offset):
    model, tokens, anchors, _, _ = tokens_and_values()
    moved = Attention(model.heads, offset)
    known = measure_token_values(keyhole.open_oracle(moved), tokens, anchors)
    np.testing.assert_allclose(known.value[:, 0], model.heads[0].value, atol=1e-13)
    np.testing.assert_allclose(known.offset, offset, atol=1e-13)
    exact = moved(tokens[:, None, :])
    assert (np.abs(known.answers[:, 0] - exact) <= 8 * known.errors[:, 0]).all()


def test_a_column_is_solved_from_its_measurements_and_forecast_without_them():
    model, tokens, anchors, oracle, known = tokens_and_values()
    pairs, (head,) = TokenPairs(oracle, tokens, known), model.heads
    number = int(anchors[0])
    truth = head.score @ tokens[number] + head.key_bias
    empty = Column.forecast(pairs, number, np.zeros(5), 1.0)
    assert empty.missing == 5
    np.testing.assert_array_equal(empty.estimate, np.zeros(5))
    probes = empty.first_probes()
    found = pairs.ask(probes, np.full(5, number), "score")
    column = empty.add(probes, found)
    assert empty.missing == 5  # a column is a value: the first one has not changed
    assert column.missing == int(found.saturated.sum()) == 0
    np.testing.assert_allclose(column.estimate, truth, atol=1e-11)
    more, gain = column.best_probes(1)
    assert gain >= 0
    assert not np.isin(more, column.spent).any()


def test_every_learner_of_one_head_takes_a_vocabulary():
    model = attention(np.random.default_rng(6), 4)
    words = np.random.default_rng(7).standard_normal((30, 4))
    for learner in (keyhole.LowRank(), keyhole.SingleHead(rank="unknown")):
        recovery = keyhole.recover(keyhole.open_oracle(model, vocabulary=words), learner)
        assert recovery.outcome is keyhole.Outcome.RECOVERED
        assert keyhole.distance(recovery.model, model) < 1e-10
