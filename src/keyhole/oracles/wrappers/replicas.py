"""Several boxes that hold the same model, answering as one.

A part goes to whichever replica is free. A replica that fails gives its part to the others and,
after a few failures in a row, is left alone. Who answers does not change what is asked.
"""

import threading
from collections.abc import Sequence

from keyhole.arrays import Array
from keyhole.errors import Inconsistent, InvalidArgument, OracleError
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.http.retry import Repeats
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.parts import Parted

STRIKES = 3  # failures in a row after which a replica is left alone


class Replicas(Parted):
    """Spreads the parts of a batch over its members."""

    def __init__(self, members: Sequence[Oracle], batch: int | None = None) -> None:
        if not members:
            raise InvalidArgument("replicas need at least one member")
        widths = {member.spec.width for member in members}
        if len(widths) > 1:
            raise InvalidArgument(f"replicas of different widths: {sorted(widths)}")
        first, *others = (member.spec.domain for member in members)
        if not all(first.accepts_the_same_as(other) for other in others):
            raise InvalidArgument("replicas that accept different tokens or lengths")
        # 64 queries are few enough to share a chunk among a few replicas
        self.members, self.batch = tuple(members), 64 if batch is None else batch
        self.concurrency = sum(self._slots(member) for member in members)
        self.answered = [0] * len(members)  # queries, by member
        self._free = [self._slots(member) for member in members]
        self._strikes = [0] * len(members)
        self._change = threading.Condition()
        self.repeats = Repeats()

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        return self.members[0].spec

    @staticmethod
    def _slots(member: Oracle) -> int:
        return int(getattr(member, "concurrency", 1))

    def answer(self, queries: QueryBatch, stop: threading.Event) -> Array:
        failed: dict[int, OracleError] = {}
        while len(failed) < len(self.members):
            if failed:
                self.repeats.spend(len(queries))
            number = self._take(failed, stop)
            try:
                answers = self.members[number].ask(queries)
            except Inconsistent:
                self._give_back(number, worked=True)
                raise
            except OracleError as error:
                failed[number] = error
                self._give_back(number, worked=False)
            except BaseException:
                self._give_back(number, worked=True)
                raise
            else:
                self._give_back(number, worked=True, answered=len(queries))
                return answers
        worst = "; ".join(str(error) for error in failed.values())
        raise OracleError(f"none of {len(self.members)} replicas answered: {worst}")

    def _take(self, failed: dict[int, OracleError], stop: threading.Event) -> int:
        """A free member that has not failed on this part; one in good standing, if there is any."""
        with self._change:
            while True:
                able = [k for k in range(len(self.members)) if k not in failed]
                able = [k for k in able if self._strikes[k] < STRIKES] or able
                free = [k for k in able if self._free[k]]
                if free:
                    chosen = min(free, key=lambda k: self.answered[k])
                    self._free[chosen] -= 1
                    return chosen
                if stop.is_set():
                    raise OracleError("given up: another part of the batch failed")
                self._change.wait(timeout=0.1)

    def _give_back(self, number: int, *, worked: bool, answered: int = 0) -> None:
        with self._change:
            self._free[number] += 1
            self._strikes[number] = 0 if worked else self._strikes[number] + 1
            self.answered[number] += answered
            self._change.notify_all()

    def close(self) -> None:
        for member in self.members:
            member.close()
