"""Runs the cells of an audit: in this process, in several, or on a cluster; and continues.

Finished cells go one by one to a file of JSON lines, whose first line names the model and the plan.
A process killed at any moment leaves at most one broken last line, which is dropped.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from keyhole.arrays import Array, digest
from keyhole.audit.cells import Cell, Plan, run_cell
from keyhole.errors import Interrupted, InvalidArgument, JournalError, JournalMismatch
from keyhole.extras import need
from keyhole.models.attention import Attention
from keyhole.processes import end_with_parent
from keyhole.schema import WrongType, read_record

FORMAT = "keyhole-audit-1"
Results = Generator[dict[str, Any], None, None]
# of the linear algebra in each process: the same sums in the same order everywhere
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Step:
    """What a progress callback is told after every cell."""

    done: int
    total: int
    resumed: int  # of these, found in the file
    cell: str


@dataclass(frozen=True)
class Audit:
    """The finished audit."""

    model: Mapping[str, Any]
    plan: Plan
    max_norm: float
    cells: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]
    resumed: int = 0

    def _repr_html_(self) -> str:
        from keyhole.audit.summary import show_rows  # which reads audits

        return show_rows(self)


def run_audit(
    model: Attention,
    plan: Plan | None = None,
    *,
    store: str | Path | None = None,
    workers: int = 0,
    scheduler: Any = None,
    progress: Callable[[Step], None] | None = None,
) -> Audit:
    """Attacks the model behind every protection of the plan.

    `workers=0` computes in this process; otherwise in so many processes, or on the Dask cluster of
    `scheduler` (an address or a `distributed.Client`). With `store`, a stopped run continues.
    """
    plan = plan or Plan()
    if workers < 0:
        raise InvalidArgument(f"workers must not be negative, got {workers}")
    cells, notes = plan.cells(model)
    arrays = model.to_arrays()
    about = {
        "width": model.width,
        "heads": len(model.heads),
        "outputs": model.outputs,
        "digest": digest(*arrays.values()).hex(),
    }
    with _Store.open(store, {"format": FORMAT, "model": about, "plan": plan.to_json()}) as file:
        done = {cell.key: file.known[cell.key] for cell in cells if cell.key in file.known}
        resumed = len(done)
        todo = [cell for cell in cells if cell.key not in done]
        try:
            with contextlib.closing(_results(arrays, plan, todo, workers, scheduler)) as results:
                for result in results:
                    file.add(result)
                    done[result["key"]] = result
                    if progress is not None:
                        progress(Step(len(done), len(cells), resumed, result["key"]))
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped after {len(done)} of {len(cells)} cells; "
                + ("run again to continue" if store else "with a store it could be continued")
            ) from None
    return Audit(
        about,
        plan,
        plan.max_norm or model.natural_length(),
        tuple(done[cell.key] for cell in cells),
        tuple(notes),
        resumed,
    )


def _results(
    arrays: Mapping[str, Array], plan: Plan, cells: list[Cell], workers: int, scheduler: Any
) -> Results:
    """The cells' results as they come, from wherever they are computed."""
    if scheduler is not None:
        return _on_cluster(arrays, plan, cells, scheduler)
    if workers == 0:
        return (run_cell(arrays, plan, cell) for cell in cells)
    return _in_processes(arrays, plan, cells, workers)


def _in_processes(
    arrays: Mapping[str, Array], plan: Plan, cells: list[Cell], workers: int
) -> Results:
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)  # read by the children when they start
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_child,
    )
    try:
        tasks = [pool.submit(run_cell, arrays, plan, cell) for cell in cells]
        for task in as_completed(tasks):
            yield task.result()
    except BrokenProcessPool as error:
        raise Interrupted(
            "a worker process died (out of memory?); finished cells are kept in the store, if "
            "there is one: run again, with fewer workers"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start_child() -> None:
    end_with_parent()
    """A child that is stopped needs no last words, and one whose parent was killed no work."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _on_cluster(
    arrays: Mapping[str, Array], plan: Plan, cells: list[Cell], scheduler: Any
) -> Results:
    library = need("distributed", "distributed", "an audit on a cluster")
    own = isinstance(scheduler, str)
    try:
        client = library.Client(scheduler, timeout="10s") if own else scheduler
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"no Dask scheduler answers at {scheduler}: {error}") from error
    tasks = [client.submit(run_cell, dict(arrays), plan, cell, pure=False) for cell in cells]
    try:
        for task in library.as_completed(tasks):
            yield task.result()
    finally:
        client.cancel([task for task in tasks if not task.done()])
        if own:
            client.close()


@dataclass(frozen=True)
class _Finished:
    """A line of the store: what `run_cell` found out."""

    key: str
    protection: str
    bounded: bool
    multiple: int
    repeat: int
    queries: int
    outcome: str
    reason: str
    parameter_error: float | None
    function_error: float | None
    cost: float

    @property
    def cell(self) -> Cell:
        return Cell(self.protection, self.bounded, self.multiple, self.repeat)


class _Store:
    """Finished cells on disk; without a path, nowhere."""

    def __init__(self, file: TextIO | None, known: dict[str, Any]) -> None:
        self.file, self.known = file, known

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: str | Path | None, header: Mapping[str, Any]) -> Iterator["_Store"]:
        if path is None:
            yield cls(None, {})
            return
        path = Path(path)
        try:
            known, end = _read(path, header)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.touch(0o600)
            with path.open("r+" if path.exists() else "w", encoding="utf-8") as file:
                file.seek(end)
                file.truncate()  # a line that was being written when the run was killed
                store = cls(file, known)
                if end == 0:
                    store._write(header)
                yield store
        except OSError as error:
            raise JournalError(
                f"{path} cannot be read or written ({error.strerror}): make room, or name another "
                "store (--store)"
            ) from error

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())

    def add(self, result: Mapping[str, Any]) -> None:
        self._write(result)


def _read(path: Path, header: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Finished cells, and where the last whole line ends."""
    if not path.exists():
        return {}, 0
    known: dict[str, Any] = {}
    end, first = 0, True
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if not isinstance(record, dict):
            if first and line.endswith(b"\n"):
                raise JournalMismatch(f"{path} is not the file of an audit: name another store")
            break
        if first and record != json.loads(json.dumps(header)):
            raise JournalMismatch(
                f"{path} belongs to an audit of another model or plan: name another store, or "
                "repeat the first call"
            )
        if not first:
            finished = _checked(path, record)
            known[finished.key] = asdict(finished)
        first, end = False, end + len(line)
    return known, end


def _checked(path: Path, record: Mapping[str, Any]) -> _Finished:
    """The finished cell, if the record is one."""
    try:
        finished = read_record(_Finished, record, "a finished cell")
        if finished.key != finished.cell.key:
            raise WrongType(f"the key {finished.key!r} names another cell")
    except WrongType as error:
        raise JournalError(
            f"{path} is damaged ({error}); it was left as it is. Name another store"
        ) from error
    return finished
