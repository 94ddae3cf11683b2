"""For tests, benchmarks and demonstrations: a whole elastic job on this machine, as real processes, in one call."""

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
from pslite.launch.coordinator_process.task_processes_on_this_machine import LocalTasks, Resize
from pslite.launch.environment_parsing import encryption_of
from pslite.net.authentication import TOKEN_BYTES

__all__ = ["LocalResult", "Resize", "pace", "run_local"]

_PACE = "PSLITE_PACE_FILE"
#: of jobs whose processes may be starved: newcomers and dl2-run's word on how a process ended are waited for
_SETTINGS = Settings(grace=60.0, start=60.0, verdict=6.0, balance="even")
#: of `pace`, in seconds: one pause at the most, and between two looks at whether it is over
_MAX_PAUSE, _LOOK = 5.0, 0.05


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


#: what a test does to a job; True says that it has not done it yet
Hook = Callable[[Status, LocalTasks], bool | None]


class _Limited(LocalTasks):
    """A local director that gives up after a time limit, and says when nothing more is going to be done to the job."""

    def __init__(self, *args: Any, deadline: float, gate: Path, hook: Hook | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline = deadline
        #: is there while the schedule, or the hook, still has something to do
        self._gate = gate
        self._hook = hook
        self._scheduled = False

    def exchange(self, status: Status, *, urgent: bool) -> Reply:
        reply = super().exchange(status, urgent=urgent)
        self._scheduled = self._scheduled or self.schedule_done(status)
        pending = self._hook is not None and self._hook(status, self)
        if self._scheduled and not pending:
            self._gate.unlink(missing_ok=True)
        return Reply(members=reply.members, stop=time.monotonic() > self._deadline)


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
        director = _Limited(
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
