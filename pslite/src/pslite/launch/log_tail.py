"""Last lines of a task's error output, for the report of how it ended.

Schedulers have error output written to a file. It is read from there after the end, and not taken through a pipe: a
pipe would end the task when its dl2-run dies.
"""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass

from pslite.job.printable_text import printable

_MAX_LINES, _MAX_BYTES = 12, 2000
_STDERR = 2


@dataclass(frozen=True)
class LogTail:
    """The file to which error output goes, and its length at the start."""

    path: str
    start: int

    def text(self) -> str:
        """Return the path and the last lines written since; "" if nothing was."""
        try:
            with open(f"/proc/self/fd/{_STDERR}", "rb") as file:  # noqa: PTH123  (the file may have another name by now)
                end = file.seek(0, os.SEEK_END)
                first = max(min(self.start, end), end - _MAX_BYTES)
                file.seek(first)
                data = file.read(_MAX_BYTES)
        except OSError:
            return ""
        lines = data.decode(errors="replace").replace("\r", "\n").split("\n")
        if first > self.start:
            lines = lines[1:] or lines  # the first one is cut
        written = [printable(line.rstrip(), keep="\t") for line in lines if line.strip()]
        if not written:
            return ""
        return "\n".join((f"the end of {self.path} on {socket.gethostname()}:", *written[-_MAX_LINES:]))


def open_tail() -> LogTail | None:
    """Return where this process's error output goes; None if it is no file."""
    try:
        found = os.fstat(_STDERR)
        if not stat.S_ISREG(found.st_mode):
            return None
        return LogTail(printable(os.readlink(f"/proc/self/fd/{_STDERR}")), found.st_size)  # noqa: PTH115
    except OSError:
        return None
