"""A progress bar in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]  # called with numbers of bytes done


def ignore(count: int) -> None:
    """The `Advance` without a bar."""


@contextmanager
def bar(title: str, total: int, wanted: bool) -> Iterator[Advance]:
    """Yield a function to call with numbers of bytes done. Without rich or a terminal, nothing is shown."""
    if not wanted or not sys.stderr.isatty():
        yield ignore
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:
        yield ignore
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total)
        yield lambda count: shown.advance(task, count)
