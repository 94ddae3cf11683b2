"""Connections and transactions: where the store is, how it is opened, and what its errors mean for people."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Executable, Row, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from dl2d.core.errors import SchemaOutdated, StoreError, StoreUnavailable
from dl2d.store.sqlite_file import SqliteFile

# Another process (a backup, an admin's shell, `db upgrade`) may hold the write lock this long before a write fails.
LOCK_SECONDS = 10.0
_CONNECT_SECONDS = 10
#: libpq's options by which a connection ends some 25 s after its server has lost its power, where the kernel would wait
#: for a quarter of an hour.
_LOST_SERVER = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 25_000}
_POSTGRESQL = "postgresql+psycopg"
_EXAMPLES = "write sqlite:////var/lib/dl2d/dl2d.sqlite or postgresql://user@host/database"
_END_IDLE = f"SET LOCAL idle_in_transaction_session_timeout = '{int(LOCK_SECONDS * 1000)}ms'"
_WRITE = "dl2d_write"
_DURABLE = "dl2d_durable"
_NO_ACCESS = (
    "check that the folder exists, and owner and mode of folder and file; at first only the daemon's account may read "
    "them: ask the administrator for read access (docs/sql.md, Read access)"
)


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """Where a store is."""

    url: URL

    @classmethod
    def parse(cls, text: str) -> StoreLocation:
        """Read a URL.

        Raises
        ------
        StoreError
            It is not the URL of an SQLite file or a PostgreSQL database. The message never repeats a password.
        """
        try:
            url = make_url(text)
        except (ArgumentError, ValueError):
            # A text that is not understood may still hold a password: it is not repeated.
            raise StoreError(f"store.url is not a database URL; {_EXAMPLES}") from None
        if url.drivername in {"sqlite", "sqlite+pysqlite"}:
            if (url.database or "").startswith("file:") or url.query:
                raise StoreError(f"store.url {cls(url)} has SQLite options, which are not supported; {_EXAMPLES}")
            return cls(url.set(drivername="sqlite"))
        if url.drivername in {"postgresql", "postgres", _POSTGRESQL}:
            return cls(url.set(drivername=_POSTGRESQL))
        raise StoreError(f"store.url names the database {url.drivername}, which dl2d does not support; {_EXAMPLES}")

    @property
    def in_memory(self) -> bool:
        """Whether the store lives in this process alone."""
        return self.url.drivername == "sqlite" and self.url.database in {None, "", ":memory:"}

    @property
    def file(self) -> Path | None:
        """SQLite's file, or None for what is not a file."""
        if self.url.drivername != "sqlite" or self.in_memory:
            return None
        return Path(str(self.url.database))

    def is_missing(self) -> bool:
        """Whether the store is a file that does not exist, which SQLite would make on opening.

        Raises ``StoreUnavailable`` if it may not even be looked at.
        """
        try:
            return self.file is not None and not self.file.exists()
        except OSError as error:
            raise StoreUnavailable(f"opening {self}: {error.strerror}; {_NO_ACCESS}") from error

    @property
    def is_postgresql(self) -> bool:
        """Whether the store is a PostgreSQL database."""
        return self.url.drivername == _POSTGRESQL

    def without_secrets(self, text: str) -> str:
        """The text with every password of this URL taken out."""
        secrets = [self.url.password, *(self.url.query.get(key) for key in ("password", "sslpassword"))]
        for secret in secrets:
            if secret:
                text = text.replace(str(secret), "***")
        return text

    def __str__(self) -> str:
        plain = "postgresql" if self.is_postgresql else self.url.drivername
        return (
            str(self.file) if self.file else self.url.set(drivername=plain, password=None, query={}).render_as_string()
        )


