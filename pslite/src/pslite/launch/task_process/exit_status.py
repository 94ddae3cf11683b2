"""How a task's process ended: its exit status, the cause as far as it shows from outside, its last lines of output."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pslite.job.job_status import Cause
from pslite.job.printable_text import printable

#: of error output, that the report of an end has at most
_MAX_LINES, _MAX_BYTES = 12, 2000
_STDERR = 2


@dataclass(frozen=True)
class OomKills:
    """Numbers of processes that the kernel has killed for lack of memory; None where that cannot be read."""

    cgroup: int | None
    machine: int | None


def oom_kills(root: Path = Path("/")) -> OomKills:
    """Return the numbers for this process's control group, which its children share, and for the machine.

    Control groups: memory.events of version 2, memory.oom_control of version 1 (the kernel's
    Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
    """
    found = None
    for path in _counters(root):
        found = _count(path)
        if found is not None:
            break
    return OomKills(found, _count(root / "proc/vmstat"))


def _counters(root: Path) -> list[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    base = root / "sys/fs/cgroup"
    places = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        path = path.lstrip("/")
        if "memory" in kinds.split(","):
            places += [base / "memory" / path / "memory.oom_control"]
        elif not kinds:
            places += [base / path / "memory.events", base / "unified" / path / "memory.events"]
    return places


def _count(path: Path) -> int | None:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended."""

    cause: Cause
    #: what is known beyond status or signal; empty for nothing
    text: str = ""


def classify(code: int, before: OomKills, after: Callable[[], OomKills]) -> ExitStatus:
    """Classify how a process ended.

    Parameters
    ----------
    code
        its exit status, -n for signal n.
    before
        the kills when it was started.
    after
        returns the kills now.

    """
    if code == 0:
        return ExitStatus(Cause.DONE)
    now = after()
    killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if before.cgroup is not None and now.cgroup is not None:
        if now.cgroup > before.cgroup and killed:
            return ExitStatus(Cause.OUT_OF_MEMORY, "out of memory in its control group")
        if now.cgroup > before.cgroup and code > 0:
            return ExitStatus(Cause.OUT_OF_MEMORY, "a process of its control group was killed for lack of memory")
    elif killed and (now.machine or 0) > (before.machine or 0):
        return ExitStatus(Cause.OUT_OF_MEMORY, "out of memory, probably: the kernel killed a process of this machine")
    return ExitStatus(Cause.KILLED if code < 0 else Cause.FAILED)


@dataclass(frozen=True)
class LogTail:
    """The file to which error output goes, and its length at the start.

    It is read after the end, and not taken through a pipe: a pipe would end the task when its dl2-run dies.
    """

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
