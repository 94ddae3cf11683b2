"""Submitting jobs through pyslurm, in processes of its own."""

from __future__ import annotations

import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from dl2d.core.errors import Rejected, Unavailable
from dl2d_slurm.commands.commands import UMASK, Answer, failure, installed_version
from dl2d_slurm.commands.rpc_rate import PYSLURM_SUBMIT, is_overloaded
from dl2d_slurm.submission.job_fields_for_rest_and_pyslurm import JobFieldsControl, job_description

log = structlog.get_logger(__name__)

_PROGRAM = Path(__file__).with_name("pyslurm_process.py")
_MAX_ANSWER_BYTES = 1 << 16
#: Of what the process writes on standard error.
_MAX_SAID_BYTES = 2000
#: How long a process that has closed its socket is given to end.
_END_SECONDS = 1.0
#: No process is started so soon after one that gave no answer.
_PAUSE_SECONDS = 10.0
#: Maximum number of processes, started as they are needed. A call keeps its process busy.
_MAX_PROCESSES = 4


class _Reply(msgspec.Struct):
    """A line of ``pyslurm_process.py``; its docstring says which fields a line has."""

    release: str = ""
    number: int = 0
    job_id: int = 0
    error: str = ""
    refused: str = ""


@dataclass(eq=False)
class PyslurmControl(JobFieldsControl):
    """``JobControl`` by pyslurm, which submits, and scancel. Thread-safe.

    Slurm's library may hang or crash: a call has a deadline, at which its process is killed, and a later call starts
    another one. For ``_PAUSE_SECONDS`` from then on, calls for which there is no process fail at once with the reason.
    """

    def __post_init__(self) -> None:
        self._python = self.place or sys.executable
        #: Processes that no thread uses, the last one used first; None stands for one that can be started.
        self._idle: queue.LifoQueue[_PyslurmProcess | None] = queue.LifoQueue()
        for _ in range(_MAX_PROCESSES):
            self._idle.put(None)
        #: Held while a process is started or all are ended.
        self._starting = threading.Lock()
        self._closed = False
        #: Processes that were started and not ended from here.
        self._processes: set[_PyslurmProcess] = set()
        #: None is started before this time, by the timer, because of the last failure.
        self._no_start_before = -math.inf
        self._last_failure = ""

    def check(self) -> None:
        """See ``JobControl``: starts a process where there is none."""
        with self._process(self._deadline()):
            pass

    def submit(self, options: Sequence[str], script: str, more: Mapping[str, str] | None = None) -> Answer:
        """See ``JobControl``. One call of pyslurm."""
        job = job_description(options, script, {**self.environment, **(more or {})}, backend="pyslurm")
        deadline = self._deadline()
        with self._process(deadline) as process:
            begin, overloaded = self.rate.begins((PYSLURM_SUBMIT,)), False
            try:
                reply, said = process.submit(job, deadline)
                overloaded = is_overloaded(reply.error)
            finally:
                self.rate.ended(PYSLURM_SUBMIT, begin, overloaded=overloaded)
            answer = (
                Answer(0, "", said, job_id=str(reply.job_id))
                if reply.job_id > 0
                else Answer(1, "", f"{said}\n{reply.error}")
            )
            # It has read slurm.conf once, in which slurmctld may have another address by now.
            if reply.error and isinstance(failure("", answer), Unavailable):
                process.end()
        if reply.refused:
            raise Rejected("the job cannot be submitted with backend: pyslurm", said=reply.refused)
        return answer

    def close(self) -> None:
        """See ``JobControl``. Ends the processes, whatever they do; none is started again."""
        with self._starting:
            self._closed = True
            for process in self._processes:
                process.end()

    def _deadline(self) -> float:
        return time.monotonic() + self.time_limit

    @contextmanager
    def _process(self, deadline: float) -> Iterator[_PyslurmProcess]:
        """A process, for this thread alone; it is ended if it gives no answer."""
        try:
            process = self._idle.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            raise Unavailable(f"all processes of pyslurm were busy for {self.time_limit:g} s") from None
        good = None
        try:
            if process is None or process.has_ended():
                self._end(process)
                process = self._started(deadline)
            yield process
            good = process
        except Unavailable as error:
            if self.timer() >= self._no_start_before:
                self._no_start_before, self._last_failure = self.timer() + _PAUSE_SECONDS, str(error)
            raise
        finally:
            if good is None:
                self._end(process)
            self._idle.put(good)

    def _started(self, deadline: float) -> _PyslurmProcess:
        if (wait := self._no_start_before - self.timer()) > 0:
            raise Unavailable(f"{self._last_failure}; tried again in {wait:.0f} s")
        installed = installed_version(self.commands)
        with self._starting:
            if self._closed:
                raise Unavailable("pyslurm is not used any more: the daemon ends")
            process = _PyslurmProcess(self._python, self.environment, self.time_limit)
            self._processes.add(process)
        try:
            built = process.release(deadline)
            # It reads and writes structures of Slurm's library, which differ from release to release.
            if not installed.startswith(f"{built}."):
                problem = f"was built for Slurm {built}, but Slurm {installed} is installed: build it again"
                raise Unavailable(f"pyslurm of {self._python} {problem}")
        except BaseException:
            self._end(process)
            raise
        return process

    def _end(self, process: _PyslurmProcess | None) -> None:
        if process is not None:
            process.end()
            with self._starting:
                self._processes.discard(process)


