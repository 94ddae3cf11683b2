"""Stacks of the threads of this process: all of them on standard error, and the line at which one is."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import traceback


def dump_stacks() -> None:
    """Write the stacks of all threads of this process to standard error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a notebook's has no descriptor
        faulthandler.dump_traceback(sys.stderr, all_threads=True)


def place_of(thread: int) -> str:
    """Return where a thread is, as "train.py:12 in load"; empty if it has ended."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001  (documented, for debuggers)
    if frame is None:
        return ""
    found = traceback.extract_stack(frame)[-1]
    return f"{found.filename}:{found.lineno} in {found.name}"
