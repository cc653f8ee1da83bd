import numpy as np

from keyhole.models.attention import Attention, Head
from keyhole.report.blocks import blocks_of
from keyhole.report.charts import Logarithmic, decade, spectrum_chart, trace_chart, whole_ticks
from keyhole.results import Trace


def test_a_logarithmic_axis_holds_all_numbers() -> None:
    axis = Logarithmic.around([3e-16, 2.0, 0.0])
    assert (axis.low, axis.high) == (-16, 1)
    assert axis.height(0.0) == 100.0
    assert axis.height(10.0) == 0.0
    assert axis.height(1e-16) == 100.0
    assert axis.ticks()[0].label == "10⁻¹⁶"
    assert len(axis.ticks()) <= 7
    assert Logarithmic.around([]).ticks()


def test_words_of_an_axis() -> None:
    assert [decade(power) for power in (-12, -1, 0, 1, 3)] == ["10⁻¹²", "0.1", "1", "10", "10³"]
    assert [tick.label for tick in whole_ticks(1)] == ["1"]
    assert [tick.label for tick in whole_ticks(4)] == ["1", "2", "3", "4"]
    assert [tick.label for tick in whole_ticks(1119)] == ["1", "500", "1,000"]


def test_singular_values_and_the_size_of_errors() -> None:
    model = Attention([Head(np.diag([4.0, 2.0]), None, np.ones(2))])
    errors = Attention([Head(np.full((2, 2), 1e-8), None, np.ones(2))])
    chart = spectrum_chart(blocks_of(model, errors)[0])
    assert chart is not None
    assert chart.rows == (("1", "4"), ("2", "2"))
    assert "2e-08" in chart.summary.replace("2.0e-08", "2e-08")
    assert len(chart.levels) == 1
    nothing = Attention([Head(np.zeros((2, 2)), None, np.ones(2))])
    assert spectrum_chart(blocks_of(nothing, None)[0]) is None


def test_a_trace_separates_fresh_queries() -> None:
    trace = Trace((1, 5, 9), ("score", "score", "verification"), (0.0, 1e-15, 3e-2), 9)
    chart = trace_chart(trace, {"precision": {"relative": 1e-16}})
    assert chart is not None
    assert [series.path.count("M") for series in chart.series] == [2, 1]
    assert "3 of 9 queries" in chart.summary
    assert "3.0e-02 at most" in chart.summary
    assert "1 agree to the last bit" in chart.summary
    assert chart.levels[0].at == 100.0 * (1 - 1 / 16)
    assert trace_chart(Trace((), (), (), 0), {}) is None