def open_engine(place: StoreLocation) -> Engine:
    """An engine with dl2d's settings; connects to nothing yet.

    In SQLite transactions are begun here, because Python's driver would begin them late and always deferred: a
    transaction that reads first and writes later then fails at once when another writer came between.
    """
    options: dict[str, Any] = {"hide_parameters": True}
    if place.is_postgresql:
        asked = {"connect_timeout": _CONNECT_SECONDS, "application_name": "dl2d", **_LOST_SERVER}
        options["connect_args"] = {key: value for key, value in asked.items() if key not in place.url.query}
        options["pool_pre_ping"] = True
    else:
        options["connect_args"] = {"timeout": LOCK_SECONDS, "check_same_thread": False}
    if place.in_memory:
        options["poolclass"] = StaticPool
    else:
        options |= {"pool_size": 5, "max_overflow": 20, "pool_timeout": 30}
    engine = create_engine(place.url, **options)
    if place.is_postgresql:
        event.listen(engine, "connect", _set_up_postgresql)
    else:
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_postgresql(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = '{int(LOCK_SECONDS * 1000)}ms'")
    connection.commit()


def _set_up_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")
    # What is deleted or replaced is overwritten: it may be a user's environment.
    connection.execute("PRAGMA secure_delete = ON")
    # FULL: a commit is on the disk when the call returns, as the contract says, also through a power cut.
    connection.execute("PRAGMA synchronous = FULL")


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    durable = options.get(_DURABLE, True)
    if connection.info.get(_DURABLE, True) != durable:
        connection.exec_driver_sql(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        connection.info[_DURABLE] = durable
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITE) else "BEGIN")


class Database:
    """Transactions on one store, for any number of threads."""

    def __init__(self, place: StoreLocation) -> None:
        self.place = place
        self.engine = open_engine(place)
        #: Called first in each writing transaction; raises ``AlreadyRunning`` if another daemon has the lease.
        self.fence: Callable[[Connection], None] | None = None
        self._closed = False
        self._file = None if place.file is None else SqliteFile(place.file)
        # SQLite has one writer at a time. Waiting for this lock is fair and wakes at once; waiting for
        # SQLite's polls. In memory there is one connection, so readers queue too.
        self._writers = threading.Lock()

    @contextlib.contextmanager
    def reading(self, doing: str) -> Iterator[Connection]:
        """A transaction that only reads. ``doing`` begins the message of an error."""
        queue = self._writers if self.place.in_memory else contextlib.nullcontext()
        with queue, translated(self.place, doing), self._open().connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def writing(self, doing: str, *, durable: bool = True) -> Iterator[Connection]:
        """A transaction that writes; kept as a whole when the block ends, or not at all if it raises.

        With ``durable=False`` it may be lost by a power cut (not by a crash of this process) soon after.
        """
        queue = contextlib.nullcontext() if self.place.is_postgresql else self._writers
        engine = self._open().execution_options(**{_WRITE: True, _DURABLE: durable})
        with queue, translated(self.place, doing), engine.connect() as connection, connection.begin():
            if self.place.is_postgresql and not durable:
                connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
            if self.fence is not None:
                if self.place.is_postgresql:  # one that stands still in the middle must not keep its locks
                    connection.exec_driver_sql(_END_IDLE)
                self.fence(connection)
            yield connection

    def size(self) -> int:
        """Bytes on disk: SQLite's file with its write-ahead log, or PostgreSQL's database."""
        if self.place.file is not None:
            files = (self.place.file, self.place.file.with_name(f"{self.place.file.name}-wal"))
            with translated(self.place, "measuring the store"):
                return sum(file.stat().st_size for file in files if file.exists())
        postgresql = "SELECT pg_database_size(current_database())"
        memory = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        with self.reading("measuring the store") as connection:
            found = connection.exec_driver_sql(postgresql if self.place.is_postgresql else memory)
            return int(found.scalar_one())

    def close(self) -> None:
        """Give up all connections; further transactions are refused."""
        self._closed = True
        self.engine.dispose()

    def _open(self) -> Engine:
        if self._closed:
            raise StoreError(f"the store {self.place} is closed")
        if self._file is not None:
            self._file.check()
        return self.engine


