"""Progress on stderr: a live bar in a terminal, plain lines elsewhere, silence for --json."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

QUIET_SECONDS = 5.0  # between two plain lines


@contextlib.contextmanager
def shown(enabled: bool = True) -> Iterator[Callable[[Any], None] | None]:
    """A callback for recover(progress=…)."""
    if not enabled:
        yield None
        return
    if not sys.stderr.isatty():
        yield _plain()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("[bold]{task.description:<12}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} questions"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=1, rate="")

        def update(event: Any) -> None:
            total = max(event.expected or event.asked, event.asked)
            rate = f"{event.asked / max(event.seconds, 1e-9):,.0f}/s"
            bar.update(task, description=event.stage, completed=event.asked, total=total, rate=rate)

        yield update


def _plain() -> Callable[[Any], None]:
    last = time.monotonic()

    def line(event: Any) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET_SECONDS:
            last = time.monotonic()
            of = f" of about {event.expected:,}" if event.expected else ""
            sys.stderr.write(f"{event.stage}: {event.asked:,}{of} questions\n")

    return line
