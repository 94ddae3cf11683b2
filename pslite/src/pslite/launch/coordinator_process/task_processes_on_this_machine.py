"""Tasks of a job as processes of this machine: started, resized by a schedule, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pslite.job.job_status import Reply, Role, Status
from pslite.launch.gpus import VISIBLE, gpu_for_task, visible_gpus

#: how long members may take to end by themselves when the job is over, and tasks that have not joined by then
_END_SECONDS = 15.0
_NOT_JOINED_END_SECONDS = 2.0


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


class LocalTasks:
    """Membership source that starts workers and servers as processes of this machine.

    Where this process sees several GPUs, each worker sees one of them.

    Parameters
    ----------
    command
        the user's command.
    workers
        how many at the start.
    servers
        how many at the start; 0 for an all-reduce job.
    schedule
        changes, in the order of their versions.
    environ
        environment of the tasks.
    present
        tasks that are running already.

    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        workers: int,
        servers: int,
        schedule: Sequence[Resize] = (),
        environ: Mapping[str, str] | None = None,
        present: Collection[str] = (),
    ) -> None:
        self._command = ["--", *command]
        self._schedule = list(schedule)
        self._environ = dict(os.environ if environ is None else environ)
        self._architecture = "ps" if servers else "allreduce"
        self._counts: dict[Role, int] = {"ps": servers, "worker": workers}
        self._targets: dict[Role, list[str]] = {"ps": [], "worker": []}
        self._next: dict[Role, int] = {"ps": 0, "worker": 0}
        for task in sorted(present):
            role: Role = "ps" if task.startswith("ps") else "worker"
            self._targets[role].append(task)
            self._next[role] = max(self._next[role], int(task.rpartition("-")[2]) + 1)
        self._address = ""
        self._token = b""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._oldest = False
        gpus = visible_gpus(self._environ)
        self._gpus = gpus if len(gpus) > 1 else []
        #: which of them each worker has
        self._given: dict[str, str] = {}

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:  # noqa: ARG002
        """Start the first tasks."""
        self._address, self._token = address, token
        self._fit()

    @property
    def targets(self) -> frozenset[str]:
        """Tasks that should be members."""
        return frozenset(self._targets["worker"] + self._targets["ps"])

    def resize(self, change: Resize) -> None:
        """Change the sizes now, whatever the version is."""
        self._counts = {"ps": change.servers, "worker": change.workers}
        self._oldest = change.oldest
        self._fit()

    def replace(self, task: str) -> None:
        """Start a replacement of a task that has ended, as a scheduler would."""
        for role, have in self._targets.items():
            if task in have:
                have.remove(task)
                have.append(self._spawn(role))

    def _fit(self) -> None:
        for role, have in self._targets.items():
            while len(have) > self._counts[role]:
                have.pop(0 if self._oldest else -1)
            while len(have) < self._counts[role]:
                have.append(self._spawn(role))

    def _spawn(self, role: Role) -> str:
        task = f"{role}-{self._next[role]}"
        self._next[role] += 1
        environ = {
            "DL2_ARCHITECTURE": self._architecture,
            **self._environ,
            "DL2_ROLE": role,
            "DL2_TASK": task,
            "DL2_COORDINATOR": self._address,
            "DL2_TOKEN": self._token.hex(),
        }
        if role == "worker" and self._gpus:
            used = Counter[str]()
            for other, gpu in self._given.items():
                used[gpu] += 1000 * (self.processes[other].poll() is None)
            environ[VISIBLE] = self._given[task] = gpu_for_task(self._gpus, used)
        self.processes[task] = subprocess.Popen(
            [sys.executable, "-m", "pslite.run", *self._command], env=environ, start_new_session=True
        )
        return task

    def exchange(self, status: Status, *, urgent: bool) -> Reply:  # noqa: ARG002
        """Follow the schedule."""
        for process in self.processes.values():
            process.poll()
        while self._schedule and status.version >= self._schedule[0].at_version:
            if self._schedule[0].wait and not self._settled(status):
                break
            self.resize(self._schedule.pop(0))
        return Reply(members=self.targets, heartbeat_seconds=0.1)

    def schedule_done(self, status: Status) -> bool:
        """Whether the last change of size is complete."""
        return not self._schedule and self._settled(status)

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

    def close(self, status: Status) -> None:
        """Wait for the tasks to end, and kill those that do not."""
        # members know that the job is over; others would go on trying to join
        members = {member.task for member in status.members}
        began = time.monotonic()
        self._end(
            {task: began + (_END_SECONDS if task in members else _NOT_JOINED_END_SECONDS) for task in self.processes}
        )

    def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for the processes to end, then kill their process groups."""
        self._end(dict.fromkeys(self.processes, time.monotonic() + seconds))

    def _end(self, deadlines: Mapping[str, float]) -> None:
        for task, process in self.processes.items():
            try:
                process.wait(max(0.0, deadlines[task] - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal to every task's dl2-run."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def exit_codes(self) -> dict[str, int | None]:
        """Return how dl2-run ended, for each task; negative for a signal."""
        return {task: process.poll() for task, process in self.processes.items()}
