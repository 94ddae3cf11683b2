"""Plays the script on a site: submits each act in its turn, starts the static runs, and shows how it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from dl2d.cli.demo.reference import References
from dl2d.cli.demo.script import Act, Script
from dl2d.cli.demo.site import DemoFailed, Site
from dl2d.cli.job_lines import JobLine, job_lines
from dl2d.cli.output import number, table
from dl2d.cli.status import arrow
from dl2d.core.jobs import Job, JobKey, JobState

_LOOK_SECONDS = 0.25
#: Longer than any machine that can run it needs; a demo that hangs is ended and says so.
_LIMIT_SECONDS = 900.0
#: Part of its epochs after which a job does not wait for another one's rest any more: they must overlap.
_LATE = 0.4
#: Plain lines are written when something changed, and at least this often.
_LINE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Played:
    """An act that has ended."""

    act: Act
    job: Job
    #: When it was submitted, seconds since 1970.
    arrived: float


class Stage:
    """Plays once. ``say`` takes lines for people, ``console`` is where the live table goes, if it is a terminal."""

    def __init__(
        self, site: Site, references: References, script: Script, *, console: Console, say: Callable[[str], None]
    ) -> None:
        self._site = site
        self._references = references
        self._script = script
        self._console = console
        self._say = say
        self._arrived: list[tuple[Act, JobKey, float]] = []
        self._settled_since: float | None = None
        self.began = time.time()

    def play(self) -> tuple[Played, ...]:
        """Return when all jobs and static runs have ended.

        Raises
        ------
        DemoFailed
            The daemon ended, or it all takes too long.
        """
        show = _Table(self._console) if self._console.is_terminal else _Lines(self._say)
        with show:
            while True:
                self._site.check()
                now = time.time()
                lines = {line.job.key: line for line in job_lines(self._site.store, ended_since=0.0)}
                self._enter(lines, now)
                jobs = [lines[key] for _, key, _ in self._arrived if key in lines]
                self._compare(jobs)
                show.update(self._headline(jobs, now), jobs, now - self.began)
                ended = sum(line.job.state.ended for line in jobs)
                if ended == len(self._script.acts) and not self._references.running:
                    break
                if now - self.began > _LIMIT_SECONDS:
                    raise DemoFailed(f"not all jobs ended within {_LIMIT_SECONDS:g} s:\n{self._site.said()}")
                time.sleep(_LOOK_SECONDS)
        return tuple(Played(act, self._site.job(key), arrived) for act, key, arrived in self._arrived)

    def _enter(self, lines: dict[JobKey, JobLine], now: float) -> None:
        """Submit the next act when the last one has got what was decided for it, or has waited long enough."""
        if len(self._arrived) == len(self._script.acts):
            return
        if self._arrived:
            _, key, arrived = self._arrived[-1]
            waited = now - arrived
            line = lines.get(key)
            late = any(each.job.progress.epoch > _LATE * each.job.request.epochs for each in lines.values())
            if line is None or not _settled(line):
                self._settled_since = None
            elif self._settled_since is None:
                self._settled_since = now
            rested = self._settled_since is not None and now - self._settled_since >= self._script.rest
            ready = waited >= self._script.gap and rested
            if not (ready or late or waited >= self._script.longest_gap):
                return
        act = self._script.acts[len(self._arrived)]
        key = self._site.submit(act)
        self._settled_since = None
        self._arrived.append((act, key, now))
        self._say(f"{now - self.began:6.1f} s  job {key.id} ({act.name}) submitted: {' '.join(act.command()[2:])}")

    def _compare(self, jobs: list[JobLine]) -> None:
        """Start static runs one after another once all jobs train, so that they hold nobody up."""
        begun = [line for line in jobs if line.job.state is JobState.RUNNING or line.job.state.ended]
        if len(begun) < len(self._script.acts) or self._references.running:
            return
        for act in self._script.acts:
            if self._references.start(act):
                return

    def _headline(self, jobs: list[JobLine], now: float) -> str:
        waiting = len(self._script.acts) - len(self._arrived)
        parts = [f"{now - self.began:5.1f} s", f"{sum(line.job.state.ended for line in jobs)} ended"]
        if waiting:
            parts.append(f"{waiting} still to come")
        if self._references.running:
            parts.append(f"static run of {', '.join(self._references.running)} to compare with")
        return ", ".join(parts)


def _settled(line: JobLine) -> bool:
    progress, decided = line.job.progress, line.decided
    return (
        line.job.state is JobState.RUNNING
        and decided is not None
        and (progress.workers, progress.ps) == decided.allocation
    )


class _Table:
    """A live table."""

    _HEADINGS = (
        "JOB", "STATE", ">WORKERS", ">PS", ">EPOCH", "", ">STEPS/S", ">LOSS", "~WHY NOT MORE",
    )  # fmt: skip

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, headline: str, jobs: list[JobLine], _seconds: float) -> None:
        parts: list[RenderableType] = [
            Text(headline, style="bold"),
            table(self._HEADINGS, map(self._row, jobs)),
        ]
        self._live.update(Group(*parts), refresh=True)

    @staticmethod
    def _row(line: JobLine) -> tuple[str | Text, ...]:
        job, progress = line.job, line.job.progress
        part = min(1.0, progress.epoch / job.request.epochs)
        bar = "━" * round(10 * part)
        return (
            job.request.name,
            Text(str(job.state), style="green" if job.state is JobState.RUNNING else ""),
            *_counts(line),
            f"{progress.epoch:.1f}/{job.request.epochs:g}",
            Text(f"{bar:10}", style="cyan"),
            number(progress.steps_per_second) if not job.state.ended else "-",
            number(progress.loss),
            line.why,
        )


class _Lines:
    """A line for each job that changed, for logs."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: dict[JobKey, tuple[object, ...]] = {}
        self._last = 0.0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, _headline: str, jobs: list[JobLine], seconds: float) -> None:
        periodic = seconds - self._last >= _LINE_SECONDS
        if periodic:
            self._last = seconds
        for line in jobs:
            job, progress = line.job, line.job.progress
            now = (job.state, *_counts(line))
            if now == self._told.get(job.key) and not (periodic and not job.state.ended):
                continue
            self._told[job.key] = now
            workers, servers = _counts(line)
            detail = f"{number(progress.steps_per_second):>5} steps/s" if not job.state.ended else job.end_reason
            self._say(
                f"{seconds:6.1f} s  {job.request.name:8} {job.state:9} {workers:>4} workers {servers:>4} PSs  "
                f"epoch {progress.epoch:4.1f}/{job.request.epochs:<3g} loss {number(progress.loss):7} {detail}"
            )


def _counts(line: JobLine) -> tuple[str, str]:
    job, decided = line.job, line.decided
    if job.state.ended:
        return "-", "-"
    return (
        arrow(job.progress.workers, decided.allocation.workers if decided else None),
        arrow(job.progress.ps, decided.allocation.ps if decided else None),
    )
