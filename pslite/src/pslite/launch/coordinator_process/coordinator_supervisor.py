"""Supervisor of a job's coordinator: runs it in a child process, and another one from its log when it dies or hangs.

The supervisor itself does little: it holds the listening socket, so that members that connect in the meantime wait in
its queue, and the tasks that it has started on this machine, so that they keep their parent process. Over a channel
between the two it gives the coordinator the membership source and forwards signals.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from pslite.coordinator import Coordinator
from pslite.coordinator.state.state_log_entries import decode
from pslite.errors import Cancelled, Fenced, PsliteError, UsageError
from pslite.failure_rate_limits import MAX_DEATHS, Incident
from pslite.job.job_status import MembershipSource, Reply, Status
from pslite.job.message_base_class import WireRecord
from pslite.job.printable_text import flush_output, tell
from pslite.launch.coordinator_process.task_processes_on_this_machine import LocalTasks
from pslite.launch.daemon_connection.membership_from_daemon import report_failure
from pslite.launch.signal_forwarding import ENDING, OWN, handled
from pslite.net.message_framing import Channel, Inbox
from pslite.storage.coordinator_log import CoordinatorLog, read_state

#: the shortest time between two statuses that are not urgent, in seconds
_STATUS_SECONDS = 0.1
_CLOSE_SECONDS = 5.0
MAX_BYTES = 64 << 20


class Started(WireRecord, tag=True):
    """From the coordinator: the address and token at which members join."""

    address: str
    token: bytes


class StatusMessage(WireRecord, tag=True):
    """From the coordinator, several times a second: it is alive, and the status of the job if the supervisor has tasks.

    `last` when the job is over, while members and the daemon have not yet taken that.
    """

    status: Status | None
    urgent: bool
    last: bool = False


class Request(WireRecord, tag=True):
    """From the supervisor: what its membership source asks for."""

    reply: Reply


class Terminate(WireRecord, tag=True):
    """From the supervisor: it has received that signal, so the job is to end."""

    number: int


#: what a coordinator sends
FromCoordinator = Started | StatusMessage


@dataclass(eq=False)
class SupervisorChannel:
    """The coordinator's end: the membership source of the job, which forwards to those that decide."""

    #: connected to the supervisor
    sock: socket.socket
    #: whether a new supervisor may continue the job from the log; then the coordinator ends silently if this one dies
    followed: bool
    #: whether the supervisor starts the tasks: then its requests count, and it is sent every status
    has_tasks: bool
    #: a membership source in the coordinator's own process; its requests count if the supervisor has no tasks
    source: MembershipSource | None
    #: the signal that ends the job
    ending: int = 0
    _reply: Reply | None = None
    _sent_at: float = 0.0
    _orphaned: bool = False

    def __post_init__(self) -> None:
        self._channel: Channel[Request | Terminate] = Channel(self.sock, Inbox(Request | Terminate, MAX_BYTES))

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:
        """Have the supervisor start its tasks, and the source."""
        self._channel.send(Started(address, token))
        if self.source is not None:
            self.source.start(address, token, wake)

    def exchange(self, status: Status, *, urgent: bool) -> Reply | None:
        """Forward the status; return the newest request.

        Raises
        ------
        Cancelled
            the job is to end.
        Fenced
            the supervisor has died, and another coordinator may continue the job.

        """
        self._receive()
        now = time.monotonic()
        if not self._channel.unsent and (urgent or now - self._sent_at >= _STATUS_SECONDS):
            self._sent_at = now
            self._channel.send(StatusMessage(status if self.has_tasks else None, urgent))
        self._channel.flush()
        reply = self.source.exchange(status, urgent=urgent) if self.source is not None else None
        return self._reply if self.has_tasks else reply

    def _receive(self) -> None:
        messages, still_open = self._channel.receive()
        for message in messages:
            if isinstance(message, Request):
                self._reply = message.reply
            elif not self.ending:
                self.ending = message.number
                raise Cancelled(signal.Signals(message.number).name)
        if not still_open and not self.ending:
            if self.followed:
                raise Fenced("dl2-run has died, and may be started again")
            self.ending, self._orphaned = signal.SIGKILL, True
            raise Cancelled("dl2-run has died")

    def close(self, status: Status) -> None:
        """Report how the job has ended, unless the supervisor has died, which the daemon sees by itself."""
        if self._orphaned:
            return
        self.sock.settimeout(_CLOSE_SECONDS)
        self._channel.send(StatusMessage(status if self.has_tasks else None, urgent=True, last=True))
        if self.source is not None:
            self.source.close(status)


