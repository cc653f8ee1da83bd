"""What recoveries of library layers came to: family by number format by width, as measured.

`benchmarks/map.py` recovers layers as libraries make them, with nothing given, and writes one line
a run to measured.json beside this file. The page "what can be recovered today" is a table of it,
`keyhole check` looks up the place of a box, and `keyhole plan` takes its forecast from here.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import numpy as np

FILE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Run:
    """One recovery of a layer, nothing given.

    Args:
        layer: What was recovered, as the library calls it.
        family: What it is, as `keyhole.measurement.families` names it.
        format: The number format of weights and arithmetic.
        width: Numbers in a token.
        seed: Of weights and queries.
        outcome: Name of the outcome.
        error: Root mean square of the model's errors on fresh answers, over the spread of the
            answers; None without a model.
        rounding: The same of the box's own errors, against its weights in float64.
        queries: All that were paid, to learn and to verify.
        floors: The same over the number of unknowns per number in an answer; None where that is not
            known because nothing was found.
        seconds: CPU seconds of one core, those of the box included.
        gigabytes: Peak of memory of the process, libraries included.
    """

    layer: str
    family: str
    format: str
    width: int
    seed: int
    outcome: str
    error: float | None
    rounding: float
    queries: int
    floors: float | None
    seconds: float
    gigabytes: float


@dataclass(frozen=True)
class Cell:
    """The runs of one layer, format and width together.

    Args:
        runs: How many there were.
        recovered: How many of them ended RECOVERED.
        error: Worst error of the recovered ones; None where there are none.
        floors: Median of their queries, in floors; None where there are none.
        seconds: Median CPU seconds of all runs.
        gigabytes: Largest peak of memory.
    """

    runs: int
    recovered: int
    error: float | None
    floors: float | None
    seconds: float
    gigabytes: float

    def __str__(self) -> str:
        """What a table says: how many, how well, at what price."""
        count = f"{self.recovered} of {self.runs}"
        if self.error is None or self.floors is None:
            return f"{count} ({self.seconds:.0f} s)"
        return f"{count}, {self.error:.0e}, {self.floors:.1f} ×, {self.seconds:.0f} s"


def read_runs(path: Path = FILE) -> list[Run]:
    """All runs of a file, in its order."""
    return [Run(**line) for line in json.loads(path.read_text(encoding="utf-8"))]


def write_runs(runs: Iterable[Run], path: Path = FILE) -> None:
    """One line for each run."""
    names = [each.name for each in fields(Run)]
    lines = [json.dumps({name: getattr(run, name) for name in names}) for run in runs]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def gather(runs: Sequence[Run]) -> Cell:
    """What several runs of the same kind come to; there has to be one."""
    good = [run for run in runs if run.outcome == "RECOVERED"]
    errors = [run.error for run in good if run.error is not None]
    floors = [run.floors for run in good if run.floors is not None]
    return Cell(
        runs=len(runs),
        recovered=len(good),
        error=max(errors, default=None),
        floors=median(floors) if floors else None,
        seconds=median(run.seconds for run in runs),
        gigabytes=max(run.gigabytes for run in runs),
    )


@dataclass(frozen=True)
class Price:
    """What recovering a box will take, by what others like it took.

    Args:
        queries: To learn and to verify, as expected.
        most_queries: At most, by the dearest of the layers that are like it.
        seconds: CPU seconds of one core, as expected.
        most_seconds: At most, likewise.
    """

    queries: int
    most_queries: int
    seconds: float
    most_seconds: float


def forecast(
    family: str, number_format: str, width: int, runs: Sequence[Run] | None = None
) -> Price | None:
    """The price of a box: in the middle of the layers of its family that were recovered in its
    number format, each between the widths at which it was, in logarithms. Up to twice beyond the
    last of them queries grow with the width and time with its cube, as products of all answers
    with all unknowns do. None where nothing like the box was recovered.

    Args:
        family: As `keyhole.measurement.families` names it.
        number_format: Of the answers.
        width: Numbers in a token.
        runs: Those of measured.json, if not given.
    """
    alike = [
        run
        for run in (read_runs() if runs is None else runs)
        if (run.family, run.format, run.outcome) == (family, number_format, "RECOVERED")
    ]
    queries: list[float] = []
    seconds: list[float] = []
    for layer in dict.fromkeys(run.layer for run in alike):
        of_layer = [run for run in alike if run.layer == layer]
        widths = sorted({run.width for run in of_layer})
        inside = min(max(width, widths[0]), widths[-1])
        beyond = width / inside
        if not 0.5 <= beyond <= 2.0:
            continue
        for figures, name, power in ((queries, "queries", 1), (seconds, "seconds", 3)):
            usual = [median(getattr(r, name) for r in of_layer if r.width == w) for w in widths]
            between = np.interp(np.log(inside), np.log(widths), np.log(usual))
            figures.append(float(np.exp(between)) * beyond**power)
    if not queries:
        return None
    asked = round(median(queries)), round(max(queries))
    return Price(*asked, round(median(seconds), 1), round(max(seconds), 1))


def look_up(family: str, number_format: str, width: int) -> list[str]:
    """Where a box stands: a sentence for each layer of its family that was measured in its number
    format, at the width nearest to its own."""
    alike = [run for run in read_runs() if (run.family, run.format) == (family, number_format)]
    sentences = []
    for layer in dict.fromkeys(run.layer for run in alike):
        of_layer = [run for run in alike if run.layer == layer]
        nearest = min({run.width for run in of_layer}, key=lambda w: (abs(w - width), w))
        cell = gather([run for run in of_layer if run.width == nearest])
        sentence = f"{layer}, width {nearest}: {cell.recovered} of {cell.runs} recovered"
        if cell.error is not None and cell.floors is not None:
            sentence += (
                f", answers within {cell.error:.0e} of their spread, "
                f"{cell.floors:.1f} floors of queries"
            )
        sentences.append(f"{sentence}, {cell.seconds:.0f} CPU seconds")
    return sentences
