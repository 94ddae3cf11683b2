"""Version of the database schema: reads it, checks it, and migrates a database to the one that this code needs.

The migrations are alembic's, in ``db/migrations`` of a source checkout and inside the package in an installation.
No alembic.ini is read and no logging is configured.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import threading
from pathlib import Path
from typing import cast

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text, update

from dl2d.core.errors import AlreadyRunning, SchemaOutdated, StoreError
from dl2d.store import sqlite_file
from dl2d.store.connections_and_transactions import LOCK_SECONDS, Database, StoreLocation, translated
from dl2d.store.lease import LeaseRow, lease_of
from dl2d.store.sql_views import create_views, describe, readable

#: Not alembic's usual name, so that the database may be shared with another program that uses alembic.
VERSION_TABLE = "dl2d_schema_version"
# Alembic's operations go through one proxy per process, so only one thread may migrate at a time.
_MIGRATING = threading.RLock()
# Key of PostgreSQL's advisory lock for migrations: "dl2d" and a 1 in hexadecimal.
_MIGRATION_LOCK = 0x646C32640001


def migrations() -> Path:
    """Folder of the migrations. Raises ``StoreError`` if the installation lacks them."""
    package = Path(__file__).resolve().parent
    for folder in (package / "migrations", package.parents[1] / "db" / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise StoreError(f"the migrations are missing beside {package}; install dl2d again")


def head() -> str:
    """Revision that this code needs."""
    found = _scripts().get_current_head()
    assert found is not None
    return found


def current(url: str) -> str | None:
    """Revision that the database has; None where it is empty or does not exist yet."""
    place = StoreLocation.parse(url)
    if place.in_memory or place.is_missing():
        return None
    doing = "reading the schema's version"
    with contextlib.closing(Database(place)) as database, database.reading(doing) as connection:
        return revision_of(connection)


def upgrade(url: str) -> None:
    """Bring the database to ``head()``, creating an SQLite file where there is none; all steps or none are kept.

    Doing it again changes nothing, and two at once do it once. A database in memory makes its schema itself. A daemon
    that held the lease before can write no more.

    Raises
    ------
    AlreadyRunning
        A daemon uses the database, with the schema that it has now.
    SchemaOutdated
        The database was written by a newer dl2d, or by one from before the first release.
    StoreUnavailable
        It cannot be reached or written.
    """
    place = StoreLocation.parse(url)
    if place.in_memory:
        return
    if place.file is not None:
        with translated(place, "setting up the write-ahead log"):
            sqlite_file.create(place.file, LOCK_SECONDS)
    with contextlib.closing(Database(place)) as database, database.writing("upgrading the schema") as connection:
        if place.is_postgresql:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        found = revision_of(connection)
        check_known(found, place)
        if found not in (None, head()):
            _check_unused(database)
            # A suspended daemon that has lost its lock must not go on either, with code for the old schema.
            connection.execute(update(LeaseRow).values(term=LeaseRow.term + 1, holder="dl2d db upgrade"))
        migrate(connection)


def _check_unused(database: Database) -> None:
    try:
        lease_of(database).check_free()
    except AlreadyRunning:
        raise AlreadyRunning(
            f"a daemon uses the store {database.place}: stop it before the schema is upgraded, and start the new one "
            "after that"
        ) from None


def grant_reading(url: str, role: str) -> None:
    """Let a role of PostgreSQL read all views and tables, without ``jobs.launch``, which may hold users' secrets.

    Raises
    ------
    StoreError
        The database is not PostgreSQL, or has no such role.
    """
    place = StoreLocation.parse(url)
    if not place.is_postgresql:
        raise StoreError(f"{place} is an SQLite file, which has no roles: give the file to a group that may read it")
    with contextlib.closing(Database(place)) as database, database.writing(f"granting {role} to read") as connection:
        check(connection, place)
        quoted = connection.dialect.identifier_preparer.quote_identifier(role)
        for what in readable():
            connection.exec_driver_sql(f"GRANT SELECT {what} TO {quoted}")


def migrate(connection: Connection) -> None:
    """Run the missing migrations in the connection's transaction."""
    with _MIGRATING:
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        create_views(connection)
        describe(connection)


def make_in_memory(database: Database) -> None:
    """Give an empty SQLite database in memory the schema that this code needs.

    The migrations are run once in a process, and what they made is copied: to run them takes 60 ms.
    """
    with (
        _MIGRATING,
        contextlib.closing(_made_in_memory().engine.raw_connection()) as made,
        contextlib.closing(database.engine.raw_connection()) as empty,
    ):
        cast("sqlite3.Connection", made.driver_connection).backup(cast("sqlite3.Connection", empty.driver_connection))


@functools.cache
def _made_in_memory() -> Database:
    database = Database(StoreLocation.parse("sqlite://"))
    with database.writing("making the schema") as connection:
        migrate(connection)
    return database


def check(connection: Connection, place: StoreLocation) -> None:
    """Raise ``SchemaOutdated`` unless the database has exactly the schema that this code needs."""
    found = revision_of(connection)
    if found == head():
        return
    check_known(found, place)
    if found is None:
        raise SchemaOutdated(f"the store {place} is empty; start the daemon (dl2d run), or run `dl2d db upgrade`")
    raise SchemaOutdated(f"the store {place} has schema {found}, this dl2d needs {head()}; stop the daemon and "
                         "run `dl2d db upgrade`")  # fmt: skip


def check_known(found: str | None, place: StoreLocation) -> None:
    """Raise ``SchemaOutdated`` where the revision is one that this code does not know: newer, or from long before."""
    if found is None:
        return
    try:
        known = _scripts().get_revision(found)
    except CommandError:
        known = None
    if known is None:
        newer = "a newer dl2d wrote it; install that version again, or restore a backup from before"
        older = "it is from before the first release; move it away, and a new store is made"
        raise SchemaOutdated(
            f"the store {place} has schema {found}, which this dl2d (schema {head()}) does not know: "
            f"{newer if found > head() else older}"
        )


def revision_of(connection: Connection) -> str | None:
    """Revision of the database behind a connection; None where it is empty."""
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


@functools.cache
def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def _config() -> Config:
    config = Config()
    # The parser of the options expands per cent signs.
    config.set_main_option("script_location", str(migrations()).replace("%", "%%"))
    return config
