"""Task agent: starts the process of one task, monitors it, forwards signals, and reports its end to the coordinator.

Its connection to the coordinator is reopened when it breaks, since another coordinator may take over.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pslite.errors import PsliteError
from pslite.job.job_status import Cause
from pslite.job.step_time_and_usage_statistics import Usage, in_words
from pslite.launch.gpus import open_gpus
from pslite.launch.signal_forwarding import ENDING, OWN, from_terminal, handled, wait_for
from pslite.launch.task_process.exit_status import ExitStatus, LogTail, OomKills, classify, oom_kills, open_tail
from pslite.launch.task_process.resource_usage import ProcessMonitor, family, kill
from pslite.net.authentication import Identity, connect
from pslite.net.message_framing import Channel, Inbox
from pslite.net.messages import MAX_CONTROL_BYTES, AgentExit, AgentUsage, FromCoordinator, JobEnded, Message, Noted

_PAUSE_SECONDS = 0.01


@dataclass(eq=False)
class AgentConnection:
    """Reports about one task to the coordinator; may be used from any thread."""

    #: the task's
    identity: Identity
    #: host:port of the coordinator
    address: str
    #: whether the coordinator has ever been reached
    reached: bool = False
    #: whether the job goes on without the task, whose process has to end
    given_up: bool = False
    #: whether the coordinator has ended since the job was cancelled; not if another one has taken its place
    cancelled: bool = False
    _channel: Channel[FromCoordinator] | None = None
    _noted: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, seconds: float) -> str:
        """Connect within `seconds`; return the reason of a failure, "" for success."""
        try:
            sock, _ = connect(self.address, self.identity, "agent", timeout=seconds)
        except PsliteError as error:
            return str(error)
        with self._lock:
            self.reached = True
            if self._channel is None:
                self._channel = Channel(sock, Inbox(FromCoordinator, MAX_CONTROL_BYTES))
                self.cancelled = False
            else:
                sock.close()  # another thread has connected first
        return ""

    def poll(self) -> bool:
        """Receive messages; return whether the connection is open."""
        with self._lock:
            channel = self._channel
            if channel is None:
                return False
            try:
                messages, still_open = channel.receive()
            except PsliteError:
                messages, still_open = [], False
            self._noted |= any(isinstance(message, Noted) for message in messages)
            ends = [message.cancelled for message in messages if isinstance(message, JobEnded)]
            self.cancelled |= any(ends)
            self.given_up |= not all(ends)
            if still_open:
                channel.flush()
            else:
                self._channel = None
                channel.close()
            return still_open

    def send(self, message: Message) -> None:
        """Send a message; drop it if an earlier one is still unsent, so that messages do not pile up."""
        with self._lock:
            if self._channel is not None and not self._channel.unsent:
                self._channel.send(message)

    def report(self, message: AgentExit, seconds: float, reach: float) -> bool:
        """Report how the task ended; return whether the coordinator acknowledged it within `seconds`.

        Without a connection, one must be established within `reach` seconds.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.poll():
                if self._noted:
                    break
                # a process that ends at once may be faster than this connection
                if self.open(min(reach, max(0.0, deadline - time.monotonic()))):
                    break
            with self._lock:
                if self._channel is not None:
                    self._channel.send(message)
            while not self._noted and time.monotonic() < deadline and self.poll():
                time.sleep(_PAUSE_SECONDS)
            if self._noted:
                break
        return self._noted

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None


#: time limits for the coordinator to acknowledge the report of a failure, and to be reached again after a success
_REPORT_SECONDS, _QUICK_SECONDS = 2.0, 0.2
#: how long a process that was given up may take to end by itself
_GIVEN_UP_SECONDS = 10.0
#: time limits for the first connection and for later ones, and the time between two polls
_CONNECT_SECONDS, _AGAIN_SECONDS, _LOOK_SECONDS = 60.0, 5.0, 0.5
#: time between two attempts if the first connection failed: a task that the coordinator never hears of is ended
_REFUSED_SECONDS = 30.0

#: variable with the exit status of dl2-run for a task that fails after SIGTERM, or because its job was cancelled
STOPPED_VARIABLE = "DL2_STOPPED_STATUS"


