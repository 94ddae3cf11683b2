"""Coordinator log: the state of a job in an SQLite database, from which another coordinator continues the job.

The folder holds the database `log.sqlite` (write-ahead log) and `lock`, a file that the coordinator in charge has
locked and that contains its process id.

A committed state survives the death of the process, not a crash of the machine: nothing is synchronized to disk.
Members look for a coordinator at one address for the time of one lease, so one that starts after a crash of the
machine finds nobody; and waiting for a busy disk could silence a coordinator for seconds.

Every opening starts a new *term*, and a coordinator only writes while the database has its own term.  So one that was
stopped and has been replaced in the meantime notices it, also on file systems on which locks have no effect.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path

from pslite.errors import Fenced, LogError, UsageError

_DATABASE = "log.sqlite"
#: the log of versions before 0.2, a text file
_OLD = "log"
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS job (term INTEGER NOT NULL, state BLOB);
CREATE TABLE IF NOT EXISTS step (term INTEGER NOT NULL, record BLOB NOT NULL);
INSERT INTO job SELECT 0, NULL WHERE NOT EXISTS (SELECT * FROM job);
INSERT INTO step SELECT 0, x'' WHERE NOT EXISTS (SELECT * FROM step);
UPDATE job SET term = term + 1;
UPDATE step SET term = term + 1;
COMMIT;
"""


class CoordinatorLog:
    """The log in a folder, which is locked as long as this is open.

    Parameters
    ----------
    folder
        created with access for its owner alone if it does not exist.

    Raises
    ------
    UsageError
        another process has locked it, or it cannot be created or read.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UsageError(f"the coordinator's log in {folder} cannot be opened: {error.strerror}") from error
        try:
            self._acquire_lock()
            self._database = _open(folder)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            self._database.executescript(_SCHEMA)
            #: number of this opening, from 1; and the last state that was written, None if there is none
            self.term: int
            self.state: bytes | None
            self.term, self.state = self._database.execute("SELECT term, state FROM job").fetchone()
        except (sqlite3.Error, TypeError) as error:
            self.close()
            raise _unreadable(folder, error) from error

    def _acquire_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 64, 0).decode(errors="replace").strip() or "of unknown id"
            raise UsageError(
                f"the coordinator's log in {self._folder} is in use by process {holder}, and a job has one "
                "coordinator: end that process first, or set DL2_STATE to another folder"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def write(self, state: bytes) -> None:
        """Replace the state; once this returns, it survives the death of this process.

        Raises
        ------
        Fenced
            another coordinator has opened the log since.
        LogError
            the database cannot be written.

        """
        self._update("UPDATE job SET state = ? WHERE term = ?", state)

    @property
    def step_record(self) -> bytes:
        """The step record that was written last; empty if none was."""
        return bytes(self._database.execute("SELECT record FROM step").fetchone()[0])

    def write_step_record(self, record: bytes) -> None:
        """Replace the step record, which has what differs in every step; raises as `write`."""
        self._update("UPDATE step SET record = ? WHERE term = ?", record)

    def _update(self, statement: str, value: bytes) -> None:
        try:
            changed = self._database.execute(statement, (value, self.term)).rowcount
        except sqlite3.Error as error:
            raise LogError(str(error)) from error
        if not changed:
            raise self._fenced()

    def check(self) -> None:
        """Check that no other coordinator has opened the log since. Raises `Fenced` if one has."""
        found = self._database.execute("SELECT term FROM job").fetchone()
        if found != (self.term,) or not (self._folder / _DATABASE).exists():
            raise self._fenced()

    def _fenced(self) -> Fenced:
        return Fenced(f"another coordinator has taken over the log in {self._folder}")

    def close(self) -> None:
        """Release the log for another coordinator."""
        if self._lock >= 0:
            self._database.close()
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Delete the log, since no coordinator can continue the job; the folder too, if it is empty."""
        for name in (_DATABASE, f"{_DATABASE}-wal", f"{_DATABASE}-shm", "lock"):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        self.close()


def read_state(folder: Path) -> bytes | None:
    """Return the last state in a folder's log without locking it; None if there is none.

    Raises
    ------
    UsageError
        the log cannot be read.

    """
    if not (folder / _DATABASE).exists():
        if (folder / _OLD).exists():
            raise UsageError(
                f"the coordinator's log in {folder} is of an earlier version, from which a job cannot be continued: "
                "remove the folder and start the script again, from its checkpoint if it has one"
            )
        return None
    with contextlib.closing(_open(folder)) as database:
        try:
            found: tuple[bytes | None] | None = database.execute("SELECT state FROM job").fetchone()
        except sqlite3.Error as error:
            raise _unreadable(folder, error) from error
    return found[0] if found else None


def _open(folder: Path) -> sqlite3.Connection:
    path = folder / _DATABASE
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        # used by one thread at a time, which need not be the one that opens it
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")
    except (OSError, sqlite3.Error) as error:
        raise _unreadable(folder, error) from error
    return database


def _unreadable(folder: Path, error: Exception) -> UsageError:
    return UsageError(
        f"the coordinator's log in {folder} cannot be used ({error}): repair or remove the folder; without it, start "
        "the script again, from its checkpoint if it has one"
    )
