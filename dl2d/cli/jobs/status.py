"""``dl2d status``: jobs with their allocation and progress, and the tasks of one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich import filesize
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dl2d.cli.canary_summary import canary_json, canary_sentence, newest_canary
from dl2d.cli.daemon_access.job_views_from_store_or_api import job_source
from dl2d.cli.daemon_access.read_daemon_health import DaemonHealth
from dl2d.cli.jobs.reason_and_remarks_of_job import (
    as_of_now,
    job_json,
    remark_on,
    remark_on_silence,
    remark_on_tasks,
    why_of,
)
from dl2d.cli.output import (
    console,
    duration,
    number,
    on_terminal,
    print_json,
    print_tables,
    print_text,
    table,
)
from dl2d.cli.shared_options import ConfigOption, JsonOption, option
from dl2d.config.settings import DEFAULT_PATH
from dl2d.core.cluster import Task
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Constraint
from dl2d.core.job_views import MAX_LISTED, JobStatus, StatusView, TaskStatus
from dl2d.core.jobs import JobKey, JobState
from pslite.job.printable_text import printable

_DAY = 86_400.0
#: Seconds between two looks at the store, or at what the daemon's job API shows.
_WATCH_SECONDS, _WATCH_API_SECONDS = 1.0, 5.0
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
_NO_JOBS = "no job is waiting or running; --all also lists those that ended within the last day"
_NO_JOBS_OF_A_DAY = "no job is waiting or running, and none ended within the last day"
_HEADINGS = (
    "ID", "~NAME", "USER", "MODEL", "STATE", ">WORKERS", ">PS", ">EPOCH", ">STEPS/S", ">LOSS", ">AGE", "~WHY",
)  # fmt: skip
#: Columns that a narrow terminal does without, the first one first.
_DISPENSABLE = ("MODEL", "LOSS", "STEPS/S", "USER", "AGE")
_TASK_HEADINGS = ("TASK", "STATE", "NODE", ">SINCE", ">CPU", ">MEMORY", ">GPU", ">STEP/P95 MS", "~NOTE")


def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Only this job, with its tasks.")] = None,
    every: Annotated[bool, option("Also jobs that ended within the last day.", "--all", "-a")] = False,
    limit: Annotated[
        int, option("How many of the newest jobs to show.", "--limit", "-n", min=1, max=MAX_LISTED)
    ] = 1000,
    newest: Annotated[bool, option("Newest first instead of submit order.", "--newest")] = False,
    watch: Annotated[
        bool,
        option("Keep showing, once a second (every 5 s through the job API), until Ctrl-C.", "--watch", "-w"),
    ] = False,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Show jobs: allocation now and as decided, progress, and what each one waits for.

    The first line says how the daemon is: its last good tick, the age of its listing of the cluster, what is wrong, and
    its last error. It is written to the error output.
    """

    def tell_health(health: DaemonHealth) -> None:
        if not as_json:
            print_text(_health_line(health), err=True)

    with job_source(config, on_failure=tell_health) as source:

        def look() -> StatusView:
            return source.views.status(job, ended_since=time.time() - _DAY if every else None, limit=limit)

        if watch and on_terminal() and not as_json:
            _watch(look, source.health, _WATCH_SECONDS if source.site else _WATCH_API_SECONDS, newest=newest)
            return
        health = source.health()
        tell_health(health)
        seen = look()
        canary = None
        if source.site is not None and seen.mode is Mode.CANARY:
            settings, store = source.site
            canary = newest_canary(store, settings)
        if as_json:
            tried = None if canary is None else canary_json(*canary)
            shown = _as_json(seen, newest=newest, with_tasks=job is not None)
            print_json(shown | {"left_out": seen.left_out, "daemon": health.as_json(), "canary": tried})
            return
        if seen.mode is not Mode.LIVE:
            typer.echo(f"mode {seen.mode}: {MODE_WORDS[seen.mode]}")
        if canary is not None:
            print_text(canary_sentence(*canary))
        lines = _lines(seen, newest=newest)
        if lines:
            print_tables(*_tables(lines, seen, time.time()))
            if job is not None:
                of_tasks = remark_on_tasks(line.task for line in seen.tasks if line.task is not None)
                for remark in filter(None, (remark_on(lines[0].job), of_tasks)):
                    print_text(remark)
        else:
            typer.echo(_NO_JOBS_OF_A_DAY if every else _NO_JOBS)
        if seen.left_out:
            typer.echo(f"{seen.left_out} older jobs are left out: --limit {seen.left_out + limit} shows them, too")
        if every:
            typer.echo(f"store: {filesize.decimal(seen.store_bytes)}")


def _task_remark(line: TaskStatus) -> str:
    """Note of the daemon, reason of its end, slowdown."""
    report = line.report
    words = [line.task.note if line.task is not None else ""]
    if report is not None:
        words.append(report.how)
        if report.slowdown is not None:
            words.append(f"{report.slowdown:g} times slower: {report.slowdown_reason}")
    return "; ".join(word for word in words if word)


