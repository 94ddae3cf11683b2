"""A store with days of recorded jobs: rows of every table, written in bulk, which takes a minute for a month."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, text

from dl2d.core.cluster import Snapshot
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Constraint, Decision
from dl2d.core.jobs import JobRequest, JobState, Launch
from dl2d.core.plan_of_starts_and_stops import Outcome, Plan
from dl2d.core.policy_registry import RunState, TrialCase, VersionState
from dl2d.core.resources import Resources
from dl2d.store.connections_and_transactions import Database, StoreLocation
from dl2d.store.tables.jobs import JobRow, ProgressRow
from dl2d.store.tables.kind_speeds import SpeedRow
from dl2d.store.tables.membership_changes import RuntimePlanRow
from dl2d.store.tables.mode_changes import ModeChangeRow
from dl2d.store.tables.policy_versions import LearningRunRow, PolicyChangeRow, PolicyTrialRow, PolicyVersionRow
from dl2d.store.tables.resizes import ResizeEventRow, ResizeRow
from dl2d.store.tables.row_mapping import Base, table_of
from dl2d.store.tables.slots_and_decisions import DecisionRow, ShadowAllocationRow, SlotResourceRow, SlotRow
from dl2d.store.tables.tasks import TaskReportRow, TaskRow

SLOT_SECONDS = 300.0
_COOKBOOK = Path(__file__).parents[1] / "docs" / "sql-cookbook.md"
_MODELS = ("resnet-50", "vgg-16", "bert", "gpt-2")
_USERS = (("ada", "physics"), ("grace", "physics"), ("alan", "maths"), ("emmy", "maths"), ("kurt", "logic"))
_WORKER, _PS = Resources.of(cpu=4, gpu=1, memory=16384), Resources.of(cpu=2, memory=4096)
_CONSTRAINTS = (Constraint.SATISFIED, Constraint.CAPACITY, Constraint.QUEUE, Constraint.COOLDOWN)


def cookbook() -> list[tuple[int, str, str]]:
    """Number, title and query of each question of the SQL cookbook."""
    page = _COOKBOOK.read_text(encoding="utf-8")
    found = re.findall(r"\*\*(\d+)\. (.*?)\*\*.*?```sql\n(.*?)```", page, re.DOTALL)
    return [(int(number), title, query) for number, title, query in found]


def on_day(query: str, at: float) -> str:
    """A question with the day of a time in the place of the day that the page names."""
    return query.replace("2026-11-20", time.strftime("%Y-%m-%d", time.gmtime(at)))


def cpu_clock(connection: Connection) -> Callable[[], float]:
    """Seconds of CPU time of the process that answers: this one for SQLite, the server's for PostgreSQL, which is asked
    without parallel workers.
    """
    if connection.dialect.name == "sqlite":
        return time.process_time
    connection.execute(text("SET max_parallel_workers_per_gather = 0"))
    schedule = Path(f"/proc/{connection.execute(text('SELECT pg_backend_pid()')).scalar_one()}/schedstat")
    return lambda: int(schedule.read_text(encoding="ascii").split()[0]) / 1e9


def fill(
    url: str, *, days: int, jobs_per_day: int, now: float, seed: int = 1, shadow_last: bool = False
) -> None:  # fmt: skip
    """Fill a migrated, empty database with ``days`` days that end at ``now``; half of them are of mode shadow."""
    rng = random.Random(seed)
    begin = now - days * 86_400
    slots = int(days * 86_400 / SLOT_SECONDS)
    half = slots // 2
    shadow = range(half + 1, slots + 1) if shadow_last else range(1, half + 1)
    modes = (Mode.LIVE, Mode.SHADOW) if shadow_last else (Mode.SHADOW, Mode.LIVE)
    database = Database(StoreLocation.parse(url))
    with database.writing("filling") as connection:
        rows = _Rows(connection)
        rows.add(PolicyVersionRow, *(_version(number, begin) for number in (1, 2)))
        rows.add(PolicyChangeRow, *(_policy_change(number, begin) for number in (1, 2)))
        rows.add(PolicyTrialRow, *(_trial(day, begin) for day in range(1, days + 1)))
        rows.add(LearningRunRow, *(_learning_run(day, begin) for day in range(1, days + 1)))
        rows.add(ModeChangeRow, _mode(1, begin, "", modes[0]))
        rows.add(ModeChangeRow, _mode(2, begin + days * 43_200, modes[0].value, modes[1]))
        rows.add(SpeedRow, *(_speed(model, workers, begin) for model in _MODELS for workers in (1, 2, 4, 8)))
        count = days * jobs_per_day
        submitted = (begin + 86_400 * number / jobs_per_day for number in range(1, count + 1))
        jobs = iter([_add_job(rows, rng, number, at, now) for number, at in enumerate(submitted, start=1)])
        coming, live = next(jobs, None), list[_Timeline]()
        for number in range(1, slots + 1):
            at = begin + number * SLOT_SECONDS
            while coming is not None and coming.submitted <= at:
                live.append(coming)
                coming = next(jobs, None)
            live = [job for job in live if job.ended >= at]
            _add_slot(rows, rng, number, at, live, shadow=number in shadow)
        rows.write()
    database.close()


class _Rows:
    """Rows that are to be written, by table; a month of them would need a gigabyte of memory."""

    #: In an order in which a row's foreign keys are there before it.
    _TABLES: tuple[type[Base], ...] = (
        PolicyVersionRow, PolicyChangeRow, PolicyTrialRow, LearningRunRow, ModeChangeRow, SpeedRow, SlotRow, JobRow,
        DecisionRow, ShadowAllocationRow, SlotResourceRow, TaskRow, ResizeRow, ResizeEventRow, ProgressRow,
        TaskReportRow, RuntimePlanRow,
    )  # fmt: skip

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: dict[type[Base], list[dict[str, Any]]] = {model: [] for model in self._TABLES}

    def add(self, model: type[Base], *values: dict[str, Any]) -> None:
        self._rows[model] += values
        if len(self._rows[model]) >= 5000:
            self.write()

    def write(self) -> None:
        for model, values in self._rows.items():
            if values:
                self._connection.execute(insert(table_of(model)), values)
                values.clear()


@dataclass(slots=True)
class _Timeline:
    """A job's size over time."""

    number: int
    submitted: float
    started: float
    shrinks: float
    ended: float
    workers: int
    ps: int
    previous: tuple[int, int] = (0, 0)

    def size(self, at: float) -> tuple[int, int]:
        return (0, 0) if at < self.started else (self.workers - (at >= self.shrinks), self.ps)


