"""The lease: one daemon per store.

Its term in the table ``lease`` is what counts: it grows with each holder, and a holder of an older term cannot write.
A file lock or an advisory lock beside it tells at once when the holder dies, since the operating system or PostgreSQL
gives it back then.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import structlog
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Mapped

from dl2d import lock_file
from dl2d.core.errors import AlreadyRunning, StoreUnavailable
from dl2d.store.connections_and_transactions import Database, StoreLocation, translated
from dl2d.store.tables.row_mapping import ZERO, Base, Moment, UserText, column


class LeaseRow(Base):
    """Who holds the store, or held it last; the lock itself is a file lock or an advisory lock."""

    __tablename__ = "lease"

    name: Mapped[str] = column("always daemon", primary_key=True)
    holder: Mapped[UserText] = column("process and machine")
    term: Mapped[int] = column("number of the holder, from 1; one with a smaller number may not write")
    since: Mapped[Moment]
    renewals: Mapped[int] = column("number of signs of life of the holder", server_default=ZERO)


_log = structlog.get_logger(__name__)
_ADVICE = "stop it first, or start this one with --standby; only for another cluster set another store.url"


class Lease:
    """A lock that only one process can hold. For a store in memory, which is this process's own, there is none."""

    def take(self, holder: str) -> None:
        """Take it or raise ``AlreadyRunning`` naming its holder."""

    def check(self) -> None:
        """Take it again if it was lost; ``AlreadyRunning`` if another process has it."""

    def release(self) -> None:
        """Give it back."""

    def check_free(self) -> None:
        """Raise ``AlreadyRunning`` if a process holds it."""


class FileLease(Lease):
    """A lock on ``<database>.lock``, which holds the holder's name. The file stays: only the lock on it counts.

    It cannot be lost: the kernel releases it only when the process ends.
    """

    def __init__(self, place: StoreLocation, file: Path) -> None:
        self._place = place
        # Symbolic links are resolved, so that daemons that reach one file by different paths use one lock.
        real = Path(os.path.realpath(file))
        self._path = real.with_name(real.name + ".lock")
        self._descriptor: int | None = None

    def take(self, holder: str) -> None:
        """Take the lock and write the holder's name into the file."""
        if self._descriptor is not None:
            return
        try:
            self._descriptor = lock_file.acquire(self._path, holder)
        except BlockingIOError as error:
            other = str(error) or "it has not given its name"
            raise AlreadyRunning(f"the store {self._place} is held by another daemon ({other}); {_ADVICE}") from None
        except OSError as error:
            raise StoreUnavailable(f"cannot lock the store: {self._path}: {error.strerror}") from error

    def release(self) -> None:
        """Give the lock back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def check_free(self) -> None:
        """Take the lock and give it back. Makes no lock file, since this account may not be the daemon's."""
        if self._path.exists():
            self.take("")
            self.release()


class ServerLease(Lease):
    """An advisory lock that belongs to one connection to PostgreSQL, which is used for nothing else.

    The server ends the lock with the connection. If the server restarts, the lock is taken again before the next write.
    """

    _KEY = int.from_bytes(hashlib.sha256(b"dl2d daemon lease").digest()[:8], "big", signed=True)

    def __init__(self, place: StoreLocation, engine: Engine) -> None:
        self._place = place
        self._engine = engine
        self._connection: Connection | None = None
        self._one = threading.Lock()
        #: Set when the pool had to make a new connection: the server may have dropped the lease's too.
        self._doubtful = threading.Event()

    def doubt(self) -> None:
        """Check before the next write that the lock is still held."""
        self._doubtful.set()

    def take(self, holder: str) -> None:  # noqa: ARG002 (the holder's row is written by the store)
        """Take the lock."""
        with self._one:
            if self._connection is None:
                self._connection = self._locked()
                self._doubtful.clear()

    def check(self) -> None:
        """Check that the connection is still open, where that is not sure."""
        if not self._doubtful.is_set():
            return
        with self._one:
            if not self._doubtful.is_set():
                return
            # Cleared before looking: what happens from here on raises a new doubt.
            self._doubtful.clear()
            try:
                if self._connection is not None and self._alive(self._connection):
                    return
                self._discard()
                self._connection = self._locked()
            except BaseException:
                self._doubtful.set()
                raise
            _log.info("store.lease_taken_again", store=str(self._place))

    def release(self) -> None:
        """Give the lock back and end its connection."""
        with self._one:
            if self._connection is not None:
                # The server notices later that a connection has ended; this is done when it returns.
                try:
                    self._connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": self._KEY})
                except SQLAlchemyError as error:
                    _log.warning("store.lease_unlock_failed", store=str(self._place), error=type(error).__name__)
            self._discard()

    def check_free(self) -> None:
        """Take the lock and give it back."""
        self.take("")
        self.release()

    def _alive(self, connection: Connection) -> bool:
        try:
            connection.exec_driver_sql("SELECT 1")
        except SQLAlchemyError as error:
            _log.warning("store.lease_lost", store=str(self._place), error=type(error).__name__)
            return False
        return True

    def _discard(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            # Ended for good: in the pool it would keep the lock.
            connection.invalidate()
            connection.close()
        except SQLAlchemyError as error:
            _log.warning("store.lease_close_failed", store=str(self._place), error=type(error).__name__)

    def _locked(self) -> Connection:
        with translated(self._place, "taking the lease"):
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            try:
                held = connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": self._KEY}).scalar_one()
                if held:
                    return connection
                named = connection.execute(text("SELECT holder FROM lease WHERE name = 'daemon'")).scalar()
            except BaseException:
                connection.close()
                raise
            connection.close()
        raise AlreadyRunning(
            f"the store {self._place} is held by another daemon ({named or 'it has not given its name'}); {_ADVICE}"
        )


def lease_of(database: Database) -> Lease:
    """The lock that goes with a database."""
    place = database.place
    if place.file is not None:
        return FileLease(place, place.file)
    if not place.is_postgresql:
        return Lease()
    lease = ServerLease(place, database.engine)
    event.listen(database.engine, "connect", lambda *_: lease.doubt())
    return lease
