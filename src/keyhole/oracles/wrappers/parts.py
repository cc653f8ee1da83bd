"""A batch in parts of fixed size, answered in any order, several at a time.

The grid depends on the queries alone, never on who answers or how fast: whoever answers a part
sees the same batch, so one process, many connections and many machines give the same bits.
"""

import itertools
import threading
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.base import Oracle
from keyhole.oracles.queries import QueryBatch

Part = tuple[int, QueryBatch]  # first query's number, the queries


def grid(queries: QueryBatch, batch: int | None) -> list[Part]:
    """The parts of a batch: `batch` queries each, the last one shorter."""
    if batch is not None and batch < 1:
        raise InvalidArgument(f"batch must be at least 1, got {batch}")
    step = batch or max(1, len(queries))
    return [(start, queries[start : start + step]) for start in range(0, len(queries), step)]


def assembled(count: int, parts: dict[int, Array]) -> Array:
    """The answers in the order of the queries."""
    if not parts:
        return np.zeros(0)
    ordered = [parts[start] for start in sorted(parts)]
    if len({part.shape[1:] for part in ordered}) > 1:
        raise OracleError("the box changed the shape of its answers between two parts of a batch")
    answers = np.concatenate(ordered)
    if len(answers) != count:
        raise OracleError(f"the box gave {len(answers)} answers to {count} queries")
    return answers


class Parted(Oracle):
    """An oracle that answers parts, up to `concurrency` of them at the same time.

    `stream` hands over every part as soon as it is answered, and sends another only when the one
    before was taken: a journal has kept it by then, so that no more than `concurrency` parts are
    ever sent and not kept.
    """

    batch: int | None = None
    concurrency: int = 1

    @abstractmethod
    def answer(self, queries: QueryBatch, stop: threading.Event) -> Array:
        """Answers one part. `stop` is set when the answer is no longer wanted."""

    def ask(self, queries: QueryBatch) -> Array:
        return assembled(len(queries), dict(self.stream(queries)))

    def stream(self, queries: QueryBatch) -> Iterator[tuple[int, Array]]:
        """(number of the first query, answers) of each part, in the order they are ready."""
        if not len(queries):
            return
        parts, stop = grid(queries, self.batch), threading.Event()
        if self.concurrency == 1 or len(parts) == 1:
            for start, part in parts:
                yield start, self.answer(part, stop)
            return
        pool = ThreadPoolExecutor(min(self.concurrency, len(parts)), "keyhole-part")
        try:
            yield from self._as_ready(pool, iter(parts), stop)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _as_ready(
        self, pool: ThreadPoolExecutor, parts: Iterator[Part], stop: threading.Event
    ) -> Iterator[tuple[int, Array]]:
        """Answered parts. What is ready is handed over before a failure is raised: it was paid
        for, as is what was under way when another part failed."""
        waiting: dict[Future[Array], int] = {}
        failed: BaseException | None = None

        def send(count: int) -> None:
            for start, part in itertools.islice(parts, count):
                waiting[pool.submit(self.answer, part, stop)] = start

        send(self.concurrency)
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                start, error = waiting.pop(future), future.exception()
                if error is None:
                    yield start, future.result()
                else:
                    failed = failed or error
                    stop.set()
                send(1 if failed is None else 0)
        if failed is not None:
            raise failed
