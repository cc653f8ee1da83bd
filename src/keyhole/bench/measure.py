"""Runs a case: Keyhole first, then every other method on the same box, seeds and queries.

Figures of a row are medians over the seeds. Time outside the box is that of the whole call less
what the box took to answer; peak memory is that of a run of its own (tracemalloc, which slows what
it watches). A method has solved a box if its parameters are right up to the symmetries within the
case's `solved`; Keyhole must also say RECOVERED.
"""

import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from keyhole.arrays import Array, real_number
from keyhole.bench.cases import SUITES, Case, Growth, Secret
from keyhole.bench.students import Lesson, students
from keyhole.errors import InvalidArgument, KeyholeError
from keyhole.models.canonical import distance
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch
from keyhole.recovery import learn, recover
from keyhole.results import Outcome, Recovery

KEYHOLE = "Keyhole"


@dataclass(frozen=True)
class Row:
    """How one method did on one case. `quoted` names the source of what was not measured."""

    case: str
    method: str
    queries: float
    floor: float | None = None
    parameters: float | None = None  # largest relative error of a block, up to the symmetries
    answers: float | None = None  # relative root mean square on fresh sequences; labels: share
    seconds: float | None = None  # of the processor
    outside: float | None = None  # seconds outside the box
    memory: float | None = None  # MiB at the peak
    solved: int | None = None  # of so many seeds:
    seeds: int = 0
    ended: str = ""
    quoted: str = ""


@dataclass(frozen=True)
class Slope:
    """A figure as a power of a size: the exponent fitted to the last sizes, and that of theory;
    time outside the box and peak memory of the same runs."""

    what: str
    sizes: tuple[float, ...]
    values: tuple[float, ...]
    theory: float
    seconds: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()  # MiB

    def fit(self, values: tuple[float, ...]) -> float:
        """The exponent between the last sizes."""
        half = len(self.sizes) // 2
        return float(np.polyfit(np.log(self.sizes[half:]), np.log(values[half:]), 1)[0])

    @property
    def fitted(self) -> float:
        return self.fit(self.values)


class Timed(Wrapper):
    """Adds up the processor time that the box takes."""

    def __init__(self, inner: Oracle) -> None:
        self.inner, self.seconds = inner, 0.0

    def ask(self, queries: QueryBatch) -> Array:
        start = time.process_time()
        answers = self.inner.ask(queries)
        self.seconds += time.process_time() - start
        return answers


def run_suite(
    name: str,
    *,
    quick: bool = False,
    seeds: int = 3,
    first: int = 0,
    seconds: float = 5.0,
    told: Callable[[str], None] | None = None,
) -> tuple[list[Row], list[Slope]]:
    """Every case of a suite, and how its queries grow. `quick`: the smallest case, one seed."""
    if name not in SUITES:
        raise InvalidArgument(f"no suite {name!r}; there are {', '.join(SUITES)}")
    suite = SUITES[name]
    rows = []
    for case in suite.cases[:1] if quick else suite.cases:
        rows += run_case(
            case, seeds=1 if quick else seeds, first=first, seconds=seconds, memory=not quick,
            told=told,
        )  # fmt: skip
    rows += [Row(**row) for row in suite.quoted]
    slopes = [] if quick else [measure_growth(growth, first) for growth in suite.growth]
    return rows, slopes


def run_case(
    case: Case,
    *,
    seeds: int = 1,
    first: int = 0,
    seconds: float = 5.0,
    memory: bool = False,
    told: Callable[[str], None] | None = None,
) -> list[Row]:
    """Keyhole, the papers' own algorithms, and students, on boxes of one case.

    `seconds` is the processor time that each student may take; `memory` asks for one more run of
    Keyhole, whose peak is measured; `told` hears the name of each method.
    """
    real_number("seconds", seconds, 0.0, finite=False)
    found: dict[str, list[Row]] = {}
    for seed in range(first, first + seeds):
        alone = seed == first
        for row in run_seed(case, seed, seconds, memory and alone, told if alone else None):
            found.setdefault(row.method, []).append(row)
    return [summarise(rows) for rows in found.values()]


