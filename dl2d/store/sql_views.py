"""Views for administrators, as ``views.sql`` defines and describes them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, text
from sqlalchemy.exc import ProgrammingError

from dl2d.store import lease  # noqa: F401 - their tables
from dl2d.store.tables import (
    canaries,  # noqa: F401 - their tables
    jobs,
    kind_speeds,  # noqa: F401 - their tables
    mode_changes,  # noqa: F401 - their tables
    policy_versions,  # noqa: F401 - their tables
    resize_guard_state,  # noqa: F401 - their tables
    slots_and_decisions,  # noqa: F401 - their tables
    tasks,  # noqa: F401 - their tables
)
from dl2d.store.tables.row_mapping import Base

#: Views of earlier versions that have other names now.
_FORMER = ("resize_history",)
#: What stands in braces in ``views.sql``, by dialect; {0} and {1} are the words after the name.
_WRITTEN: Mapping[str, Mapping[str, str]] = {
    "sqlite": {
        "time": "datetime({0}, 'unixepoch')",
        "hour": "strftime('%Y-%m-%d %H:00:00', {0}, 'unixepoch')",
        "day": "date({0}, 'unixepoch')",
        "now": "CAST(strftime('%s', 'now') AS REAL)",
        "amount": "COALESCE(json_extract({0}, '$.{1}'), 0.0)",
        "event": "(SELECT datetime(e.at, 'unixepoch') FROM resize_events AS e WHERE e.task = resizes.task AND "
        "e.job_number = resizes.job_number AND e.direction = resizes.direction AND e.state = '{0}')",
    },
    "postgresql": {
        "time": "to_timestamp({0})",
        "hour": "date_trunc('hour', to_timestamp({0}))",
        "day": "CAST(to_timestamp({0}) AS date)",
        "now": "CAST(extract(epoch FROM now()) AS double precision)",
        "amount": "COALESCE(CAST(CAST({0} AS json) ->> '{1}' AS double precision), 0.0)",
        "event": "(SELECT to_timestamp(e.at) FROM resize_events AS e WHERE e.task = resizes.task AND "
        "e.job_number = resizes.job_number AND e.direction = resizes.direction AND e.state = '{0}')",
    },
}
_BRACES = re.compile(r"\{(\w+) ?([^{}]*?)(?: (cpu|gpu))?\}")
_COLUMN = re.compile(r"(?:\{time )?\b(\w+)\.(\w+)\}?(?: AS (\w+))?,?\s*")


@dataclass(frozen=True, slots=True)
class View:
    """A view: its name, its definition with braces, and what it and its columns hold."""

    name: str
    definition: str
    comment: str
    columns: Mapping[str, str]

    def statement(self, dialect: str) -> str:
        """The statement that creates it in ``sqlite`` or ``postgresql``."""
        written = _WRITTEN[dialect]
        return _BRACES.sub(lambda found: written[found[1]].format(found[2], found[3]), self.definition)


@functools.cache
def views() -> tuple[View, ...]:
    """All views, in the order in which they are created.

    A column that only repeats one of a table has the comment of that one, unless ``views.sql`` describes it itself.
    """
    script = Path(__file__).with_name("views.sql").read_text(encoding="utf-8")
    described = re.findall(r"COMMENT ON (?:VIEW|COLUMN) (\w+)(?:\.(\w+))? IS '((?:[^']|'')*)';", script)
    comments = {(view, column): said.replace("''", "'") for view, column, said in described}
    found = []
    for definition, name in re.findall(r"^(CREATE VIEW (\w+) AS\b.*?);$", script, re.DOTALL | re.MULTILINE):
        columns = {column: said for (view, column), said in comments.items() if view == name and column}
        found.append(View(name, definition, comments[name, ""], _described(definition, columns)))
    return tuple(found)


def _described(definition: str, own: Mapping[str, str]) -> dict[str, str]:
    """The columns of a view in their order, each with its own comment or that of the column that it repeats."""
    tables = Base.metadata.tables
    columns = {}
    for entry in _entries(definition.partition("SELECT")[2].partition("\nFROM")[0]):
        match = _COLUMN.fullmatch(entry)
        name = entry.rpartition(" AS ")[2] if " AS " in entry else entry.rpartition(".")[2]
        said = own.get(name, "")
        if not said and match is not None and match[1] in tables and match[2] in tables[match[1]].c:
            said = re.sub("(, |^)(whole )?seconds since 1970", "", tables[match[1]].c[match[2]].comment or "")
        columns[name] = said
    return columns


def _entries(selected: str) -> list[str]:
    """The entries of a list, split at commas outside parentheses and braces."""
    entries, depth, start = [], 0, 0
    for position, char in enumerate(selected):
        depth += (char in "({") - (char in ")}")
        if char == "," and not depth:
            entries.append(selected[start:position].strip())
            start = position + 1
    return [*entries, selected[start:].strip()]


def create_views(connection: Connection) -> None:
    """Create the views in place of those of an earlier version; who may read one may go on reading it."""
    for name in _FORMER:
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")
    for view in views():
        statement = view.statement(connection.dialect.name)
        if connection.dialect.name == "postgresql":
            _replace(connection, view.name, statement)
        else:
            connection.exec_driver_sql(f"DROP VIEW IF EXISTS {view.name}")
            connection.exec_driver_sql(statement)


def _replace(connection: Connection, name: str, statement: str) -> None:
    """Replace a view of PostgreSQL; where its columns are others than before, with a new one and its old readers."""
    try:
        with connection.begin_nested():
            connection.exec_driver_sql(statement.replace("CREATE VIEW", "CREATE OR REPLACE VIEW", 1))
    except ProgrammingError:
        query = text(
            "SELECT grantee FROM information_schema.role_table_grants WHERE table_schema = current_schema() "
            "AND table_name = :name AND privilege_type = 'SELECT' AND grantee <> current_user"
        )
        readers = connection.execute(query, {"name": name}).scalars().all()
        connection.exec_driver_sql(f"DROP VIEW {name}")
        connection.exec_driver_sql(statement)
        for reader in readers:
            quoted = reader if reader == "PUBLIC" else connection.dialect.identifier_preparer.quote_identifier(reader)
            connection.exec_driver_sql(f"GRANT SELECT ON {name} TO {quoted}")


def describe(connection: Connection) -> None:
    """Comment on all tables, views and their columns. Only PostgreSQL keeps comments."""
    if connection.dialect.name != "postgresql":
        return
    described = [(f"TABLE {table.name}", table.comment or "") for table in Base.metadata.sorted_tables]
    for table in Base.metadata.sorted_tables:
        described += [(f'COLUMN {table.name}."{column.name}"', column.comment or "") for column in table.c]
    for view in views():
        described.append((f"VIEW {view.name}", view.comment))
        described += [(f'COLUMN {view.name}."{name}"', said) for name, said in view.columns.items()]
    for what, said in described:
        quoted = said.replace("'", "''").replace("%", "%%")
        connection.exec_driver_sql(f"COMMENT ON {what} IS '{quoted}'")


def readable() -> list[str]:
    """What a reader of PostgreSQL is granted, as it stands in ``GRANT SELECT``: everything but secrets."""
    granted = [f"ON {view.name}" for view in views()]
    for table in Base.metadata.sorted_tables:
        public = ", ".join(f'"{column.name}"' for column in table.c if column is not jobs.JobRow.__table__.c.launch)
        granted.append(f"({public}) ON {table.name}")
    return granted
