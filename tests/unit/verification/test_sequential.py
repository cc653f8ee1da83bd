"""The nightly test: benign years stay quiet, changes are found, and it may be looked at always."""

import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.verification.sequential import ALWAYS, Alternatives, Monitor, Night, best_bet

ASKED = 30


def nights(bad):
    return [Night(ASKED, int(k)) for k in bad]


def share_of_alarms(monitor, years):
    return np.mean([monitor.follow(nights(year)).max() >= 1.0 / monitor.alpha for year in years])


def test_benign_years_raise_no_alarm_beyond_the_level():
    rng = np.random.default_rng(0)
    years = rng.binomial(ASKED, 1e-3, (200, 365))
    assert share_of_alarms(Monitor(), years) <= 0.01
    assert share_of_alarms(Monitor(independent=True), years) <= 0.01


def test_failures_in_bad_nights_break_the_independent_form_alone():
    rng = np.random.default_rng(1)
    bad_night = rng.random((200, 365)) < 1e-2  # a tenth of answers fails in these: 1e-3 in all
    years = np.where(bad_night, rng.binomial(ASKED, 0.1, (200, 365)), 0)
    assert share_of_alarms(Monitor(), years) <= 0.01
    assert share_of_alarms(Monitor(independent=True), years) > 0.5


def test_every_night_is_a_fair_bet():
    """The mean of every factor under any benign distribution is at most one: what Ville needs."""
    monitor = Monitor()
    for chance, bad in ((1e-3 * ASKED, 1), (1e-3, 30), (1e-2, 3)):  # of a bad night, failures in it
        mean = (1 - chance) * monitor.factors(Night(ASKED, 0)) + chance * monitor.factors(
            Night(ASKED, bad)
        )
        assert (mean <= 1.0 + 1e-12).all()


def test_weights_of_nights_sum_to_at_most_one():
    for alternatives in (Alternatives(), ALWAYS):
        total = sum(alternatives.weight_of_night(n) for n in range(1, 20_000))
        assert 0.98 < total <= 1.0 + 1e-9


def test_a_change_is_found_and_dated():
    rng = np.random.default_rng(2)
    delays, starts = [], []
    for _ in range(100):
        healthy, changed = rng.binomial(ASKED, 5e-4, 40), rng.binomial(ASKED, 0.2, 10)
        seen = nights([*healthy, *changed])
        first = int(np.argmax(Monitor().follow(seen) >= 100.0)) + 1
        delays.append(first - 40)
        starts.append(Monitor().find_start(seen[:first]))
    assert np.median(delays) <= 3
    assert abs(np.median(starts) - 41) <= 1


def test_a_bet_never_stakes_everything():
    assert 0.0 < best_bet(0.005, ASKED, 1e-3) < best_bet(0.05, ASKED, 1e-3) < 1.0
    assert best_bet(0.8, ASKED, 1e-3) < 1.0


def test_what_makes_no_sense_is_said():
    with pytest.raises(InvalidArgument, match="3 bad answers of 2"):
        Night(2, 3)
    with pytest.raises(InvalidArgument, match="sum to 1"):
        Alternatives(shares=(0.1,), weights=(0.5,))
    with pytest.raises(InvalidArgument, match="alpha"):
        Monitor(alpha=1.5)
