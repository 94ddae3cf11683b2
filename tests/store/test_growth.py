"""What a tick and a heartbeat read does not grow with the history: the work is counted, not timed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from daemon.api.api_world import ApiWorld
from sqlalchemy import event, func, insert, select
from sqlalchemy.engine import Connection

from dl2d.core.cluster import TaskState
from dl2d.core.jobs import JobKey, JobState, Role, User
from dl2d.core.policy import Evidence
from dl2d.policies.drf import Drf
from dl2d.store.tables.jobs import MAX_NAMESAKES, JobRow, ProgressRow
from dl2d.store.tables.kind_speeds import SpeedRow
from dl2d.store.tables.membership_changes import RuntimePlanRow
from dl2d.store.tables.resizes import ResizeEventRow, ResizeRow
from dl2d.store.tables.row_mapping import Base, table_of
from dl2d.store.tables.slots_and_decisions import DecisionRow, ShadowAllocationRow, SlotResourceRow, SlotRow
from dl2d.store.tables.tasks import TaskReportRow, TaskRow
from dl2d.testing import OWNER

_JOBS = 3
#: Half of them are elastic jobs: more than a tick reads of those that ended last.
_PAST = 420


class NeedsEverything(Drf):
    """A policy that needs all measurements that there are."""

    needs = frozenset(Evidence)


@dataclass
class Work:
    """Work of a database by statement: instructions of SQLite's virtual machine, or rows that PostgreSQL read."""

    counted: Counter[str] = field(default_factory=Counter)
    now: str = ""

    @contextmanager
    def counting(self, world: ApiWorld) -> Iterator[None]:
        engine = world.store._database.engine
        engine.dispose()  # connections that count are opened anew
        postgresql = engine.dialect.name == "postgresql"
        listeners = [("connect", self._without_full_scans), ("commit", self._count_rows)]
        if not postgresql:
            listeners = [("connect", self._count_instructions), ("before_cursor_execute", self._note)]
        for name, listener in listeners:
            event.listen(engine, name, listener)
        yield
        for name, listener in listeners:
            event.remove(engine, name, listener)
        engine.dispose()

    def _note(self, _connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        self.now = statement

    def _count_instructions(self, connection: Any, _record: Any) -> None:
        def count() -> int:
            self.counted[self.now] += 1
            return 0

        connection.set_progress_handler(count, 1)

    def _without_full_scans(self, connection: Any, _record: Any) -> None:
        # On small tables the planner takes them even where there is an index.
        connection.execute("SET enable_seqscan = off")
        connection.commit()

    def _count_rows(self, connection: Connection) -> None:
        rows = connection.exec_driver_sql(
            "SELECT relname, COALESCE(seq_tup_read, 0) + COALESCE(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables"
        )
        for table, read in rows.all():
            self.counted[table] += read
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")  # else the next transaction counts them again


def test_a_name_is_looked_up_among_a_bounded_number_of_jobs(kept_url: str) -> None:
    world = ApiWorld(url=kept_url)
    try:
        world.ready(name="train")
        other = world.ready(name="train")
        _end_jobs(world, other, 1, 200)
        found = world.store.find_jobs("train")
        assert [job.state.ended for job in found] == [False, False] + [True] * MAX_NAMESAKES
        short = _looked_up(world)
        _end_jobs(world, other, 201, 2000)
        assert world.store.find_jobs("train")[2].ended_at == 2000.0
        long = _looked_up(world)
    finally:
        world.close()
    assert short
    assert long <= 1.1 * short


def test_what_a_user_asks_for_reads_no_more_of_a_long_history_of_others(kept_url: str) -> None:
    world = ApiWorld(url=kept_url)
    try:
        own = world.ready(name="train")
        _end_jobs(world, own, 1, 10)
        user = User(OWNER.uid, OWNER.user)

        def asked() -> int:
            work = Work()
            with work.counting(world):
                assert len(world.store.find_jobs("train", user)) == 11
                assert world.store.list_jobs(user, ended_since=0.0, limit=100).total == 11
                assert world.store.list_jobs(user, ended_since=math.inf, limit=100).total == 1
            return sum(work.counted.values())

        _end_jobs(world, own, 11, 200, uid=4242, user_name="bob")
        short = asked()
        _end_jobs(world, own, 201, 2000, uid=4242, user_name="bob")
        long = asked()
    finally:
        world.close()
    assert short
    assert long <= 1.1 * short


def _end_jobs(world: ApiWorld, like: JobKey, first: int, last: int, **changes: object) -> None:
    """Add copies of a job that have ended."""
    with world.store._database.writing("adding jobs") as connection:
        row = connection.execute(select(table_of(JobRow)).where(JobRow.slug == like.slug)).one()._asdict()
        records = {
            name: _decoded(connection, JobRow, name) for name in ("worker_demand", "ps_demand", "request", "launch")
        }
        rows = [row | records | {"number": 10_000 + n, "id": f"x{n}", "slug": f"test.x{n}.1", "submitted": 1,
                                 "state": JobState.FINISHED, "ended_at": float(n), **changes}
                for n in range(first, last + 1)]  # fmt: skip
        connection.execute(insert(table_of(JobRow)), rows)
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("ANALYZE")


def _looked_up(world: ApiWorld) -> int:
    work = Work()
    with work.counting(world):
        world.store.find_jobs("train")
    return sum(work.counted.values())


def test_a_tick_and_a_heartbeat_read_no_more_of_a_long_history(kept_url: str) -> None:
    world = ApiWorld(url=kept_url, policy=NeedsEverything(), slot_seconds=20.0)
    try:
        keys = [world.ready() for _ in range(_JOBS)]
        world.settle()
        _add_history(world, 1, _PAST)
        short = _work(world, keys)
        _add_history(world, _PAST + 1, 5 * _PAST)
        long = _work(world, keys)
    finally:
        world.close()
    assert {what for what, count in short.counted.items() if count}
    # What grows with the history would be six times as much.
    grown = {what: (short.counted[what], count) for what, count in long.counted.items()
             if count > 2 * short.counted[what] + 20}  # fmt: skip
    assert grown == {}


def _work(world: ApiWorld, keys: list[Any]) -> Work:
    """Work of a slot's tick and of one heartbeat of each job, twice."""
    work = Work()
    with work.counting(world):
        for _ in range(2):
            world.tick(world.slot_seconds)
            for key in keys:
                members = [{"task": task.id, "role": str(task.role), "state": "active"}
                           for task in world.store.tasks(live=True, job=key)]  # fmt: skip
                answer = world.heartbeat(key, state="running", members=members, loss=0.5, samples_per_second=9.0)
                assert answer.status_code == 200
    return work


def _add_history(world: ApiWorld, first: int, count: int) -> None:
    """Add ended jobs, and tasks, resizes, progress and decisions of the live jobs, all before now."""
    numbers = range(first, first + count)
    with world.store._database.writing("adding a history") as connection:

        def copies(model: type[Base], **changes: Any) -> list[dict[str, Any]]:
            """One row of a table as often as there are numbers, changed by functions of the number."""
            table = table_of(model)
            like = dict(connection.execute(select(table).order_by(*table.primary_key).limit(1)).one()._mapping)
            return [like | {name: make(number) for name, make in changes.items()} for number in numbers]

        def add(model: type[Base], rows: list[dict[str, Any]]) -> None:
            connection.execute(insert(table_of(model)), rows)

        def past(number: int) -> float:
            return world.now - 1e6 + 10.0 * number

        live = connection.execute(select(func.min(JobRow.number))).scalar_one()
        decoded = {
            name: _decoded(connection, JobRow, name) for name in ("request", "launch", "worker_demand", "ps_demand")
        }
        add(JobRow, [row | decoded for row in copies(
            JobRow, number=lambda n: 1000 + n, slug=lambda n: f"test.{1000 + n}.1", id=lambda n: str(1000 + n),
            anchor=lambda n: f"x{n}", submitted=lambda _: 1, state=lambda _: JobState.FINISHED, ended_at=past,
            static=lambda n: n % 2 == 0,
        )])  # fmt: skip
        demand = _decoded(connection, TaskRow, "demand")
        ended = {"state": lambda _: TaskState.RELEASED, "ended_at": past, "job_number": lambda _: live}
        add(TaskRow, [row | {"demand": demand} for row in copies(
            TaskRow, id=lambda n: f"worker-{1000 + n}", role=lambda _: Role.WORKER, ordinal=lambda n: 1000 + n,
            since=past, **ended,
        )])  # fmt: skip
        of_task = {"job_number": lambda _: live, "task": lambda n: f"worker-{1000 + n}"}
        add(ResizeRow, copies(ResizeRow, began_at=past, ended_at=past, **of_task))
        add(ResizeEventRow, copies(ResizeEventRow, at=past, **of_task))
        add(TaskReportRow, [{"job_number": live, "task": f"worker-{1000 + n}", "at": past(n), "gpus": 0, "cause": "",
                             "how": "", "slowdown_reason": ""} for n in numbers])  # fmt: skip
        add(ProgressRow, copies(ProgressRow, job_number=lambda _: live, at=past))
        add(RuntimePlanRow, [{"job_number": live, "number": n, "at": past(n), "first_version": 1, "workers": 1,
                              "servers": 1, "added": (), "removed": (), "moved_bytes": 0, "prepare_ms": 0.0,
                              "move_ms": 0.0, "suspension_p50_ms": 0.0, "suspension_max_ms": 0.0}
                             for n in numbers])  # fmt: skip
        large = {name: _decoded(connection, SlotRow, name) for name in ("snapshot", "decision", "plan", "outcome")}
        add(SlotRow, [row | large | {"proposed": None, "shadow": None} for row in copies(
            SlotRow, number=lambda n: -n, at=past)])  # fmt: skip
        of_slot = {"slot": lambda n: -n, "job_number": lambda _: live}
        add(DecisionRow, [row | {"detail": None} for row in copies(DecisionRow, **of_slot)])
        shadow = {column.name for column in table_of(ShadowAllocationRow).c}
        add(ShadowAllocationRow, [{name: value for name, value in row.items() if name in shadow}
                                  | {"given_workers": row["workers"], "given_ps": row["ps"]}
                                  for row in copies(DecisionRow, **of_slot)])  # fmt: skip
        add(SlotResourceRow, copies(SlotResourceRow, slot=lambda n: -n))
        if connection.dialect.name == "postgresql":  # as autovacuum does
            connection.exec_driver_sql("ANALYZE")
        add(SpeedRow, [{"model": f"old-{n}", "architecture": "ps", "consistency": "sync", "workers": 1, "ps": 1,
                        "samples_per_second": 1.0, "measurements": 1, "jobs": 1, "at": past(n), "since": past(n),
                        "previous_speed": 0.0, "job": "x", "other_samples_per_second": None, "other_measurements": 0,
                        "other_jobs": 0, "other_since": 0.0, "other_job": ""} for n in numbers])  # fmt: skip


def _decoded(connection: Connection, model: type[Base], name: str) -> Any:
    """A record that a JSON column holds; selected rows hold its text."""
    column = table_of(model).c[name]
    stored = connection.execute(select(column).where(column.is_not(None)).limit(1)).scalar_one()
    return column.type.decode(stored)  # type: ignore[attr-defined]
