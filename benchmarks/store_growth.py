"""What a long history costs: times of the calls of ticks and heartbeats (those of store_tick.py), and bytes on disk.

    python benchmarks/store_growth.py --jobs 20 --days 30
    python benchmarks/store_growth.py --jobs 1000 --days 1
    python benchmarks/store_growth.py --jobs 20 --days 30 --ended 500

Makes live jobs with a report of progress every 10 s, a decision on each every 5 minutes, a resize an hour, and --ended
ended jobs a day, in an SQLite file; then measures --ticks ticks. With --prune it then deletes the older half, and
measures again.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import replace

from harness import options_of, show
from sqlalchemy import insert, text
from store_tick import Bench, empty_store, job_of

from dl2d.core.jobs import JobState, Progress
from dl2d.core.measured_losses import MAX_LOSSES
from dl2d.core.store import RetentionTimes
from dl2d.store.database import Database, StoreLocation
from dl2d.store.jobs import JobRow, _job_values
from dl2d.store.row_mapping import table_of

_DAY = 86_400
_END = 1_700_000_000
_COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)"


def fill(bench: Bench, url: str, jobs: int, days: int, ended: int) -> None:
    """Add the history of the live jobs, and jobs that have ended."""
    begin, first = _END - days * _DAY, bench.store.jobs(live=True)[0].key
    for number in range(MAX_LOSSES):
        heard = Progress(
            at=begin + number / 1e3, epoch=number / 9, loss=1 / (1 + number), samples_per_second=1000.0 + number % 7,
            workers=1 + number % 8, ps=2,
        )  # fmt: skip
        bench.store.report_progress(first, heard)
    database = Database(StoreLocation.parse(url))
    with database.writing("making a history") as connection:

        def run(statement: str, **values: object) -> None:
            connection.execute(text(statement), {"begin": begin, "jobs": jobs, **values})

        past = (replace(job_of(jobs + number), state=JobState.FINISHED, ended_at=begin + days * _DAY * number / ended)
                for number in range(ended))  # fmt: skip
        if values := [{**_job_values(job), "number": number} for number, job in enumerate(past, start=jobs + 1)]:
            connection.execute(insert(table_of(JobRow)), values)
        for table, columns in (
            ("job_speeds", "workers, ps, samples_per_second, measurements, at, since, last"),
            ("job_losses", "curve"),
        ):
            run(f"INSERT INTO {table} (job_number, {columns}) SELECT number, {columns} FROM {table}, "
                "(SELECT number FROM jobs WHERE number BETWEEN 2 AND :jobs) WHERE job_number = 1")  # fmt: skip
        run(f"{_COUNT} INSERT INTO progress (job_number, at, version, total_versions, epoch, loss, steps_per_second, "
            "samples_per_second, workers, ps) SELECT number, :begin + i * 10.0, i, 1000000, i / 9.0, 1.0 / (1 + i), "
            "4.0, 1000.0 + i % 7, 1 + (i / 360) % 8, 2 FROM jobs, n WHERE number <= :jobs",
            count=days * 8640)  # fmt: skip
        run(f"{_COUNT} INSERT INTO slots (number, at, policy, policy_version, measure, inputs_hash, seed, seconds, "
            "changed, started, draining, failures, snapshot, decision, plan, outcome) SELECT i, :begin + i * 300.0, "
            "'drf', '1', '', :hash, '1', 0.1, 0, 0, 0, 0, zeroblob(:blob), x'', x'', x'' FROM n",
            count=days * 288, hash="0" * 64, blob=400 + 70 * jobs)  # fmt: skip
        run("INSERT INTO decisions (slot, job_number, workers, ps, previous_workers, previous_ps, binding_constraint, "
            "reason, guard) SELECT slots.number, jobs.number, 2, 2, 2, 2, 'capacity', 'no gpu left for a third worker',"
            " '' FROM slots, jobs WHERE jobs.number <= :jobs")  # fmt: skip
        run(f"{_COUNT} INSERT INTO tasks (job_number, id, role, ordinal, node, demand, state, handle, asked_at, "
            "granted_at, ended_at, since, cause, note) SELECT number, 'worker-' || (9 + i), 'worker', 9 + i, 'n1', "
            """'{"cpu"\\:2}', 'released', 'h' || i, :begin + i * 3600, :begin + i * 3600, :begin + i * 3600 + 9, """
            ":begin + i * 3600 + 9, '', '' FROM jobs, n WHERE number <= :jobs", count=days * 24)  # fmt: skip
        run("INSERT INTO resizes (job_number, task, direction, role, node, began_at, ended_at) "
            "SELECT job_number, id, 'grow', role, node, asked_at, ended_at FROM tasks WHERE ordinal > 9")  # fmt: skip
        run("INSERT INTO resize_events (job_number, task, direction, state, step, at, note) SELECT job_number, task, "
            "direction, 'confirmed', 3, began_at + 5, '' FROM resizes JOIN tasks USING (job_number) "
            "WHERE tasks.id = task AND ordinal > 9")  # fmt: skip
    database.close()


def measure(bench: Bench, first: int, ticks: int) -> dict[str, float]:
    """Median milliseconds of the calls of some ticks, of which the first is slot number ``first``."""
    bench.times.clear()
    for number in range(first, first + ticks):
        bench.tick(number, _END + 20.0 * number)
    return {name: statistics.median(times) for name, times in bench.times.items()}


def main() -> None:
    """Measure one size."""
    options = options_of(__doc__, jobs=20, days=30, ended=0, ticks=5, prune=False)
    with empty_store("sqlite") as url:
        bench = Bench(url, options.jobs)
        with closing(bench.store) as store:
            fill(bench, url, options.jobs, options.days, options.ended * options.days)
            first = store.last_slot_number() + 1
            show(ms=measure(bench, first, options.ticks), bytes=store.size())
            if not options.prune:
                return
            half, steps, deleted = options.days * _DAY / 2, [], True
            while deleted:
                began = time.perf_counter()
                deleted = store.prune(RetentionTimes(progress=half, decisions=half, slots=half, jobs=half), float(_END))
                steps.append(time.perf_counter() - began)
            show(prune_steps=len(steps), prune_seconds=sum(steps), longest_step_ms=1000 * max(steps),
                 ms=measure(bench, first + options.ticks, options.ticks), bytes=store.size())  # fmt: skip


if __name__ == "__main__":
    main()
