"""Follow a job until it ends: a progress bar on a terminal, a line per change elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dl2d.cli.output import console, number, on_terminal, print_text
from dl2d.core.errors import Dl2dError
from dl2d.core.jobs import Job, JobKey

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore

_POLL_SECONDS = 0.5


def follow(store: SqlStore, key: JobKey, *, quiet: bool) -> Job:
    """Wait until a job has ended and return it; ``quiet`` prints nothing meanwhile.

    Raises
    ------
    Dl2dError
        The job is not in the store.
    """
    if quiet or not on_terminal():
        return _by_lines(store, key, quiet=quiet)
    columns = (
        TextColumn("[bold]{task.fields[name]}"), TextColumn("{task.fields[state]}"), BarColumn(),
        TextColumn("epoch {task.completed:.1f}/{task.total:g}"), TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console(), transient=True) as progress:
        job = _look(store, key)
        bar = progress.add_task("", total=job.request.epochs, name=job.request.name, state=str(job.state), detail="")
        while not job.state.ended:
            progress.update(bar, completed=job.progress.epoch, state=str(job.state), detail=_detail(job))
            time.sleep(_POLL_SECONDS)
            job = _look(store, key)
    return job


def _by_lines(store: SqlStore, key: JobKey, *, quiet: bool) -> Job:
    told: tuple[object, ...] = ()
    while True:
        job = _look(store, key)
        now = (job.state, job.progress.workers, job.progress.ps, int(10 * job.progress.epoch / job.request.epochs))
        if now != told and not quiet and not job.state.ended:
            print_text(f"{job.state}, epoch {job.progress.epoch:.1f}/{job.request.epochs:g}, {_detail(job)}")
        told = now
        if job.state.ended:
            return job
        time.sleep(_POLL_SECONDS)


def _look(store: SqlStore, key: JobKey) -> Job:
    job = store.job(key)
    if job is None:
        raise Dl2dError(f"job {key.slug} was removed from the store")
    return job


def _detail(job: Job) -> str:
    progress = job.progress
    return f"{progress.workers}w+{progress.ps}ps, {number(progress.steps_per_second)} steps/s"
