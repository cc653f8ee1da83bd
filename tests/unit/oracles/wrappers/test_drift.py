import numpy as np
import pytest

import keyhole
from keyhole.models.draw import attention
from keyhole.oracles.wrappers.batching import Batching
from keyhole.oracles.wrappers.counting import Counting
from keyhole.oracles.wrappers.drift import PURPOSE, RECALLED, DriftWatch
from keyhole.oracles.wrappers.noise import Noisy

WIDTH = 8


class Changing:
    """Another model after so many questions."""

    width = WIDTH

    def __init__(self, after):
        self.models = [attention(np.random.default_rng(k), WIDTH) for k in (0, 1)]
        self.left = after

    def __call__(self, tokens):
        self.left -= len(tokens)
        return self.models[self.left < 0](tokens)


def watched(box, every=20):
    counting = Counting(keyhole.open_oracle(box))
    return counting, Batching(DriftWatch(counting, every), chunk_questions=16)


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
        attention(np.random.default_rng(0), WIDTH), precision=keyhole.Precision(additive=1e-3)
    )
    _, box = watched(Noisy(secret, additive=1e-3))
    tokens = np.random.default_rng(0).standard_normal((200, 3, WIDTH))
    box.ask(keyhole.Questions.of(tokens, "test"))


def test_the_result_of_a_drifting_box_is_never_clean():
    for after in (12, 30, 60, 75):
        assert (
            keyhole.recover(Changing(after), throw=False).outcome is not keyhole.Outcome.RECOVERED
        )


def test_every_must_be_positive():
    with pytest.raises(keyhole.InvalidArgument):
        DriftWatch(keyhole.open_oracle(Changing(1)), 0)
