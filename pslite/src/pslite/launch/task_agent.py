"""Task agent: starts the process of one task, monitors it, forwards signals, and reports its end to the coordinator."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pslite.job.job_status import Cause
from pslite.job.member_measurements import Usage, in_words
from pslite.launch.agent_connection import AgentConnection
from pslite.launch.exit_status import ExitStatus, OomKills, classify, oom_kills
from pslite.launch.gpus import open_gpus
from pslite.launch.log_tail import LogTail, open_tail
from pslite.launch.resource_usage import ProcessMonitor, family, kill
from pslite.launch.signals import ENDING, OWN, from_terminal, handled, wait_for
from pslite.net.authentication import Identity
from pslite.net.messages import AgentExit, AgentUsage

#: time limits for the coordinator to acknowledge the report of a failure, and to be reached again after a success
_REPORT_SECONDS, _QUICK_SECONDS = 2.0, 0.2
#: how long a process that was given up may take to end by itself
_GIVEN_UP_SECONDS = 10.0
#: time limits for the first connection and for later ones, and the time between two polls
_CONNECT_SECONDS, _AGAIN_SECONDS, _LOOK_SECONDS = 60.0, 5.0, 0.5

#: variable with the exit status of dl2-run for a task that fails after SIGTERM, or because its job was cancelled
STOPPED_VARIABLE = "DL2_STOPPED_STATUS"


class TaskAgent:
    """Runs the command of a task.

    Parameters
    ----------
    identity
        the task's.
    coordinator
        host:port of the coordinator.
    command
        what to run, without a shell.
    environ
        its environment.
    say
        takes lines for the user.
    watch_seconds
        the shortest time between two samples of what the task uses; 0 for none.
    count_kills
        counts processes that were killed for lack of memory.
    open_log
        finds out where the task's error output goes.

    """

    def __init__(
        self,
        identity: Identity,
        coordinator: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        say: Callable[[str], None],
        watch_seconds: float = 5.0,
        count_kills: Callable[[], OomKills] = oom_kills,
        open_log: Callable[[], LogTail | None] = open_tail,
    ) -> None:
        self._identity = identity
        self._command = list(command)
        self._environ = dict(environ)
        self._say = say
        self._watch_seconds = watch_seconds
        self._count_kills = count_kills
        self._open_log = open_log
        self._connection = AgentConnection(identity, coordinator)
        self._process: subprocess.Popen[bytes] | None = None
        #: set when the process has been started, or never will be
        self._began = threading.Event()
        self._over = threading.Event()
        self._peak = 0
        #: signals that came before there was a process
        self._early: list[int] = []
        self._interrupts = 0
        self._terminated = False

    def run(self) -> int:
        """Run the command to its end; return the exit status for dl2-run (128 + n for a signal n)."""
        with handled(self._forward):
            threading.Thread(target=self._monitor, name="pslite-agent", daemon=True).start()
            try:
                return self._run()
            finally:
                self._over.set()
                self._began.set()

    def _run(self) -> int:
        before, kills, since = resource.getrusage(resource.RUSAGE_CHILDREN), self._count_kills(), time.monotonic()
        log = self._open_log()
        try:
            self._process = process = subprocess.Popen(self._command, env=self._environ)
        except OSError as error:
            text = f"cannot start {self._command[0]!r}: {error.strerror}"
            self._say(text)
            self._report(0, 127, ExitStatus(Cause.NOT_STARTED, text))
            return 127
        self._began.set()
        for number in self._early:
            process.send_signal(number)  # came before the process was there
        code = wait_for(process)
        self._over.set()
        output = log.text() if code and log is not None else ""
        usage = self._total_usage(before, time.monotonic() - since)
        self._say(f"{self._identity.task} has used {in_words(usage)}")
        self._report(process.pid, code, classify(code, kills, self._count_kills), usage, output)
        status = self._environ.get(STOPPED_VARIABLE, "")
        if code and status.isdecimal() and (self._terminated or self._connection.cancelled):
            return int(status)
        return code if code >= 0 else 128 - code

    # --- signals --------------------------------------------------------------------------------------------------

    def _forward(self, number: int) -> None:
        """Forward a signal to the task; a second interrupt kills the task with its descendants."""
        process = self._process
        self._terminated |= number == signal.SIGTERM
        if process is None:
            if number in ENDING:
                self._early.append(number)
            return
        if process.returncode is not None or (number in OWN and self._identity.role == "ps"):
            return  # scripts alone give these signals a meaning
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                kill(reversed(family(process.pid)))
                return
            if from_terminal():
                return  # the terminal has sent it to the task, too
        os.kill(process.pid, number)

    # --- monitoring -------------------------------------------------------------------------------------------------

    def _monitor(self) -> None:
        """Thread: keep the connection to the coordinator open, and report what the task uses."""
        refused = self._connection.open(_CONNECT_SECONDS)
        if refused:
            self._say(f"cannot report to the coordinator: {refused}")
        self._began.wait()
        process = self._process
        if process is None:
            return
        gpus = open_gpus(self._environ) if self._watch_seconds and self._identity.role == "worker" else None
        monitor = ProcessMonitor(process.pid, interval=self._watch_seconds, gpus=gpus)
        due = time.monotonic() + monitor.pause
        while not self._over.wait(min(_LOOK_SECONDS, monitor.pause or _LOOK_SECONDS)):
            if not self._connection.poll() and not refused:
                self._connection.open(_AGAIN_SECONDS)
            if self._connection.given_up:
                self._kill_if_it_hangs(process)
            if not self._watch_seconds or time.monotonic() < due:
                continue
            usage = monitor.sample()
            due = time.monotonic() + monitor.pause
            self._peak = monitor.peak
            if usage is not None:
                self._connection.send(AgentUsage(usage=usage))
        if gpus is not None:
            gpus.close()

    def _kill_if_it_hangs(self, process: subprocess.Popen[bytes]) -> None:
        """The job goes on without the task: kill it with its descendants if it does not end by itself."""
        if self._over.wait(_GIVEN_UP_SECONDS):
            return
        self._say(f"{self._identity.task} was given up and does not end: it is killed")
        kill(reversed(family(process.pid)))
        self._over.wait(_GIVEN_UP_SECONDS)

    def _total_usage(self, before: resource.struct_rusage, seconds: float) -> Usage:
        """Return what the task has used in all, from the kernel's accounting of waited-for children."""
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        # the largest of all processes that we ever had: the task's if it is larger than those before it. A process
        # counts as at least as large as we were when it was made (the kernel's exec_mmap), some 30 MB
        largest = after.ru_maxrss * 1024 if after.ru_maxrss > before.ru_maxrss else 0
        return Usage(
            seconds=seconds,
            cpu_seconds=cpu,
            cpu_percent=100 * cpu / max(seconds, 1e-6),
            memory_bytes=0,
            memory_peak=max(self._peak, largest),
            processes=0,
        )

    def _report(self, pid: int, code: int, ending: ExitStatus, usage: Usage | None = None, output: str = "") -> None:
        report = AgentExit(
            pid=pid,
            status=max(0, code),
            signal=max(0, -code),
            cause=ending.cause,
            text=ending.text,
            usage=usage,
            output=output,
        )
        # a coordinator that has not heard of the task waits for it
        reach = _REPORT_SECONDS if code or not self._connection.reached else _QUICK_SECONDS
        if not self._connection.report(report, _REPORT_SECONDS, reach) and code:
            self._say("the coordinator did not accept the report of how the task ended")
        self._connection.close()
