"""Read-only queries on the database beside a running daemon."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, cast

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from dl2d.core.errors import RequestError, SchemaOutdated
from dl2d.store import schema_version
from dl2d.store.connections_and_transactions import Database, StoreLocation

Rows = list[tuple[Any, ...]]


def ask(place: StoreLocation, query: str) -> tuple[list[str], Rows]:
    """Column names and rows of a query's answer. Nothing can be changed.

    Raises
    ------
    RequestError
        The database does not understand the query, or it would change something.
    SchemaOutdated
        There is no database, or it has another schema than this code.
    """
    with _read_only(place) as connection:
        return _answer(connection, query)


@contextlib.contextmanager
def _read_only(place: StoreLocation) -> Iterator[Connection]:
    if place.is_missing():
        raise SchemaOutdated(
            f"there is no database at {place}; the daemon's first start or `dl2d db upgrade` creates it"
        )
    with contextlib.closing(Database(place)) as database:
        with database.reading("opening the database") as connection:
            schema_version.check(connection, place)
        with database.engine.connect() as connection:
            read_only = "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"
            connection.exec_driver_sql(read_only if place.is_postgresql else "PRAGMA query_only = ON")
            connection.commit()
            if not place.is_postgresql:
                # ATTACH would create the file that it names.
                driver = cast("sqlite3.Connection", connection.connection.driver_connection)
                driver.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            else:
                # Only single statements can be prepared: a second one could begin a transaction that writes.
                cast("Any", connection.connection.driver_connection).prepare_threshold = 0
            yield connection


def _answer(connection: Connection, query: str) -> tuple[list[str], Rows]:
    """Column names and rows; PostgreSQL's means and sums, which are decimals, as floats."""
    try:
        # psycopg takes a per cent sign for the beginning of a parameter.
        postgresql = connection.dialect.name == "postgresql"
        found = connection.exec_driver_sql(query.replace("%", "%%") if postgresql else query)
    except SQLAlchemyError as error:
        words = " ".join(str(getattr(error, "orig", None) or error).split())
        raise RequestError("QUERY", words) from error
    if not found.returns_rows:
        raise RequestError("QUERY", "returns no rows: write a SELECT statement")
    rows = [tuple(float(value) if isinstance(value, Decimal) else value for value in row) for row in found]
    return list(found.keys()), rows


def shell_environment(place: StoreLocation) -> dict[str, str]:
    """Variables that make psql open this database read-only; a password on its command line would be seen by all."""
    url = place.url
    query = {key: value for key, value in url.query.items() if isinstance(value, str)}
    named = {
        "PGHOST": url.host or query.get("host"), "PGPORT": url.port, "PGUSER": url.username, "PGDATABASE": url.database,
        "PGPASSWORD": url.password, "PGSSLMODE": query.get("sslmode"),
        "PGOPTIONS": "-c default_transaction_read_only=on",
    }  # fmt: skip
    return {name: str(value) for name, value in named.items() if value}
