"""What a tick costs the store: the calls of one tick at a given number of jobs, and how the cost grows with history.

    python benchmarks/store_tick.py [--jobs 1000] [--ticks 30] [--url postgresql://...]

Each job holds 2 workers and 2 servers; in each tick a tenth of the jobs swap a worker. Without ``--url`` it measures
SQLite in a temporary file and, where a server is installed, a private PostgreSQL (fsync on, unlike in the tests).
Prints one line per database: medians in milliseconds of the first and of the last third of the ticks (the
difference is what history costs), the longest call, and bytes on disk per tick.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

from harness import options_of, show

from dl2d.core.cluster import Node, Snapshot, TaskState
from dl2d.core.decision import Alternative, Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import Allocation, Job, JobKey, Launch, Progress, Role
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.core.plan_of_starts_and_stops import Outcome, Plan, Start, Stop
from dl2d.core.resources import Resources, Shortfall
from dl2d.core.store import Slot, TaskChange
from dl2d.store import schema_version
from dl2d.store.sql_store import SqlStore
from dl2d.testing import make_job

# isort: split
from postgres_server import PostgresMissing, PostgresServer

_WORKER, _PS = Resources.of(cpu=2, gpu=1, memory=8192), Resources.of(cpu=2, memory=4096)
_ENVIRONMENT = tuple((f"VARIABLE_{number}", "/opt/site/software/some/where:" * 3) for number in range(20))


class Timed:
    """A store that measures the time of each call, in milliseconds by method and ``of``."""

    def __init__(self, store: SqlStore, times: dict[str, list[float]], of: str = "") -> None:
        self._store, self._times, self._of = store, times, of

    def __getattr__(self, name: str) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            done = getattr(self._store, name)(*args, **options)
            self._times[f"{name}{self._of}"].append(1000 * (time.perf_counter() - began))
            return done

        return timed


class Bench:
    """A store under ticks, and the time of each call."""

    def __init__(self, url: str, jobs: int) -> None:
        self.store = SqlStore(url)
        self.times: dict[str, list[float]] = defaultdict(list)
        self._timed, self._of_one = Timed(self.store, self.times), Timed(self.store, self.times, " (one job)")
        live = [job_of(number) for number in range(jobs)]
        for job in live:
            self.store.add_job(job)
        roles = (Role.WORKER, Role.WORKER, Role.PS, Role.PS)
        asked = self.store.ask_tasks([_start(job.key, role) for job in live for role in roles], 0.0)
        self.store.change_tasks([TaskChange(task.job, task.id, TaskState.CONFIRMED) for task in asked], 1.0)

    def tick(self, number: int, at: float) -> None:
        """One tick's calls in the daemon's order, and one heartbeat."""
        store = self._timed
        jobs = store.jobs(live=True)
        tasks = store.tasks(live=True)
        keys, kinds = [job.key for job in jobs], {TrainingKind.of(jobs[0].request)}
        store.last_ended(200)
        store.speeds(kinds, others=8)
        store.job_speeds(keys)
        store.losses(keys)
        swapped = [job.key for job in jobs[number % 10 :: 10]]
        oldest = {task.job: task for task in reversed(tasks) if task.role is Role.WORKER}
        slot = _slot(number, at, jobs, tasks, swapped)
        leaving = [oldest[key] for key in swapped]
        starts = [_start(key, Role.WORKER) for key in swapped]
        came = store.ask_tasks(starts, at)
        changes = [
            *(TaskChange(task.job, task.id, TaskState.CONFIRMED, handle=f"{number}") for task in came),
            *(TaskChange(task.job, task.id, TaskState.RELEASED) for task in leaving),
        ]
        store.change_tasks(changes, at + 1)
        store.record_slot(slot)
        self._heartbeat(keys[0], Progress(at=at, version=number, epoch=number / 9, loss=1 / number, workers=2, ps=2))
        self._of_one.decisions(keys[0])
        self._of_one.resizes(keys[0])
        store.slot(number)

    def _heartbeat(self, job: JobKey, heard: Progress) -> None:
        store = self._timed
        store.job(job)
        tasks = self._of_one.tasks(live=True, job=job)
        store.named_tasks(job, [task.id for task in tasks])
        store.report_progress(job, heard)


def job_of(number: int) -> Job:
    job = make_job(
        number, cluster="main", submitted=1_700_000_000 + number, name=f"train-{number}", epochs=90.0,
        samples_per_epoch=1.2e6, batch=256, worker=_WORKER, ps=_PS,
    )  # fmt: skip
    launch = Launch(("python", "train.py", "--data", f"/data/{number}"), "/home/ada/project", _ENVIRONMENT)
    return replace(job, launch=launch)


def _start(job: JobKey, role: Role) -> Start:
    return Start(job, role, f"node-{int(job.id) % 96}", _WORKER if role is Role.WORKER else _PS)


def _slot(number: int, at: float, jobs: tuple[Job, ...], tasks: tuple, swapped: list[JobKey]) -> Slot:
    reason = Reason(Constraint.CAPACITY, "no gpu left for a third worker", (Shortfall("gpu", 1.0, 0.0),))
    decided = tuple(
        JobDecision(
            job.key,
            Allocation(2, 2),
            reason,
            previous=Allocation(2, 2),
            alternatives=tuple(Alternative(Allocation(workers, 2), 0.1 * workers) for workers in (1, 3)),
        )
        for job in jobs
    )
    decision = Decision("drf", "1", decided, "dominant share", tuple((job.key, Allocation(1, 1)) for job in jobs))
    nodes = tuple(Node(f"node-{index}", Resources.of(cpu=64, gpu=8, memory=512_000)) for index in range(96))
    return Slot(
        number=number,
        at=at,
        snapshot=Snapshot(at, number, nodes, jobs, tasks),
        proposed=decision,
        decision=decision,
        plan=Plan(tuple(_start(key, Role.WORKER) for key in swapped), tuple(Stop(key, "worker-0") for key in swapped)),
        outcome=Outcome(started=tuple(f"dl2:{key.slug}:worker-{number}" for key in swapped)),
        inputs_hash="ab" * 32,
        seed=number,
        seconds=0.1,
    )


@contextmanager
def empty_store(database: str) -> Iterator[str]:
    """URL of a new store in SQLite, or in a private PostgreSQL."""
    with ExitStack() as stack:
        if database == "sqlite":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dl2d-bench-"))
            url = f"sqlite:///{folder}/store.sqlite"
        else:
            server = PostgresServer(fsync=True)
            stack.callback(server.stop)
            server.start()
            url = stack.enter_context(server.database())
        schema_version.upgrade(url)
        yield url


def measure(name: str, url: str, jobs: int, ticks: int) -> None:
    """Run the ticks on one database."""
    bench = Bench(url, jobs)
    with closing(bench.store):
        before = bench.store.size()
        for number in range(1, ticks + 1):
            bench.tick(number, 20.0 * number)
        grown = (bench.store.size() - before) / ticks
    third = max(1, ticks // 3)
    calls = {
        call: [statistics.median(times[:third]), statistics.median(times[-third:]), max(times)]
        for call, times in bench.times.items()
    }
    show(database=name, jobs=jobs, ticks=ticks, bytes_per_tick=grown, calls_first_last_max_ms=calls)


def main() -> None:
    """Measure each database that there is."""
    options = options_of(__doc__, jobs=1000, ticks=30, url="")
    if options.url:
        schema_version.upgrade(options.url)
        measure("given", options.url, options.jobs, options.ticks)
        return
    for database in ("sqlite", "postgresql"):
        try:
            with empty_store(database) as url:
                measure(database, url, options.jobs, options.ticks)
        except PostgresMissing as missing:
            print(f"PostgreSQL was not measured: {missing}", file=sys.stderr)


if __name__ == "__main__":
    main()
