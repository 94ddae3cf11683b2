"""Container agent: runs, in a container of a job, the tasks that the daemon assigns to it, one after the other.

A resource manager such as YARN starts containers of a role, not tasks. The agent reports to the daemon, whose
answers say which task the container runs and when it is to end. A container without a task waits.

The containers of a service that its user posted have no credential: they register with the secret in the description of
the service, and their tasks run dl2-run's own command in the container's own folder and environment. Where the
scheduler only observes, the whole job runs in the coordinator's container.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import psutil

from pslite.errors import UsageError
from pslite.job.environment_passed_to_tasks import NODE_VARIABLES
from pslite.job.job_status import TERMINATED
from pslite.launch.daemon_connection.daemon_http import UID_VARIABLE, error_text, fetch
from pslite.launch.daemon_connection.job_registration import Registration, register
from pslite.launch.environment_parsing import DURABILITY_VARIABLE, PROGRESS_VARIABLE, need
from pslite.launch.signal_forwarding import ENDING, handled
from pslite.launch.task_process.resource_usage import family, kill
from pslite.net.tls import VARIABLE

_INSTANCE = re.compile(r"(coordinator|worker|ps)-([0-9]{1,6})")
#: variables with options of dl2-run, and the daemon's account, which hold for its tasks too
_RUN_OPTIONS = frozenset({"DL2_BALANCE", "DL2_QUIET", DURABILITY_VARIABLE, PROGRESS_VARIABLE, UID_VARIABLE, VARIABLE})
_REPORT_SECONDS = 3.0
_HTTP_SECONDS = 10.0
#: how long the end of the job's own process is reported until the daemon answers
_FINAL_REPORT_SECONDS = 30.0
#: how long processes that a task leaves behind have to end after SIGTERM, and how long SIGKILL is repeated
_TERMINATE_SECONDS, KILL_SECONDS = 2.0, 30.0
#: HTTP statuses of a scheduler that does not know the job, its credential or its resource manager, and the time of only
#: such answers after which a container without a task ends: the administrator may be restoring the daemon's files
_REFUSAL_STATUSES, REFUSED_SECONDS = frozenset({401, 403, 404, 409}), 900.0
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class ContainerEnvironment:
    """A container's place in its job, and how it reaches the daemon."""

    daemon: str
    #: name of the job in the daemon's URLs, and its credential; empty where the container has to register
    job: str
    credential: str = field(repr=False)
    #: secret of the service, to register with
    proof: str = field(repr=False)
    role: str
    position: int
    container: str
    node: str


def container_environment(environ: Mapping[str, str]) -> ContainerEnvironment:
    """Read DL2_DAEMON, DL2_INSTANCE, DL2_JOB with DL2_CREDENTIAL or else DL2_PROOF, and YARN's own variables.

    Raises
    ------
    UsageError
        one is missing or malformed.

    """
    instance = _INSTANCE.fullmatch(need(environ, "DL2_INSTANCE"))
    if instance is None:
        raise UsageError(f"DL2_INSTANCE is {environ['DL2_INSTANCE']!r}: it must be a role and a number, as in worker-0")
    daemon = need(environ, "DL2_DAEMON")
    if not daemon.startswith(("http://", "https://")):
        raise UsageError(f"DL2_DAEMON is {daemon!r}: it must be an http:// or https:// URL")
    node = ":".join(part for part in (environ.get("NM_HOST"), environ.get("NM_PORT")) if part)
    job = environ.get("DL2_JOB", "")
    return ContainerEnvironment(
        daemon=daemon.rstrip("/"),
        job=job,
        credential=need(environ, "DL2_CREDENTIAL") if job else "",
        proof="" if job else need(environ, "DL2_PROOF"),
        role=instance[1],
        position=int(instance[2]),
        container=need(environ, "CONTAINER_ID"),
        node=node,
    )


class _Task(msgspec.Struct):
    id: str
    argv: list[str]
    cwd: str
    env: dict[str, str]


class _Order(msgspec.Struct):
    report_seconds: float
    task: _Task | None = None
    grace: float | None = None
    #: Whether the task that runs is to be started again: it has not joined its job, and its coordinator has moved.
    again: bool = False


