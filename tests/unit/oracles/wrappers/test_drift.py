import numpy as np
import pytest

import keyhole
from keyhole.models.random import attention
from keyhole.oracles.wrappers.batch import Batcher
from keyhole.oracles.wrappers.count import QueryCounter
from keyhole.oracles.wrappers.degrade import Noisy
from keyhole.oracles.wrappers.drift import PURPOSE, RECALLED, REPEATS, DriftWatch

WIDTH = 8


class Changing:
    """Another model after so many queries."""

    width = WIDTH

    def __init__(self, after):
        self.models = [attention(np.random.default_rng(k), WIDTH) for k in (0, 1)]
        self.left = after

    def __call__(self, tokens):
        self.left -= len(tokens)
        return self.models[self.left < 0](tokens)


def watched(box, every=20):
    counting = QueryCounter(keyhole.open_oracle(box))
    return counting, Batcher(DriftWatch(counting, every), chunk_queries=16)


def test_a_box_that_changes_half_way_is_caught():
    _, box = watched(Changing(40))
    with pytest.raises(keyhole.Inconsistent, match="the box changed") as caught:
        keyhole.SingleHead().learn(box, np.random.default_rng(0))
    assert caught.value.counterexample.input.shape[1] == WIDTH


def test_a_box_that_stays_is_left_in_peace_and_the_recalls_are_counted():
    secret = attention(np.random.default_rng(0), WIDTH)
    counting, box = watched(secret)
    found = keyhole.SingleHead().learn(box, np.random.default_rng(0))
    assert keyhole.distance(found.model, secret) < 1e-12
    assert counting.by_purpose[PURPOSE] % RECALLED == 0
    assert counting.by_purpose[PURPOSE] >= RECALLED


def test_stated_noise_is_no_drift():
    secret = keyhole.open_oracle(
        attention(np.random.default_rng(0), WIDTH), precision=keyhole.NoiseModel(additive=1e-3)
    )
    _, box = watched(Noisy(secret, additive=1e-3))
    tokens = np.random.default_rng(0).standard_normal((200, 3, WIDTH))
    box.ask(keyhole.QueryBatch.of(tokens, "test"))


def test_noise_that_nobody_stated_is_measured_and_is_no_drift():
    secret = keyhole.open_oracle(attention(np.random.default_rng(0), WIDTH))
    counting, box = watched(Noisy(secret, additive=1e-3))
    tokens = np.random.default_rng(0).standard_normal((200, 3, WIDTH))
    box.ask(keyhole.QueryBatch.of(tokens, "test"))
    looks = 200 // 32  # every 20 queries, in chunks of 16
    assert counting.by_purpose[PURPOSE] == looks + REPEATS  # one kind of query, measured once


def test_a_noisy_box_that_changes_is_caught():
    _, box = watched(Noisy(keyhole.open_oracle(Changing(100)), additive=1e-3))
    tokens = np.random.default_rng(0).standard_normal((200, 3, WIDTH))
    with pytest.raises(keyhole.Inconsistent, match="the box changed"):
        box.ask(keyhole.QueryBatch.of(tokens, "test"))


def test_a_coarse_box_that_rounds_by_batches_is_left_in_peace():
    """Another last bit in another batch, in a format that only the answers show."""
    secret = attention(np.random.default_rng(0), WIDTH)

    def box(tokens):
        shaken = secret(tokens) * (1.0 + 2.0**-11 * (len(tokens) % 3))
        return np.round(shaken * 2**9) / 2**9

    counting = QueryCounter(keyhole.open_oracle(box, width=WIDTH))
    watch = DriftWatch(counting, 20, roundoff=lambda answers: 2.0**-11)
    tokens = np.random.default_rng(0).standard_normal((100, 3, WIDTH))
    Batcher(watch, chunk_queries=16).ask(keyhole.QueryBatch.of(tokens, "test"))
    assert counting.by_purpose[PURPOSE] == 100 // 32  # nothing had to be measured


def test_a_box_that_rounds_a_lone_query_differently_is_left_in_peace():
    """Terms much larger than their sum: the last bit of one of them is many of an answer's."""
    secret = attention(np.random.default_rng(0), WIDTH)

    def box(tokens):
        return secret(tokens) + (1e-13 if len(tokens) == 1 else 0.0)

    counting = QueryCounter(keyhole.open_oracle(box, width=WIDTH))
    tokens = np.random.default_rng(0).standard_normal((100, 3, WIDTH))
    Batcher(DriftWatch(counting, 20), chunk_queries=16).ask(keyhole.QueryBatch.of(tokens, "test"))
    assert counting.by_purpose[PURPOSE] == 100 // 32 + REPEATS