def _add_slot(
    rows: _Rows, rng: random.Random, number: int, at: float, live: list[_Timeline], *, shadow: bool
) -> None:  # fmt: skip
    rows.add(SlotRow, _slot(number, at, shadow=shadow, fallback=number % 97 == 0))
    for resource, capacity in (("cpu", 512.0), ("gpu", 128.0), ("memory", 4194304.0)):
        used = rng.uniform(0.4, 1.0) * capacity
        rows.add(
            SlotResourceRow,
            {"slot": number, "resource": resource, "capacity": capacity, "used": used, "held": 0.9 * used},
        )
    for job in live:
        workers, ps = size = job.size(at)
        rows.add(DecisionRow, _decision(number, job.number, size, job.previous, rng))
        if shadow:
            more = rng.choice((-1, 0, 0, 1))
            rows.add(
                ShadowAllocationRow,
                {"slot": number, "job_number": job.number, "workers": max(workers + more, 0), "ps": ps,
                 "given_workers": workers, "given_ps": ps, "guard": "",
                 "binding_constraint": rng.choice(_CONSTRAINTS), "reason": "the next worker saves 31 s"},
            )  # fmt: skip
        job.previous = size


def _add_job(rows: _Rows, rng: random.Random, number: int, submitted: float, now: float) -> _Timeline:
    waited, trained = rng.expovariate(1 / 1800), rng.expovariate(1 / 9000) + 300
    started, ended = submitted + waited, submitted + waited + trained
    workers, ps = rng.choice((1, 2, 4)), rng.choice((1, 2))
    state = JobState.FAILED if number % 40 == 0 else JobState.FINISHED
    if ended > now:
        state = JobState.RUNNING if started < now else JobState.READY
    done = 1.0 if ended <= now else max(now - started, 0) / trained
    rows.add(JobRow, _job(number, submitted, started if started < now else None, ended if ended <= now else None,
                          state, 20.0 * done, workers, ps, rng))  # fmt: skip
    # Each twelfth job loses a worker halfway, if it has several.
    shrinks = started + trained / 2 if number % 12 == 0 and workers > 1 else math.inf
    job = _Timeline(number, submitted, started, shrinks, ended, workers, ps)
    if started >= now:
        return job
    for role, many, demand in (("worker", workers, _WORKER), ("ps", ps, _PS)):
        for ordinal in range(many):
            left = shrinks if (role, ordinal) == ("worker", workers - 1) else math.inf
            failed = state is JobState.FAILED and left == math.inf
            left = min(left, ended)
            _add_task(rows, number, role, ordinal, demand, started, left if left <= now else None, failed=failed)
    for point in range(1, 6):
        at = started + (min(ended, now) - started) * point / 5
        rows.add(ProgressRow, _reported(4 * point * done, workers, ps) | {"job_number": number, "at": at})
    rows.add(
        RuntimePlanRow,
        {"job_number": number, "number": 1, "at": started, "first_version": 1, "workers": workers, "servers": ps,
         "added": (), "removed": (), "moved_bytes": 2**20, "prepare_ms": 3.0, "move_ms": 9.0,
         "suspension_p50_ms": 0.1, "suspension_max_ms": rng.uniform(0, 9)},
    )  # fmt: skip
    return job


