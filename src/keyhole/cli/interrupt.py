"""Ctrl-C: once finishes the batch under way, so that what was paid for is kept; twice stops."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Stop:
    """Turns the first Ctrl-C into an end after the batch under way, the second into an end now.

    Between two batches nothing is lost by stopping, so that the first one stops at once.
    """

    def __init__(self, progress: Callable[[Any], None] | None = None) -> None:
        self.progress = progress
        self.under_way = 0
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def __call__(self, event: Any) -> None:
        """For recover(progress=…): watches the batches, stops after one where that was asked."""
        if self.requested and event.under_way == 0:
            raise KeyboardInterrupt  # answered, counted and recorded
        if self.progress is not None:
            self.progress(event)
        self.under_way = event.under_way

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self.requested or self.under_way == 0:
            raise KeyboardInterrupt
        self.requested = True
        # not through sys.stderr: the signal may have come while that was being written to
        stderr = 2
        os.write(
            stderr,
            f"\nkeyhole: finishing the {self.under_way} queries under way; Ctrl-C again stops "
            "at once\n".encode(),
        )
