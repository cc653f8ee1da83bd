"""The page, the JUnit file and the record of a watch."""

from xml.etree import ElementTree

import numpy as np
import pytest

import keyhole
from keyhole.models.random import attention
from keyhole.report.watch_page import draw_curve, to_junit, to_record, write_watch_page

MODEL = attention(np.random.default_rng(0), 4)


@pytest.fixture
def night(tmp_path):
    for _ in range(3):
        found = keyhole.watch(lambda tokens: MODEL(tokens) + 1.0, MODEL, tmp_path / "w.json")
    return found


def test_the_page_shows_curve_and_nights(night, tmp_path):
    page = write_watch_page(night, {"box": "<b>"}, tmp_path / "w.html").read_text()
    assert "<svg" in page
    assert all(one.when in page for one in night.history)
    assert "The box changed." in page
    assert "<b>" not in page


def test_junit_fails_with_an_alarm(night):
    suites = ElementTree.fromstring(to_junit(night, {"box": "a"}))
    assert suites.find("testsuite").get("failures") == "1"
    assert "ALARM" in suites.find(".//failure").text


def test_the_record_has_what_a_script_needs(night):
    told = to_record(night, {"box": "a"})
    assert told["alarm"] is True
    assert told["since"]
    assert told["nights"] == len(told["history"]) == 3
    assert told["alarm_from"] == pytest.approx(100.0)


def test_a_curve_of_one_night():
    chart = draw_curve([0.9], 100.0)
    assert "0.9 after the last" in chart.summary
    assert [tick.label for tick in chart.x_ticks] == ["1"]
    assert chart.series[0].path.startswith("M50.00 ")