class _PyslurmProcess:
    """``pyslurm_process.py`` while it runs."""

    def __init__(self, python: str, environment: Mapping[str, str], time_limit: float) -> None:
        """``time_limit``: by what deadline it is asked, for messages."""
        self._python, self._time_limit = python, time_limit
        self._number = 0
        try:
            with ExitStack() as opened:
                self._socket, theirs = map(opened.enter_context, socket.socketpair())
                #: What Slurm's library, and Python, write on standard error.
                self._stderr = opened.enter_context(os.fdopen(os.memfd_create("stderr"), "r+b", buffering=0))
                self._process = subprocess.Popen(
                    [python, str(_PROGRAM), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    pass_fds=[theirs.fileno()],
                    # Texts of jobs are UTF-8, whatever the daemon's locale is.
                    env={**environment, "LC_ALL": "C.UTF-8"},
                    cwd="/",
                    umask=UMASK,
                    start_new_session=True,
                )
                opened.pop_all()
                theirs.close()
        except OSError as error:
            raise Unavailable(f"pyslurm: {python} cannot be run", said=str(error)) from None

    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._process.poll() is not None

    def release(self, deadline: float) -> str:
        """Release of Slurm for which pyslurm was built, which it tells first.

        Raises ``Unavailable`` where pyslurm cannot be used.
        """
        reply = self._read(deadline)
        if not reply.release:
            raise Unavailable(
                f"pyslurm of {self._python} cannot be used", said=f"{self._said()}\n{reply.error}".strip()
            )
        return reply.release

    def submit(self, job: Mapping[str, object], deadline: float) -> tuple[_Reply, str]:
        """The reply for a job, and what was written on standard error.

        Raises ``Unavailable`` where it is not known whether the job was submitted.
        """
        self._said()  # of the calls before
        self._number += 1
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self._socket.sendall(msgspec.json.encode({"number": self._number, "job": job}) + b"\n")
        except OSError as error:
            raise self._no_answer(error) from None
        reply = self._read(deadline)
        if reply.number != self._number or not (reply.job_id > 0 or reply.error or reply.refused):
            raise Unavailable("pyslurm does not say whether it has submitted the job", said=self._said())
        return reply, self._said()

    def end(self) -> None:
        """Kill it, with what it has started."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()
        self._stderr.close()

    def _read(self, deadline: float) -> _Reply:
        text = bytearray()
        try:
            while not text.endswith(b"\n"):
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                part = self._socket.recv(_MAX_ANSWER_BYTES)
                text += part
                if not part or len(text) > _MAX_ANSWER_BYTES:
                    raise self._no_answer(None)
            return msgspec.json.decode(text, type=_Reply)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._no_answer(error) from None

    def _no_answer(self, error: Exception | None) -> Unavailable:
        said = self._said() or str(error or "")
        if isinstance(error, TimeoutError):
            return Unavailable(f"pyslurm did not answer within {self._time_limit:g} s", said=said)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)  # where it has closed its socket, it ends
        status = self._process.returncode
        if status is None:
            return Unavailable("the process of pyslurm answered with something else than a reply", said=said)
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return Unavailable(f"the process of pyslurm ended with {how}", said=said)

    def _said(self) -> str:
        """What was written on standard error since this was asked."""
        try:
            text = os.pread(self._stderr.fileno(), _MAX_SAID_BYTES, 0)
            self._stderr.truncate(0)
            self._stderr.seek(0)  # also for the process, which writes on where this is
        except (OSError, ValueError):  # ended from another thread
            return ""
        return text.decode(errors="replace").strip()
