"""CPU time of each question of the SQL cookbook on a filled store, in milliseconds.

    python benchmarks/sql_cookbook.py [--databases sqlite postgresql] [--days 30] [--jobs 500] [--repeats 3]

The store has --days days with --jobs jobs a day and a slot every 5 minutes (`tests/filled_store.py`), in the newer
half in mode shadow. Least of --repeats runs: of this process for SQLite, of the server's process for PostgreSQL, which
is asked without parallel workers. The elapsed time is the least, too; other programs on the machine change it.
"""

from __future__ import annotations

import time

from harness import options_of, show
from sqlalchemy import text
from store_tick import empty_store

from dl2d.store.database import Database, Place

# isort: split
from filled_store import cookbook, cpu_clock, fill, on_day


def main() -> None:
    options = options_of(__doc__, databases=["sqlite", "postgresql"], days=30, jobs=500, repeats=3)
    for kind in options.databases:
        with empty_store(kind) as url:
            now = time.time()
            fill(url, days=options.days, jobs_per_day=options.jobs, now=now, shadow_last=True)
            database = Database(Place.parse(url))
            if kind == "postgresql":  # as autovacuum does
                with database.writing("statistics") as connection:
                    connection.execute(text("ANALYZE"))
            with database.reading("asking") as connection:
                clock = cpu_clock(connection)
                for number, title, query in cookbook():
                    cpu, elapsed, rows = [], [], 0
                    for _ in range(options.repeats):
                        begin, from_clock = time.perf_counter(), clock()
                        rows = len(connection.execute(text(on_day(query, now - 86_400))).all())
                        cpu.append(clock() - from_clock)
                        elapsed.append(time.perf_counter() - begin)
                    show(database=kind, number=number, title=title, rows=rows, cpu_ms=1e3 * min(cpu),
                         elapsed_ms=1e3 * min(elapsed))  # fmt: skip
            database.close()


if __name__ == "__main__":
    main()
