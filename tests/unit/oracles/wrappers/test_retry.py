import random

import numpy as np
import pytest

import keyhole
from keyhole.oracles.wrappers.retry import Patience, Retry, Transient, patiently

ASKED = keyhole.Questions.of(np.zeros((2, 1, 3)), "test")


def failing(times, error):
    left = [times]

    def box(tokens):
        if left[0]:
            left[0] -= 1
            raise error
        return np.arange(len(tokens), dtype=float)

    return keyhole.open_oracle(box, 3)


def test_what_passes_is_asked_again():
    box = Retry(failing(2, ConnectionError()), Patience(3, 0.001), (ConnectionError,))
    np.testing.assert_array_equal(box.ask(ASKED), [0.0, 1.0])
    assert box.failures == 2


def test_patience_ends():
    box = Retry(failing(3, ConnectionError("gone")), Patience(3, 0.001), (ConnectionError,))
    with pytest.raises(keyhole.OracleError, match=r"gone.*3 attempts"):
        box.ask(ASKED)


def test_what_does_not_pass_is_final():
    box = Retry(failing(1, ValueError("wrong")), Patience(3, 0.001), (ConnectionError,))
    with pytest.raises(keyhole.OracleError, match="wrong"):
        box.ask(ASKED)
    assert box.failures == 0


def test_delays_double_up_to_the_longest_with_jitter_and_keep_what_is_asked_for():
    patience, rng = Patience(first=1.0, longest=4.0), random.Random(0)
    delays = [[patience.delay(k, None, rng) for _ in range(50)] for k in (1, 2, 3, 9)]
    for most, seen in zip((1.0, 2.0, 4.0, 4.0), delays, strict=True):
        assert most / 2 <= min(seen) < max(seen) <= most
    assert patience.delay(1, 60.0, rng) == 60.0


def test_a_pause_beyond_willingness_is_refused():
    def attempt():
        raise Transient("busy", after=1e6)

    with pytest.raises(keyhole.OracleError, match="come back"):
        patiently(attempt, Patience(5, 0.001))


@pytest.mark.parametrize(
    "options", [{"attempts": 0}, {"first": 2.0, "longest": 1.0}, {"first": -1.0}]
)
def test_patience_makes_sense(options):
    with pytest.raises(keyhole.InvalidArgument):
        Patience(**options)