#: environment variable with the folder of the log, and its value for no log
STATE_VARIABLE = "DL2_STATE"
_NO_LOG = "none"
#: a coordinator that has sent no status for so long hangs; half of the lease, after which members look for another one
_HANG_SECONDS = 5.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class LogLocation:
    """Where the coordinator log of a job is, and what it says if it continues one."""

    #: named by the user, so that another dl2-run can continue the job from it
    folder: Path | None = None
    #: in a temporary folder of this job; with neither there is no log, and the job ends with its coordinator
    temporary: bool = False
    #: of a job that is continued: the port at which its members look for the coordinator; 0 for a new job
    port: int = 0
    #: of a job that is continued: the tasks that should be members
    wanted: frozenset[str] = frozenset()


def locate_log(environ: Mapping[str, str]) -> LogLocation:
    """Return where the log is: in the folder DL2_STATE, or in a temporary one, which is not created yet.

    Raises
    ------
    UsageError
        the folder has a log that cannot be read, or that is of another version.

    """
    named = environ.get(STATE_VARIABLE, "")
    if named == _NO_LOG:
        return LogLocation()
    if not named:
        return LogLocation(temporary=True)
    folder = Path(named)
    state = read_state(folder)
    if state is None:
        return LogLocation(folder)
    try:
        record = decode(state)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"the coordinator's log in {folder} ({STATE_VARIABLE}) was written by another version of pslite: {error}"
        ) from error
    wanted = record.reply.members if record.reply is not None else None
    port = int(record.address.rpartition(":")[2])
    return LogLocation(folder, port=port, wanted=wanted or frozenset())


