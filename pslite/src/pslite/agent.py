"""dl2-run around one task: the parent of its process, which reports to the coordinator how that process ended."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from pslite.auth import Identity, connect
from pslite.channel import Channel, Inbox
from pslite.errors import PsliteError
from pslite.messages import MAX_CONTROL_BYTES, AgentExit, FromCoordinator, Noted

_REPORT_SECONDS = 2.0


class Agent:
    """Runs a command as the process of a task.

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

    """

    def __init__(
        self,
        identity: Identity,
        coordinator: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        say: Callable[[str], None],
    ) -> None:
        self._identity = identity
        self._coordinator = coordinator
        self._command = list(command)
        self._environ = dict(environ)
        self._say = say
        self._channel: Channel[FromCoordinator] | None = None
        self._connected = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Run the command to its end; return the exit status for dl2-run (128 + n for a signal n)."""
        previous = {number: signal.signal(number, self._forward) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            try:
                self._process = subprocess.Popen(self._command, env=self._environ)
            except OSError as error:
                self._say(f"cannot start {self._command[0]!r}: {error.strerror}")
                self._connect()
                self._report(0, 127, 0, f"cannot start {self._command[0]!r}: {error.strerror}")
                return 127
            threading.Thread(target=self._connect, name="pslite-agent", daemon=True).start()
            code = self._process.wait()
            self._report(self._process.pid, max(0, code), max(0, -code), "")
            return code if code >= 0 else 128 - code
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _connect(self) -> None:
        try:
            sock, _ = connect(self._coordinator, self._identity, "agent", timeout=60.0)
        except PsliteError as error:
            self._say(f"cannot report to the coordinator: {error}")
            return
        self._channel = Channel(sock, Inbox(FromCoordinator, MAX_CONTROL_BYTES))
        self._connected.set()

    def _report(self, pid: int, status: int, number: int, text: str) -> None:
        # a process that ends at once may be faster than our own connection
        if not self._connected.wait(_REPORT_SECONDS if status or number else 0.2):
            return
        channel = self._channel
        assert channel is not None
        channel.send(AgentExit(pid=pid, status=status, signal=number, text=text))
        deadline = time.monotonic() + _REPORT_SECONDS
        try:
            while time.monotonic() < deadline:
                messages, still_open = channel.receive()
                if not still_open or any(isinstance(m, Noted) for m in messages):
                    break
                channel.flush()
                time.sleep(0.01)
        except PsliteError:
            self._say("the coordinator did not take the report of how the task ended")
        channel.close()
