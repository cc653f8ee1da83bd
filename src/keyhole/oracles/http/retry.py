"""Patience with a box that fails now and then: exponential back-off with jitter.

A failure that may pass is a `Transient`; everything else is final at once. The delays are random
(so that many clients do not come back together) and never part of what is asked.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from keyhole.arrays import whole_number
from keyhole.errors import InvalidArgument, OracleError

T = TypeVar("T")
JITTER = random.Random()  # no part of any result: only of when something is asked again


class Transient(OracleError):
    """A failure that may be gone when the query is asked again."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after  # seconds the box asked us to wait


class Outage(OracleError):
    """The box failed until patience ended. Says nothing about the query that it failed on."""


class Repeats:
    """Counts the queries that are sent again after a failure, over all threads, and refuses them
    beyond a limit of their own."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.spent = limit, 0
        self._lock = threading.Lock()

    def spend(self, queries: int) -> None:
        with self._lock:
            if self.limit is not None and self.spent + queries > self.limit:
                raise Outage(
                    f"the box fails too often: {self.spent} queries were sent again, and {queries} "
                    f"more would exceed the {self.limit} that a budget of so many allows on top. "
                    "Run again when it answers; with the same journal nothing is paid twice"
                )
            self.spent += queries


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how long to try again.

    Args:
        attempts: Of one part, the first included.
        first: Seconds before the second attempt, doubled each time.
        longest: Seconds that the doubling stops at.
        willing: Seconds to wait if the box asks for it; beyond that, give up.
    """

    attempts: int = 8
    first: float = 0.25
    longest: float = 30.0
    willing: float = 300.0

    def __post_init__(self) -> None:
        whole_number("attempts", self.attempts, 1)
        if not 0 <= self.first <= self.longest:
            raise InvalidArgument("delays must satisfy 0 <= first <= longest")

    def delay(self, failures: int, after: float | None, rng: random.Random) -> float:
        """Seconds to wait after so many failures: half to all of the doubled delay, and never
        less than the box asks for."""
        backoff = min(self.longest, self.first * 2.0 ** (failures - 1)) * rng.uniform(0.5, 1.0)
        return max(backoff, after or 0.0)


def patiently(
    attempt: Callable[[], T],
    patience: RetryPolicy,
    stop: threading.Event | None = None,
    failed: Callable[[Transient], None] | None = None,
) -> T:
    """What `attempt` returns, tried again after each `Transient` until patience ends."""
    for failures in range(1, patience.attempts + 1):
        try:
            return attempt()
        except Transient as error:
            if failed is not None:
                failed(error)
            if failures == patience.attempts:
                raise Outage(f"{error} (the last of {failures} attempts)") from error
            if error.after is not None and error.after > patience.willing:
                raise Outage(
                    f"{error}: it asks to come back in {error.after:.0f} seconds; run again then, "
                    "with the same journal nothing is paid twice"
                ) from error
            pause(patience.delay(failures, error.after, JITTER), stop)
    raise AssertionError("unreachable")


def pause(seconds: float, stop: threading.Event | None) -> None:
    """Sleeps, unless the answer is no longer wanted."""
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Outage("given up: another part of the batch failed")
