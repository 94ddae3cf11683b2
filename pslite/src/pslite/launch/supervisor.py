"""Keeps a job's coordinator alive: it runs in a process of its own, and when that dies, or hangs, another goes on from
its log.

The process that does so does as little as can be: it holds the listening socket, so that members that come meanwhile
wait in its queue, and the director that starts tasks here, so that they stay the processes of one parent.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from pslite.coordinator import Coordinator
from pslite.coordinator.record import decode
from pslite.errors import Cancelled, PsliteError, UsageError
from pslite.launch.local_tasks import LocalTasks
from pslite.launch.signals import ENDING, OWN, handled
from pslite.launch.supervisor_channel import MAX_BYTES, End, Living, Started, SupervisorChannel, Told, Wish
from pslite.net.framing import Channel, Inbox
from pslite.storage.coordinator_log import CoordinatorLog, read_state

#: variable that names the folder of the log
VARIABLE = "DL2_STATE"
#: what it says where there is to be none
_NONE = "none"
#: a coordinator that has died so often is not started again
_MOST_DEATHS = 10
#: one that says nothing for so long hangs: half of the lease, after which its members look for another one
_HANG_SECONDS = 5.0
#: the time between two looks at that
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Place:
    """Where a coordinator's log is."""

    #: what the user has named: somebody else, too, can start a coordinator on it
    folder: Path | None = None
    #: in a folder that is made for this job; without either there is no log, and the job ends with its coordinator
    temporary: bool = False
    #: of the coordinator whose job is gone on with: the port at which members look for it; 0: a job begins
    port: int = 0
    #: the tasks that it wanted
    wanted: frozenset[str] = frozenset()


def find_place(environ: Mapping[str, str]) -> Place:
    """Return where the log is: in the folder that DL2_STATE names, or in a temporary one, which is not made yet.

    Raises
    ------
    UsageError
        what is in the folder is no log of ours, or cannot be read.

    """
    named = environ.get(VARIABLE, "")
    if named == _NONE:
        return Place()
    if not named:
        return Place(temporary=True)
    folder = Path(named)
    state = read_state(folder)
    if state is None:
        return Place(folder)
    try:
        record = decode(state)
    except msgspec.MsgspecError as error:
        raise UsageError(f"the coordinator's log in {folder} ({VARIABLE}) is of another version: {error}") from error
    wanted = record.reply.members if record.reply is not None else None
    port = int(record.address.rpartition(":")[2])
    return Place(folder, port=port, wanted=wanted or frozenset())


