"""A coordinator's log: what another one needs to go on with the job where this one ended.

A folder with three files: `lock`, held by the one that speaks for the job; `log`, one line of JSON for each state that
was written down, the last whole one of the highest term counts; `scales`, what servers were told last of the norm of a
gradient, which changes with every step and is written over.

What is written outlives the process, not the machine: nothing waits for the disk.  Members look for a coordinator at
one address and for the time of one lease, so that none that comes after a crash of its machine would find them; and a
coordinator that waits for a busy disk is silent for seconds.

Every opening is a new *term*.  A log in which somebody else has written since is closed for good: so a coordinator
that was stopped for a while and follows another one in time says nothing more (the lock alone does not do on file
systems without locks).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from pslite.errors import Fenced, UsageError

#: the log is written anew when it is larger than this, in bytes, and than so many times its last line
_LEAST_BYTES, _LINES = 1 << 20, 16
#: bytes that say how long `scales` is: what is after it is of an earlier one
_LENGTH = 4


class _Line(msgspec.Struct, omit_defaults=True):
    term: int
    #: absent where a term begins
    state: msgspec.Raw = msgspec.Raw(b"")


class Journal:
    """The log in a folder; opened, and locked, with the object.

    Parameters
    ----------
    folder
        made if it is not there, for its owner alone.

    Raises
    ------
    UsageError
        another process has it, or it cannot be made or read.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "log"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UsageError(f"the coordinator's log in {folder} cannot be opened: {error.strerror}") from error
        try:
            self._seize()
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            self._scales = os.open(folder / "scales", os.O_RDWR | os.O_CREAT, 0o600)
            data = self._path.read_bytes()
            #: the last state that was written down, as JSON; None if there is none
            self.state, last = _last(data)
            #: of this opening, counted from 1
            self.term = last + 1
            self._size = len(data)
            start = b"" if data.endswith(b"\n") or not data else b"\n"
            self._append(start + msgspec.json.encode(_Line(self.term)) + b"\n")
        except OSError as error:
            self.close()
            raise UsageError(f"the coordinator's log in {folder} cannot be used: {error.strerror}") from error

    def _seize(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 64, 0).decode(errors="replace").strip() or "of unknown id"
            raise UsageError(
                f"the coordinator's log in {self._folder} is in use by process {holder}: there is one coordinator for "
                "a job; end that one first, or give another folder (DL2_STATE)"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def write(self, state: bytes) -> None:
        """Append a state, in JSON without line breaks; from then on it outlives this process.

        Raises
        ------
        Fenced
            somebody else has written since.
        OSError
            it cannot be written.

        """
        line = msgspec.json.encode(_Line(self.term, msgspec.Raw(state))) + b"\n"
        self.check()
        if self._size + len(line) > max(_LEAST_BYTES, _LINES * len(line)):
            self._begin_anew(line)
        else:
            self._append(line)

    def check(self) -> None:
        """See whether the log is still ours alone.

        Raises
        ------
        Fenced
            somebody else has written since.

        """
        try:
            there, ours = self._path.stat(), os.fstat(self._file)
            alone = (there.st_dev, there.st_ino, there.st_size) == (ours.st_dev, ours.st_ino, self._size)
        except FileNotFoundError:
            alone = False
        if not alone:
            raise Fenced(f"another coordinator has taken over the log in {self._folder}")

    def _append(self, line: bytes) -> None:
        done = 0
        while done < len(line):
            written = os.write(self._file, line[done:])
            done += written
            self._size += written

    def _begin_anew(self, line: bytes) -> None:
        """Put a file that begins with `line` in the place of the one there."""
        beside = self._folder / "log.new"
        file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        old, size = self._file, self._size
        self._file, self._size = file, 0
        try:
            self._append(line)
        except OSError:
            self._file, self._size = old, size
            os.close(file)
            raise
        beside.rename(self._path)
        os.close(old)

    @property
    def scales(self) -> bytes:
        """What was noted last; empty if nothing was."""
        data = os.pread(self._scales, os.fstat(self._scales).st_size, 0)
        length = int.from_bytes(data[:_LENGTH], "little")
        return data[_LENGTH : _LENGTH + length]

    def note(self, scales: bytes) -> None:
        """Write over what was noted before."""
        os.pwrite(self._scales, len(scales).to_bytes(_LENGTH, "little") + scales, 0)

    def close(self) -> None:
        """Let another one have the log."""
        for name in ("_file", "_scales", "_lock"):
            descriptor = self.__dict__.pop(name, -1)
            if descriptor >= 0:
                os.close(descriptor)

    def remove(self) -> None:
        """The job is over, or cannot be gone on with: nobody may find the log. The folder goes too if it is empty."""
        for name in ("log", "log.new", "scales", "lock"):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        self.close()


def last_state(folder: Path) -> bytes | None:
    """Return the last state in a folder's log, without locking it; None if there is none."""
    try:
        return _last((folder / "log").read_bytes())[0]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"the coordinator's log in {folder} cannot be read: {error.strerror}") from error


def _last(data: bytes) -> tuple[bytes | None, int]:
    """Return the state that counts, and the highest term; a line that was not written to its end is left out."""
    decoder = msgspec.json.Decoder(_Line)
    state: bytes | None = None
    highest = 0
    for text in data.split(b"\n"):
        try:
            line = decoder.decode(text)
        except msgspec.MsgspecError:
            continue
        if line.term < highest:
            continue  # by one that had not heard yet that it was followed
        highest = line.term
        if line.state:
            state = bytes(line.state)
    return state, highest
