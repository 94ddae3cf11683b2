"""The tick: observe, decide, guard, place, apply, record. The daemon and the simulator run this one function.

Which stages it has is the mode's to say (``dl2d.core.mode.STAGES``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

import structlog

from dl2d.core.cluster import Snapshot, Task, TaskState
from dl2d.core.codec import digest
from dl2d.core.decision import Decision
from dl2d.core.jobs import Job, JobKey, JobState
from dl2d.core.mode import STAGES, Mode, Stages
from dl2d.core.plan import Outcome, Plan
from dl2d.core.request import RequestRules
from dl2d.core.resource_manager import ResourceManager, RmSnapshot
from dl2d.core.store import Slot, Store, TaskChange
from dl2d.tick.apply import apply, start_anchor
from dl2d.tick.decide import Deciders, SetAside, decide, inputs_hash
from dl2d.tick.guard import GuardRules, Memory, guard
from dl2d.tick.idle import idle_jobs
from dl2d.tick.observe import take_snapshot, with_evidence
from dl2d.tick.observed_decision import Observer
from dl2d.tick.place.place import place
from dl2d.tick.reconcile import Patience, heard_since, reconcile
from dl2d.tick.static_jobs import newcomers, watch
from dl2d.tick.task_specs import Launcher

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
    mode: Mode = Mode.LIVE
    #: Name and version of the resource manager, which is in charge where dl2d is not.
    scheduler: str = ""
    #: What the site allows jobs; bounds of those that declare none.
    limits: RequestRules = field(default_factory=RequestRules)
    #: Seconds that jobs may wait beside room for them, before the fallback decides in the policy's place.
    idle_seconds: float = math.inf
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
    #: Since when jobs wait beside room for them; None where none do.
    idle_since: float | None = None
    #: The policy in whose place the fallback decides.
    set_aside: SetAside | None = None


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
    mode: Mode = Mode.LIVE
    #: Jobs that wait although every one of them could start in the room that is free, and for how many seconds some do.
    idle: tuple[JobKey, ...] = ()
    idle_seconds: float = 0.0
    #: The policy that is not asked any more; the next tick has the fallback decide.
    set_aside: SetAside | None = None


def tick(context: Context, carry: Carry) -> tuple[Carry, Report]:
    """Run one tick.

    The policy is asked once per slot, and earlier when a job becomes ready or ends, a task fails or the nodes change;
    in between the standing decision is carried on with, as room becomes free. A slot is recorded when it was decided.
    A policy that leaves jobs waiting beside room for them for ``idle_seconds`` is set aside: from the next tick on the
    fallback decides, until another version of the policy does.

    Raises
    ------
    ResourceManagerError, StoreError, PolicyError
        The tick could not be completed. What it had done is persisted; the next tick mends the rest.
    """
    begin = context.timer()
    stages = STAGES[context.mode]
    seen = context.manager.snapshot()
    elastic, static = _books(context.store)
    static = _watch(context, stages, static, elastic.jobs, seen)
    jobs, tasks, found = _mend(context, elastic, {job.key for job in static.jobs}, seen, carry)
    stopping = _hold_to(context, jobs, found, dict(carry.stopping), seen.at) if stages.act else {}
    failures = found.failures
    if stages.watch:
        jobs, tasks = (*jobs, *static.jobs), (*tasks, *static.tasks)
    snapshot = take_snapshot(jobs, tasks, seen, carry.slot + 1)
    silent = {job.key for job in snapshot.jobs if not job.static} - found.heard.keys()
    aside = carry.set_aside
    if aside is not None and not aside.names(context.deciders.policy):
        aside = None
    answered = _situation(context.mode, snapshot, failures, silent, aside)
    # A clock that was set back must not make a decision stand for hours.
    since = snapshot.at - carry.decided_at
    due = not 0 <= since < context.slot_seconds or answered != carry.answered
    standing = carry.standing
    decided = standing is None or due
    if decided and stages.decide:
        snapshot = with_evidence(snapshot, context.deciders.needs, context.store)
    if standing is None or due:
        ruling = _rule(context, stages, snapshot, carry.memory, silent, seen, aside)
    else:
        ruling = _Ruling(standing, standing)
    decision = ruling.decision
    plan, outcome, idle = Plan(), Outcome(), _Idle(set_aside=aside)
    if stages.act:
        plan = place(snapshot, decision, context.deciders.placement, silent=silent)
        outcome = apply(plan, {job.key: job for job in jobs}, context.store, context.manager, context.launcher, seen.at)
        idle = _look_for_idle(context, snapshot, decision, plan, silent, carry.idle_since, aside)
    seconds = context.timer() - begin
    report = Report(
        snapshot, decision, plan, outcome, decided, seconds, context.mode, idle.jobs, idle.seconds(snapshot.at),
        idle.set_aside,
    )  # fmt: skip
    carry = replace(
        carry,
        failures=tuple(failures.items()),
        stopping=tuple(stopping.items()),
        heard=tuple(found.heard.items()),
        idle_since=idle.since,
        set_aside=idle.set_aside,
    )
    if not decided:
        return carry, report
    context.store.record_slot(
        Slot(
            number=snapshot.slot,
            at=snapshot.at,
            snapshot=snapshot,
            proposed=ruling.proposed,
            decision=decision,
            plan=plan,
            outcome=outcome,
            inputs_hash=inputs_hash(
                snapshot,
                context.deciders.policy if stages.decide else Observer(context.scheduler),
                context.deciders.placement,
                context.seed,
            ),
            seed=context.seed,
            seconds=seconds,
            shadow=ruling.shadow,
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


@dataclass(frozen=True, slots=True)
class _Ruling:
    """What is recorded as decided: by the policy, as it is in force, and as it would be in force."""

    proposed: Decision
    decision: Decision
    shadow: Decision | None = None


def _rule(
    context: Context,
    stages: Stages,
    snapshot: Snapshot,
    memory: Memory,
    silent: Collection[JobKey],
    seen: RmSnapshot,
    aside: SetAside | None,
) -> _Ruling:
    """The decision of a slot: the policy's, after the guard, or what the scheduler in charge gave; or both."""
    guarded = None
    if stages.decide:
        proposed = decide(snapshot, context.deciders, context.seed, context.timer, set_aside=aside)
        guarded = guard(proposed, snapshot, context.rules, memory, silent=silent)
        if stages.act:
            return _Ruling(proposed, guarded)
    reasons = {listed.handle: listed.reason for listed in seen.jobs}
    waits = {job.key: reasons.get(job.anchor, "") for job in snapshot.jobs}
    given = Observer(context.scheduler).decision(snapshot, waits)
    return _Ruling(given if guarded is None else proposed, given, guarded)


