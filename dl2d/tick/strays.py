"""Strays: listed jobs that have a tag of this cluster and are no task or anchor of the store."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dl2d.core.cluster import ANCHOR
from dl2d.core.jobs import Job
from dl2d.core.resource_manager import RmIdentity, RmJob
from dl2d.core.store import TickStore
from dl2d.tick.task_matching import Matches


def strays_of_known_jobs(store: TickStore, matches: Matches) -> dict[RmIdentity, Job]:
    """The job of each stray that the store has ever asked for. Other strays may not be dl2d's.

    A job that was submitted before the task whose tag it has is not that task: users can write tags themselves.
    """
    found: dict[RmIdentity, Job] = {}
    for key in {key for _, key, _ in matches.strays}:
        job = store.job(key)
        if job is not None and not job.static:
            submitted = {task.id: task.submitted for task in store.tasks(live=False, job=key)} | {ANCHOR: 0}
            found |= {
                listed.identity: job
                for listed, of, name in matches.strays
                if of == key and name in submitted and not 0 < listed.submitted < submitted[name]
            }
    return found


def compare_strays(
    matches: Matches, live_tags: Collection[str], known: Mapping[RmIdentity, Job]
) -> tuple[list[tuple[RmJob, Job | None, str]], list[str]]:
    """The strays that have to be stopped, with their job and the reason; and remarks on those that are not dl2d's."""
    stops: list[tuple[RmJob, Job | None, str]] = []
    remarks = []
    for stray, key, name in matches.strays:
        job, other = known.get(stray.identity), matches.listed.get(stray.tag)
        if job is None:
            remarks.append(f"{stray.handle} has the tag of {name} of {key.slug}, which this store never asked for")
        elif stray.tag not in live_tags:
            stops.append((stray, job, f"{name} of {key.slug} is not wanted"))
        elif other is not None and not other.state.ended:
            stops.append((stray, job, f"{name} of {key.slug} runs twice"))
    return stops, remarks
