"""Container agent: runs, in a container of a job, the tasks that the scheduler gives to it, one after the other.

A resource manager such as YARN starts containers of a role, not tasks: which task of the job a container runs, and when
it ends, the scheduler says in its answers to the container's reports. A container without a task waits.

The containers of a service that its user posted have no credential: they register with the secret in the description of
the service, and their tasks run dl2-run's own command in the container's own folder and environment. Where the
scheduler only observes, the whole job runs in the coordinator's container.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import psutil

from pslite.errors import UsageError
from pslite.launch.daemon_http import error_text, open_url
from pslite.launch.registration import Registration, register
from pslite.launch.resource_usage import family
from pslite.launch.signals import ENDING, handled
from pslite.launch.task_environment import PROGRESS_VARIABLE, need
from pslite.net.tls import VARIABLE

_INSTANCE = re.compile(r"(coordinator|worker|ps)-([0-9]{1,6})")
#: what the node manager puts into a container's environment and a task may need
_OF_THE_NODE = ("CONTAINER_ID", "CUDA_VISIBLE_DEVICES", "HADOOP_", "LOCAL_DIRS", "LOG_DIRS", "NM_", "NVIDIA_")
#: variables in which dl2-run's own options are: they hold for its tasks too
_OPTIONS = frozenset({"DL2_BALANCE", "DL2_QUIET", PROGRESS_VARIABLE, VARIABLE})
_REPORT_SECONDS = 3.0
_HTTP_SECONDS = 10.0
_MAX_REPLY = 1 << 22
#: how long the scheduler may take to note how the job's own process ended
_FINAL_SECONDS = 30.0
#: how long processes that a task leaves behind may take to end, and how long they are killed
_LEFT_SECONDS, KILL_SECONDS = 2.0, 30.0
#: answers by which the scheduler does not know the job, its credential or its resource manager, and how long nothing
#: else may come until a container without a task ends: the administrator may be restoring the scheduler's files
_REFUSALS, REFUSED_SECONDS = frozenset({401, 403, 404, 409}), 900.0
_LOOK_SECONDS = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: exit status of a coordinator's container that was ended from outside: not 0, which would end the job
_ENDED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class ContainerEnvironment:
    """A container's place in its job, and how it reaches the scheduler."""

    daemon: str
    #: name of the job in the scheduler's URLs, and its credential; empty where the container has to register
    job: str
    credential: str = field(repr=False)
    #: secret of the service, to register with
    proof: str = field(repr=False)
    role: str
    instance: int
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
        instance=int(instance[2]),
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
    #: The task that runs is to be started again: it has not joined its job, and its coordinator has moved.
    again: bool = False


