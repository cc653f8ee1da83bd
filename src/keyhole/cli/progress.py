"""Progress on stderr: a live bar in a terminal, plain lines elsewhere, silence for --json."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

QUIET_SECONDS = 5.0  # between two plain lines
Told = Callable[[Any], None]


@contextlib.contextmanager
def shown(enabled: bool = True) -> Iterator[Told | None]:
    """A callback for recover(progress=…)."""
    if not enabled:
        yield None
        return
    if not sys.stderr.isatty():
        yield _plain(asking)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("[bold]{task.description:<12}"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=1, words="")

        def update(event: Any) -> None:
            known = event.expected or event.at_most or event.asked
            total = max(known, event.asked, 1)
            words = asking(event).partition(": ")[2]
            bar.update(
                task, description=event.stage, completed=event.asked, total=total, words=words
            )

        yield update


@contextlib.contextmanager
def searching(enabled: bool = True) -> Iterator[Told | None]:
    """A callback for learn(progress=…): the search has no end that could be told beforehand."""
    if not enabled:
        yield None
        return
    if not sys.stderr.isatty():
        yield _plain(fitting)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda event: status.update(fitting(event))


def asking(event: Any) -> str:
    """score: 1,038 of about 1,160 queries, 850/s, 1 s left; or what is computed between them"""
    expected = event.expected or 0
    of = f" of about {expected:,}" if expected >= event.asked > 0 else ""
    if not expected and (event.at_most or 0) >= event.asked > 0:
        of = f" of at most {event.at_most:,}"
    text = f"{event.stage}: {event.asked:,}{of} queries"
    if event.note:
        return f"{text}, {event.note}"
    settled = 0.5  # seconds before which a rate is no measurement
    if event.seconds < settled or not event.asked:
        return text
    rate = event.asked / event.seconds
    text += f", {rate:,.0f}/s" if rate >= 1 else f", {1 / rate:,.1f} s each"
    known = expected >= event.asked
    return text + (f", {left((expected - event.asked) / rate)} left" if known else "")


def fitting(event: Any) -> str:
    """2 heads: 3 restarts, best residual 1.2e-04, 12 s"""
    heads = "1 head" if event.heads == 1 else f"{event.heads} heads"
    return (
        f"{heads}: {event.restarts} restarts, best residual {event.residual:.1e}, "
        f"{left(event.seconds)}"
    )


def left(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _plain(words: Callable[[Any], str]) -> Told:
    last = time.monotonic()

    def line(event: Any) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET_SECONDS:
            last = time.monotonic()
            sys.stderr.write(words(event) + "\n")
            sys.stderr.flush()

    return line
