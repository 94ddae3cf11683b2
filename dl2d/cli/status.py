"""``dl2d status``: jobs with their allocation and progress, and the tasks of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Final

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dl2d.cli.canary_summary import canary_in_force, canary_json, canary_sentence
from dl2d.cli.daemon_health import daemon_health
from dl2d.cli.job_summary import JobLine, as_of_now, job_lines
from dl2d.cli.options import ConfigOption, JsonOption, find_job, reading
from dl2d.cli.output import (
    byte_size,
    console,
    duration,
    number,
    on_terminal,
    print_json,
    print_tables,
    print_text,
    table,
)
from dl2d.config.settings import DEFAULT_PATH, load_settings
from dl2d.core.cluster import Task
from dl2d.core.daemon_mode import Mode
from dl2d.core.jobs import JobKey, JobState
from dl2d.core.policy_registry import SiteStore
from dl2d.core.store import TaskReport

_DAY = 86_400.0
_WATCH_SECONDS = 1.0
#: Seconds to wait for the daemon's answer.
_ANSWER_SECONDS = 2.0
_COLOURS = {
    JobState.SUBMITTED: "yellow",
    JobState.READY: "yellow",
    JobState.RUNNING: "green",
    JobState.FINISHED: "dim",
    JobState.FAILED: "red",
    JobState.CANCELLED: "magenta",
    JobState.LOST: "red",
}
#: Explanation of the modes in which the policy does not decide on all jobs.
MODE_WORDS = {
    Mode.OBSERVE: "dl2d records what the site's scheduler does, and starts and stops no task",
    Mode.SHADOW: "dl2d records its decisions beside those of the site's scheduler, and starts and stops no task",
    Mode.CANARY: "the policy decides on some of the jobs, the fallback on the others",
}
_NO_JOBS: Final = "no job is waiting or running; --all also lists those that ended within the last day"
_NO_JOBS_OF_A_DAY: Final = "no job is waiting or running, and none ended within the last day"
_HEADINGS = (
    "ID", "~NAME", "USER", "MODEL", "STATE", ">WORKERS", ">PS", ">EPOCH", ">STEPS/S", ">LOSS", ">AGE", "~WHY",
)  # fmt: skip
#: Columns that a narrow terminal does without, the first one first.
_DISPENSABLE = ("MODEL", "LOSS", "STEPS/S", "USER", "AGE")
#: Jobs that are shown at most.
_MOST = 10_000
_TASK_HEADINGS = ("TASK", "STATE", "NODE", ">SINCE", ">CPU", ">MEMORY", ">GPU", ">STEP/P95 MS", "~NOTE")


def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Only this job, with its tasks.")] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that ended within the last day.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=_MOST, help="How many of the newest jobs to show.")
    ] = 1000,
    newest: Annotated[bool, typer.Option("--newest", help="Newest first instead of submit order.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing, once a second, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Show jobs: allocation now and as decided, progress, and what each one waits for."""
    settings = load_settings(config)
    health = daemon_health(settings, _ANSWER_SECONDS)
    if not as_json and (health.problems or health.waiting or not health.runs):
        print_text(f"daemon: {health.text.removeprefix('; ')}", err=True)
    with reading(settings) as store:
        left_out = 0

        def look() -> tuple[Sequence[JobLine], tuple[TaskLine, ...]]:
            nonlocal left_out
            if job is None:
                lines = job_lines(store, ended_since=time.time() - _DAY if every else None)
                left_out, lines = max(0, len(lines) - limit), lines[-limit:]
                return (lines[::-1] if newest else lines), ()
            chosen = find_job(store, job)
            last = [] if chosen.state.ended else store.decisions(chosen.key, limit=1)
            return [JobLine(as_of_now(chosen), last[0].decided if last else None)], task_lines(store, chosen.key)

        if as_json:
            lines, tasks = look()
            shown = _as_json(store, lines, tasks, with_tasks=job is not None)
            canary = canary_in_force(store, settings, mode_of(store))
            tried = None if canary is None else canary_json(*canary)
            print_json(shown | {"left_out": left_out, "daemon": health.as_json(), "canary": tried})
        elif watch and on_terminal():
            _watch(look)
        else:
            lines, tasks = look()
            if (mode := mode_of(store)) is not Mode.LIVE:
                typer.echo(f"mode {mode}: {MODE_WORDS[mode]}")
            if (canary := canary_in_force(store, settings, mode)) is not None:
                print_text(canary_sentence(*canary))
            if lines:
                print_tables(*_tables(lines, tasks, time.time()))
                if job is not None and lines[0].remark:
                    print_text(lines[0].remark)
            else:
                typer.echo(_NO_JOBS_OF_A_DAY if every else _NO_JOBS)
            if left_out:
                typer.echo(f"{left_out} older jobs are left out: --limit {left_out + limit} shows them, too")
            if every:
                typer.echo(f"store: {byte_size(store.size())}")


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task and the newest report of its coordinator on it."""

    id: str
    #: None where the resource manager has not listed the task of an observed job yet.
    task: Task | None
    report: TaskReport | None

    @property
    def remark(self) -> str:
        """Note of the daemon, reason of its end, slowdown."""
        report = self.report
        words = [self.task.note if self.task is not None else ""]
        if report is not None:
            words.append(report.how)
            if report.slowdown is not None:
                words.append(f"{report.slowdown:g} times slower: {report.slowdown_reason}")
        return "; ".join(word for word in words if word)

    def as_json(self) -> dict[str, object]:
        """What ``--json`` shows of it; memory in MiB."""
        task, report = self.task, self.report
        shown: dict[str, object] = {"task": self.id}
        if task is not None:
            shown |= {"role": str(task.role), "state": str(task.state), "node": task.node,
                      "since": task.since, "note": task.note}  # fmt: skip
        return {**shown, "report": None if report is None else asdict(report)}


def task_lines(store: SiteStore, key: JobKey) -> tuple[TaskLine, ...]:
    """The tasks that have not ended, and those that failed."""
    reports = {report.task: report for report in store.task_reports(key)}
    live = [TaskLine(task.id, task, reports.pop(task.id, None)) for task in store.tasks(live=True, job=key)]
    lost = {name: report for name, report in reports.items() if report.how}
    ended = {task.id: task for task in store.named_tasks(key, lost)}
    return (*live, *(TaskLine(name, ended.get(name), report) for name, report in lost.items()))


def _watch(look: Callable[[], tuple[Sequence[JobLine], tuple[TaskLine, ...]]]) -> None:
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


def _tables(lines: Sequence[JobLine], tasks: Sequence[TaskLine], now: float) -> list[Table]:
    parts = [table(_HEADINGS, (_row(line, now) for line in lines), dispensable=_DISPENSABLE)]
    if tasks:
        parts.append(table(_TASK_HEADINGS, (_task_row(line, now) for line in tasks)))
    return parts


def _task_row(line: TaskLine, now: float) -> tuple[str, ...]:
    task, report = line.task, line.report
    at_all = (line.id, str(task.state), task.node, duration(now - task.since)) if task else (line.id, "", "", "")
    if report is None:
        return (*at_all, "-", "-", "-", "-", line.remark)
    return (
        *at_all,
        "-" if report.cpu_percent is None else f"{report.cpu_percent:.0f}%",
        _size(report.memory_peak if report.memory is None else report.memory),
        "-" if report.gpu_percent is None else f"{report.gpus}x{report.gpu_percent:.0f}%",
        "-" if report.step_ms is None else f"{number(report.step_ms)}/{number(report.step_p95_ms)}",
        line.remark,
    )


def _size(mebibytes: float | None) -> str:
    if mebibytes is None:
        return "-"
    return f"{mebibytes:.0f}M" if mebibytes < 1024 else f"{mebibytes / 1024:.1f}G"


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
    store: SiteStore, lines: Sequence[JobLine], tasks: Sequence[TaskLine], *, with_tasks: bool
) -> dict[str, object]:
    shown: dict[str, object] = {
        "at": time.time(),
        "slot": store.last_slot_number(),
        "mode": str(mode_of(store)),
        "store_bytes": store.size(),
        "jobs": [line.as_json() for line in lines],
    }
    if with_tasks:
        shown["tasks"] = [line.as_json() for line in tasks]
    return shown
