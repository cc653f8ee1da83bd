import random

import pytest

import keyhole
from keyhole.oracles.http.retry import RetryPolicy, Transient, patiently


def failing(times, error):
    """An attempt that fails so often, and then returns how often it was made."""
    made = []

    def attempt():
        made.append(1)
        if len(made) <= times:
            raise error
        return len(made)

    return attempt


def test_what_passes_is_tried_again():
    seen = []
    assert patiently(failing(2, Transient("busy")), RetryPolicy(3, 0.001), failed=seen.append) == 3
    assert len(seen) == 2


def test_patience_ends():
    with pytest.raises(keyhole.OracleError, match=r"gone.*3 attempts"):
        patiently(failing(3, Transient("gone")), RetryPolicy(3, 0.001))


def test_what_does_not_pass_is_final():
    seen = []
    with pytest.raises(keyhole.OracleError, match="wrong"):
        patiently(
            failing(1, keyhole.OracleError("wrong")), RetryPolicy(3, 0.001), failed=seen.append
        )
    assert seen == []


def test_delays_double_up_to_the_longest_with_jitter_and_keep_what_is_asked_for():
    patience, rng = RetryPolicy(first=1.0, longest=4.0), random.Random(0)
    delays = [[patience.delay(k, None, rng) for _ in range(50)] for k in (1, 2, 3, 9)]
    for most, seen in zip((1.0, 2.0, 4.0, 4.0), delays, strict=True):
        assert most / 2 <= min(seen) < max(seen) <= most
    assert patience.delay(1, 60.0, rng) == 60.0


def test_a_pause_beyond_willingness_is_refused():
    def attempt():
        raise Transient("busy", after=1e6)

    with pytest.raises(keyhole.OracleError, match="come back"):
        patiently(attempt, RetryPolicy(5, 0.001))


@pytest.mark.parametrize(
    "options", [{"attempts": 0}, {"first": 2.0, "longest": 1.0}, {"first": -1.0}]
)
def test_patience_makes_sense(options):
    with pytest.raises(keyhole.InvalidArgument):
        RetryPolicy(**options)
