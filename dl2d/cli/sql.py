"""``dl2d sql``: queries on the daemon's database that cannot change it."""

from __future__ import annotations

import datetime as dt
import decimal
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from dl2d.cli.options import ConfigOption, JsonOption
from dl2d.cli.output import print_json, print_tables, table
from dl2d.config.settings import DEFAULT_PATH, load_settings
from dl2d.core.errors import Dl2dError, RequestError
from dl2d.store import schema
from dl2d.store.database import Database, Place


def sql(
    query: Annotated[
        str | None,
        typer.Argument(help="A SELECT statement; without it a shell, or standard input."),
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Query the database; nothing can be changed.

    Without QUERY it opens sqlite3 or psql on the database, read-only, if standard input is a terminal; otherwise it
    reads the query from there. Views and example queries: docs/sql-cookbook.md.
    """
    place = Place.parse(load_settings(config).store_url)
    if query is None and sys.stdin.isatty():
        _open_shell(place)
    headings, rows = _ask(place, query or sys.stdin.read())
    if as_json:
        print_json([dict(zip(headings, map(_plain, row), strict=True)) for row in rows])
        return
    columns = list(zip(*rows, strict=True)) or [()] * len(headings)
    numbers = [bool(column) and all(isinstance(value, int | float | None) for value in column) for column in columns]
    titles = [f">{heading}" if right else heading for heading, right in zip(headings, numbers, strict=True)]
    print_tables(table(titles, [[_shown(value) for value in row] for row in rows]))


def _ask(place: Place, query: str) -> tuple[list[str], Sequence[Sequence[Any]]]:
    """Column names and rows of a query's answer.

    Raises
    ------
    RequestError
        The database does not understand the query, or it would change something.
    Dl2dError
        There is no database, or it has another schema.
    """
    if place.is_missing():
        raise Dl2dError(f"there is no database at {place}; `dl2d db upgrade` creates it")
    database = Database(place)
    try:
        with database.reading("opening the database") as connection:
            schema.check(connection, place)
        with database.engine.connect() as connection:
            read_only = "SET TRANSACTION READ ONLY" if place.is_postgresql else "PRAGMA query_only = ON"
            connection.exec_driver_sql(read_only)
            try:
                found = connection.exec_driver_sql(query.replace("%", "%%") if place.is_postgresql else query)
            except SQLAlchemyError as error:
                words = " ".join(str(getattr(error, "orig", None) or error).split())
                raise RequestError("QUERY", words) from error
            if not found.returns_rows:
                raise RequestError("QUERY", "returns no rows: write a SELECT statement")
            return list(found.keys()), found.all()
    finally:
        database.close()


def _open_shell(place: Place) -> None:
    """Replace this process by the database's own shell, read-only.

    Raises
    ------
    Dl2dError
        It is not installed.
    """
    program = "psql" if place.is_postgresql else "sqlite3"
    path = shutil.which(program)
    if path is None:
        raise Dl2dError(f"{program} is not installed: install it, or write a query behind `dl2d sql`")
    if place.is_postgresql:
        os.execve(path, [program], os.environ | _environment(place.url))  # noqa: S606 - fixed arguments, no shell
    os.execv(path, [program, "-readonly", "-header", "-column", str(place.file)])  # noqa: S606 - the same


def _environment(url: URL) -> dict[str, str]:
    """Psql's variables for a URL; a password on its command line would be seen by all users."""
    query = {key: value for key, value in url.query.items() if isinstance(value, str)}
    named = {
        "PGHOST": url.host or query.get("host"), "PGPORT": url.port, "PGUSER": url.username, "PGDATABASE": url.database,
        "PGPASSWORD": url.password, "PGSSLMODE": query.get("sslmode"),
        "PGOPTIONS": "-c default_transaction_read_only=on",
    }  # fmt: skip
    return {name: str(value) for name, value in named.items() if value}


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"{float(value):.10g}" if isinstance(value, float | decimal.Decimal) else str(value)


def _plain(value: object) -> object:
    """A value that JSON has."""
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, dt.date | dt.datetime):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else value
