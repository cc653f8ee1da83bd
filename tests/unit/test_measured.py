"""Measured recoveries are read, gathered and looked up."""

from dataclasses import replace

from keyhole.measured import Run, gather, look_up, read_runs, write_runs
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
