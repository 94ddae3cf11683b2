"""Postponing of coordinators: asks the resource manager to put back those that ``idle_coordinators`` finds."""

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
    """Put idle coordinators back into the queue, or have them start sooner; the state after that, and the next history.

    None is put back for jobs that are ``held_back`` (``long_waiting_jobs``). What the resource manager refuses is not
    asked for again. Where it does not answer, the tick goes on without it, and a later one asks.
    """
    postpone, guard_state, earlier = context.postpone, reconciled.guard_state, history
    if postpone is None or reconciled.listing.incomplete:
        return reconciled, history
    found, history = find_postponements(
        reconciled.snapshot, [job for job in reconciled.jobs.values() if job.state is JobState.SUBMITTED],
        reconciled.anchors, history, postponed=guard_state.postponed, placement=context.deciders.placement,
        unable=reconciled.unable | set(held_back),
        others_wait=any(not claim.standing and not claim.is_task for claim in reconciled.listing.claims),
        wait_seconds=context.timeouts.queue_seconds + context.slot_seconds, now=now,
    )  # fmt: skip
    if not found.leaving and not found.returning:
        return reconciled, history
    # Before the resource manager is asked: its answer may be lost.
    noted = {each.job.key: each.postponement for each in found.leaving}
    guard_state = replace(guard_state, postponed={**guard_state.postponed, **noted})
    context.store.check_lease()
    context.store.keep_guard_state(guard_state)
    requests = [
        *((each.job.key, each.anchor, each.seconds) for each in found.leaving),
        *((key, anchor, 0.0) for key, anchor in found.returning),
    ]
    refused, not_asked = set[JobKey](), set[JobKey]()
    for number, (key, anchor, seconds) in enumerate(requests, 1):
        try:
            postpone(anchor.identity, seconds)
        except Unavailable as error:
            log.warning("the resource manager does not answer", handle=anchor.handle, error=str(error))
            not_asked = {key for key, _, _ in requests[number:]}
            # It does not count as a round: the next tick asks for those that were not asked.
            rounds = earlier.rounds if earlier.beneficiary == history.beneficiary else 0
            history = replace(history, rounds=rounds)
            break
        except ResourceManagerError as error:
            log.error("the resource manager does not postpone a coordinator", handle=anchor.handle, error=str(error))
            refused.add(key)
            continue
        if key in noted:
            log.info("coordinator put back into the queue", job=key.id, handle=anchor.handle, seconds=seconds,
                     reason=noted[key].reason)  # fmt: skip
        else:
            log.info("coordinator may start now", job=key.id, handle=anchor.handle)
    stay = noted.keys() & (refused | not_asked)
    if stay:
        kept = {key: why for key, why in guard_state.postponed.items() if key not in stay}
        guard_state = replace(guard_state, postponed=kept)
        context.store.keep_guard_state(guard_state)
    silent = dict.fromkeys(noted.keys() - stay, LEAVES_FOR_OTHERS)
    return (
        replace(reconciled, guard_state=guard_state, silent={**reconciled.silent, **silent}),
        replace(history, refused=history.refused | refused),
    )
