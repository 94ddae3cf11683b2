"""What a long history costs: times of all queries of a tick and a heartbeat, and bytes on disk.

    python benchmarks/store_growth.py --jobs 20 --days 30
    python benchmarks/store_growth.py --jobs 1000 --days 1
    python benchmarks/store_growth.py --jobs 20 --days 30 --ended 500

Makes live jobs with a report of progress every 10 s, a decision on each every 5 minutes, a resize an hour, and --ended
ended jobs a day, in an SQLite file with the schema before the bounded measurements (0011); then upgrades it and asks
each query of a tick and a heartbeat; with --prune it then deletes the older half and asks again. Prints times in
milliseconds (median of five), seconds, bytes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from alembic import command
from harness import options_of, show
from sqlalchemy import insert, text
from store_tick import _job, _start

from dl2d.core.cluster import TaskState
from dl2d.core.jobs import JobKey, JobState, Progress, Role
from dl2d.core.measured_speeds import TrainingKind
from dl2d.core.store import Keep, TaskChange
from dl2d.store import schema, sqlite_file
from dl2d.store.database import LOCK_SECONDS, Database, Place
from dl2d.store.jobs import JobRow, _job_values
from dl2d.store.row_mapping import table_of
from dl2d.store.sql_store import SqlStore

_DAY = 86_400
_END = 1_700_000_000
_COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)"


def fill(url: str, jobs: int, days: int, ended_a_day: int) -> None:
    """Make the history in a new file whose schema is 0011."""
    place = Place.parse(url)
    database = Database(place)
    begin, ended = _END - days * _DAY, ended_a_day * days
    with database.writing("making a history") as connection:
        config = schema._config()  # noqa: SLF001
        config.attributes["connection"] = connection
        command.upgrade(config, "0011")
        live = [replace(_job(number), state=JobState.RUNNING) for number in range(jobs)]
        past = [replace(_job(jobs + number), state=JobState.FINISHED, ended_at=begin + 86_400.0 * number / ended_a_day)
                for number in range(ended)]  # fmt: skip
        columns = {row[1] for row in connection.exec_driver_sql("PRAGMA table_info(jobs)")}
        values = [{name: value for name, value in {**_job_values(job), "number": number}.items() if name in columns}
                  for number, job in enumerate((*live, *past), start=1)]  # fmt: skip
        connection.execute(insert(table_of(JobRow)), values)
        every = {"count": days * 8640, "begin": begin, "jobs": jobs}
        connection.execute(text(
            f"{_COUNT} INSERT INTO progress SELECT number, :begin + i * 10.0, i, 1000000, i / 9.0, "
            "1.0 / (1 + i), 4.0, 1000.0 + i % 7, 1 + (i / 360) % 8, 2 FROM jobs, n WHERE number <= :jobs "
            .replace("progress SELECT", "progress (job_number, at, version, total_versions, epoch, loss, "
                     "steps_per_second, samples_per_second, workers, ps) SELECT")), every)  # fmt: skip
        connection.execute(text(
            f"{_COUNT} INSERT INTO slots (number, at, policy, policy_version, measure, inputs_hash, seed, seconds, "
            "changed, started, draining, failures, snapshot, decision, plan, outcome) SELECT i, :begin + i * 300.0, "
            "'drf', '1', '', :hash, '1', 0.1, 0, 0, 0, 0, zeroblob(:blob), x'', x'', x'' FROM n"),
            {"count": days * 288, "begin": begin, "hash": "0" * 64, "blob": 400 + 70 * jobs})  # fmt: skip
        connection.execute(text(
            "INSERT INTO decisions (slot, job_number, workers, ps, previous_workers, previous_ps, binding_constraint, "
            "reason, guard) SELECT slots.number, jobs.number, 2, 2, 2, 2, 'capacity', :reason, '' FROM slots, jobs "
            "WHERE jobs.number <= :jobs"), {"jobs": jobs, "reason": "no gpu left for a third worker"})  # fmt: skip
        connection.execute(text(
            f"{_COUNT} INSERT INTO tasks (job_number, id, role, ordinal, node, demand, state, handle, asked_at, "
            "granted_at, ended_at, since, cause, note) SELECT number, 'worker-' || (9 + i), 'worker', 9 + i, 'n1', "
            """'{"cpu"\\:2}', 'released', 'h' || i, :begin + i * 3600, :begin + i * 3600, :begin + i * 3600 + 9, """
            ":begin + i * 3600 + 9, '', '' FROM jobs, n WHERE number <= :jobs"),
            {**every, "count": days * 24})  # fmt: skip
        connection.execute(text(
            "INSERT INTO resizes (job_number, task, direction, role, node, began_at, ended_at) "
            "SELECT job_number, id, 'grow', role, node, asked_at, ended_at FROM tasks"))  # fmt: skip
        connection.execute(text(
            "INSERT INTO resize_events (job_number, task, direction, state, step, at, note) "
            "SELECT job_number, task, direction, 'confirmed', 3, began_at + 5, '' FROM resizes"))  # fmt: skip
    database.close()


def ask(store: SqlStore) -> dict[str, float]:
    """Milliseconds of each query of a tick and of a heartbeat."""
    live = store.jobs(live=True)
    keys: list[JobKey] = [job.key for job in live]
    one, kinds = keys[0], {TrainingKind.of(live[0].request)}
    at = iter(float(_END + 10 * number) for number in range(1, 1000))
    names = [task.id for task in store.tasks(live=True, job=one)]

    def report() -> None:
        said = Progress(at=next(at), version=9, loss=0.5, samples_per_second=1000.0, workers=2, ps=2)
        store.report_progress(one, said)

    queries: dict[str, Callable[[], object]] = {
        "tick: jobs": lambda: store.jobs(live=True),
        "tick: tasks": lambda: store.tasks(live=True),
        "tick: last_ended": lambda: store.last_ended(200),
        "tick: speeds": lambda: store.speeds(kinds, others=8),
        "tick: job_speeds": lambda: store.job_speeds(keys),
        "tick: losses": lambda: store.losses(keys),
        "tick: last_slot_number": store.last_slot_number,
        "heartbeat: job": lambda: store.job(one),
        "heartbeat: named_tasks": lambda: store.named_tasks(one, names),
        "heartbeat: change_tasks": lambda: store.change_tasks([TaskChange(one, names[0], TaskState.CONFIRMED)], 1.0),
        "heartbeat: report_progress": report,
        "heartbeat: tasks": lambda: store.tasks(live=True, job=one),
        "learner: history of 28 days": lambda: _history(store),
    }
    return {
        name: round(statistics.median(_milliseconds(query) for _ in range(5)), 2) for name, query in queries.items()
    }


def _history(store: SqlStore) -> None:
    """What a learner reads, but for the sights, whose snapshots are not real here."""
    from dl2d.store.history_for_simulation import _sizes, _start_seconds  # noqa: PLC0415

    with store._database.reading("history") as connection:  # noqa: SLF001
        _start_seconds(connection, _END - 28 * _DAY, _END)
        _sizes(connection, _END - 28 * _DAY, _END, {})


def _milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    """Measure one size."""
    options = options_of(__doc__, jobs=20, days=30, ended=-1, prune=False)
    with tempfile.TemporaryDirectory(prefix="dl2d-bench-") as folder:
        url = f"sqlite:///{folder}/store.sqlite"
        sqlite_file.create(Path(folder, "store.sqlite"), LOCK_SECONDS)
        fill(url, options.jobs, options.days, options.jobs if options.ended < 0 else options.ended)
        upgraded = _milliseconds(lambda: schema.upgrade(url)) / 1000
        with closing(SqlStore(url)) as store:
            for job in store.jobs(live=True):
                starts = [_start(job.key, role) for role in (Role.WORKER, Role.PS) for _ in (1, 2)]
                asked = store.ask_tasks(starts, 1.0)
                store.change_tasks([TaskChange(job.key, task.id, TaskState.CONFIRMED) for task in asked], 2.0)
            show(upgrade_seconds=upgraded, ms=ask(store), bytes=store.size())
            if not options.prune:
                return
            half, steps, deleted = options.days * _DAY / 2, [], True
            while deleted:
                began = time.perf_counter()
                deleted = store.prune(Keep(progress=half, decisions=half, slots=half, jobs=half), float(_END))
                steps.append(time.perf_counter() - began)
            show(prune_steps=len(steps), prune_seconds=sum(steps), longest_step_ms=1000 * max(steps), ms=ask(store),
                 bytes=store.size())  # fmt: skip


if __name__ == "__main__":
    main()
