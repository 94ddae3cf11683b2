"""Reads the recorded history of a site."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sqlalchemy import Connection, and_, func, select

from dl2d.core.cluster import Node, Snapshot, TaskState, in_submit_order
from dl2d.core.jobs import NO_LAUNCH, NOTHING, Allocation, Job, JobKey
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.core.progress_callback import Count
from dl2d.core.resources import Resources
from dl2d.core.store import ClusterState, History, RecordedSizes
from dl2d.store.tables.jobs import JobRow, job_of
from dl2d.store.tables.kind_speeds import speeds
from dl2d.store.tables.membership_changes import RuntimePlanRow, runtime_plan_of
from dl2d.store.tables.resizes import GROW, ResizeEventRow, ResizeRow
from dl2d.store.tables.row_mapping import table_of
from dl2d.store.tables.slots_and_decisions import DecisionRow, SlotRow, snapshot

_HOUR = 3600.0


def read_history(connection: Connection, begin: float, end: float, *, unreported: bool, progress: Count) -> History:
    """See ``SqlStore.history``."""
    there = (JobRow.submitted < end) & (JobRow.ended_at.is_(None) | (JobRow.ended_at > begin))
    found = list(map(job_of, connection.execute(select(table_of(JobRow)).where(there))))
    jobs = in_submit_order(
        [replace(job, progress=job.progress_at(end)) for job in found if unreported or not job.unreported]
    )
    slots = _slots(connection, begin, end)
    states = tuple(_cluster_states(connection, slots, unreported=unreported, progress=progress))
    first_decided = _first_decided(connection, slots)
    plans = select(table_of(RuntimePlanRow)).where(RuntimePlanRow.at >= begin, RuntimePlanRow.at < end)
    return History(
        begin=begin,
        end=end,
        jobs=tuple(replace(job, launch=NO_LAUNCH) for job in jobs),
        cluster_states=states,
        speeds=speeds(connection, {TrainingKind.of(job.request) for job in jobs}, others=0),
        plans=tuple(map(runtime_plan_of, connection.execute(plans.order_by(RuntimePlanRow.at)))),
        starts=tuple(_start_seconds(connection, begin, end)),
        sizes={
            **_sizes_of_ended(jobs, begin, end),
            **_sizes(connection, begin, end, {job.key.slug: job.key for job in jobs}, first_decided),
        },
        complete_from=max(
            _decisions_complete_from(connection, slots, found, first_decided),
            _jobs_complete_from(connection, states, found),
        ),
    )


def _slots(connection: Connection, begin: float, end: float) -> Sequence[tuple[int, float, str]]:
    """Number, time and policy of the slots between two times, oldest first."""
    between = (SlotRow.at >= begin) & (SlotRow.at < end)
    numbers = select(SlotRow.number, SlotRow.at, SlotRow.policy).where(between).order_by(SlotRow.at, SlotRow.number)
    return [(number, at, policy) for number, at, policy in connection.execute(numbers)]


def _first_decided(connection: Connection, slots: Sequence[tuple[int, float, str]]) -> int | None:
    """The first of some slots that has decisions on jobs; None if none has."""
    if not slots:
        return None
    between = DecisionRow.slot.between(slots[0][0], slots[-1][0])
    return connection.execute(select(func.min(DecisionRow.slot)).where(between)).scalar()


def _decisions_complete_from(
    connection: Connection, slots: Sequence[tuple[int, float, str]], jobs: Iterable[Job], first_decided: int | None
) -> float:
    """Time just after the last slot whose decisions were deleted; 0 if none were.

    Decisions are deleted from the oldest slot on, so these are all before the first slot that has any. The newest of
    them in which there was a job has it in its snapshot; there is none if no job had come yet.
    """
    without = [(at, number) for number, at, _ in slots if first_decided is None or number < first_decided]
    newest = -1
    for job in jobs:
        place = bisect_left(without, (math.inf if job.ended_at is None else job.ended_at, 0)) - 1
        if place > newest and without[place][0] > job.key.submitted:
            newest = place
    if newest < 0 or not snapshot(connection, without[newest][1]).jobs:
        return 0.0
    return math.nextafter(without[-1][0], math.inf)


def _jobs_complete_from(connection: Connection, states: Sequence[ClusterState], jobs: Iterable[Job]) -> float:
    """Time just after the last state with a job that was deleted; 0 if none was."""
    known = {job.key.slug for job in jobs}
    for state in reversed(states):
        unknown = {key.slug for key in state.epochs} - known
        if unknown:  # it may have ended just before the slot
            stored = select(JobRow.slug).where(JobRow.slug.in_(sorted(unknown)))
            if not unknown <= set(connection.execute(stored).scalars()):
                return math.nextafter(state.at, math.inf)
    return 0.0


def _cluster_states(
    connection: Connection, slots: Iterable[tuple[int, float, str]], *, unreported: bool,
    progress: Count,
) -> Iterable[ClusterState]:  # fmt: skip
    """The cluster in the first slot of each hour."""
    hours: dict[int, tuple[int, str]] = {}
    for number, at, policy in slots:
        hours.setdefault(int(at // _HOUR), (number, policy))
    for done, (number, policy) in enumerate(hours.values()):
        progress(done, len(hours))
        yield _cluster_state(snapshot(connection, number), policy, unreported=unreported)


def _sizes_of_ended(jobs: Iterable[Job], begin: float, end: float) -> dict[JobKey, RecordedSizes]:
    """Sizes of the static jobs that ended, as the resource manager told them: one may have run between two slots."""
    return {
        job.key: ((max(job.started_at, begin), Allocation(job.progress.workers, job.progress.ps)),)
        for job in jobs
        if job.static and job.state.ended and job.progress.workers
        if job.started_at is not None and job.started_at < end
    }


def _sizes(
    connection: Connection, begin: float, end: float, keys: Mapping[str, JobKey], first_decided: int | None
) -> dict[JobKey, RecordedSizes]:
    """Sizes that jobs came to have, from the decisions that changed them. Keys of jobs are by slug.

    In the first slot that has decisions, all decisions tell what jobs had before.
    """
    workers, ps = DecisionRow.workers != DecisionRow.previous_workers, DecisionRow.ps != DecisionRow.previous_ps
    changes = (
        select(
            JobRow.slug, SlotRow.at, DecisionRow.workers, DecisionRow.ps, DecisionRow.previous_workers,
            DecisionRow.previous_ps,
        )
        .join(SlotRow, SlotRow.number == DecisionRow.slot)
        .join(JobRow, JobRow.number == DecisionRow.job_number)
        .where(SlotRow.at >= begin, SlotRow.at < end, workers | ps | (DecisionRow.slot == first_decided))
        .order_by(DecisionRow.slot)
    )  # fmt: skip
    found: dict[JobKey, list[tuple[float, Allocation]]] = defaultdict(list)
    for row in connection.execute(changes):
        if row.slug in keys:
            sizes, before = found[keys[row.slug]], Allocation(row.previous_workers, row.previous_ps)
            if not sizes and before != NOTHING:  # what it had when the recorded time began
                sizes.append((begin, before))
            if (size := Allocation(row.workers, row.ps)) != (sizes[-1][1] if sizes else NOTHING):
                sizes.append((row.at, size))
    return {key: tuple(sizes) for key, sizes in found.items() if sizes}


def _start_seconds(connection: Connection, begin: float, end: float) -> Iterable[float]:
    """Seconds from asking for a task until it took part, of each task of an elastic job that did.

    Without tasks that waited in the resource manager's queue for their turn, which were asked for without a node.
    """
    key = ("job_number", "task", "direction")
    events = (
        select(ResizeRow.began_at, ResizeEventRow.at)
        .join(ResizeEventRow, and_(*(table_of(ResizeRow).c[name] == table_of(ResizeEventRow).c[name] for name in key)))
        .join(JobRow, JobRow.number == ResizeRow.job_number)
        .where(ResizeRow.began_at >= begin, ResizeRow.began_at < end, ResizeRow.direction == GROW, ResizeRow.node != "")
        .where(ResizeEventRow.state == TaskState.CONFIRMED, ResizeEventRow.at < end, JobRow.static.is_(False))
        .order_by(ResizeRow.job_number, ResizeRow.task)
    )
    return [confirmed - asked for asked, confirmed in connection.execute(events)]


def _cluster_state(seen: Snapshot, policy: str, *, unreported: bool) -> ClusterState:
    others = set() if unreported else {job.key for job in seen.jobs if job.unreported}
    ours: dict[str, list[Resources]] = defaultdict(list)
    for task in seen.tasks:
        if task.job not in others:
            ours[task.node].append(task.room)
    nodes = tuple(
        Node(node.name, node.capacity, node.used.minus(Resources.total(ours[node.name])), node.state, node.remark)
        for node in seen.nodes
    )
    epochs = {job.key: job.progress.epoch for job in seen.jobs if job.key not in others}
    return ClusterState(seen.at, nodes, epochs, policy)