@dataclass(eq=False)
class Supervisor:
    """Runs the coordinators of a job, one after the other."""

    #: creates a coordinator, in its own process, from its membership source (`director`), the listening socket
    #: (`listener`) and the log (`log`)
    make: Callable[..., Coordinator]
    #: the listening socket; open here until `run` returns
    listener: socket.socket
    #: where the log is
    location: LogLocation
    #: takes lines for the user
    say: Callable[[str], None]
    #: starts the tasks on this machine, and decides who is a member
    tasks: LocalTasks | None = None
    #: a membership source in the coordinator's process, which decides where there are no `tasks`
    source: MembershipSource | None = None
    #: monotonic seconds, by which deaths of coordinators are counted
    clock: Callable[[], float] = time.monotonic
    #: folder of the log; None without one
    _folder: Path | None = None
    _tasks_started: bool = False
    #: process id of the coordinator, 0 without one
    _child: int = 0
    _channel: Channel[FromCoordinator] | None = None
    #: signals received that end the job; whether the coordinator has been sent the first
    _signals: list[int] = field(default_factory=list)
    _terminate_sent: bool = False
    #: whether the signal handler may send: the main thread is not in the middle of a message
    _idle: bool = False

    def run(self) -> int:
        """Run the job to its end; return the exit status."""
        deaths: list[Incident] = []
        try:
            with handled(self._on_signal):
                self._folder = self._make_folder() if self.location.temporary else self.location.folder
                while True:
                    code = os.waitstatus_to_exitcode(self._run_coordinator())
                    if code >= 0:
                        return code
                    now = self.clock()
                    deaths = [*MAX_DEATHS.recent(deaths, now), Incident(now)]
                    name = signal.Signals(-code).name
                    too_often = len(deaths) >= MAX_DEATHS.count
                    if self._signals or self._folder is None or too_often:
                        within = f"{MAX_DEATHS.seconds / 3600:g} h"
                        more = f", {len(deaths)} times within {within}: it is not started again" if too_often else ""
                        if self._folder is None:
                            more = "; without a log it cannot be started again"
                        self.say(f"the coordinator was killed by {name}{'' if self._signals else more}")
                        return 128 + (self._signals[0] if self._signals else -code)
                    self.say(f"the coordinator was killed by {name}; another one takes its place")
        finally:
            self.listener.close()
            if self.tasks is not None:
                self.tasks.stop(2.0)
            if self.location.temporary and self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _make_folder(self) -> Path | None:
        """Create the temporary folder; None if that is not possible."""
        try:
            return Path(tempfile.mkdtemp(prefix="pslite-"))
        except OSError as error:
            self.say(
                f"the coordinator's log cannot be created ({error.strerror}): the job ends if its coordinator dies"
            )
            return None

    def _on_signal(self, number: int) -> None:
        """Forward a signal to the tasks, or end the job: in good order, or at once with the second signal."""
        if number in OWN:
            if self.tasks is not None:
                self.tasks.send_signal(number)
            return
        self._signals.append(number)
        if len(self._signals) > 1:
            if self.tasks is not None:
                self.tasks.stop(0.0)
            if self._child:
                os.kill(self._child, signal.SIGKILL)
        elif self._idle:
            self._send_terminate()

    def _send_terminate(self) -> None:
        if self._signals and not self._terminate_sent and self._channel is not None:
            self._terminate_sent = True
            self._channel.send(Terminate(self._signals[0]))

    def _run_coordinator(self) -> int:
        """Run one coordinator; return how its process ended, as waitpid(2) does."""
        ours, theirs = socket.socketpair()
        flush_output()
        child = os.fork()
        if not child:
            ours.close()
            self._be_coordinator(theirs)
        theirs.close()
        with ours:
            self._child = child
            self._channel = Channel(ours, Inbox(FromCoordinator, MAX_BYTES))
            ours.setblocking(True)
            self._terminate_sent = False
            self._serve(self._channel)
            self._channel = None
        _, status = os.waitpid(child, 0)
        self._child = 0
        return status

    def _serve(self, channel: Channel[FromCoordinator]) -> None:
        """Answer a coordinator until its process has ended; kill it if it hangs."""
        # Without a log, or while it waits for the daemon to take the end of the job, it is not killed: no other one
        # could take its place.
        silent, monitored = 0.0, False
        while True:
            self._idle = True
            self._send_terminate()
            began = time.monotonic()
            ready, _, _ = select.select([channel.sock], [], [], _POLL_SECONDS if monitored else None)
            if not ready:
                # a wait that took much longer shows that this process was stopped, too
                took = time.monotonic() - began
                silent = silent + took if took < 2 * _POLL_SECONDS else 0.0
                if silent >= _HANG_SECONDS:
                    self.say(f"the coordinator hangs: it has sent nothing for {_HANG_SECONDS:g} s")
                    os.kill(self._child, signal.SIGKILL)
                    monitored = False
                continue
            messages, still_open = channel.wait()
            self._idle = False
            silent = 0.0
            for message in messages:
                last = isinstance(message, StatusMessage) and message.last
                monitored = self._folder is not None and not last
                if self.tasks is not None:
                    self._answer(self.tasks, channel, message)
            if not still_open:
                return

    def _answer(self, tasks: LocalTasks, channel: Channel[FromCoordinator], message: FromCoordinator) -> None:
        """Pass a message of the coordinator to the tasks of this machine, and answer it."""
        if isinstance(message, Started):
            if not self._tasks_started:
                self._tasks_started = True
                tasks.start(message.address, message.token, lambda: None)
            return
        assert message.status is not None
        if message.last:
            tasks.close(message.status)
        else:
            channel.send(Request(tasks.exchange(message.status, urgent=message.urgent)))

    def _be_coordinator(self, sock: socket.socket) -> NoReturn:
        """Run the coordinator in the child process, and exit."""
        code = 1
        try:
            # terminals and resource managers signal this process, too; the supervisor handles the signals
            for number in ENDING + OWN:
                signal.signal(number, signal.SIG_IGN)
            folder = self._folder
            channel = SupervisorChannel(
                sock,
                followed=self.location.folder is not None,
                has_tasks=self.tasks is not None,
                source=self.source,
            )
            try:
                log = CoordinatorLog(folder) if folder is not None else None
                coordinator = self.make(director=channel, listener=self.listener, log=log)
            except PsliteError as error:
                if self.source is not None:
                    report_failure(self.source, str(error))
                raise
            code = _run(coordinator, channel)
        except PsliteError as error:
            code = 2 if isinstance(error, UsageError) else 1
            tell("dl2-run", str(error))
        except BaseException:  # noqa: BLE001  (the process ends here, whatever it is)
            traceback.print_exc()
        finally:
            with contextlib.suppress(ValueError):
                flush_output()
            os._exit(code)


def _run(coordinator: Coordinator, channel: SupervisorChannel) -> int:
    try:
        status = coordinator.run()
    except Cancelled:
        return 128 + channel.ending
    if status.state != "finished":
        tell("dl2-run", f"job {status.state}: {status.reason or ''}")
        return 1
    return 0