@dataclass(frozen=True, slots=True)
class _Idle:
    """Jobs that wait beside room for them, since when some do, and the policy that was set aside for it."""

    jobs: tuple[JobKey, ...] = ()
    since: float | None = None
    set_aside: SetAside | None = None

    def seconds(self, at: float) -> float:
        """For how long some wait."""
        return 0.0 if self.since is None else at - self.since


def _look_for_idle(
    context: Context,
    snapshot: Snapshot,
    decision: Decision,
    plan: Plan,
    silent: Collection[JobKey],
    since: float | None,
    aside: SetAside | None,
) -> _Idle:
    """Whether jobs wait beside room for them, and whether that has lasted too long."""
    deciders = context.deciders
    idle = idle_jobs(snapshot, decision, plan, deciders.placement, silent=silent)
    if not idle:
        return _Idle(set_aside=aside)
    # A clock that was set back begins anew.
    since = snapshot.at if since is None or since > snapshot.at else since
    waited, policy = snapshot.at - since, deciders.policy
    if aside is None and waited >= context.idle_seconds and policy is not deciders.fallback:
        text = f"left {len(idle)} jobs waiting for {waited:.0f} s beside room for them"
        aside = SetAside(policy.name, policy.version, text)
    return _Idle(idle, since, aside)


def _situation(
    mode: Mode,
    snapshot: Snapshot,
    failures: dict[JobKey, tuple[int, str]],
    silent: Collection[JobKey],
    aside: SetAside | None,
) -> str:
    """What a decision answers to: another situation asks for another decision before the slot is over."""
    nodes = [(node.name, node.capacity, node.state) for node in snapshot.nodes]
    static = {job.key for job in snapshot.jobs if job.static}
    fixed = [(task.job, task.id) for task in snapshot.tasks if task.job in static]
    jobs = [job.key for job in snapshot.jobs]
    return digest(mode, jobs, nodes, sorted(failures.items()), sorted(silent), fixed, aside)


