"""A box asked by many machines: parts of a batch are tasks of a Dask cluster.

The box itself travels to the workers once (a function, a model, a torch module, the path of an
ONNX file). A worker that dies costs its part, which another worker then answers. Workers are your
own machines: what is sent to them is code, as with every Dask task.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument, OracleError
from keyhole.extras import need
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.http.client import Endpoint
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.parts import assembled, grid

RETRIES = 3  # times a task may fail for reasons of its machine


def _answered(box: Oracle, tokens: Array) -> Array:
    """Runs on a worker."""
    return box.ask(QueryBatch.of(tokens, "distributed"))


class Distributed(Wrapper):
    """Asks through a cluster. `client` is a `distributed.Client`, or the address of a scheduler."""

    def __init__(self, inner: Oracle, client: Any, batch: int | None = None) -> None:
        library = need("distributed", "distributed", "asking through a cluster")
        if isinstance(getattr(inner, "endpoint", None), Endpoint):
            raise InvalidArgument(
                "an HTTP endpoint gains nothing from a cluster: name several replicas of it instead"
            )
        self.inner, self.batch = inner, 64 if batch is None else batch  # queries of one task
        self._own = isinstance(client, str)
        try:
            self.client = library.Client(client) if self._own else client
            self._box = self._sent()
        except (OSError, TypeError, ValueError, AttributeError) as error:
            raise OracleError(f"the cluster cannot be used: {error}") from error

    def ask(self, queries: QueryBatch) -> Array:
        return assembled(len(queries), dict(self.stream(queries)))

    def stream(self, queries: QueryBatch) -> Iterator[tuple[int, Array]]:
        """(number of the first query, answers) of each part, in the order they are ready."""
        from distributed import CancelledError, as_completed

        parts = dict(grid(queries, self.batch))
        tasks = {self._submit(part): start for start, part in parts.items()}
        lost: Counter[int] = Counter()
        waiting = as_completed(list(tasks))  # type: ignore[no-untyped-call]
        try:
            for task in waiting:
                start = tasks.pop(task)
                try:
                    yield start, self._result(task)
                except CancelledError as error:
                    lost[start] += 1
                    if lost[start] > RETRIES:
                        raise OracleError(
                            f"the cluster lost the queries from {start} on {lost[start]} times"
                        ) from error
                    self._box = self._sent()
                    again = self._submit(parts[start])
                    tasks[again] = start
                    waiting.add(again)  # type: ignore[no-untyped-call]
        finally:
            self.client.cancel([task for task in tasks if not task.done()], force=True)

    def _sent(self) -> Any:
        """The box on every worker there is now."""
        return self.client.scatter(self.inner, broadcast=True, hash=False)

    def _submit(self, part: QueryBatch) -> Any:
        return self.client.submit(_answered, self._box, part.tokens(), pure=False, retries=RETRIES)

    def _result(self, task: Any) -> Array:
        from distributed import CancelledError

        try:
            answers: Array = task.result()
        except (OracleError, CancelledError):
            raise
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except Exception as error:
            raise OracleError(
                f"a worker failed with {type(error).__name__}: {str(error)[:500]}"
            ) from error
        return answers

    def close(self) -> None:
        if self._own:
            self.client.close()
        self.inner.close()
