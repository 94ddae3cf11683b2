"""Submitting jobs through pyslurm, in processes of its own."""

from __future__ import annotations

import math
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import structlog

from dl2d.core.errors import Rejected, Unavailable
from dl2d_slurm.commands.commands import UMASK, Answer, Commands, installed_version, privileged_users
from dl2d_slurm.commands.rpc_rate import PYSLURM_SUBMIT, RpcRate, is_overloaded
from dl2d_slurm.submission.command_control import CommandControl
from dl2d_slurm.submission.job_description import job_description

log = structlog.get_logger(__name__)

_PROGRAM: Final = Path(__file__).with_name("pyslurm_process.py")
_MAX_ANSWER_BYTES: Final = 1 << 16
#: No process is started so soon after one that gave no answer.
_PAUSE_SECONDS: Final = 10.0
#: Maximum number of processes, started as they are needed. A call keeps its process busy.
_MAX_PROCESSES: Final = 4


class _Reply(msgspec.Struct):
    """A line of ``pyslurm_process.py``, whose text says when it has which field."""

    release: str = ""
    job_id: int = 0
    error: str = ""
    refused: str = ""


class PyslurmControl:
    """``JobControl`` by pyslurm, which submits, and scancel. Thread-safe.

    Slurm's library may hang or crash: a call has a deadline, at which its process is killed, and a later call starts
    another one. Until ``_PAUSE_SECONDS`` have passed since then, calls for which there is no process fail at once with
    the reason.

    Parameters
    ----------
    python
        Interpreter that has pyslurm; empty for the daemon's own.
    commands
        Run scancel.
    time_limit
        Seconds after which a submission counts as unanswered; before that it waits as long at most for a process.
    environment
        Environment of jobs and of the processes.
    timer
        Seconds on a monotonic clock.
    """

    def __init__(
        self,
        python: str,
        commands: Commands,
        rate: RpcRate,
        *,
        time_limit: float,
        environment: Mapping[str, str],
        timer: Callable[[], float],
    ) -> None:
        self._python = python or sys.executable
        self._commands, self._by_commands, self._rate = commands, CommandControl(commands), rate
        self._time_limit = time_limit
        self._environment = dict(environment)
        self._timer = timer
        #: Processes that no thread uses, the last one used first; None stands for one that can be started.
        self._idle: queue.LifoQueue[_PyslurmProcess | None] = queue.LifoQueue()
        for _ in range(_MAX_PROCESSES):
            self._idle.put(None)
        #: All that run.
        self._processes: set[_PyslurmProcess] = set()
        self._start_at = -math.inf
        self._problem = ""

    def check(self) -> None:
        """See ``JobControl``: starts a process where there is none."""
        with self._running():
            pass

    def privileged(self) -> Collection[int]:
        """See ``JobControl``: root and SlurmUser."""
        return privileged_users(self._commands)

    def submit(self, options: Sequence[str], script: str, more: Mapping[str, str] | None = None) -> Answer:
        """See ``JobControl``. One call of pyslurm."""
        job = job_description(options, script, {**self._environment, **(more or {})}, backend="pyslurm")
        with self._running() as process:
            begin, overloaded = self._rate.begins((PYSLURM_SUBMIT,)), False
            try:
                reply = process.ask({"job": job})
                overloaded = is_overloaded(reply.error)
            finally:
                self._rate.ended(PYSLURM_SUBMIT, begin, overloaded=overloaded)
            if reply.job_id <= 0 and not reply.error and not reply.refused:
                raise Unavailable("pyslurm does not say whether it has submitted the job")
        if reply.refused:
            raise Rejected("the job cannot be submitted with backend: pyslurm", said=reply.refused)
        return Answer(0, str(reply.job_id), "") if reply.job_id > 0 else Answer(1, "", reply.error)

    def cancel(self, jobs: Sequence[str], *, state: str = "", signal: str = "") -> Answer:
        """See ``JobControl``. One scancel."""
        return self._by_commands.cancel(jobs, state=state, signal=signal)

    def close(self) -> None:
        """See ``JobControl``. Ends the processes, whatever they do."""
        for process in tuple(self._processes):
            process.end()

    @contextmanager
    def _running(self) -> Iterator[_PyslurmProcess]:
        """A process, for this thread alone; it is ended if it gives no answer."""
        try:
            process = self._idle.get(timeout=self._time_limit)
        except queue.Empty:
            raise Unavailable(f"pyslurm did not answer earlier submissions within {self._time_limit:g} s") from None
        kept = None
        try:
            if process is None or process.has_ended():
                self._end(process)
                process = self._started()
            yield process
            kept = process
        except Unavailable as error:
            if self._timer() >= self._start_at:
                self._start_at, self._problem = self._timer() + _PAUSE_SECONDS, str(error)
            raise
        finally:
            if kept is None:
                self._end(process)
            self._idle.put(kept)

    def _end(self, process: _PyslurmProcess | None) -> None:
        if process is not None:
            process.end()
            self._processes.discard(process)

    def _started(self) -> _PyslurmProcess:
        if (wait := self._start_at - self._timer()) > 0:
            raise Unavailable(f"{self._problem}; tried again in {wait:.0f} s")
        process = _PyslurmProcess(self._python, self._environment, self._time_limit)
        self._processes.add(process)
        try:
            built, here = process.first_reply(), installed_version(self._commands)
            # It reads and writes structures of Slurm's library, which differ from release to release.
            if not here.startswith(f"{built}."):
                problem = f"was built for Slurm {built}, but Slurm {here} is installed: build it again"
                raise Unavailable(f"pyslurm of {self._python} {problem}")
        except BaseException:
            self._end(process)
            raise
        return process


class _PyslurmProcess:
    """``pyslurm_process.py`` while it runs."""

    def __init__(self, python: str, environment: Mapping[str, str], time_limit: float) -> None:
        self._python, self._time_limit = python, time_limit
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [python, str(_PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**environment, "LC_ALL": "C.UTF-8"},
                cwd="/",
                umask=UMASK,
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"pyslurm: {python} cannot be run", said=str(error)) from None
        finally:
            theirs.close()

    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._process.poll() is not None

    def first_reply(self) -> str:
        """Release of Slurm for which pyslurm was built. Raises ``Unavailable`` where pyslurm cannot be used."""
        reply = self._read(time.monotonic() + self._time_limit)
        if not reply.release:
            raise Unavailable(f"pyslurm of {self._python} cannot be used", said=reply.error)
        return reply.release

    def ask(self, request: object) -> _Reply:
        """The reply to a request. Raises ``Unavailable`` where there is none."""
        deadline = time.monotonic() + self._time_limit
        try:
            self._socket.settimeout(self._time_limit)
            self._socket.sendall(msgspec.json.encode(request) + b"\n")
        except OSError as error:
            raise self._no_answer(error) from None
        return self._read(deadline)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

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
        if isinstance(error, TimeoutError):
            return Unavailable(f"pyslurm did not answer within {self._time_limit:g} s")
        self._process.kill()
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return Unavailable(f"the process of pyslurm ended with {how} or gave no answer", said=str(error or ""))
