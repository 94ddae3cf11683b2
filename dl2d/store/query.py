"""Read-only queries on the database beside a running daemon: from administrators, and the comparison of shadow mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from dl2d.core.errors import RequestError, SchemaOutdated
from dl2d.store import schema
from dl2d.store.database import Database, Place

_COUNTS = """
SELECT policy, policy_version, count(*) AS decisions, count(DISTINCT job) AS jobs,
       sum(CASE compared WHEN 'same' THEN 1 ELSE 0 END) AS same,
       sum(CASE compared WHEN 'more' THEN 1 ELSE 0 END) AS more,
       sum(CASE compared WHEN 'less' THEN 1 ELSE 0 END) AS less,
       sum(CASE compared WHEN 'other' THEN 1 ELSE 0 END) AS other,
       sum(CASE WHEN given_workers = 0 AND workers > 0 THEN 1 ELSE 0 END) AS started_earlier
FROM shadow_decisions WHERE days_ago < {days:f} GROUP BY policy, policy_version ORDER BY min(slot)
"""
_JOBS = """
SELECT job_id, name, user_name, count(*) AS decisions, sum(CASE compared WHEN 'same' THEN 0 ELSE 1 END) AS different,
       avg(given_workers) AS given_workers, avg(workers) AS workers, avg(given_ps) AS given_ps, avg(ps) AS ps
FROM shadow_decisions WHERE days_ago < {days:f}
GROUP BY job, job_id, name, user_name HAVING sum(CASE compared WHEN 'same' THEN 0 ELSE 1 END) > 0
ORDER BY different DESC, job LIMIT {limit:d}
"""


def ask(place: Place, query: str) -> tuple[list[str], Sequence[Sequence[Any]]]:
    """Column names and rows of a query's answer. Nothing can be changed.

    Raises
    ------
    RequestError
        The database does not understand the query, or it would change something.
    SchemaOutdated
        There is no database, or it has another schema than this code.
    """
    if place.is_missing():
        raise SchemaOutdated(f"there is no database at {place}; `dl2d db upgrade` creates it")
    database = Database(place)
    try:
        with database.reading("opening the database") as connection:
            schema.check(connection, place)
        with database.engine.connect() as connection:
            read_only = "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"
            connection.exec_driver_sql(read_only if place.is_postgresql else "PRAGMA query_only = ON")
            connection.commit()
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


def shadow_counts(place: Place, days: float) -> list[dict[str, Any]]:
    """Decisions of the last days in mode shadow by policy and version, and how many gave a job the same, more or less.

    Raises ``SchemaOutdated`` as ``ask`` does.
    """
    return _records(place, _COUNTS.format(days=days))


def shadow_jobs(place: Place, days: float, limit: int) -> list[dict[str, Any]]:
    """Jobs for which most of these decisions differ from what the site's scheduler gave, with mean sizes.

    Raises ``SchemaOutdated`` as ``ask`` does.
    """
    return _records(place, _JOBS.format(days=days, limit=limit))


def _records(place: Place, query: str) -> list[dict[str, Any]]:
    headings, rows = ask(place, query)
    return [dict(zip(headings, (_number(value) for value in row), strict=True)) for row in rows]


def _number(value: Any) -> Any:
    """PostgreSQL's means and sums are decimals."""
    return value if value is None or isinstance(value, str | int | float) else float(value)


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
