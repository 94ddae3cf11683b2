"""Read-only queries on the database beside a running daemon: of users, and to compare decisions in mode shadow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, cast

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from dl2d.core.errors import RequestError, SchemaOutdated
from dl2d.store import schema
from dl2d.store.database import Database, Place

Rows = list[tuple[Any, ...]]
# The index on the slot finds these decisions; days_ago of shadow_decisions would be computed for the whole history.
_RECENT = "slot > (SELECT coalesce(max(slot), 0) FROM slot_times WHERE days_ago >= {:f})"
_COUNTS = """
SELECT policy, policy_version, count(*) AS decisions, count(DISTINCT job) AS jobs,
       sum(CASE compared WHEN 'same' THEN 1 ELSE 0 END) AS same,
       sum(CASE compared WHEN 'more' THEN 1 ELSE 0 END) AS more,
       sum(CASE compared WHEN 'less' THEN 1 ELSE 0 END) AS less,
       sum(CASE compared WHEN 'other' THEN 1 ELSE 0 END) AS other,
       sum(CASE WHEN given_workers = 0 AND workers > 0 THEN 1 ELSE 0 END) AS started_earlier
FROM shadow_decisions WHERE {recent} GROUP BY policy, policy_version ORDER BY min(slot)
"""
_JOBS = """
SELECT job_id, name, user_name, count(*) AS decisions, sum(CASE compared WHEN 'same' THEN 0 ELSE 1 END) AS different,
       avg(given_workers) AS given_workers, avg(workers) AS workers, avg(given_ps) AS given_ps, avg(ps) AS ps
FROM shadow_decisions WHERE {recent}
GROUP BY job, job_id, name, user_name HAVING sum(CASE compared WHEN 'same' THEN 0 ELSE 1 END) > 0
ORDER BY different DESC, job LIMIT {limit:d}
"""


def ask(place: Place, query: str) -> tuple[list[str], Rows]:
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
def _read_only(place: Place) -> Iterator[Connection]:
    if place.is_missing():
        raise SchemaOutdated(
            f"there is no database at {place}; the daemon's first start or `dl2d db upgrade` creates it"
        )
    with contextlib.closing(Database(place)) as database:
        with database.reading("opening the database") as connection:
            schema.check(connection, place)
        with database.engine.connect() as connection:
            read_only = "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"
            connection.exec_driver_sql(read_only if place.is_postgresql else "PRAGMA query_only = ON")
            connection.commit()
            if place.is_postgresql:
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


def shell_environment(place: Place) -> dict[str, str]:
    """Variables that make psql open this database read-only; a password on its command line would be seen by all."""
    url = place.url
    query = {key: value for key, value in url.query.items() if isinstance(value, str)}
    named = {
        "PGHOST": url.host or query.get("host"), "PGPORT": url.port, "PGUSER": url.username, "PGDATABASE": url.database,
        "PGPASSWORD": url.password, "PGSSLMODE": query.get("sslmode"),
        "PGOPTIONS": "-c default_transaction_read_only=on",
    }  # fmt: skip
    return {name: str(value) for name, value in named.items() if value}


def shadow_comparison(place: Place, days: float, limit: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Decisions of the last days in mode shadow, compared with what the site's scheduler gave.

    First by policy and version: how many gave a job the same, more or less. Then at most ``limit`` jobs for which most
    of them differ, with mean sizes. Raises ``SchemaOutdated`` as ``ask`` does.
    """
    answers = (ask(place, query.format(recent=_RECENT.format(days), limit=limit)) for query in (_COUNTS, _JOBS))
    counts, jobs = ([dict(zip(headings, row, strict=True)) for row in rows] for headings, rows in answers)
    return counts, jobs