def test_one_label_at_a_tie_is_no_drift_and_two_are():
    class Labels:
        width, turned = WIDTH, 0

        def __call__(self, tokens):
            labels = np.sign(tokens[:, 0, 0])
            if len(tokens) == 1 and self.turned:
                self.turned -= 1
                labels = -labels
            return labels

    for turned in (1, 2):
        box = Labels()
        watch = DriftWatch(keyhole.open_oracle(box), 1000)
        for purpose in ("one", "two", "three"):
            tokens = np.random.default_rng(0).standard_normal((5, 2, WIDTH))
            watch.ask(keyhole.QueryBatch.of(tokens, purpose))
        box.turned = turned
        if turned == 1:
            watch.look()
        else:
            with pytest.raises(keyhole.Inconsistent):
                watch.look()


def test_the_budget_a_learner_sees_leaves_room_for_the_looks():
    secret = keyhole.open_oracle(attention(np.random.default_rng(0), WIDTH))
    for budget in (500, 600, 9000):
        counting = QueryCounter(Noisy(secret, additive=1e-3), budget)
        box = Batcher(DriftWatch(counting, 4096, first=512))
        while left := box.remaining:
            tokens = np.random.default_rng(0).standard_normal((min(left, 100), 2, WIDTH))
            box.ask(keyhole.QueryBatch.of(tokens, "test"))
        assert budget - 8 * RECALLED - REPEATS <= counting.paid <= budget


@pytest.mark.parametrize("after", [4, 12, 30, 60, 75, 79])
@pytest.mark.parametrize("learner", [keyhole.SingleHead(), keyhole.Auto()])
def test_a_drifting_box_is_rejected_as_one_that_changed(after, learner):
    """Whether the learner, the verification or the watch is the first to notice."""
    found = keyhole.recover(Changing(after), learner, throw=False)
    assert found.outcome is keyhole.Outcome.REJECTED
    assert "the box changed" in found.reason
    example = found.verdict.counterexample
    before, now = Changing(0).models
    np.testing.assert_allclose(example.model_answer, before(example.input[None])[0], rtol=1e-9)
    np.testing.assert_allclose(example.box_answer, now(example.input[None])[0], rtol=1e-9)
    assert not found.verdict.agrees
    assert "changed" in found.verdict.bound
    assert found.ledger.by_purpose[PURPOSE] >= 1


def test_a_long_run_stops_soon_after_the_change():
    class Wide(Changing):
        width = 60

        def __init__(self, after):
            self.models = [attention(np.random.default_rng(k), 60) for k in (0, 1)]
            self.left = after

    found = keyhole.recover(Wide(1000), keyhole.SingleHead(), throw=False)
    assert "the box changed" in found.reason
    assert found.model is None
    assert found.ledger.paid < 2048 + 512 < 60 * 61


def test_a_drift_comes_again_from_the_journal(tmp_path):
    """The same counterexample, and nothing that is paid for again."""
    path = tmp_path / "run.journal"
    first = keyhole.recover(Changing(60), journal=path, throw=False)
    again = keyhole.recover(Changing(-1), journal=path, throw=False)
    assert again.reason == first.reason
    assert again.ledger.replayed == again.ledger.paid == first.ledger.paid
    np.testing.assert_array_equal(
        again.verdict.counterexample.input, first.verdict.counterexample.input
    )


def test_looks_are_replayed_bit_for_bit(tmp_path):
    """A run with looks on its way, cut off by its budget, continues where it was."""
    secret, path = attention(np.random.default_rng(0), 48), tmp_path / "run.journal"
    whole = keyhole.recover(secret, keyhole.SingleHead())
    for budget in (300, 2049, 2050, 2200):
        cut = keyhole.recover(
            secret, keyhole.SingleHead(), budget=budget, journal=path, throw=False
        )
        assert cut.outcome is keyhole.Outcome.BUDGET_EXHAUSTED
    found = keyhole.recover(secret, keyhole.SingleHead(), journal=path)
    assert dict(found.ledger.by_purpose) == dict(whole.ledger.by_purpose)
    assert found.ledger.by_purpose[PURPOSE] == RECALLED + 1
    assert found.ledger.learning <= 1.01 * (48 * 49)
    np.testing.assert_array_equal(found.model.heads[0].score, whole.model.heads[0].score)


def test_every_must_be_positive():
    with pytest.raises(keyhole.InvalidArgument):
        DriftWatch(keyhole.open_oracle(Changing(1)), 0)