def _add_task(
    rows: _Rows, number: int, role: str, ordinal: int, demand: Resources, started: float, ended: float | None, *,
    failed: bool,
) -> None:  # fmt: skip
    name, node = f"{role}-{ordinal}", f"n{(number + ordinal) % 32}"
    joining = role == "worker" and ordinal == 1 and ended is None
    state = "joined" if joining else "confirmed" if ended is None else "failed" if failed else "released"
    rows.add(
        TaskRow,
        {"job_number": number, "id": name, "role": role, "ordinal": ordinal, "node": node, "demand": demand,
         "state": state, "handle": f"{number}.{ordinal}", "asked_at": started - 9, "granted_at": started - 5,
         "ended_at": ended, "since": started if ended is None else ended, "cause": "failed" if failed else "",
         "note": "FAILED (NonZeroExitCode), exit status 1" if failed else ""},
    )  # fmt: skip
    rows.add(
        TaskReportRow,
        {"job_number": number, "task": name, "at": started + 60, "gpus": 1, "gpu_percent": 80.0, "step_ms": 120.0,
         "cause": "out-of-memory" if failed else "", "how": "killed by signal 9" if failed else "",
         "slowdown": 2.5 if ended is None else None, "slowdown_reason": "node is busy" if ended is None else ""},
    )  # fmt: skip
    events = [("grow", "asked", started - 9), ("grow", "granted", started - 5), ("grow", "joined", started - 2)]
    if not joining:
        events.append(("grow", "confirmed", started))
    if ended is not None:
        events += [("shrink", "draining", ended - 2), ("shrink", state, ended)]
    for direction in dict.fromkeys(direction for direction, *_ in events):
        rows.add(
            ResizeRow,
            {"job_number": number, "task": name, "direction": direction, "role": role, "node": node,
             "began_at": next(at for way, _, at in events if way == direction),
             "granted_at": started - 5 if direction == "grow" else None,
             "ended_at": (None if joining else started) if direction == "grow" else ended},
        )  # fmt: skip
    for step, (direction, entered, at) in enumerate(events):
        rows.add(
            ResizeEventRow,
            {"job_number": number, "task": name, "direction": direction, "state": entered, "step": step, "at": at,
             "note": ""},
        )  # fmt: skip


def _job(
    number: int, submitted: float, started: float | None, ended: float | None, state: JobState, epoch: float,
    workers: int, ps: int, rng: random.Random,
) -> dict[str, Any]:  # fmt: skip
    user, account = rng.choice(_USERS)
    model = rng.choice(_MODELS)
    request = JobRequest(
        name=f"train-{number}", model=model, epochs=20.0, samples_per_epoch=50_000.0, steps_per_epoch=None, batch=256,
        worker=_WORKER, ps=_PS,
    )  # fmt: skip
    failed = state is JobState.FAILED
    return _reported(epoch, workers, ps) | {
        "number": number, "slug": f"main.{number}.{int(submitted)}", "cluster": "main", "id": str(number),
        "submitted": int(submitted), "name": request.name, "model": model, "user_name": user, "uid": 1000, "gid": 1000,
        "account": account, "partition": "gpu", "qos": "normal", "state": state, "anchor": str(number), "address": "",
        "started_at": started, "ended_at": ended, "end_reason": "worker-0 failed" if failed else "",
        "end_cause": "training-failed" if failed else "", "digest": "", "progress_at": ended or submitted,
        "series_at": ended, "static": number % 3 == 0, "epochs": 20.0, "max_workers": 16, "max_ps": 16,
        "worker_demand": _WORKER, "ps_demand": _PS, "request": request, "launch": Launch(("python", "train.py"), "/"),
    }  # fmt: skip