def _task_json(line: TaskStatus) -> dict[str, object]:
    """A task for ``--json``; memory in MiB."""
    task, report = line.task, line.report
    shown: dict[str, object] = {"task": line.id}
    if task is not None:
        shown |= {"role": task.role, "state": task.state, "node": task.node,
                  "since": task.since, "note": task.note}  # fmt: skip
    return {**shown, "report": report}


def _lines(seen: StatusView, *, newest: bool) -> tuple[JobStatus, ...]:
    lines = tuple(each._replace(job=as_of_now(each.job)) for each in seen.jobs)
    return lines[::-1] if newest else lines


def _health_line(health: DaemonHealth) -> str:
    return f"daemon: {health.text.removeprefix('; ')}"


def _watch(look: Callable[[], StatusView], health: Callable[[], DaemonHealth], seconds: float, *, newest: bool) -> None:
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        try:
            while True:
                seen = look()
                grid = Table.grid()
                grid.add_row(Text(printable(_health_line(health()))))
                for part in _tables(_lines(seen, newest=newest), seen, time.time()):
                    grid.add_row(part)
                live.update(grid, refresh=True)
                time.sleep(seconds)
        except KeyboardInterrupt:
            return


def _tables(lines: Sequence[JobStatus], seen: StatusView, now: float) -> list[Table]:
    suspended = _suspended_remarks(seen)
    rows = (_row(line, now, suspended.get(line.job.key, "")) for line in lines)
    parts = [table(_HEADINGS, rows, dispensable=_DISPENSABLE)]
    if seen.tasks:
        parts.append(table(_TASK_HEADINGS, (_task_row(line, now) for line in seen.tasks)))
    return parts


def _suspended_remarks(seen: StatusView) -> dict[JobKey, str]:
    """Remark on tasks that do not execute, by job."""
    of_job: dict[JobKey, list[Task]] = defaultdict(list)
    for task in seen.tasks_of_suspended:
        of_job[task.job].append(task)
    return {key: remark_on_tasks(tasks) for key, tasks in of_job.items()}


def _task_row(line: TaskStatus, now: float) -> tuple[str, ...]:
    task, report = line.task, line.report
    at_all = (line.id, task.state, task.node or "-", duration(now - task.since)) if task else (line.id, "", "", "")
    if report is None:
        return (*at_all, "-", "-", "-", "-", _task_remark(line))
    return (
        *at_all,
        "-" if report.cpu_percent is None else f"{report.cpu_percent:.0f}%",
        _size(report.memory_peak if report.memory is None else report.memory),
        "-" if report.gpu_percent is None else f"{report.gpus}x{report.gpu_percent:.0f}%",
        "-" if report.step_ms is None else f"{number(report.step_ms)}/{number(report.step_p95_ms)}",
        _task_remark(line),
    )


def _size(mebibytes: float | None) -> str:
    if mebibytes is None:
        return "-"
    return f"{mebibytes:.0f}M" if mebibytes < 1024 else f"{mebibytes / 1024:.1f}G"


def _row(line: JobStatus, now: float, suspended: str) -> tuple[str | Text, ...]:
    job, progress, decided = line.job, line.job.progress, line.decided
    ended = job.state.ended
    is_said = decided is not None and decided.binding_reason.constraint is Constraint.SILENT
    silent = "" if is_said else remark_on_silence(job, now)
    return (
        job.key.id,
        job.request.name,
        job.owner.user,
        job.request.model,
        Text(str(job.state), style=_COLOURS[job.state]),
        "-" if ended else arrow(progress.workers, decided.allocation.workers if decided else None),
        "-" if ended else arrow(progress.ps, decided.allocation.ps if decided else None),
        f"{progress.epoch:.1f}/{f'{number(job.request.epochs)} h' if job.unreported else f'{job.request.epochs:g}'}",
        "-" if ended else number(progress.steps_per_second),
        number(progress.loss),
        duration((job.ended_at or now) - job.key.submitted),
        "; ".join(filter(None, (silent, suspended, why_of(line)))),
    )


def arrow(now: int, decided: int | None) -> str:
    """A count, and the one that was decided where that differs: ``2>3``."""
    return str(now) if decided is None or decided == now else f"{now}>{decided}"


def _as_json(seen: StatusView, *, newest: bool, with_tasks: bool) -> dict[str, object]:
    suspended = _suspended_remarks(seen)
    shown: dict[str, object] = {
        "at": time.time(),
        "slot": seen.slot,
        "mode": seen.mode,
        "store_bytes": seen.store_bytes,
        "jobs": [
            job_json(line) | {"suspended": suspended.get(line.job.key) or None} for line in _lines(seen, newest=newest)
        ],
    }
    if with_tasks:
        shown["tasks"] = [_task_json(line) for line in seen.tasks]
    return shown
