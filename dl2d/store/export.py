"""Writes tables as CSV files, page by page, so that neither the memory needed nor a transaction grows with them."""

from __future__ import annotations

import base64
import csv
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from sqlalchemy import Table, select, tuple_

from dl2d.core.errors import RequestError
from dl2d.store.connections_and_transactions import Database
from dl2d.store.tables.jobs import JobRow
from dl2d.store.tables.row_mapping import Base, table_of

_PAGE = 5000


def exportable() -> dict[str, list[Any]]:
    """Columns of each table that is exported: all but the commands and environments of jobs, which may hold secrets."""
    secret = table_of(JobRow).c.launch
    tables = {table.name: table for table in Base.metadata.sorted_tables}
    return {name: [column for column in table.c if column is not secret] for name, table in tables.items()}


def export(
    database: Database, folder: Path, tables: Collection[str] = (), *, done: Callable[[str, int], None]
) -> dict[str, int]:
    """Write ``<table>.csv`` for each table, or for those that are named; returns the numbers of rows.

    A file gets its name when it is complete. NULL is an empty field; large records are Base64 of the bytes in the
    database (JSON, compressed by zlib where that is shorter). ``done`` is called with a table's name and its rows
    so far.

    Raises
    ------
    RequestError
        There is no such table, or the folder has files or cannot be written.
    StoreError
        The database cannot be read.
    """
    known = exportable()
    if missing := sorted(set(tables) - known.keys()):
        raise RequestError(
            "table", f"there is no table {', '.join(missing)}; the tables are {', '.join(sorted(known))}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise RequestError("folder", f"{folder} is not empty; name an empty or a new folder")
        return {
            name: _export_table(database, Base.metadata.tables[name], columns, folder / f"{name}.csv", done)
            for name, columns in known.items()
            if not tables or name in tables
        }
    except OSError as error:
        raise RequestError("folder", f"cannot write {error.filename or folder}: {error.strerror}") from error


def _export_table(
    database: Database, table: Table, columns: list[Any], file: Path, done: Callable[[str, int], None]
) -> int:
    key = list(table.primary_key)
    places = [columns.index(column) for column in key]
    part = file.with_name(f".{file.name}.part")
    written, last = 0, None
    # the folder's owner may have put a link there meanwhile, which root must not follow
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(part, flags, 0o600), "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([column.name for column in columns])
        while True:
            page = select(*columns).order_by(*key).limit(_PAGE)
            if last is not None:
                page = page.where(tuple_(*key) > tuple_(*last))
            with database.reading(f"exporting {table.name}") as connection:
                rows = connection.execute(page).all()
            writer.writerows([_field(value) for value in row] for row in rows)
            written += len(rows)
            done(table.name, written)
            if len(rows) < _PAGE:
                break
            last = [rows[-1][place] for place in places]
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
    return written


def _field(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, bool | int | float) else str(value)