def _reported(epoch: float, workers: int, ps: int) -> dict[str, Any]:
    return {
        "version": int(epoch * 195), "total_versions": 3900, "epoch": epoch, "loss": 2.0 / (1 + epoch),
        "steps_per_second": 4.0, "samples_per_second": 1024.0, "workers": workers, "ps": ps,
    }  # fmt: skip


def _decision(
    slot: int, number: int, size: tuple[int, int], previous: tuple[int, int], rng: random.Random
) -> dict[str, Any]:
    return {
        "slot": slot, "job_number": number, "workers": size[0], "ps": size[1], "previous_workers": previous[0],
        "previous_ps": previous[1], "binding_constraint": rng.choice(_CONSTRAINTS),
        "reason": "no gpu left for the next worker", "guard": "", "detail": None,
    }  # fmt: skip


def _slot(number: int, at: float, *, shadow: bool, fallback: bool) -> dict[str, Any]:
    nothing = Snapshot(at=at, slot=number, nodes=(), jobs=(), tasks=())
    policy, version = ("observed", "Slurm 22.05") if shadow else ("dl2", "a" * 12)
    return {
        "number": number, "at": at, "policy": policy, "policy_version": version,
        "version_number": None if shadow else 1, "fallback": "policy dl2 failed: it is late" if fallback else "",
        "shadow_policy": "dl2" if shadow else None, "shadow_policy_version": "a" * 12 if shadow else None,
        "measure": "", "inputs_hash": "0" * 64, "seed": "1", "seconds": 0.1, "changed": 1, "started": 2, "draining": 1,
        "failures": 0, "snapshot": nothing, "decision": Decision(policy, version, ()), "proposed": None,
        "shadow": None, "plan": Plan(), "outcome": Outcome(),
    }  # fmt: skip


def _version(number: int, at: float) -> dict[str, Any]:
    return {
        "number": number, "policy": "dl2", "digest": "ab"[number - 1] * 64, "parent": "", "folder": "/policies",
        "origin": "twin", "at": at, "data_from": None, "data_to": None, "jobs": 100, "metrics": {},
        "state": VersionState.LIVE if number == 1 else VersionState.RETIRED,
    }  # fmt: skip


def _policy_change(number: int, at: float) -> dict[str, Any]:
    return {
        "number": number, "version": number, "at": at, "before": VersionState.CANDIDATE, "after": VersionState.LIVE,
        "by": "gate", "reason": "passed", "replaced": None, "rollback": False,
    }  # fmt: skip


def _trial(day: int, begin: float) -> dict[str, Any]:
    return {
        "number": day, "policy": "dl2", "candidate": "ab"[day % 2] * 64, "current": "ba"[day % 2] * 64,
        "at": begin + day * 86_400, "days": ("2026-01-01", "2026-01-02", "2026-01-03"),
        "cases": tuple(TrialCase(f"day {number}", 4.0, 3.9) for number in range(20)), "change": -0.02, "low": -0.05,
        "high": 0.01, "passed": False, "reason": "not surely better",
    }  # fmt: skip


def _learning_run(day: int, begin: float) -> dict[str, Any]:
    at = begin + day * 86_400 - 900
    return {"number": day, "policy": "dl2", "started_at": at, "ended_at": at + 600, "state": RunState.FINISHED,
            "note": "version aaaaaaaaaaaa failed: not surely better"}  # fmt: skip


def _mode(number: int, at: float, before: str, after: Mode) -> dict[str, Any]:
    return {"number": number, "at": at, "before": before, "after": after, "by": "pid 7 on head", "reason": "reload"}


def _speed(model: str, workers: int, at: float) -> dict[str, Any]:
    return {
        "model": model, "architecture": "ps", "consistency": "sync", "workers": workers, "ps": workers,
        "samples_per_second": 100.0 * workers**0.8, "measurements": 16, "jobs": 3, "at": at, "since": at,
        "previous_speed": 0.0, "job": "main.1.1", "other_samples_per_second": None, "other_measurements": 0,
        "other_jobs": 0, "other_since": 0.0, "other_job": "",
    }  # fmt: skip
