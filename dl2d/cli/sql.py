"""``dl2d sql``: queries on the daemon's database that cannot change it."""

from __future__ import annotations

import datetime as dt
import math
import os
import shutil
import sys
from typing import Annotated

import typer

from dl2d.cli.output import print_json, print_tables, table
from dl2d.cli.shared_options import ConfigOption, JsonOption
from dl2d.config.settings import DEFAULT_PATH, load_settings
from dl2d.core.errors import Dl2dError
from dl2d.store.connections_and_transactions import StoreLocation
from dl2d.store.read_only_query import ask, shell_environment


def sql(
    query: Annotated[
        str | None, typer.Argument(help="A SELECT statement; without it a shell, or standard input.")
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Query the database; nothing can be changed.

    Without QUERY it opens sqlite3 or psql on the database, read-only, if standard input is a terminal; otherwise it
    reads the query from there. Views and example queries: docs/sql-cookbook.md.
    """
    place = StoreLocation.parse(load_settings(config).store_url)
    if query is None and sys.stdin.isatty():
        if as_json:
            raise typer.BadParameter("--json needs a query: a shell has its own output")
        _open_shell(place)
    headings, rows = ask(place, sys.stdin.read() if query is None else query)
    if as_json:
        print_json([dict(zip(headings, map(_plain, row), strict=True)) for row in rows])
        return
    columns = list(zip(*rows, strict=True)) or [()] * len(headings)
    numbers = [bool(column) and all(isinstance(value, int | float) for value in column) for column in columns]
    titles = [f">{heading}" if right else heading for heading, right in zip(headings, numbers, strict=True)]
    print_tables(table(titles, [[_shown(value) for value in row] for row in rows]))


def _open_shell(place: StoreLocation) -> None:
    """Replace this process by the database's own shell, read-only.

    Raises
    ------
    Dl2dError
        It is not installed.
    """
    program = "psql" if place.is_postgresql else "sqlite3"
    path = shutil.which(program)
    if path is None:
        raise Dl2dError(f"{program} is not installed: install it, or give a query: `dl2d sql QUERY`")
    if place.is_postgresql:
        os.execve(path, [program], os.environ | shell_environment(place))  # noqa: S606 - fixed arguments, no shell
    os.execv(path, [program, "-readonly", "-header", "-column", str(place.file)])  # noqa: S606 - the same


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _plain(value: object) -> object:
    """A value that JSON has; null for infinity and NaN, which it does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dt.date | dt.datetime):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else value