class ContainerAgent:
    """Runs the tasks that the daemon assigns in its answers to the container's reports.

    Parameters
    ----------
    place
        the container's place in its job.
    environ
        its environment.
    command
        the user's command, which the tasks of a container that registers run.
    run_job
        runs the whole job in this container, where the daemon only observes, with this environment; returns the exit
        status.
    say
        takes lines for the user.

    """

    def __init__(
        self,
        place: ContainerEnvironment,
        environ: Mapping[str, str],
        command: Sequence[str] = (),
        *,
        run_job: Callable[[Registration, Mapping[str, str]], int],
        say: Callable[[str], None],
    ) -> None:
        self._place = place
        self._run_job = run_job
        self._command = list(command)
        #: Command of all tasks, where the container registers, and what the daemon's environment is added to.
        self._task_command: list[str] | None = None
        self._task_environment = {name: value for name, value in environ.items() if name.startswith(NODE_VARIABLES)}
        if not place.job:
            self._task_command = [sys.executable, "-m", "pslite.run", "--", *command]
            self._task_environment = {
                name: value for name, value in environ.items() if not name.startswith("DL2_") or name in _RUN_OPTIONS
            }
            # the programs of a packed environment are found by their names
            own_programs = str(Path(sys.executable).parent.absolute())
            self._task_environment["PATH"] = os.pathsep.join((own_programs, self._task_environment.get("PATH", "")))
        self._say = say
        self._incarnation = uuid.uuid4().hex
        self._interval = _REPORT_SECONDS
        self._ending = False
        #: Address of the coordinator with which the task was started, and whether it is to be started again.
        self._coordinator = ""
        self._restart = False
        #: Since when all answers of the daemon have been refusals, and the last one.
        self._refused_since: float | None = None
        self._refusal = ""

    def run(self) -> int:
        """Run tasks until the container is asked to end, or one if it is the coordinator's; returns the exit status.

        Raises
        ------
        UsageError
            the daemon does not take the job that the container belongs to, or has not known it for a long time.

        """
        _become_subreaper()
        if not self._place.job:
            registration = self._register()
            if registration.static:
                return self._run_job(registration, {**self._task_environment, "DL2_DAEMON": self._place.daemon})
        with handled(self._note_ending, ENDING):
            #: Task that has ended and whose end the daemon has not answered yet, and its exit status.
            ended, status = "", None
            while not self._ending:
                order = self._report(ended, status)
                if order is not None:
                    ended, status = "", None
                if order is None or order.task is None:
                    self._check_refusals()
                    _reap()  # processes that were killed may have become children of this one later
                    self._pause(self._interval)
                    continue
                ended, status = order.task.id, self._run(order.task)
                self._refused_since = None
                if self._place.role == "coordinator":
                    return TERMINATED if self._ending else self._report_end(ended, status)
                if self._restart:
                    ended, status, self._restart, self._coordinator = "", None, False, ""
        # a coordinator's container that was ended from outside: 0 would end the job
        return TERMINATED if self._place.role == "coordinator" else 0

    def _check_refusals(self) -> None:
        """Raise ``UsageError`` when the daemon has refused all reports for long: the container has no use."""
        if self._refused_since is not None and time.monotonic() - self._refused_since >= REFUSED_SECONDS:
            raise UsageError(
                f"the daemon at {self._place.daemon} has refused all reports of {self._place.container}, of job "
                f"{self._place.job}, for {REFUSED_SECONDS / 60:g} minutes; its last answer: {self._refusal}"
            )

    def _register(self) -> Registration:
        """Register with the daemon; returns which job the container belongs to."""
        place = self._place
        numbers = re.fullmatch(r"container_(?:e[0-9]+_)?([0-9]+_[0-9]+)_[0-9]+_[0-9]+", place.container)
        if numbers is None:
            raise UsageError(
                f"CONTAINER_ID is {place.container!r}: it must be the id of a YARN container, as in "
                "container_1700000000000_0001_01_000002"
            )
        body = {
            "rm_id": f"application_{numbers[1]}",
            "proof": place.proof,
            "argv": self._command or ["dl2-run"],
            "cwd": os.getcwd(),  # noqa: PTH109  (a string is what is wanted)
        }
        registration = register(place.daemon, lambda: body, self._say)
        if registration.static and place.role != "coordinator":
            raise UsageError("in mode observe only the coordinator's container runs; give ps and worker no containers")
        self._place = replace(place, job=registration.job, credential=registration.credential)
        return registration

    def _note_ending(self, number: int) -> None:
        del number
        self._ending = True

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._ending and time.monotonic() < until:
            time.sleep(min(_POLL_SECONDS, max(0.0, until - time.monotonic())))

    def _report_end(self, task: str, code: int) -> int:
        """Report the end of the job's own process; returns the exit status."""
        until = time.monotonic() + _FINAL_REPORT_SECONDS
        while self._report(task, code) is None and time.monotonic() < until:
            time.sleep(min(self._interval, 1.0))
        return code if code >= 0 else 128 - code

    def _run(self, task: _Task) -> int:
        """Run a task and end all its processes; returns its exit status, or minus the number of the signal."""
        self._say(f"{task.id} starts in {self._place.container}")
        self._coordinator = task.env.get("DL2_COORDINATOR", "")
        before = {process.pid for process in family(os.getpid())}
        try:
            process = self._start(task)
        except (OSError, ValueError) as error:
            self._say(f"cannot start {task.id}: {error}")
            return 127
        deadline = self._supervise(task.id, process, before)
        self._end_leftovers(task.id, before, deadline)
        self._say(f"{task.id} has ended: {process.returncode}")
        return process.returncode

    def _start(self, task: _Task) -> subprocess.Popen[bytes]:
        """Start the process of a task."""
        # SIGTERM to the container's process group reaches a task, but not the coordinator, whose end would end the job:
        # its container may only be lost and be replaced.
        argv, cwd = (task.argv, task.cwd) if self._task_command is None else (self._task_command, ".")
        coordinates = self._place.role == "coordinator"
        return subprocess.Popen(
            argv, cwd=cwd, env={**self._task_environment, **task.env}, stdin=subprocess.DEVNULL,
            process_group=0 if coordinates else None,
            preexec_fn=_end_with_parent if coordinates else None,  # noqa: PLW1509  (there is one thread)
        )  # fmt: skip

    def _supervise(self, task: str, process: subprocess.Popen[bytes], before: set[int]) -> float | None:
        """Report until a task has ended, and stop it when that is ordered; returns its deadline, None without one."""
        deadline: float | None = None
        report_at = time.monotonic() + self._interval
        #: Whether a report has said that the container is being ended.
        ending_reported = self._place.role == "coordinator"  # reports of a coordinator never say that
        while process.poll() is None:
            now = time.monotonic()
            if self._ending and self._place.role == "coordinator":
                deadline = now
            elif self._ending and not ending_reported:
                ending_reported, report_at = True, now
            if deadline is not None and now >= deadline:
                kill(_descendants(before))
            if now >= report_at:
                order = self._report(task, None)
                report_at = time.monotonic() + self._interval
                if order is not None:
                    deadline = self._stop_as_ordered(order, task, process, deadline)
            time.sleep(_POLL_SECONDS)
        if self._ending and not ending_reported:
            self._report(task, process.returncode)  # before the remaining processes are ended, which takes time
        return deadline

    def _stop_as_ordered(
        self, order: _Order, task: str, process: subprocess.Popen[bytes], deadline: float | None
    ) -> float | None:
        """Send SIGTERM to a task that is asked to stop for the first time; returns its deadline, never a later one."""
        if order.again:
            self._say(f"{task} starts again: its coordinator has moved")
            self._restart, deadline = True, time.monotonic()
        if order.grace is None:
            return deadline
        if deadline is None and order.grace > 0:
            process.send_signal(signal.SIGTERM)
        return min(math.inf if deadline is None else deadline, time.monotonic() + order.grace)

    def _end_leftovers(self, task: str, before: set[int], deadline: float | None) -> None:
        """End the processes that a task left behind: SIGTERM, and SIGKILL after two seconds or at its deadline."""
        processes = _descendants(before)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        until = min(time.monotonic() + _TERMINATE_SECONDS, deadline or float("inf"))
        while processes and time.monotonic() < until:
            psutil.wait_procs(processes, timeout=_POLL_SECONDS)
            processes = _descendants(before)
        until = time.monotonic() + KILL_SECONDS
        while processes and time.monotonic() < until:
            kill(processes)
            psutil.wait_procs(processes, timeout=_POLL_SECONDS)
            processes = _descendants(before)
        if processes:
            pids = ", ".join(str(each.pid) for each in processes)
            self._say(f"SIGKILL did not end what {task} left behind: look at processes {pids} on this node")
        _reap()

    def _report(self, task: str, code: int | None) -> _Order | None:
        """Report to the daemon; None where it gives no order."""
        place = self._place
        body = {
            "role": place.role,
            "position": place.position,
            "container": place.container,
            "incarnation": self._incarnation,
            "node": place.node,
            "task": task,
            "exit_code": code,
        }
        if self._ending and place.role != "coordinator":
            body["ending"] = True
        if self._coordinator:
            body["coordinator"] = self._coordinator
        refused_since, self._refused_since = self._refused_since, None
        url = f"{place.daemon}/v1/jobs/{place.job}/containers"
        try:
            order = msgspec.json.decode(
                fetch(url, body, credential=place.credential, timeout=_HTTP_SECONDS), type=_Order
            )
        except urllib.error.HTTPError as error:
            self._refusal = f"{error_text(error)} (HTTP status {error.code})"
            self._say(f"the daemon refused a report of {place.container}: {self._refusal}")
            if error.code in _REFUSAL_STATUSES:
                self._refused_since = time.monotonic() if refused_since is None else refused_since
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            self._say(f"cannot report to the daemon: {error}")
            return None
        self._interval = min(60.0, max(0.1, order.report_seconds))
        return order


def _end_with_parent() -> None:
    """Have this process killed when its parent is (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _become_subreaper() -> None:
    """Make this process the parent of descendants whose parent ends (prctl(2)), so that it can end them all."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> None:
    """Collect the exit statuses of children; none of them may be a task's own process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(before: set[int]) -> list[psutil.Process]:
    """Live descendants of this process whose ids are not in ``before``."""
    found = []
    for process in family(os.getpid()):
        with contextlib.suppress(psutil.Error):
            if process.pid not in before and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
