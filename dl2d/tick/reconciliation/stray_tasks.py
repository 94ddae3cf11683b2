"""Strays: listed jobs that have a tag of this cluster and are no task or anchor of the store."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from dl2d.core.cluster import ANCHOR
from dl2d.core.jobs import Job, JobKey
from dl2d.core.resource_manager import RmIdentity, RmJob, RmListing
from dl2d.core.store import TickStore
from dl2d.tick.reconciliation.task_matching import Matches

#: Maximum number of jobs for which a user's strays are looked up in a tick.
MAX_JOBS_OF_USER = 64


def strays_of_known_jobs(store: TickStore, matches: Matches) -> dict[RmIdentity, Job | None]:
    """The job of each stray that the store has ever asked for; None where the stray was not looked up in this tick.

    Other strays may not be dl2d's. A job that was submitted before the task whose tag it has is not that task. Each
    lookup reads the store, and users can forge tags; so of each user's strays only those of ``MAX_JOBS_OF_USER`` jobs
    are looked up in a tick.
    """
    if not matches.strays:
        return {}
    known = store.known_jobs({key for _, key, _ in matches.strays})
    of_job: dict[JobKey, list[tuple[RmJob, str]]] = defaultdict(list)
    looked_up: dict[str, set[JobKey]] = defaultdict(set)
    found: dict[RmIdentity, Job | None] = {}
    for listed, key, name in matches.strays:
        keys = looked_up[listed.user]
        if key not in known:
            continue
        if key in keys or len(keys) < MAX_JOBS_OF_USER:
            keys.add(key)
            of_job[key].append((listed, name))
        else:
            found[listed.identity] = None
    for key, strays in of_job.items():
        job = store.job(key)
        if job is not None and not job.static:
            submitted = {task.id: task.submitted for task in store.tasks(live=False, job=key)} | {ANCHOR: 0}
            found |= {
                listed.identity: job
                for listed, name in strays
                if name in submitted and not 0 < listed.submitted < submitted[name]
            }
    return found


def tasks_of_another_database(
    matches: Matches, listing: RmListing, known: Mapping[RmIdentity, Job | None]
) -> Mapping[str, int]:
    """Number of running tasks and anchors, by user, that the store never asked for, so that another store did.

    ``known`` has the strays that it asked for. Any user may write a tag, so only those count of whose job the anchor is
    listed as well, with its user.
    """
    strays = [stray for stray in matches.strays if stray[0].identity not in known and stray[0].state.holds_resources]
    if not strays:
        return {}
    cluster = strays[0][1].cluster
    anchors = {
        (JobKey(cluster, listed.shown_id, listed.submitted), listed.user)
        for listed in listing.jobs
        if not listed.state.ended
    } | {(key, listed.user) for listed, key, name in strays if name == ANCHOR}
    return Counter(listed.user for listed, key, _ in strays if (key, listed.user) in anchors)


def compare_strays(
    matches: Matches, live_tags: Collection[str], known: Mapping[RmIdentity, Job | None]
) -> tuple[list[tuple[RmJob, Job | None, str]], list[str]]:
    """The strays that have to be stopped, with their job and the reason; and remarks on those that are not dl2d's.

    Users write these tags: what a remark says, and how many there are, is for the log alone.
    """
    stops: list[tuple[RmJob, Job | None, str]] = []
    remarks = []
    for stray, key, name in matches.strays:
        job, other = known.get(stray.identity), matches.listed.get(stray.tag)
        if stray.identity not in known:
            remarks.append(f"{stray.handle} has the tag of {name} of {key.slug}, which this store never asked for")
        elif job is None:
            continue
        elif stray.tag not in live_tags:
            stops.append((stray, job, f"{name} of {key.slug} is not wanted"))
        elif other is not None and not other.state.ended:
            stops.append((stray, job, f"{name} of {key.slug} runs twice"))
    return stops, remarks
