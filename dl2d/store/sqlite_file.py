"""SQLite's file: creates it, and checks that it and its log are still those that were opened."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path

from dl2d.core.errors import StoreUnavailable

#: What to do where SQLite's write-ahead log or its index was removed.
_REMOVED = {
    "-wal": (
        "and what was written since is in no file: stop the daemon with SIGTERM (systemctl stop dl2d), which writes it "
        "into the database; do not kill it"
    ),
    "-shm": (
        "and it must not write to the database any more: kill it (systemctl kill --signal=SIGKILL dl2d) and start it "
        "again; all changes are in the write-ahead log"
    ),
}


def create(file: Path, lock_seconds: float) -> None:
    """Make the file, readable by its owner alone (jobs' environments may hold secrets), and set it to WAL.

    With a write-ahead log readers never wait for the writer. The mode is kept in the file, so it is set once.
    ``lock_seconds``: how long another process may hold the lock.

    Raises
    ------
    StoreUnavailable
        It cannot be made, or its file system cannot keep a write-ahead log.
    sqlite3.Error
        SQLite refused to set it up.
    """
    try:
        os.close(os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StoreUnavailable(
            f"creating {file}: {error.strerror}; check that its folder exists and may be written"
        ) from error
    deadline = time.monotonic() + lock_seconds
    with contextlib.closing(sqlite3.connect(file, timeout=lock_seconds)) as connection:
        while True:
            try:
                # Of a file that has tables already, only VACUUM would change it.
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                # The change of mode does not wait for a lock by itself when two upgrades meet.
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
                continue
            break
    if mode != "wal":
        raise StoreUnavailable(f"{file}: this file system cannot keep a write-ahead log; put the file on a local disk")


class SqliteFile:
    """SQLite's file, its write-ahead log and the log's index, as this process opened them."""

    def __init__(self, file: Path) -> None:
        self._path = file
        #: Device and inode of each, the log and its index by their suffixes; None before they are opened.
        self._file: tuple[int, int] | None = None
        self._log: dict[str, tuple[int, int] | None] = {"-wal": None, "-shm": None}

    def check(self) -> None:
        """Raise ``StoreUnavailable`` if one was removed or replaced since it was opened: data would be lost.

        SQLite itself removes the log and its index only when the last connection is closed. It would go on writing into
        the removed log; without the index, this process and others would overwrite each other's changes.
        """
        self._check_file()
        for suffix in self._log:
            self._check_log(suffix)

    def _check_file(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            if self._file is None:  # SQLite makes it
                return
            raise StoreUnavailable(
                f"the store {self._path} was removed while this process had it open; put the file back, or stop the "
                "daemon and restore a backup"
            ) from None
        except OSError as error:
            raise StoreUnavailable(
                f"cannot read the file of the store {self._path}: {error.strerror or error}"
            ) from error
        found = (status.st_dev, status.st_ino)
        if self._file is None:
            self._file = found
        elif found != self._file:
            raise StoreUnavailable(
                f"the store {self._path} was replaced by another file while this process had it open; restart the "
                "daemon to use that one"
            )

    def _check_log(self, suffix: str) -> None:
        log = Path(f"{os.path.realpath(self._path)}{suffix}")
        try:
            status = log.stat()
            found = (status.st_dev, status.st_ino)
        except FileNotFoundError:
            found = None
        except OSError as error:
            raise StoreUnavailable(f"cannot read the log of the store {self._path}: {log}: {error.strerror}") from error
        if found == self._log[suffix]:
            return
        if _has_open(f"{log} (deleted)"):
            raise StoreUnavailable(f"{log} was removed while this process had it open, {_REMOVED[suffix]}")
        self._log[suffix] = found


def _has_open(file: str) -> bool:
    """Whether this process has a file open, by its name in ``/proc``."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(descriptor.readlink()) == file:
                return True
    return False