class StoreTables:
    """Base of the operations on some of a store's tables, each in a transaction of its own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def _rows(self, doing: str, query: Executable) -> Sequence[Row[Any]]:
        """All rows of a query; ``doing`` begins the message of an error."""
        with self._database.reading(doing) as connection:
            return connection.execute(query).all()


@contextlib.contextmanager
def translated(place: StoreLocation, doing: str) -> Iterator[None]:
    """Turn every error of SQLAlchemy, a driver or a conversion into one of dl2d's.

    Raises
    ------
    StoreUnavailable
        The database cannot be reached or cannot write now.
    StoreError
        Anything else that the database or a driver objected to.
    """
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise _explained(error, place, doing) from error
    except (UnicodeError, OverflowError, msgspec.MsgspecError) as error:
        # Overflow: a number beyond 64 bits. Unicode: half of a surrogate pair inside a record.
        raise StoreError(f"{doing}: a value cannot be kept in or read from {place}: {error}") from error
    except OSError as error:
        raise StoreUnavailable(f"{doing} failed: cannot access {place}: {error.strerror or error}") from error


# What is wrong and what to do, by SQLite's primary result code and by PostgreSQL's SQLSTATE (longest prefix wins).
_NOW_SQLITE = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space, nothing of this change was kept",
    sqlite3.SQLITE_BUSY: "another program holds the database's lock; end it (a shell with an open transaction?)",
    sqlite3.SQLITE_LOCKED: "another connection holds a table's lock; try again",
    sqlite3.SQLITE_READONLY: (
        "the file or its folder cannot be written; check owner, mode and mount (an account that may only read it can "
        "do so while the daemon runs)"
    ),
    sqlite3.SQLITE_PERM: "no permission to open the file; check owner and mode",
    sqlite3.SQLITE_CANTOPEN: f"the file cannot be opened; {_NO_ACCESS}",
    sqlite3.SQLITE_IOERR: "the disk refused to read or write; check whether it is full or failing",
    sqlite3.SQLITE_NOMEM: "out of memory",
}
_FOR_GOOD_SQLITE = {
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore the last backup",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database; check the URL",
}
_NOW_POSTGRESQL = {
    "08": "the connection was lost; check that PostgreSQL runs and can be reached",
    "25006": "the database is read-only (a standby?); connect to the primary",
    "28": "PostgreSQL refused the login; check user, password and pg_hba.conf",
    "3D": "there is no such database; create it (createdb)",
    "40": "the transaction conflicted with another; try again",
    "42501": "the database user has no permission for this; grant it the tables of dl2d",
    "53": "PostgreSQL has run out of a resource; see its log",
    "53100": "the disk of PostgreSQL is full; free some space, nothing of this change was kept",
    "53300": "PostgreSQL has no connection left; raise max_connections",
    "55P03": "another program holds a lock; end it (a shell with an open transaction?)",
    "57": "PostgreSQL stopped the request; it may be shutting down or starting",
    "58": "PostgreSQL's system failed; see its log",
}


def _explained(error: Exception, place: StoreLocation, doing: str) -> StoreError:
    cause = getattr(error, "orig", None) or error
    words = place.without_secrets(" ".join(str(cause).split("\n")[0].split()))
    start = f"{doing}: {place}"
    code = getattr(cause, "sqlite_errorcode", None)
    if code is not None:
        primary = code & 0xFF
        if primary in _NOW_SQLITE:
            return StoreUnavailable(f"{start}: {_NOW_SQLITE[primary]} ({words})")
        if primary in _FOR_GOOD_SQLITE:
            return StoreError(f"{start}: {_FOR_GOOD_SQLITE[primary]} ({words})")
    if "no such table" in words or "no such column" in words or getattr(cause, "sqlstate", None) in {"42P01", "42703"}:
        return SchemaOutdated(f"{start}: a table or column is missing; run `dl2d db upgrade` ({words})")
    state = getattr(cause, "sqlstate", None) or ""
    for prefix in sorted(_NOW_POSTGRESQL, key=len, reverse=True):
        if state.startswith(prefix):
            return StoreUnavailable(f"{start}: {_NOW_POSTGRESQL[prefix]} ({words})")
    if type(cause).__name__ in {"OperationalError", "InterfaceError", "TimeoutError", "ConnectionTimeout"} or (
        isinstance(error, DBAPIError) and error.connection_invalidated
    ):
        return StoreUnavailable(f"{start}: the database did not answer; check that it runs and try again ({words})")
    return StoreError(f"{start}: {words}")
