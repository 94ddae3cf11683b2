"""Tasks of a job as processes of this machine: started and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from pslite.job.job_status import Reply, Role, Status
from pslite.launch.gpus import VISIBLE, visible_gpus

#: how long members may take to end by themselves when the job is over, and tasks that have not joined by then
_END_SECONDS = 15.0
_NOT_JOINED_END_SECONDS = 2.0


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
        environ: Mapping[str, str] | None = None,
        present: Collection[str] = (),
    ) -> None:
        self._command = ["--", *command]
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
        gpus = visible_gpus(self._environ)
        self._gpus = gpus if len(gpus) > 1 else []
        #: which of them each worker has
        self._given: dict[str, str] = {}

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:  # noqa: ARG002
        """Start the first tasks."""
        self._address, self._token = address, token
        self._start_missing()

    @property
    def targets(self) -> frozenset[str]:
        """Tasks that should be members."""
        return frozenset(self._targets["worker"] + self._targets["ps"])

    def _start_missing(self) -> None:
        for role, have in self._targets.items():
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
            running = [gpu for other, gpu in self._given.items() if self.processes[other].poll() is None]
            environ[VISIBLE] = self._given[task] = min(self._gpus, key=running.count)
        self.processes[task] = subprocess.Popen(
            [sys.executable, "-m", "pslite.run", *self._command], env=environ, start_new_session=True
        )
        return task

    def exchange(self, status: Status, *, urgent: bool) -> Reply:  # noqa: ARG002
        """Keep the tasks as they are."""
        for process in self.processes.values():
            process.poll()
        return Reply(members=self.targets, heartbeat_seconds=0.1)

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
