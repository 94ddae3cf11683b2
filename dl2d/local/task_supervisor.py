"""Supervisor of one task: a small process that starts the task, waits for it, and writes down how it ended.

It is run by its path with ``python -I -S``, apart from the daemon, and so may import nothing but the standard library.
It goes on when the daemon dies; that is how a task's exit status is known to the next daemon. As the *subreaper* of
everything the task starts (prctl(2), PR_SET_CHILD_SUBREAPER) it is the ancestor of all of it for good: no process of
the task gets out of its sight by leaving the session or by outliving its parent, and it ends only after the last one.

Order of things, so that a crash at any point loses nothing: the manager writes the record; the supervisor forks the
task, which waits; the supervisor adds both identities to the record and syncs it; only then the task is let go.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # a tenth of the supervisor's start, and there is one per task
    from typing import Any, NoReturn

#: A supervisor that could not let its task go within this many seconds of ``submit`` gives up, so that a record without
#: a supervisor is known to be dead after ``START_LIMIT``.
BEGIN_LIMIT, START_LIMIT = 20.0, 30.0
#: Seconds that processes which a task left behind have between SIGTERM and SIGKILL.
LEFTOVER_GRACE = 5.0
#: The same for the whole task when somebody other than the manager tells the supervisor to end (a machine going down).
OUTSIDE_GRACE = 10.0
#: Longest wait between two looks at the deadline while the supervisor waits for signals.
MAX_WAIT = 3600.0
#: First and longest pause between two rounds of SIGKILL; a process in the kernel's hands may take its time.
KILL_PAUSE, MAX_KILL_PAUSE = 0.05, 1.0
#: How long to try again when the end cannot be written (disk full).
WRITE_AGAIN = 300.0
#: First line of the answer to the manager; the reason stands in the next.
STARTED, REFUSED, LATER = "started", "refused", "later"
_PR_SET_CHILD_SUBREAPER = 36
_WAITED = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def start_ticks(pid: int, *, dead: bool = False) -> int | None:
    """Start time of a process in clock ticks since boot, or None where there is none.

    Dead processes that nobody collected yet count with ``dead`` only. With the boot's id this identifies a process for
    good. Unlike a time of day it does not move when the clock is set.
    """
    stat = _stat(pid, dead=dead)
    return None if stat is None else stat[1]


def boot_id() -> str:
    """Identity of this boot of the machine (proc(5), /proc/sys/kernel/random/boot_id)."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123  pathlib is too heavy here
        return file.read().strip()


def _stat(pid: int, *, dead: bool = False) -> tuple[int, int] | None:
    """Parent and start time of a process (proc_pid_stat(5), fields 4 and 22)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            # The name stands in brackets and may hold anything, brackets and blanks included.
            fields = file.read().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {b"Z", b"X"} and not dead else (int(fields[1]), int(fields[19]))


def descendants(root: int) -> dict[int, int]:
    """Start ticks by pid of all living processes below ``root``."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal() and (stat := _stat(int(name))) is not None:
            children.setdefault(stat[0], []).append(int(name))
            ticks[int(name)] = stat[1]
    found: dict[int, int] = {}
    below = [root]
    while below:
        for pid in children.get(below.pop(), []):
            if pid not in found:
                found[pid] = ticks[pid]
                below.append(pid)
    return found


def write_json(path: str, value: object) -> None:
    """Replace a file as a whole, synced to the disk before the new name shows. Raises OSError."""
    fresh = f"{path}.{os.getpid()}.new"
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            data = memoryview(json.dumps(value).encode())
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(fresh, path)  # noqa: PTH105
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)  # noqa: PTH108
        raise
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # noqa: PTH120
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class _CannotStart(Exception):
    """The task was not started; the message says why. ``word`` tells whether trying again may help."""

    def __init__(self, word: str, message: str) -> None:
        self.word = word
        super().__init__(message)


