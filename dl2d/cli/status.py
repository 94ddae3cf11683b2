"""``dl2d status``: the jobs, and how they are doing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dl2d.cli.job_lines import JobLine, as_of_now, job_lines
from dl2d.cli.options import ConfigOption, JsonOption, find_job, reading
from dl2d.cli.output import console, duration, number, on_terminal, print_json, print_tables, table
from dl2d.config.settings import DEFAULT_PATH, load_settings
from dl2d.core.cluster import Task
from dl2d.core.jobs import JobState
from dl2d.core.mode import Mode
from dl2d.core.registry import SiteStore

_DAY = 86_400.0
_WATCH_SECONDS = 1.0
_COLOURS = {
    JobState.SUBMITTED: "yellow",
    JobState.READY: "yellow",
    JobState.RUNNING: "green",
    JobState.FINISHED: "dim",
    JobState.FAILED: "red",
    JobState.CANCELLED: "magenta",
    JobState.LOST: "red",
}
#: What the modes in which dl2d is not in charge mean.
MODE_WORDS = {
    Mode.OBSERVE: "dl2d records what the scheduler in charge does; it starts and stops nothing",
    Mode.SHADOW: "dl2d decides, and compares with the scheduler in charge; it starts and stops nothing",
}
_HEADINGS = (
    "ID", "~NAME", "USER", "MODEL", "STATE", ">WORKERS", ">PS", ">EPOCH", ">STEPS/S", ">LOSS", ">AGE", "~WHY",
)  # fmt: skip


def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Only this job, with its tasks.")] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that ended within the last day.")] = False,
    newest: Annotated[bool, typer.Option("--newest", help="Newest first instead of submit order.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing, once a second, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Show jobs: allocation now and as decided, progress, and what each one waits for."""
    with reading(load_settings(config)) as store:

        def look() -> tuple[Sequence[JobLine], tuple[Task, ...]]:
            if job is None:
                lines = job_lines(store, ended_since=time.time() - _DAY if every else None)
                return (lines[::-1] if newest else lines), ()
            chosen = find_job(store, job)
            last = [] if chosen.state.ended else store.decisions(chosen.key, limit=1)
            return [JobLine(as_of_now(chosen), last[0].decided if last else None)], store.tasks(
                live=True, job=chosen.key
            )

        if as_json:
            lines, tasks = look()
            print_json(_as_json(store, lines, tasks, with_tasks=job is not None))
        elif watch and on_terminal():
            _watch(look)
        else:
            lines, tasks = look()
            if (mode := mode_of(store)) is not Mode.LIVE:
                typer.echo(f"mode {mode}: {MODE_WORDS[mode]}")
            if lines:
                print_tables(*_tables(lines, tasks, time.time()))
            else:
                typer.echo("no jobs" if every else "no job is waiting or running (--all: also those of the last day)")


def _watch(look: Callable[[], tuple[Sequence[JobLine], tuple[Task, ...]]]) -> None:
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        try:
            while True:
                lines, tasks = look()
                grid = Table.grid()
                for part in _tables(lines, tasks, time.time()):
                    grid.add_row(part)
                live.update(grid, refresh=True)
                time.sleep(_WATCH_SECONDS)
        except KeyboardInterrupt:
            return


def _tables(lines: Sequence[JobLine], tasks: Sequence[Task], now: float) -> list[Table]:
    parts = [table(_HEADINGS, (_row(line, now) for line in lines))]
    if tasks:
        rows = [(task.id, str(task.state), task.node, duration(now - task.since), task.note) for task in tasks]
        parts.append(table(("TASK", "STATE", "NODE", ">SINCE", "NOTE"), rows))
    return parts


def _row(line: JobLine, now: float) -> tuple[str | Text, ...]:
    job, progress, decided = line.job, line.job.progress, line.decided
    ended = job.state.ended
    return (
        job.key.id,
        job.request.name,
        job.owner.user,
        job.request.model,
        Text(str(job.state), style=_COLOURS[job.state]),
        "-" if ended else arrow(progress.workers, decided.allocation.workers if decided else None),
        "-" if ended else arrow(progress.ps, decided.allocation.ps if decided else None),
        f"{progress.epoch:.1f}/{job.request.epochs:g}{' h' if job.unreported else ''}",
        "-" if ended else number(progress.steps_per_second),
        number(progress.loss),
        duration((job.ended_at or now) - job.key.submitted),
        line.why,
    )


def arrow(now: int, decided: int | None) -> str:
    """A count, and the one that was decided where that differs: ``2>3``."""
    return str(now) if decided is None or decided == now else f"{now}>{decided}"


def mode_of(store: SiteStore) -> Mode:
    """The mode that the daemon is in, or was in last."""
    last = store.mode_changes(limit=1)
    return last[0].after if last else Mode.LIVE


def _as_json(
    store: SiteStore, lines: Sequence[JobLine], tasks: Sequence[Task], *, with_tasks: bool
) -> dict[str, object]:
    shown: dict[str, object] = {
        "at": time.time(),
        "slot": store.last_slot_number(),
        "mode": str(mode_of(store)),
        "jobs": [line.as_json() for line in lines],
    }
    if with_tasks:
        shown["tasks"] = [
            {"task": task.id, "role": str(task.role), "state": str(task.state), "node": task.node,
             "since": task.since, "note": task.note}
            for task in tasks
        ]  # fmt: skip
    return shown
