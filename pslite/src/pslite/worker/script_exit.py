"""The process that a worker lives in: how the job hears that its script ends, and how the script is made to end."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType
from typing import NoReturn

from pslite.errors import JobFailed
from pslite.job.printable_text import flush_output, tell

#: where the script was started: relative names on its command line are valid there
_FOLDER = os.readlink("/proc/self/cwd")  # noqa: PTH115  (it may be gone)
#: how long the user's thread may take to notice that the job has failed before the process is ended
FAIL_GRACE_SECONDS = 5.0


class ScriptProcess:
    """A process that runs one training script: what a worker needs of the process around it."""

    def enter(self, leave: Callable[[], None], raised: Callable[[BaseException], None]) -> None:
        """The worker joins: from now on call `leave` when the script ends, and before that `raised` if by an error.

        The script ends with the interpreter, or with the function that a process of multiprocessing runs. sys.exit and
        exit with a status other than 0 are errors, too; `raise SystemExit` is not seen, but dl2-run reports the exit
        status.
        """
        forked_or_spawned = multiprocessing.parent_process() is not None
        ended_by: SystemExit | None = None

        def end() -> None:
            # multiprocessing calls this before it handles what its function has raised
            error = sys.exc_info()[1] if forked_or_spawned else ended_by
            if error is not None and not (isinstance(error, SystemExit) and not error.code):
                raised(error)
            leave()

        if forked_or_spawned:
            Finalize(None, end, exitpriority=0)  # a forked process ends without the functions of atexit
        else:
            atexit.register(end)
        before, leave_interpreter = sys.excepthook, sys.exit

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            raised(error)
            if isinstance(error, JobFailed):
                tell("pslite", f"the job ended: {error}")  # where the script was then is not the cause
            else:
                before(kind, error, trace)

        def leave_by(status: str | int | None = None) -> NoReturn:
            nonlocal ended_by
            if threading.current_thread() is threading.main_thread():
                ended_by = SystemExit(status)
            leave_interpreter(status)

        sys.excepthook = hook
        for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            setattr(module, name, leave_by)

    def begin_again(self, reason: str) -> None:
        """The job goes back to a checkpoint: run the script once more from its beginning; does not return.

        The program is replaced by a fresh one of the same command line; dl2-run goes on watching the same process.
        """
        tell("pslite", f"{reason}; the script starts again")
        flush_output()
        for child in multiprocessing.active_children():
            child.kill()  # workers of a data loader, which would go on
        with contextlib.suppress(OSError):
            os.chdir(_FOLDER)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606

    def abandon(self, reason: str) -> None:
        """The job has failed and the script does not notice: end the process.

        The script is busy in a long step or in code of its own, and nothing it does matters.
        """
        tell("pslite", reason)
        os._exit(1)
