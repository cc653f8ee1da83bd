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


def test_late_in_a_year_three_bad_nights_are_an_alarm_and_a_clean_one_among_them_is_none():
    quiet = [0] * 180
    assert Monitor().follow(nights([*quiet, 2, 2, 2]))[-1] >= 100.0
    assert Monitor().follow(nights([*quiet, 3, 0, 3]))[-1] < 100.0
    # such a pair comes in more than one of a hundred benign years: two bad nights of three failures
    pairs = 363 * (30 * 1e-3 / 3) ** 2
    assert 1.0 - np.exp(-pairs) > Monitor().alpha


def test_the_process_cannot_be_expected_to_grow():
    """The mean of E after one more night is at most E before it, in the middle of any year."""
    monitor = Monitor()
    for past in ([], [0] * 50, [0, 1, 0, 2, 1], [1] * 4 + [0] * 400):
        before = 1.0 if not past else monitor.follow(nights(past))[-1]
        for bad in (1, 3, 30):
            chance = 1e-3 * ASKED / bad
            clean, failed = (monitor.follow(nights([*past, k]))[-1] for k in (0, bad))
            assert (1 - chance) * clean + chance * failed <= before * (1 + 1e-12)


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


def test_another_box_on_the_first_night_is_an_alarm_at_once():
    assert Monitor().follow(nights([ASKED]))[-1] >= 100.0
    assert Monitor().follow(nights([0] * 100 + [ASKED]))[-1] < 100.0  # one bad night is none