class Supervisor:
    """Runs coordinators, one after the other.

    Parameters
    ----------
    make
        makes one, in its own process: of what leads to this process, the socket to listen on, and its log.
    listener
        the socket; it stays open here until `run` returns.
    place
        where the log is.
    say
        takes lines for the user.
    director
        what starts tasks here, for coordinators that use the leash as their director.

    """

    def __init__(
        self,
        make: Callable[[SupervisorChannel, socket.socket, CoordinatorLog | None], Coordinator],
        *,
        listener: socket.socket,
        place: Place,
        say: Callable[[str], None],
        director: LocalTasks | None = None,
    ) -> None:
        self._make = make
        self._listener = listener
        self._place = place
        self._folder = place.folder
        self._say = say
        self._director = director
        self._child = 0
        self._channel: Channel[Started | Living | Told] | None = None
        #: signals that asked for the end of the job
        self._asked: list[int] = []
        #: whether the coordinator has been told of the first; whether nothing is being sent to it, so that it can be
        self._told = False
        self._idle = False
        self._started = False

    def run(self) -> int:
        """Run the job to its end; return the exit status."""
        deaths = 0
        try:
            with handled(self._handle):
                if self._place.temporary:
                    self._folder = self._make_folder()
                while True:
                    code = os.waitstatus_to_exitcode(self._live())
                    if code >= 0:
                        return code
                    deaths += 1
                    name = signal.Signals(-code).name
                    if self._asked or self._folder is None or deaths == _MOST_DEATHS:
                        self._say(f"the coordinator was killed by {name}")
                        return 128 + (self._asked[0] if self._asked else -code)
                    self._say(f"the coordinator was killed by {name}; another one takes its place")
        finally:
            self._listener.close()
            if self._director is not None:
                self._director.stop(2.0)
            if self._place.temporary and self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _make_folder(self) -> Path | None:
        """Make the temporary one; whatever ends us from here on removes it."""
        try:
            return Path(tempfile.mkdtemp(prefix="pslite-"))
        except OSError as error:
            self._say(f"no place for the coordinator's log ({error.strerror}): the job ends if its coordinator dies")
            return None

    def _handle(self, number: int) -> None:
        """End the job; at once when asked for the second time."""
        if number in OWN:
            if self._director is not None:
                self._director.pass_on(number)
            return
        self._asked.append(number)
        if len(self._asked) > 1:
            if self._director is not None:
                self._director.stop(0.0)
            if self._child:
                os.kill(self._child, signal.SIGKILL)
        elif self._idle:
            self._tell_end()

    def _tell_end(self) -> None:
        if self._asked and not self._told and self._channel is not None:
            self._told = True
            self._channel.send(End(self._asked[0]))

    def _live(self) -> int:
        """Run one coordinator; returns how its process ended, as waitpid(2) says it."""
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            ours.close()
            self._be_coordinator(theirs)
        theirs.close()
        with ours:
            self._child = child
            self._channel = Channel(ours, Inbox(Started | Living | Told, MAX_BYTES))
            ours.setblocking(True)
            self._told = False
            self._direct(self._channel)
            self._channel = None
        _, status = os.waitpid(child, 0)
        self._child = 0
        return status

    def _direct(self, channel: Channel[Started | Living | Told]) -> None:
        """Have our director direct a coordinator until the process of that has ended."""
        director = self._director
        # nobody can follow one without a log, which may come to itself; so may one that waits for a director
        silent, watched = 0.0, False
        while True:
            self._idle = True
            self._tell_end()
            looked = time.monotonic()
            ready, _, _ = select.select([channel.sock], [], [], _LOOK_SECONDS if watched else None)
            if not ready:
                # a look that took much longer was at a time when this process stood still, too
                took = time.monotonic() - looked
                silent = silent + took if took < 2 * _LOOK_SECONDS else 0.0
                if silent >= _HANG_SECONDS:
                    self._say(f"the coordinator hangs: no word from it for {_HANG_SECONDS:g} s")
                    os.kill(self._child, signal.SIGKILL)
                    watched = False
                continue
            messages, still_open = channel.wait()
            self._idle = False
            silent = 0.0
            for message in messages:
                closing = message.closing if isinstance(message, Living) else getattr(message, "last", False)
                watched = self._folder is not None and not closing
                if director is None or isinstance(message, Living):
                    continue
                if isinstance(message, Started):
                    if not self._started:
                        self._started = True
                        director.start(message.address, message.token, lambda: None)
                elif message.last:
                    director.close(message.status)
                else:
                    channel.send(Wish(director.exchange(message.status, urgent=message.urgent)))
            if not still_open:
                return

    def _be_coordinator(self, sock: socket.socket) -> NoReturn:
        """Be the coordinator, in a process that must not return to what the other one was doing."""
        code = 1
        try:
            # a terminal and a resource manager send signals to us too: it is the other process that heeds them
            for number in ENDING + OWN:
                signal.signal(number, signal.SIG_IGN)
            folder = self._folder
            leash = SupervisorChannel(sock, followed=self._place.folder is not None)
            coordinator = self._make(leash, self._listener, CoordinatorLog(folder) if folder is not None else None)
            code = _run(coordinator, leash)
        except UsageError as error:
            sys.stderr.write(f"dl2-run: {error}\n")
            code = 2
        except PsliteError as error:
            sys.stderr.write(f"dl2-run: {error}\n")
        except BaseException:  # noqa: BLE001  (the process ends here, whatever it is)
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _run(coordinator: Coordinator, leash: SupervisorChannel) -> int:
    try:
        status = coordinator.run()
    except Cancelled:
        return 128 + leash.ending
    if status.state != "finished":
        sys.stderr.write(f"dl2-run: job {status.state}: {status.reason}\n")
        return 1
    return 0