class ContainerAgent:
    """Reports to the scheduler, and runs what it is given.

    Parameters
    ----------
    place
        the container's place in its job.
    environ
        its environment.
    command
        the user's command, which the tasks of a container that registers run.
    run_job
        runs the whole job in this container, where the scheduler only observes, with this environment; returns the exit
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
        #: Command of all tasks, where the container registers, and what the scheduler's environment is added to.
        self._task_command: list[str] | None = None
        self._task_environment = {name: value for name, value in environ.items() if name.startswith(_OF_THE_NODE)}
        if not place.job:
            self._task_command = [sys.executable, "-m", "pslite.run", "--", *command]
            self._task_environment = {
                name: value for name, value in environ.items() if not name.startswith("DL2_") or name in _OPTIONS
            }
            # the programs of a packed environment are found by their names
            own_programs = str(Path(sys.executable).parent.absolute())
            self._task_environment["PATH"] = os.pathsep.join((own_programs, self._task_environment.get("PATH", "")))
        self._say = say
        self._incarnation = uuid.uuid4().hex
        self._interval = _REPORT_SECONDS
        self._ending = False
        #: Address of the coordinator with which the task that runs was started, and whether it is to be started again.
        self._coordinator = ""
        self._again = False
        #: When the scheduler began to answer nothing but refusals, and the last one.
        self._refused_since: float | None = None
        self._refusal = ""

    def run(self) -> int:
        """Run tasks until the container is asked to end; a coordinator's ends with its task, with the same status.

        Raises
        ------
        UsageError
            the scheduler does not take the job that the container belongs to, or has not known it for a long time.

        """
        _adopt_orphans()
        if not self._place.job:
            registration = self._register()
            if registration.static:
                return self._run_job(registration, {**self._task_environment, "DL2_DAEMON": self._place.daemon})
        with handled(self._end, ENDING):
            task, code = "", None
            while not self._ending:
                order = self._report(task, code)
                if order is not None:
                    task, code = "", None
                if order is None or order.task is None:
                    self._check_refusals()
                    _reap()  # what was killed may have become our child later
                    self._pause(self._interval)
                    continue
                task, self._coordinator = order.task.id, order.task.env.get("DL2_COORDINATOR", "")
                status = self._run(order.task)
                self._refused_since = None
                if self._place.role == "coordinator":
                    return _ENDED if self._ending else self._finish(task, status)
                code = status
                if self._again:
                    task, code, self._again, self._coordinator = "", None, False, ""
        return _ENDED if self._place.role == "coordinator" else 0

    def _check_refusals(self) -> None:
        """End a container without a task that the scheduler has refused for long: it holds resources for nothing."""
        if self._refused_since is not None and time.monotonic() - self._refused_since >= REFUSED_SECONDS:
            raise UsageError(
                f"the scheduler at {self._place.daemon} has refused all reports of {self._place.container}, of job "
                f"{self._place.job}, for {REFUSED_SECONDS / 60:g} minutes; its last answer: {self._refusal}"
            )

    def _register(self) -> Registration:
        """Find out which job the container belongs to."""
        place = self._place
        numbers = re.fullmatch(r"container_(?:e[0-9]+_)?([0-9]+_[0-9]+)_[0-9]+_[0-9]+", place.container)
        if numbers is None:
            raise UsageError(f"CONTAINER_ID is {place.container!r}, which is not the id of a container")
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

    def _end(self, number: int) -> None:
        del number
        self._ending = True

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._ending and time.monotonic() < until:
            time.sleep(min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))

    def _finish(self, task: str, code: int) -> int:
        """Report the end of the job's own process; returns the exit status."""
        until = time.monotonic() + _FINAL_SECONDS
        while self._report(task, code) is None and time.monotonic() < until:
            time.sleep(min(self._interval, 1.0))
        return code if code >= 0 else 128 - code

    def _run(self, task: _Task) -> int:
        """Run a task to its end, with what it leaves behind; returns its exit status, or minus the signal's number."""
        self._say(f"{task.id} starts in {self._place.container}")
        before = {process.pid for process in family(os.getpid())}
        coordinates = self._place.role == "coordinator"
        argv, cwd = (task.argv, task.cwd) if self._task_command is None else (self._task_command, ".")
        try:
            # Whoever ends the container reaches a task, which is in its process group, but not the coordinator: that
            # would end the job, while its container may only be lost and another one take its place.
            process = subprocess.Popen(
                argv, cwd=cwd, env={**self._task_environment, **task.env}, stdin=subprocess.DEVNULL,
                process_group=0 if coordinates else None,
                preexec_fn=_end_with_parent if coordinates else None,  # noqa: PLW1509  (there is one thread)
            )  # fmt: skip
        except (OSError, ValueError) as error:
            self._say(f"cannot start {task.id}: {error}")
            return 127
        deadline: float | None = None
        due = time.monotonic() + self._interval
        reported = False
        while process.poll() is None:
            now = time.monotonic()
            if self._ending and coordinates:
                deadline = now
            elif self._ending and not reported:
                reported, due = True, now
            if deadline is not None and now >= deadline:
                _kill(_descendants(before))
            if now >= due:
                order = self._report(task.id, None)
                due = time.monotonic() + self._interval
                if order is not None and order.again:
                    self._say(f"{task.id} starts again: its coordinator has moved")
                    self._again, deadline = True, time.monotonic()
                if order is not None and order.grace is not None:
                    if deadline is None and order.grace > 0:
                        process.send_signal(signal.SIGTERM)
                    until = time.monotonic() + order.grace
                    deadline = until if deadline is None else min(deadline, until)
            time.sleep(_LOOK_SECONDS)
        if self._ending and not coordinates and not reported:
            self._report(task.id, process.returncode)  # at once: there may be no time for what follows
        self._clear(before, deadline)
        self._say(f"{task.id} has ended: {process.returncode}")
        return process.returncode

    def _clear(self, before: set[int], deadline: float | None) -> None:
        """End what a task left behind: asked first, killed after two seconds or at the task's deadline."""
        left = _descendants(before)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        until = min(time.monotonic() + _LEFT_SECONDS, deadline or float("inf"))
        while left and time.monotonic() < until:
            psutil.wait_procs(left, timeout=_LOOK_SECONDS)
            left = _descendants(before)
        until = time.monotonic() + KILL_SECONDS
        while left and time.monotonic() < until:
            _kill(left)
            psutil.wait_procs(left, timeout=_LOOK_SECONDS)
            left = _descendants(before)
        if left:
            self._say(f"cannot end what a task left behind: processes {', '.join(str(each.pid) for each in left)}")
        _reap()

    def _report(self, task: str, code: int | None) -> _Order | None:
        """Report to the scheduler; None where it gives no order."""
        place = self._place
        body = {
            "role": place.role,
            "instance": place.instance,
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
        headers = {"Authorization": f"Bearer {place.credential}", "Content-Type": "application/json"}
        refused_since, self._refused_since = self._refused_since, None
        url = f"{place.daemon}/v1/jobs/{place.job}/containers"
        request = urllib.request.Request(url, msgspec.json.encode(body), headers, method="POST")  # noqa: S310
        try:
            with open_url(request, _HTTP_SECONDS) as response:
                order = msgspec.json.decode(response.read(_MAX_REPLY), type=_Order)
        except urllib.error.HTTPError as error:
            self._refusal = f"{error_text(error)} (HTTP status {error.code})"
            self._say(f"the scheduler refused a report of {place.container}: {self._refusal}")
            if error.code in _REFUSALS:
                self._refused_since = time.monotonic() if refused_since is None else refused_since
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            self._say(f"cannot report to the scheduler: {error}")
            return None
        self._interval = min(60.0, max(0.1, order.report_seconds))
        return order


def _end_with_parent() -> None:
    """Have this process killed when its parent is (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends (prctl(2)), so that none is lost."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> None:
    """Take note of the ends of children, none of which may be a task's own process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(before: set[int]) -> list[psutil.Process]:
    """Living descendants of this process that are none of those before."""
    found = []
    for process in family(os.getpid()):
        with contextlib.suppress(psutil.Error):
            if process.pid not in before and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
