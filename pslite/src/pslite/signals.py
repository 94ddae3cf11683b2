"""Signals that a parent passes on to what it has started."""

from __future__ import annotations

import os
import signal
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


def from_terminal() -> bool:
    """Whether we are in the foreground of a terminal, whose Ctrl-C every process of our group gets by itself."""
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