@dataclass(frozen=True, slots=True)
class _Books:
    """Jobs and tasks of the store that have not ended."""

    jobs: tuple[Job, ...]
    tasks: tuple[Task, ...]


def _books(store: Store) -> tuple[_Books, _Books]:
    """Those of elastic jobs, and those of jobs that dl2d only looks on at."""
    jobs, tasks = store.jobs(live=True), store.tasks(live=True)
    static = {job.key for job in jobs if job.static}
    if not static:
        return _Books(jobs, tasks), _Books((), ())
    return (
        _Books(tuple(job for job in jobs if not job.static), tuple(task for task in tasks if task.job not in static)),
        _Books(tuple(job for job in jobs if job.static), tuple(task for task in tasks if task.job in static)),
    )


def _watch(context: Context, stages: Stages, static: _Books, others: Iterable[Job], seen: RmSnapshot) -> _Books:
    """Follow jobs that run at fixed sizes, and take up new ones where the mode has it; returns them as they are now."""
    store, jobs = context.store, static.jobs
    if stages.watch:
        found = newcomers(seen, (*jobs, *others), cluster=context.cluster, rules=context.limits)
        new = tuple(job for job in found if store.job(job.key) is None)
        for job in new:
            store.add_job(job)
            log.info("job watched", job=job.key.id, user=job.owner.user, name=job.request.name, model=job.request.model)
        jobs = (*jobs, *new)
    sightings = watch(jobs, static.tasks, seen, patience=context.patience.unseen)
    if not sightings:
        return _Books(jobs, static.tasks)
    # Tasks first: those of a job that has ended are nobody's any more.
    store.change_tasks([change for each in sightings for change in each.gone], seen.at)
    store.ask_tasks([start for each in sightings for start in each.came], seen.at)
    for each in sightings:
        if each.change is not None:
            job = store.change_job(each.job, each.change, each.at)
            log.info("job", job=each.job.id, state=str(job.state), reason=job.end_reason)
        if each.size is not None and (known := store.job(each.job)) is not None:
            workers, ps = each.size
            store.report_progress(each.job, replace(known.progress, at=seen.at, workers=workers, ps=ps))
    _, now = _books(store)
    handles = {job.key: job.anchor for job in now.jobs}
    came = [
        TaskChange(task.job, task.id, TaskState.CONFIRMED, handle=handles[task.job])
        for task in now.tasks
        if task.state is TaskState.ASKED
    ]
    return now if not came or not store.change_tasks(came, seen.at) else _books(store)[1]


@dataclass(frozen=True, slots=True)
class _Found:
    """What reconciliation leaves to be done."""

    stops: tuple[tuple[str, str], ...]
    failures: dict[JobKey, tuple[int, str]]
    heard: dict[JobKey, float]


def _mend(
    context: Context, books: _Books, static: Collection[JobKey], seen: RmSnapshot, carry: Carry
) -> tuple[tuple[Job, ...], tuple[Task, ...], _Found]:
    """Bring elastic jobs into line with the manager, and return what is live now and what is left to do."""
    store, failures = context.store, dict(carry.failures)
    live_jobs, live_tasks = books.jobs, books.tasks
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
    jobs, tasks = live_jobs, live_tasks
    if found.jobs:
        jobs = store.jobs(live=True)
    if found.tasks:
        tasks = store.tasks(live=True)
    if static:
        jobs = tuple(job for job in jobs if job.key not in static)
        tasks = tuple(task for task in tasks if task.job not in static)
    counted = _count_failures(live_tasks, found.tasks, failures)
    present = {job.key for job in jobs}
    failures = {key: count for key, count in counted.items() if key in present}
    return jobs, tasks, _Found(found.stops, failures, heard)


def _hold_to(
    context: Context, jobs: Iterable[Job], found: _Found, asked: dict[str, float], at: float
) -> dict[str, float]:
    """Have the manager start the anchors that wait for it and stop what has to be stopped."""
    if context.starts_anchors:
        for job in jobs:
            if job.state is JobState.SUBMITTED and not job.anchor:
                start_anchor(job, context.store, context.manager, context.launcher, at)
    return _stop(context, found, asked, at)


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
    newest = store.jobs(live=False, limit=_RECENT_JOBS)
    recent = {job.key: job for job in newest if job.state.ended and not job.static}
    for task in tasks:
        if task.job not in live and task.job not in recent:
            job = store.job(task.job)
            if job is not None and not job.static:
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
