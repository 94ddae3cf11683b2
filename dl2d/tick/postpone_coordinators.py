"""Postponing of coordinators: has those leave that ``idle_coordinators`` finds, and come back sooner."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import structlog

from dl2d.core.errors import ResourceManagerError, Unavailable
from dl2d.core.jobs import JobKey, JobState
from dl2d.tick.idle_coordinators import IdleHistory, find_postponements
from dl2d.tick.reconcile import LEAVES_FOR_OTHERS, Reconciled
from dl2d.tick.tick_context import Context

log = structlog.get_logger()


def postpone_coordinators(
    context: Context, reconciled: Reconciled, history: IdleHistory, held_back: Collection[JobKey], now: float
) -> tuple[Reconciled, IdleHistory]:
    """Have idle coordinators leave or come back; returns what is so after that, and the next history.

    None leaves for jobs that are ``held_back`` (``long_waiting_jobs``). What the resource manager refuses is not asked
    for again. Where it does not answer, the tick goes on without it, and a later one asks.
    """
    postpone, guard_state = context.postpone, reconciled.guard_state
    if postpone is None or reconciled.listing.incomplete:
        return reconciled, history
    found, history = find_postponements(
        reconciled.snapshot, [job for job in reconciled.jobs.values() if job.state is JobState.SUBMITTED],
        reconciled.anchors, history, postponed=guard_state.postponed, placement=context.deciders.placement,
        unable=(reconciled.silent.keys() - reconciled.starting) | reconciled.backing_off | set(held_back),
        others_wait=any(not claim.standing and not claim.is_task for claim in reconciled.listing.claims),
        wait_seconds=context.timeouts.queue_seconds + context.slot_seconds, now=now,
    )  # fmt: skip
    if not found.leaving and not found.returning:
        return reconciled, history
    # Before the resource manager is asked: its answer may be lost.
    noted = {job.key: why for job, _, why in found.leaving}
    guard_state = replace(guard_state, postponed={**guard_state.postponed, **noted})
    context.store.check_lease()
    context.store.keep_guard_state(guard_state)
    requests = [
        *((job.key, anchor, seconds) for (job, anchor, _), seconds in zip(found.leaving, found.seconds, strict=True)),
        *((key, anchor, 0.0) for key, anchor in found.returning),
    ]
    refused = set[JobKey]()
    for key, anchor, seconds in requests:
        log.info("coordinator postponed", job=key.id, handle=anchor.handle, seconds=seconds,
                 reason=noted[key].reason if key in noted else "there is room for its job")  # fmt: skip
        try:
            postpone(anchor.identity, seconds)
        except Unavailable as error:
            log.warning("the resource manager does not answer", handle=anchor.handle, error=str(error))
            break
        except ResourceManagerError as error:
            log.error("the resource manager does not postpone a coordinator", handle=anchor.handle, error=str(error))
            refused.add(key)
    silent = dict.fromkeys(noted.keys() - refused, LEAVES_FOR_OTHERS)
    if not refused.isdisjoint(noted):
        kept = {key: why for key, why in guard_state.postponed.items() if key not in noted.keys() & refused}
        guard_state = replace(guard_state, postponed=kept)
        context.store.keep_guard_state(guard_state)
    return (
        replace(reconciled, guard_state=guard_state, silent={**reconciled.silent, **silent}),
        replace(history, refused=history.refused | refused),
    )
