"""Stops: which ended jobs may have left tasks or an anchor running, when their anchors are stopped, and the stopping.

The resource manager is asked again for a stop only where what was to be stopped runs on for long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import structlog

from dl2d.core.cluster import ANCHOR, task_tag
from dl2d.core.errors import ResourceManagerError, Unavailable
from dl2d.core.jobs import Job, JobState
from dl2d.core.resource_manager import RmJob
from dl2d.core.store import TickStore
from dl2d.tick.observation.observe import LiveJobs
from dl2d.tick.reconciliation.unlisted_tasks_and_silent_coordinators import MAX_FUTURE_SECONDS
from dl2d.tick.tick_context import Context, Timeouts

log = structlog.get_logger()

#: Number of jobs that ended last of which anchors that still run are stopped.
_MAX_ENDED_JOBS = 200
#: The number instead if all those jobs ended within ``_RECENT_SECONDS``, as when very many are cancelled at once.
_MAX_RECENT_JOBS = 2_000
_RECENT_SECONDS = 3600.0


def ask_to_stop(
    context: Context, stops: Sequence[tuple[RmJob, str]], asked: Mapping[str, float], at: float
) -> Mapping[str, float]:
    """Have the resource manager stop jobs, except those that it was asked to stop recently.

    ``stops`` are listed jobs with the reason, ``asked`` says when each was last asked. Returns the next value of
    ``asked``.
    """
    # A job that was asked is killed after the grace period. It is asked again only if it still runs long after that,
    # since the resource manager may have lost the request.
    again_after = 2 * context.grace_seconds + context.timeouts.end_seconds
    reasons = {listed.identity: reason for listed, reason in stops}
    keys = {identity: f"{identity.handle}.{identity.submitted}" for identity in reasons}
    recent = {key: asked[key] for key in keys.values() if 0 <= at - asked.get(key, -math.inf) < again_after}
    due = [identity for identity, key in keys.items() if key not in recent]
    for identity in due:
        log.info("stop", handle=identity.handle, tag=identity.tag, user=identity.user, reason=reasons[identity])
    if due:
        context.store.check_lease()
        try:
            context.manager.stop(due, context.grace_seconds)
        except Unavailable:
            raise
        except ResourceManagerError as error:
            # One job's refusal must not end the tick, which serves all jobs. The stop is asked for again later.
            log.error("the resource manager refuses to stop jobs; dl2d asks it again later",
                      handles=[identity.handle for identity in due], error=str(error))  # fmt: skip
    return recent | {keys[identity]: at for identity in due}


def ended_jobs_to_check(store: TickStore, live: LiveJobs, at: float) -> tuple[Job, ...]:
    """Elastic jobs that have ended but may have left an anchor or tasks running."""
    live_keys = {job.key for job in live.jobs}
    last = store.last_ended(_MAX_ENDED_JOBS)  # newest first
    if len(last) == _MAX_ENDED_JOBS and at - (last[-1].ended_at or 0.0) < _RECENT_SECONDS:
        last = store.last_ended(_MAX_RECENT_JOBS)
    ended = {job.key: job for job in last}
    for task in live.tasks:
        if task.job not in live_keys and task.job not in ended:
            job = store.job(task.job)
            if job is not None and not job.static:
                ended[job.key] = job
    return tuple(job for job in ended.values() if job.key not in live_keys)


def must_stop_anchor(job: Job, anchor: RmJob, at: float, timeouts: Timeouts) -> bool:
    """Whether the anchor of an ended job is to be stopped.

    If the job was cancelled, at once. If the daemon started the anchor, so that it has its tag: ``end_seconds`` after
    the end of the job, or at once if that time is in the future, which means that the clock was set back. An anchor
    that its user submitted is not stopped otherwise: its script may go on after the training.
    """
    if job.state is JobState.CANCELLED:
        return True
    if anchor.tag != task_tag(job.key, ANCHOR):
        return False
    ended_at = math.inf if job.ended_at is None else job.ended_at
    return at - ended_at > timeouts.end_seconds or at + MAX_FUTURE_SECONDS < ended_at < math.inf