@dataclass(eq=False)
class TaskAgent:
    """Runs the command of a task."""

    identity: Identity
    #: host:port of the coordinator
    coordinator: str
    #: what to run, without a shell, and its environment
    command: Sequence[str]
    environ: Mapping[str, str]
    #: takes lines for the user
    say: Callable[[str], None]
    #: the shortest time between two samples of what the task uses; 0 for none
    watch_seconds: float = 5.0
    #: counts processes that were killed for lack of memory
    count_kills: Callable[[], OomKills] = oom_kills
    #: finds out where the task's error output goes
    open_log: Callable[[], LogTail | None] = open_tail
    _process: subprocess.Popen[bytes] | None = None
    #: set when the process has been started, or never will be
    _began: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _peak: int = 0
    #: signals that came before there was a process
    _early: list[int] = field(default_factory=list)
    _interrupts: int = 0
    #: whether a second interrupt is killing the task
    _kills: bool = False
    _terminated: bool = False

    def __post_init__(self) -> None:
        self._connection = AgentConnection(self.identity, self.coordinator)

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
        before, kills, since = resource.getrusage(resource.RUSAGE_CHILDREN), self.count_kills(), time.monotonic()
        log = self.open_log()
        try:
            self._process = process = subprocess.Popen(self.command, env=self.environ)
        except OSError as error:
            text = f"cannot start {self.command[0]!r}: {error.strerror}"
            self.say(text)
            self._report(0, 127, ExitStatus(Cause.NOT_STARTED, text))
            return 127
        self._began.set()
        for number in self._early:
            process.send_signal(number)  # came before the process was there
        code = wait_for(process)
        self._over.set()
        output = log.text() if code and log is not None else ""
        usage = self._total_usage(before, time.monotonic() - since)
        self.say(f"{self.identity.task} has used {in_words(usage)}")
        self._report(process.pid, code, classify(code, kills, self.count_kills), usage, output)
        status = self.environ.get(STOPPED_VARIABLE, "")
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
        if process.returncode is not None or (number in OWN and self.identity.role == "ps"):
            return  # scripts alone give these signals a meaning
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                if not self._kills:  # an interrupt comes while one before is handled, too
                    self._kills = True
                    kill(reversed(family(process.pid)))
                    self._kills = False
                return
            if from_terminal():
                return  # the terminal has sent it to the task, too
        os.kill(process.pid, number)

    # --- monitoring -------------------------------------------------------------------------------------------------

    def _monitor(self) -> None:
        """Thread: keep the connection to the coordinator open, and report what the task uses."""
        refused = self._connection.open(_CONNECT_SECONDS)
        if refused:
            self.say(f"cannot report to the coordinator: {refused}")
        self._began.wait()
        process = self._process
        if process is None:
            return
        gpus = open_gpus(self.environ) if self.watch_seconds and self.identity.role == "worker" else None
        monitor = ProcessMonitor(process.pid, interval=self.watch_seconds, gpus=gpus)
        due = time.monotonic() + monitor.pause
        again = time.monotonic() + _REFUSED_SECONDS
        while not self._over.wait(min(_LOOK_SECONDS, monitor.pause or _LOOK_SECONDS)):
            if not self._connection.poll() and (not refused or time.monotonic() >= again):
                refused = self._connection.open(_AGAIN_SECONDS) and refused
                again = time.monotonic() + _REFUSED_SECONDS
            if self._connection.given_up:
                self._kill_if_it_hangs(process)
            if not self.watch_seconds or time.monotonic() < due:
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
        self.say(f"{self.identity.task} was given up and does not end: it is killed")
        kill(reversed(family(process.pid)))
        self._over.wait(_GIVEN_UP_SECONDS)

    def _total_usage(self, before: resource.struct_rusage, seconds: float) -> Usage:
        """Return what the task has used in all, from the kernel's accounting of waited-for children."""
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        # the largest of all child processes so far: the task's if it is larger than those before it. A process
        # counts as at least as large as this one was when it was made (the kernel's exec_mmap), some 30 MB
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
            self.say("the coordinator did not accept the report of how the task ended")
        self._connection.close()
