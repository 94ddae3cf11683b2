"""Postponing of coordinators: asks the resource manager to put back those that ``idle_coordinators`` finds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import structlog

from dl2d.core.errors import ResourceManagerError, Unavailable
from dl2d.core.jobs import JobKey, JobState
from dl2d.core.resize_guard_state import Requeue
from dl2d.core.resource_manager import RmIdentity, RmJob
from dl2d.tick.apply_plan import may_submit_more
from dl2d.tick.idle_coordinators import IdleHistory, find_requeues
from dl2d.tick.reconcile import REQUEUED_FOR_ANOTHER_JOB, Reconciled
from dl2d.tick.reconciliation.unlisted_tasks_and_silent_coordinators import KeptSize
from dl2d.tick.tick_context import Context

log = structlog.get_logger()

#: Maximum number of coordinators in a tick. Each takes three commands on Slurm.
_MAX_PER_TICK = 32
#: Why other jobs without tasks get none in a tick that puts coordinators back.
_ROOM_FOR_ANOTHER = KeptSize("coordinators are being requeued so that another job has room")


def requeue_coordinators(
    context: Context, reconciled: Reconciled, history: IdleHistory, held_back: Collection[JobKey], now: float
) -> tuple[Reconciled, IdleHistory]:
    """Put idle coordinators back into the queue, or have them start sooner; the state after that, and the next history.

    None is put back for jobs that are ``held_back`` (``long_waiting_jobs``). What the resource manager refuses is not
    asked for again. What is left when it does not answer, after ``_MAX_PER_TICK``, or when the limits on starts are
    reached, the next ticks ask for; the round (``IdleHistory.rounds``) counts only when all of it was asked for. In a
    tick with coordinators to put back, jobs without tasks get none, except the beneficiary.
    """
    requeue, guard_state, earlier = context.requeue, reconciled.guard_state, history
    if requeue is None or reconciled.listing.incomplete:
        return reconciled, history
    found, history = find_requeues(
        reconciled.snapshot, [job for job in reconciled.jobs.values() if job.state is JobState.SUBMITTED],
        reconciled.anchors, history, requeued=guard_state.requeued, placement=context.deciders.placement,
        unable=reconciled.unable | set(held_back),
        foreign_jobs_wait=any(not claim.standing and not claim.is_task for claim in reconciled.listing.claims),
        wait_seconds=context.timeouts.queue_seconds + context.slot_seconds, now=now,
    )  # fmt: skip
    if not found.leaving and not found.returning:
        return reconciled, history
    # Before the resource manager is asked: its answer may be lost.
    noted = {each.job.key: each.requeue for each in found.leaving}
    guard_state = replace(guard_state, requeued={**guard_state.requeued, **noted})
    context.store.check_lease()
    context.store.keep_guard_state(guard_state)
    requests = [
        *((each.job.key, each.anchor, each.seconds) for each in found.leaving),
        *((key, anchor, 0.0) for key, anchor in found.returning),
    ]
    refused, all_asked, left = _ask(context, requeue, requests, noted)
    rounds = history.rounds if all_asked else earlier.rounds if earlier.beneficiary == history.beneficiary else 0
    stay = noted.keys() & (refused | left)
    if stay:
        kept = {key: why for key, why in guard_state.requeued.items() if key not in stay}
        guard_state = replace(guard_state, requeued=kept)
        context.store.keep_guard_state(guard_state)
    kept_sizes = {**reconciled.kept_sizes, **dict.fromkeys(noted.keys() - stay, REQUEUED_FOR_ANOTHER_JOB)}
    if noted:
        # What is free already is part of the room that is made.
        with_tasks = {task.job for task in reconciled.snapshot.tasks} | {history.beneficiary}
        for key, job in reconciled.jobs.items():
            if job.state is JobState.READY and key not in with_tasks:
                kept_sizes.setdefault(key, _ROOM_FOR_ANOTHER)
    return (
        replace(reconciled, guard_state=guard_state, kept_sizes=kept_sizes),
        replace(history, rounds=rounds, refused=history.refused | refused),
    )


def _ask(
    context: Context,
    requeue: Callable[[RmIdentity, float], None],
    requests: Sequence[tuple[JobKey, RmJob, float]],
    noted: Mapping[JobKey, Requeue],
) -> tuple[set[JobKey], bool, set[JobKey]]:
    """Ask the resource manager to start each anchor in so many seconds at the earliest.

    Returns the jobs for which it refused that, whether it was asked and answered for all, and those for which it was
    not asked. Where it does not answer, it may have done what was asked. ``noted`` are those that are put back.
    """
    refused, begin = set[JobKey](), context.timer()
    for number, (key, anchor, seconds) in enumerate(requests):
        if number >= _MAX_PER_TICK or not may_submit_more(context, begin):
            return refused, False, {key for key, _, _ in requests[number:]}
        try:
            requeue(anchor.identity, seconds)
        except Unavailable as error:
            log.warning("the resource manager does not answer", handle=anchor.handle, error=str(error))
            return refused, False, {key for key, _, _ in requests[number + 1 :]}
        except ResourceManagerError as error:
            log.error("the resource manager does not requeue a coordinator", handle=anchor.handle, error=str(error))
            refused.add(key)
            continue
        if key in noted:
            log.info("coordinator requeued", job=key.id, handle=anchor.handle, seconds=seconds,
                     reason=noted[key].reason)  # fmt: skip
        else:
            log.info("coordinator may start now", job=key.id, handle=anchor.handle)
    return refused, True, set()
