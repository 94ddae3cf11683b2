"""How long each question of the SQL cookbook takes on a month of 500 jobs a day, on SQLite and PostgreSQL.

    python benchmarks/sql_cookbook.py [--days 30] [--jobs-per-day 500] [--json]

The budget is 200 ms for each question. A question is asked three times; the shortest time counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import text

from dl2d.store import schema
from dl2d.store.database import Database, Place

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from filled_store import cookbook, fill
from postgres_server import PostgresMissing, PostgresServer

BUDGET_MS = 200


@contextmanager
def databases() -> Iterator[dict[str, str]]:
    """URLs of empty databases, by kind; PostgreSQL where it is installed."""
    with tempfile.TemporaryDirectory() as folder:
        urls = {"sqlite": f"sqlite:///{folder}/dl2d.sqlite"}
        try:
            server = PostgresServer()
        except PostgresMissing as missing:
            print(missing, file=sys.stderr)
            yield urls
            return
        server.start()
        try:
            with server.database() as url:
                yield urls | {"postgresql": url}
        finally:
            server.stop()


def measured(url: str) -> dict[str, float]:
    """Milliseconds by question."""
    found = {}
    with closing(Database(Place.parse(url))) as database:
        with database.writing("analysing") as connection:
            connection.exec_driver_sql("ANALYZE")
        for number, title, query in cookbook():
            times = []
            for _ in range(3):
                with database.reading("asking") as connection:
                    begin = time.perf_counter()
                    connection.execute(text(query)).all()
                    times.append(1000 * (time.perf_counter() - begin))
            found[f"{number}. {title}"] = round(min(times), 1)
    return found


def main() -> None:
    """Fill the databases, ask, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--jobs-per-day", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {}
    with databases() as urls:
        for kind, url in urls.items():
            schema.upgrade(url)
            fill(url, days=options.days, jobs_per_day=options.jobs_per_day, now=time.time())
            results[kind] = measured(url)
    if options.json:
        print(json.dumps(results))
        return
    print(f"{'ms':>60} " + " ".join(f"{kind:>12}" for kind in results))
    for question in results["sqlite"]:
        print(f"{question[:60]:60} " + " ".join(f"{times[question]:12.1f}" for times in results.values()))
    slow = {question for times in results.values() for question, took in times.items() if took > BUDGET_MS}
    print(f"{len(slow)} questions take more than {BUDGET_MS} ms")


if __name__ == "__main__":
    main()