def run_seed(
    case: Case, seed: int, seconds: float, memory: bool, told: Callable[[str], None] | None
) -> Iterator[Row]:
    hear = told or (lambda name: None)
    secret = case.draw(seed)
    hear(f"{case.name}: {KEYHOLE}")
    first = run_keyhole(case, secret, seed, memory)
    queries = int(first.queries)
    yield first
    for name, method in case.published.items():
        hear(f"{case.name}: {name}")
        box = Timed(secret.open(seed))
        start = time.process_time()
        try:
            asked, model, ended = method(box, secret, seed)
        except KeyholeError as error:
            asked, model, ended = 0, None, str(error)
        spent = time.process_time() - start
        yield _row(case, secret, name, asked, model, spent, ended, outside=spent - box.seconds)
    if not case.students:
        return
    lesson = _lesson(case, secret, queries, seconds, seed)
    for name, student in students().items():
        if lesson.labels and name.startswith("least squares"):
            continue  # a label has no derivative
        hear(f"{case.name}: {name}")
        start = time.process_time()
        try:
            taught = student(lesson, np.random.default_rng([seed, 4]))
        except InvalidArgument:
            continue  # no torch module of this family
        spent = time.process_time() - start
        yield _row(case, secret, name, len(lesson.tokens), taught.model, spent, taught.ended)


def run_keyhole(case: Case, secret: Secret, seed: int, memory: bool) -> Row:
    """The row of Keyhole itself."""
    box = Timed(secret.open(seed))
    start = time.process_time()
    run = _recover(case, secret, box, seed)
    spent = time.process_time() - start
    return _row(
        case,
        secret,
        KEYHOLE,
        len(secret.examples[0]) if secret.examples else run.ledger.learning,
        run.model,
        spent,
        run.outcome.name,
        run.outcome is Outcome.RECOVERED,
        floor=run.ledger.floor,
        outside=spent - box.seconds,
        memory=_peak(case, seed) if memory else None,
    )


def _recover(case: Case, secret: Secret, box: Oracle, seed: int) -> Recovery:
    if secret.examples:
        return learn(*secret.examples, case.learner, seed=seed, throw=False)
    return recover(box, case.learner, seed=seed, throw=False, budget=case.budget)


def _peak(case: Case, seed: int) -> float:
    """MiB at the peak of one more run."""
    secret = case.draw(seed)
    box = secret.open(seed)
    tracemalloc.start()
    try:
        _recover(case, secret, box, seed)
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def _lesson(case: Case, secret: Secret, queries: int, seconds: float, seed: int) -> Lesson:
    if secret.examples:
        tokens, answers = secret.examples
    else:
        tokens = secret.sequences(np.random.default_rng([seed, 3]), queries)
        given = tokens if tokens.ndim == 3 else tokens[:, :, None].astype(np.float64)
        answers = secret.open(seed).ask(QueryBatch.of(given, "bench"))
    return Lesson(tokens, answers, secret.model, seconds, case.labels)


def _row(
    case: Case,
    secret: Secret,
    method: str,
    queries: float,
    model: Any,
    seconds: float,
    ended: str,
    right: bool = True,
    **more: Any,
) -> Row:
    wrong = Row(case.name, method, queries, seconds=seconds, solved=0, seeds=1, ended=ended, **more)
    if model is None:
        return wrong
    parameters = float(distance(model, secret.model))
    answers = None
    if callable(model):
        tokens = secret.sequences(np.random.default_rng([9, 9]), 1000)
        wanted, said = np.asarray(secret.model(tokens)), np.asarray(model(tokens))
        if case.labels:
            answers = float(np.mean(wanted != said))
        else:
            answers = float(np.linalg.norm(said - wanted) / np.linalg.norm(wanted))
    solved = int(right and parameters <= case.solved)
    shown = {**vars(wrong), "parameters": parameters, "answers": answers, "solved": solved}
    return Row(**shown)


def summarise(rows: list[Row]) -> Row:
    """Medians over the seeds, successes added up."""

    def middle(name: str) -> float | None:
        known = [getattr(row, name) for row in rows if getattr(row, name) is not None]
        return float(median(known)) if known else None

    numbers = ("queries", "floor", "parameters", "answers", "seconds", "outside", "memory")
    found: dict[str, Any] = {name: middle(name) for name in numbers}
    endings = list(dict.fromkeys(row.ended for row in rows))
    return Row(
        rows[0].case,
        rows[0].method,
        solved=sum(row.solved or 0 for row in rows),
        seeds=len(rows),
        ended=", ".join(endings),
        **found,
    )


def measure_growth(growth: Growth, seed: int = 0, memory: bool = True) -> Slope:
    """Keyhole at growing sizes."""
    rows = []
    for size in growth.sizes:
        case = growth.case(size)
        secret = case.draw(seed)
        rows.append(run_keyhole(case, secret, seed, memory))
    columns = {
        name: tuple(float(getattr(row, name)) for row in rows)
        for name in (growth.figure, "outside", *(["memory"] if memory else []))
    }
    values, seconds = columns[growth.figure], columns["outside"]
    return Slope(
        growth.what, growth.sizes, values, growth.theory, seconds, columns.get("memory", ())
    )
