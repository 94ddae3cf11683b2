"""The process that a worker lives in: how the job hears that its script ends, and how the script is made to end."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class Host(Protocol):
    """What a worker needs of the process around it."""

    def enter(self, leave: Callable[[], None], raised: Callable[[BaseException], None]) -> None:
        """The worker joins: from now on call `leave` when the script ends, and before that `raised` if by an error."""

    def abandon(self, reason: str) -> None:
        """The job has failed and the script does not notice: end it."""


class ScriptProcess:
    """A process that runs one training script."""

    def enter(self, leave: Callable[[], None], raised: Callable[[BaseException], None]) -> None:
        """Watch the end of the interpreter."""
        atexit.register(leave)
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            raised(error)
            before(kind, error, trace)

        sys.excepthook = hook

    def abandon(self, reason: str) -> None:
        """End the process: the script is busy in a long step or in code of its own, and nothing it does matters."""
        sys.stderr.write(f"pslite: {reason}\n")
        sys.stderr.flush()
        os._exit(1)
