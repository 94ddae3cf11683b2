"""Reading what a site recorded in some days."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Final

from sqlalchemy import select

from dl2d.core.cluster import Node, Snapshot, TaskState
from dl2d.core.history import History, Sight
from dl2d.core.jobs import Job, Launch
from dl2d.core.measured import MeasuredSpeeds, TrainingKind
from dl2d.core.resources import Resources
from dl2d.store import rows
from dl2d.store.database import Database
from dl2d.store.mapping import JobRow, ResizeEventRow, RuntimePlanRow, SlotRow, table_of

_HOUR: Final = 3600.0
_NO_LAUNCH: Final = Launch((), "")


def read_history(
    database: Database,
    begin: float,
    end: float,
    speeds: Callable[[Collection[TrainingKind]], tuple[MeasuredSpeeds, ...]],
) -> History:
    """See ``RecordingStore.history``; ``speeds`` is ``Store.speeds``. Commands and environments are left out."""
    with database.reading("reading what was recorded") as connection:
        there = (JobRow.submitted < end) & (JobRow.ended_at.is_(None) | (JobRow.ended_at > begin))
        found = (rows.to_job(row) for row in connection.execute(select(*table_of(JobRow).c).where(there)))
        # How much a job does of which only the time is known cannot be played at another size.
        jobs = sorted((job for job in found if not job.unreported), key=lambda job: rows.submit_order(job.key))
        between = (SlotRow.at >= begin) & (SlotRow.at < end)
        numbers = select(SlotRow.number, SlotRow.at).where(between).order_by(SlotRow.at, SlotRow.number)
        hours: dict[int, int] = {}
        for number, at in connection.execute(numbers):
            hours.setdefault(int(at // _HOUR), number)
        sights = []
        for number in hours.values():
            packed = connection.execute(select(SlotRow.snapshot).where(SlotRow.number == number)).scalar_one()
            sights.append(_sight(rows.unpack(packed, Snapshot, f"slot {number}")))
        plans = select(*table_of(RuntimePlanRow).c).where(RuntimePlanRow.at >= begin, RuntimePlanRow.at < end)
        changes = tuple(rows.to_runtime_plan(row) for row in connection.execute(plans.order_by(RuntimePlanRow.at)))
        events = (
            select(ResizeEventRow.job_number, ResizeEventRow.task, ResizeEventRow.state, ResizeEventRow.at)
            .join(JobRow, JobRow.number == ResizeEventRow.job_number)
            .where(JobRow.static.is_(False))
            .where(ResizeEventRow.at >= begin, ResizeEventRow.at < end, ResizeEventRow.direction == "grow")
            .where(ResizeEventRow.state.in_([TaskState.ASKED.value, TaskState.CONFIRMED.value]))
        )
        moments: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
        for row in connection.execute(events):
            moments[row.job_number, row.task][row.state] = row.at
    starts = [
        each[TaskState.CONFIRMED] - each[TaskState.ASKED]
        for _, each in sorted(moments.items())
        if len(each) == 2
    ]  # fmt: skip
    kinds = {TrainingKind.of(job.request) for job in jobs}
    return History(
        begin=begin,
        end=end,
        jobs=tuple(_without_secrets(jobs)),
        sights=tuple(sights),
        speeds=speeds(kinds),
        plans=changes,
        starts=tuple(starts),
    )


def _without_secrets(jobs: Iterable[Job]) -> Iterable[Job]:
    return (replace(job, launch=_NO_LAUNCH) for job in jobs)


def _sight(snapshot: Snapshot) -> Sight:
    others = {job.key for job in snapshot.jobs if job.unreported}
    ours: dict[str, list[Resources]] = defaultdict(list)
    for task in snapshot.tasks:
        if task.job not in others:
            ours[task.node].append(task.demand)
    nodes = tuple(
        Node(node.name, node.capacity, node.used.minus(Resources.total(ours[node.name])), node.state, node.remark)
        for node in snapshot.nodes
    )
    epochs = {job.key: job.progress.epoch for job in snapshot.jobs if job.key not in others}
    return Sight(snapshot.at, nodes, epochs)
