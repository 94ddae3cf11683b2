"""Signal handling of processes that forward signals to their children."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

#: what asks for an end
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: what programs give a meaning of their own; Slurm sends them before a time limit (sbatch --signal)
OWN = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def handled(handler: Callable[[int], None], numbers: tuple[signal.Signals, ...] = ENDING + OWN) -> Iterator[None]:
    """Have signals handled, in the main thread; those that are ignored (nohup) stay so, here and in children."""

    def handle(number: int, _frame: FrameType | None) -> None:
        handler(number)

    before = {}
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Wait for a child's end in the main thread, whose handlers of signals run at once; returns its `returncode`.

    `process.wait()` would keep a signal that comes just before its system call from its handler until the child ends:
    only a descriptor that signals are written to (`signal.set_wakeup_fd`) is readable still when one asks.
    """
    there, here = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    fd = signal.set_wakeup_fd(here, warn_on_full_buffer=False)
    child = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    try:
        while (code := process.poll()) is None:
            select.select([there], [], [])
            os.read(there, 4096)
        return code
    finally:
        signal.signal(signal.SIGCHLD, child)
        signal.set_wakeup_fd(fd)
        os.close(there)
        os.close(here)


def from_terminal() -> bool:
    """Whether this process is in the foreground of a terminal, whose Ctrl-C every process of its group gets."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
