"""The tick: observe, decide, guard, place, apply, record. The daemon and the simulator run this one function."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

import structlog

from dl2d.core.cluster import Snapshot, Task, TaskState
from dl2d.core.codec import digest
from dl2d.core.decision import Decision
from dl2d.core.jobs import Job, JobKey, JobState
from dl2d.core.plan import Outcome, Plan
from dl2d.core.resource_manager import ResourceManager, RmSnapshot
from dl2d.core.store import Slot, Store, TaskChange
from dl2d.daemon.apply import apply, start_anchor
from dl2d.daemon.decide import Deciders, decide, inputs_hash
from dl2d.daemon.guard import GuardRules, Memory, guard
from dl2d.daemon.launching import Launcher
from dl2d.daemon.observe import take_snapshot, with_evidence
from dl2d.daemon.place import place
from dl2d.daemon.reconcile import Patience, heard_since, reconcile

log = structlog.get_logger()

#: How many of the newest jobs are looked at for ended ones that left something running.
_RECENT_JOBS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a tick works with; nothing in it changes from tick to tick."""

    cluster: str
    manager: ResourceManager
    store: Store
    deciders: Deciders
    launcher: Launcher
    rules: GuardRules
    patience: Patience
    #: Longest time that a decision stands, in seconds.
    slot_seconds: float
    seed: int
    starts_anchors: bool
    #: Grace between asking a process to end and killing it, in seconds.
    grace: float
    #: Seconds on a monotonic clock, to measure how long things take.
    timer: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """What one tick hands to the next. A daemon that starts with an empty one only decides a little earlier."""

    slot: int = 0
    #: The decision in force, when it was made, and the state of the cluster that it answered.
    standing: Decision | None = None
    decided_at: float = float("-inf")
    answered: str = ""
    memory: Memory = field(default_factory=Memory)
    #: Ticks in a row in which tasks of a job were found to have ended before they joined, and how the last one ended.
    failures: tuple[tuple[JobKey, tuple[int, str]], ...] = ()
    #: When each handle was last asked to stop.
    stopping: tuple[tuple[str, float], ...] = ()
    #: Since when each job's coordinator has called without a gap.
    heard: tuple[tuple[JobKey, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What a tick did, for the log and for tests."""

    snapshot: Snapshot
    decision: Decision
    plan: Plan
    outcome: Outcome
    #: Whether the policy was asked, or the standing decision still held.
    decided: bool
    seconds: float


def tick(context: Context, carry: Carry) -> tuple[Carry, Report]:
    """Run one tick.

    The policy is asked once per slot, and earlier when a job becomes ready or ends, a task fails or the nodes change;
    in between the standing decision is carried on with, as room becomes free. A slot is recorded when it was decided.

    Raises
    ------
    ResourceManagerError, StoreError, PolicyError
        The tick could not be completed. What it had done is persisted; the next tick mends the rest.
    """
    begin = context.timer()
    seen = context.manager.snapshot()
    jobs, tasks, found = _mend(context, seen, carry)
    stopping = _stop(context, found, dict(carry.stopping), seen.at)
    failures = found.failures
    snapshot = take_snapshot(jobs, tasks, seen, carry.slot + 1)
    silent = {job.key for job in snapshot.jobs} - found.heard.keys()
    answered = _situation(snapshot, failures, silent)
    # A clock that was set back must not make a decision stand for hours.
    since = snapshot.at - carry.decided_at
    due = not 0 <= since < context.slot_seconds or answered != carry.answered
    standing = carry.standing
    if standing is None or due:
        snapshot = with_evidence(snapshot, context.deciders.needs, context.store)
        proposed = decide(snapshot, context.deciders, context.seed, context.timer)
        decision = guard(proposed, snapshot, context.rules, carry.memory, silent=silent)
        decided = True
    else:
        proposed = decision = standing
        decided = False
    plan = place(snapshot, decision, context.deciders.placement, silent=silent)
    outcome = apply(plan, {job.key: job for job in jobs}, context.store, context.manager, context.launcher, seen.at)
    seconds = context.timer() - begin
    report = Report(snapshot, decision, plan, outcome, decided, seconds)
    carry = replace(
        carry,
        failures=tuple(failures.items()),
        stopping=tuple(stopping.items()),
        heard=tuple(found.heard.items()),
    )
    if not decided:
        return carry, report
    context.store.record_slot(
        Slot(
            number=snapshot.slot,
            at=snapshot.at,
            snapshot=snapshot,
            proposed=proposed,
            decision=decision,
            plan=plan,
            outcome=outcome,
            inputs_hash=inputs_hash(snapshot, context.deciders.policy, context.deciders.placement, context.seed),
            seed=context.seed,
            seconds=seconds,
        )
    )
    following = replace(
        carry,
        slot=snapshot.slot,
        standing=decision,
        decided_at=snapshot.at,
        answered=answered,
        memory=carry.memory.after(decision, snapshot.at),
    )
    return following, report


def _situation(snapshot: Snapshot, failures: dict[JobKey, tuple[int, str]], silent: Collection[JobKey]) -> str:
    """What a decision answers to: another situation asks for another decision before the slot is over."""
    nodes = [(node.name, node.capacity, node.state) for node in snapshot.nodes]
    return digest([job.key for job in snapshot.jobs], nodes, sorted(failures.items()), sorted(silent))


@dataclass(frozen=True, slots=True)
class _Found:
    """What reconciliation leaves to be done."""

    stops: tuple[tuple[str, str], ...]
    failures: dict[JobKey, tuple[int, str]]
    heard: dict[JobKey, float]


def _mend(context: Context, seen: RmSnapshot, carry: Carry) -> tuple[tuple[Job, ...], tuple[Task, ...], _Found]:
    """Reconcile store and manager, start anchors, and return what is live now."""
    store, failures = context.store, dict(carry.failures)
    live_jobs, live_tasks = store.jobs(live=True), store.tasks(live=True)
    heard = heard_since(live_jobs, dict(carry.heard), seen.at, context.patience.silent)
    live = {job.key for job in live_jobs}
    for key, _ in carry.heard:
        if key not in heard and key in live:
            log.warning("coordinator is silent", job=key.id, seconds=context.patience.silent)
    found = reconcile(
        live_jobs,
        live_tasks,
        _ended(store, live_jobs, live_tasks),
        seen,
        cluster=context.cluster,
        patience=context.patience,
        failures=failures,
        heard=heard,
    )
    for remark in found.remarks:
        log.warning("reconcile", remark=remark)
    for key, change in found.jobs:
        job = store.change_job(key, change, seen.at)
        if change.state is not None:
            log.info("job", job=key.id, state=str(job.state), reason=job.end_reason)
    store.change_tasks(found.tasks, seen.at)
    jobs = store.jobs(live=True) if found.jobs else live_jobs
    if context.starts_anchors:
        for job in jobs:
            if job.state is JobState.SUBMITTED and not job.anchor:
                start_anchor(job, store, context.manager, context.launcher, seen.at)
    tasks = store.tasks(live=True) if found.tasks else live_tasks
    counted = _count_failures(live_tasks, found.tasks, failures)
    present = {job.key for job in jobs}
    failures = {key: count for key, count in counted.items() if key in present}
    return jobs, tasks, _Found(found.stops, failures, heard)


def _stop(context: Context, found: _Found, asked: dict[str, float], at: float) -> dict[str, float]:
    """Stop what has to be stopped; who was asked is asked again only when the grace is well over."""
    patience = 2 * context.grace + context.patience.end
    stopping = {handle: asked[handle] for handle, _ in found.stops if 0 <= at - asked.get(handle, -math.inf) < patience}
    due = [(handle, reason) for handle, reason in found.stops if handle not in stopping]
    for handle, reason in due:
        log.info("stop", handle=handle, reason=reason)
    if due:
        context.manager.stop([handle for handle, _ in due], context.grace)
    return stopping | {handle: at for handle, _ in due}


def _ended(store: Store, jobs: Iterable[Job], tasks: Iterable[Task]) -> tuple[Job, ...]:
    """Jobs that have ended but may have left an anchor or tasks running."""
    live = {job.key for job in jobs}
    recent = {job.key: job for job in store.jobs(live=False, limit=_RECENT_JOBS) if job.state.ended}
    for task in tasks:
        if task.job not in live and task.job not in recent and (job := store.job(task.job)) is not None:
            recent[job.key] = job
    return tuple(job for job in recent.values() if job.key not in live)


def _count_failures(
    tasks: Iterable[Task], changes: Iterable[TaskChange], failures: dict[JobKey, tuple[int, str]]
) -> dict[JobKey, tuple[int, str]]:
    """Count ticks with failures: tasks that were started together and failed together are one try.

    A start that never reached the manager is not the job's fault and does not count.
    """
    before = {(task.job, task.id): task for task in tasks}
    confirmed = {task.job for task in before.values() if task.state is TaskState.CONFIRMED}
    counted = {key: count for key, count in failures.items() if key not in confirmed}
    failed: dict[JobKey, str] = {}
    for change in changes:
        task = before[change.job, change.task]
        if change.state is TaskState.FAILED and task.state.rank < TaskState.JOINED.rank and task.handle:
            failed[change.job] = f"{change.task}: {change.note or 'no reason given'}"
    for key, last in failed.items():
        counted[key] = (counted.get(key, (0, ""))[0] + 1, last)
    return counted
