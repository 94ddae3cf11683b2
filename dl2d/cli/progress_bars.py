"""Progress of commands that take long: bars or lines on standard error, and an orderly end after Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dl2d.core.progress_callback import Tell

#: Exit status after Ctrl-C, as shells have it.
_INTERRUPTED = 130
#: Seconds between two lines of progress, where bars cannot be drawn.
_LINE_SECONDS = 10.0


class ProgressDisplay(Progress):
    """Progress bars on standard error; where that is no terminal, a line every 10 seconds instead.

    Each task has a field ``note``. ``clock`` gives seconds on a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        super().__init__(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._clock = clock
        self._began = self._told = clock()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """See ``Progress.update``."""
        super().update(task_id, **changes)
        now = self._clock()
        if not self.disable or now - self._told < _LINE_SECONDS:
            return
        self._told, task = now, self.tasks[self.task_ids.index(task_id)]
        reached = f"{task.completed:g}" + ("" if task.total is None else f" of {task.total:g}")
        note = f", {task.fields['note']}" if task.fields.get("note") else ""
        typer.echo(f"{task.description}: {reached} after {now - self._began:.0f} s{note}", err=True)


@contextlib.contextmanager
def shown_progress(clock: Callable[[], float] = time.monotonic) -> Iterator[Tell]:
    """Show progress while the block runs: each thing that is told of has a bar of its own."""
    bars: dict[str, TaskID] = {}
    with ProgressDisplay(clock) as display:

        def tell(what: str, done: int, total: int, note: str = "") -> None:
            if what not in bars:
                bars[what] = display.add_task(what, note=note)
            display.update(bars[what], completed=done, total=total, note=note)

        yield tell


@contextlib.contextmanager
def interruptible(remark: Callable[[], str]) -> Iterator[None]:
    """End with exit status 130 after Ctrl-C, and print what ``remark`` says of what is left."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped: {remark()}", err=True)
        raise typer.Exit(_INTERRUPTED) from None
