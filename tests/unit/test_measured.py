"""Measured recoveries are read, gathered and looked up."""

from dataclasses import replace

import pytest

from keyhole.measured import Run, forecast, gather, look_up, read_runs, write_runs
from keyhole.measurement.families import Family
from keyhole.oracles.noise import FORMATS

RUN = Run(
    layer="a block", family="a whole pre-norm block", format="float32", width=16, seed=1,
    outcome="RECOVERED", error=1e-6, rounding=2e-7, queries=900, floors=9.0, seconds=3.0,
    gigabytes=0.3,
)  # fmt: skip


def test_a_file_of_runs_is_read_as_it_was_written(tmp_path):
    runs = [RUN, replace(RUN, outcome="not ended", error=None, floors=None)]
    write_runs(runs, tmp_path / "runs.json")
    assert read_runs(tmp_path / "runs.json") == runs


def test_a_cell_counts_and_tells_the_worst_error():
    worse = replace(RUN, error=3e-6, floors=11.0, seconds=5.0)
    failed = replace(RUN, outcome="ILL_CONDITIONED", error=0.5, seconds=7.0)
    assert str(gather([RUN, worse, failed])) == "2 of 3, 3e-06, 10.0 ×, 5 s"
    assert str(gather([failed])) == "0 of 1 (7 s)"


def test_every_measured_run_is_of_a_known_family_and_format():
    for run in read_runs():
        assert run.family in {"", *Family}
        assert run.format in dict(FORMATS)


def test_a_place_is_that_of_the_nearest_width():
    places = look_up(Family.PRE_NORM_BLOCK, "float32", 30)
    assert any("width 32" in place for place in places)
    assert look_up(Family.PRE_NORM_BLOCK, "no format", 30) == []


def test_a_price_lies_between_those_of_the_widths_around_it():
    wide = replace(RUN, width=64, queries=3600, seconds=48.0)
    dear = replace(RUN, layer="another", width=32, queries=3600, seconds=24.0)
    runs = [RUN, wide, dear, replace(RUN, layer="a third", outcome="ILL_CONDITIONED", queries=1)]
    price = forecast(RUN.family, RUN.format, 32, runs)
    assert price is not None
    assert price.queries == pytest.approx((1800 + 3600) / 2)
    assert price.seconds == pytest.approx((12.0 + 24.0) / 2)
    assert (price.most_queries, price.most_seconds) == (3600, 24.0)


def test_a_price_is_told_up_to_twice_beyond_what_was_measured():
    price = forecast(RUN.family, RUN.format, 32, [RUN])
    assert price is not None
    assert (price.queries, price.seconds) == (1800, 24.0)
    assert forecast(RUN.family, RUN.format, 40, [RUN]) is None
    assert forecast(RUN.family, "float64", 16, [RUN]) is None


def test_a_price_is_within_a_factor_of_two_of_the_median_of_what_was_measured():
    recovered = [run for run in read_runs() if run.outcome == "RECOVERED"]
    assert recovered
    for run in recovered:
        price = forecast(run.family, run.format, run.width)
        assert price is not None
        assert run.queries <= 2 * price.most_queries
        assert run.seconds <= 2 * price.most_seconds