class _Supervisor:
    def __init__(self, order: dict[str, Any]) -> None:
        self._path: str = order["record_path"]
        self._stop_path: str = order["stop_path"]
        self._record: dict[str, Any] = order["record"]
        self._launch: dict[str, Any] = order["launch"]
        self._begin_before: float = order["begin_before"]
        self._leader = 0
        self._status: int | None = None
        #: time.monotonic() at which everything left is killed; None while nobody asked for the end.
        self._kill_at: float | None = None
        self._asked = ""
        self._termed = False
        self._killed = False

    def start(self) -> None:
        """Start the task. Raises _CannotStart."""
        try:
            self._fork()
        except _CannotStart:
            if self._leader:
                os.waitpid(self._leader, 0)
            raise

    def _fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
        for number in _WAITED:
            signal.signal(number, signal.SIG_DFL)  # a daemon that ignores SIGCHLD would prevent waiting for the task
        go_read, go_write = os.pipe()
        failed_read, failed_write = os.pipe()
        self._leader = os.fork()
        if self._leader == 0:
            os.close(go_write)
            os.close(failed_read)
            self._become_task(go_read, failed_write)
        os.close(go_read)
        os.close(failed_write)
        try:
            self._record["keeper"] = {"pid": os.getpid(), "ticks": start_ticks(os.getpid())}
            self._record["leader"] = {"pid": self._leader, "ticks": start_ticks(self._leader)}
            write_json(self._path, self._record)
            # From here on who wants to stop the task finds this process in the record: one of the two sees the other.
            if os.path.exists(self._stop_path):  # noqa: PTH110
                raise _CannotStart(REFUSED, "it was stopped before it began")
            if time.monotonic() > self._begin_before:
                raise _CannotStart(LATER, "the machine was too slow to start it in time; nothing was run")
            os.write(go_write, b"g")
        except OSError as error:
            raise _CannotStart(LATER, f"cannot write {self._path}: {error.strerror}") from error
        finally:
            os.close(go_write)  # without the word to go the task ends here
        with os.fdopen(failed_read, "rb") as failure:
            if said := failure.read():
                raise _CannotStart(REFUSED, said.decode(errors="replace"))

    def _become_task(self, go: int, failed: int) -> NoReturn:
        """In the forked child: wait for the word, then become the user's program."""
        try:
            if not os.read(go, 1):
                os._exit(127)
            os.setsid()
            launch = self._launch
            # Python ignores SIGPIPE and SIGXFSZ, and the daemon may have been started with SIGHUP ignored.
            for number in (*_WAITED, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, set())
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            output = os.open(launch["output"], flags, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(launch["cwd"])
            os.execve(launch["program"], launch["argv"], launch["env"])  # noqa: S606
        except OSError as error:
            os.write(failed, f"{error.filename or launch['program']}: {error.strerror}".encode())
        except ValueError as error:  # a zero byte, or no name of an environment variable
            os.write(failed, str(error).encode())
        finally:
            os._exit(127)

    def supervise(self) -> None:
        """Wait until every process of the task has ended, killing what has to be, and write down how it went."""
        pause = KILL_PAUSE
        while self._reap():
            wait = MAX_WAIT
            if self._kill_at is not None:
                wait = self._kill_at - time.monotonic()
                if wait <= 0:
                    self._killed = self._killed or self._status is None
                    self._signal_all(signal.SIGKILL)
                    wait = pause
                    pause = min(2 * pause, MAX_KILL_PAUSE)
            info = signal.sigtimedwait(_WAITED, min(wait, MAX_WAIT))
            if info is not None and info.si_signo != signal.SIGCHLD:
                self._stop()
        self.write_end(self._cause(), "", WRITE_AGAIN)

    def _reap(self) -> bool:
        """Collect what ended; False when nothing is left."""
        pid = -1
        while pid:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == self._leader:
                self._status = status
        if self._status is not None and self._kill_at is None:
            # Whatever the task left behind must go too: its room is given away as soon as this process ends.
            self._kill_at = time.monotonic() + LEFTOVER_GRACE
            self._signal_all(signal.SIGTERM)
        return True

    def _stop(self) -> None:
        try:
            with open(self._stop_path, encoding="utf-8") as file:  # noqa: PTH123
                kill_at, asked = float(json.load(file)["kill_at"]), "stopped"
        except (OSError, ValueError, KeyError):
            kill_at, asked = time.monotonic() + OUTSIDE_GRACE, "outside"
        if self._status is None:
            self._asked = self._asked or asked
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)
        if not self._termed and self._kill_at > time.monotonic():
            self._termed = True
            self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for pid, ticks in descendants(os.getpid()).items():
            if start_ticks(pid) == ticks:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # ended, or a program with set-user-id
                    os.kill(pid, number)

    def _cause(self) -> str:
        if not self._asked:
            return "itself"
        return "killed" if self._killed else self._asked

    def write_end(self, cause: str, said: str, patience: float) -> None:
        """Add the end to the record; tries again for ``patience`` seconds when the disk is full. Raises OSError."""
        self._record["ended"] = {"at": time.time(), "status": self._status, "cause": cause, "said": said}
        give_up = time.monotonic() + patience
        while True:
            try:
                write_json(self._path, self._record)
            except FileNotFoundError:
                raise  # somebody removed the whole state folder
            except OSError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(1.0)
            else:
                return


def _answer(word: str, said: str = "") -> None:
    """Tell the manager, which may be gone; then let go of its pipes."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{word}\n{said}".encode())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def main() -> int:
    """Read the order from standard input, start the task, answer how that went, and supervise it."""
    if os.fork():
        os._exit(0)  # so that init and not the daemon is the supervisor's parent
    os.setsid()
    order: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    # The task's standard input is /dev/null from its first moment, and the supervisor's must not tie it to the daemon.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    supervisor = _Supervisor(order)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        _answer(LATER, f"prctl: {os.strerror(ctypes.get_errno())}")
        return 1
    try:
        supervisor.start()
    except _CannotStart as error:
        try:
            supervisor.write_end("never", str(error), 0)
        except OSError as trouble:
            print(f"{sys.argv[1]}: {error}; and this cannot be written: {trouble}", file=sys.stderr)  # noqa: T201
        _answer(error.word, str(error))
        return 1
    _answer(STARTED)
    supervisor.supervise()
    return 0


if __name__ == "__main__":
    sys.exit(main())
