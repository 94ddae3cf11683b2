"""A whole elastic job on this machine, as real processes that are resized by a schedule, in one call."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pslite.coordinator import Coordinator, Settings
from pslite.job.job_status import PlanReport, Reply, Status
from pslite.launch.environment_parsing import encryption_of
from pslite.launch.local_tasks import LocalTasks
from pslite.net.authentication import TOKEN_BYTES

_PACE = "PSLITE_PACE_FILE"
#: of jobs whose processes may be starved: newcomers and dl2-run's word on how a process ended are waited for
_SETTINGS = Settings(grace=60.0, start=60.0, verdict=6.0, balance="even")
#: of `pace`, in seconds: one pause at the most, and between two looks at whether it is over
_MAX_PAUSE, _LOOK = 5.0, 0.05


@dataclass(frozen=True)
class Resize:
    """A change of size, due at a version of the job.

    With `wait` the previous change must be complete first; without, it may be requested while that is in progress.
    """

    at_version: int
    workers: int
    servers: int
    wait: bool = True
    #: the tasks to remove are the oldest instead of the newest
    oldest: bool = False


@dataclass(frozen=True)
class LocalResult:
    """How a local job went."""

    state: str
    reason: str | None
    digest: str | None
    versions: int
    plans: tuple[PlanReport, ...]
    #: one value for each worker and each plan it went through
    suspensions_ms: tuple[float, ...]
    #: exit status of dl2-run for each task
    exit_codes: dict[str, int | None]
    #: what the coordinator said
    log: tuple[str, ...] = field(default=(), repr=False)


class ResizedTasks(LocalTasks):
    """Local tasks whose numbers follow a schedule; the job is cancelled after a time limit.

    The file `gate` is there while the schedule, or the hook, still has something to do.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        schedule: Sequence[Resize],
        deadline: float,
        gate: Path,
        hook: Hook | None,
        **options: Any,
    ) -> None:
        super().__init__(command, **options)
        self._schedule = list(schedule)
        self._deadline = deadline
        self._gate = gate
        self._hook = hook
        self._scheduled = False

    def resize(self, change: Resize) -> None:
        """Change the sizes now, whatever the version is."""
        self._counts = {"ps": change.servers, "worker": change.workers}
        for role, have in self._targets.items():
            while len(have) > self._counts[role]:
                have.pop(0 if change.oldest else -1)
        self._start_missing()

    def replace(self, task: str) -> None:
        """Start a replacement of a task that has ended, as a scheduler would."""
        for role, have in self._targets.items():
            if task in have:
                have.remove(task)
                have.append(self._spawn(role))

    def exchange(self, status: Status, *, urgent: bool) -> Reply:
        """Follow the schedule."""
        super().exchange(status, urgent=urgent)  # notes which processes have ended
        while self._schedule and status.version >= self._schedule[0].at_version:
            if self._schedule[0].wait and not self._settled(status):
                break
            self.resize(self._schedule.pop(0))
        members = self.targets
        self._scheduled = self._scheduled or (not self._schedule and self._settled(status))
        pending = self._hook is not None and self._hook(status, self)
        if self._scheduled and not pending:
            self._gate.unlink(missing_ok=True)
        return Reply(members=members, stop=time.monotonic() > self._deadline)

    def _settled(self, status: Status) -> bool:
        gone = {m.task for m in status.members if m.state == "left"}
        wanted = {role: set(tasks) - gone for role, tasks in self._targets.items()}
        active = {m.task for m in status.members if m.state == "active"}
        reported = status.plans[-1] if status.plans else None
        return (
            active == wanted["worker"] | wanted["ps"]
            and not any(m.state == "draining" for m in status.members)
            and reported is not None
            and (reported.workers, reported.servers) == (len(wanted["worker"]), len(wanted["ps"]))
        )

    def exit_codes(self) -> dict[str, int | None]:
        """Return how dl2-run ended, for each task; negative for a signal."""
        return {task: process.poll() for task, process in self.processes.items()}


#: what a test does to a job; True says that it has not done it yet
Hook = Callable[[Status, ResizedTasks], bool | None]


def run_local(
    command: Sequence[str],
    *,
    workers: int = 1,
    servers: int = 1,
    schedule: Sequence[Resize] = (),
    timeout: float = 240.0,
    environ: Mapping[str, str] | None = None,
    settings: Settings | None = None,
    on_status: Hook | None = None,
    say: Callable[[str], None] | None = None,
    paced: bool = True,
) -> LocalResult:
    """Run a job on this machine and resize it by a schedule.

    Parameters
    ----------
    command
        the user's command, such as [sys.executable, "train.py"].
    workers
        how many at the start.
    servers
        how many at the start; 0 for an all-reduce job.
    schedule
        changes of size.
    timeout
        seconds after which the job is cancelled.
    environ
        environment of the tasks; this process's if None.
    settings
        times of the coordinator; work is divided evenly unless they say otherwise.
    on_status
        called about ten times a second with the status and the director (whose `processes` can be killed, say). While
        it returns True it still has something to do, and a worker that calls `pace` does not end before.
    say
        takes the coordinator's lines as they come.
    paced
        whether `pace` holds workers up while there is something to do; without, a job may end before that.

    """
    log: list[str] = []
    environ = os.environ if environ is None else environ

    def note(text: str) -> None:
        log.append(text)
        if say is not None:
            say(text)

    with tempfile.TemporaryDirectory(prefix="pslite-") as folder:
        gate = Path(folder, "schedule-is-running")
        if paced and (schedule or on_status is not None):
            gate.touch()
        director = ResizedTasks(
            command,
            workers=workers,
            servers=servers,
            schedule=schedule,
            environ={**environ, _PACE: str(gate)},
            deadline=time.monotonic() + timeout,
            gate=gate,
            hook=on_status,
        )
        coordinator = Coordinator(
            job="local",
            token=secrets.token_bytes(TOKEN_BYTES),
            director=director,
            say=note,
            settings=settings or _SETTINGS,
            host="127.0.0.1",
            encrypt=encryption_of(environ),
        )
        try:
            status = coordinator.run()
        finally:
            director.stop(0.0)
    return LocalResult(
        state=status.state,
        reason=status.reason,
        digest=status.result.digest if status.result else None,
        versions=status.version,
        plans=tuple(status.plans),
        suspensions_ms=tuple(coordinator.state.suspensions),
        exit_codes=director.exit_codes(),
        log=tuple(log),
    )


def pace(version: int, total: int) -> None:
    """Call it in the loop of a test's worker: slows a job down while something is still to be done to it.

    That is, its schedule of resizes is not complete, or `on_status` says that it is not done.

    The pause grows towards the last version, so that a job does not end before on a machine on which a newcomer takes
    half a minute to start; it is over as soon as all is done.
    """
    path = os.environ.get(_PACE)
    left = max(1, total - version)
    until = time.monotonic() + min(_MAX_PAUSE, max(0.01 * (total / left) ** 2, 60.0 / (left * (left + 1))))
    while path and Path(path).exists() and (rest := until - time.monotonic()) > 0:
        time.sleep(min(rest, _LOOK))
