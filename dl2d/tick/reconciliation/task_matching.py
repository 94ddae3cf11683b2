"""Matching: which listed job is which task or anchor of the store, by identity.

A handle alone proves nothing: resource managers reuse handles and requeue jobs, and a listing may show a record twice,
late, or with a tag that its user has written or removed.

====================================================  =====================================================
a listed job has                                      it is
====================================================  =====================================================
the task's handle and tag, and the same submit time   the task
(or one of the two is unknown)
the task's handle and submit time, no tag, and the   the task, whose user has removed the tag
owner of its job
the task's handle and tag, and a later submit time   another job: the task has ended
the task's tag and the owner of its job, and the     the task, whose start was not answered
store has no handle yet
anything else                                         not the task
====================================================  =====================================================

An anchor that its user has submitted has no tag of dl2d, or one that the user has written, which counts for nothing:
its submit time and user are those with which it registered. If the resource manager has put it back into its queue, it
has a later submit time, and is the anchor of another job, which goes on where this one was. So nothing of its user that
has its handle is stopped for its tag, whether the job has ended or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dl2d.core.cluster import ANCHOR, Task, parse_tag, task_tag
from dl2d.core.jobs import Job, JobKey
from dl2d.core.resource_manager import RmIdentity, RmJob, RmListing
from dl2d.tick.observation.observe import LiveJobs


@dataclass(frozen=True, slots=True)
class Matches:
    """The listed jobs that are tasks and anchors of the store, by their tags."""

    listed: Mapping[str, RmJob]
    #: Tags of tasks and anchors whose id belongs to another job now, or that were requeued.
    replaced: frozenset[str] = frozenset()
    #: The live jobs whose anchor was requeued, and what waits or runs in its place.
    requeued: Mapping[JobKey, RmJob] = field(default_factory=lambda: MappingProxyType({}))
    #: Tags of live tasks, and of anchors of live jobs, that are not listed.
    unlisted: frozenset[str] = frozenset()
    #: Jobs with a tag of this cluster that have not ended and are no task or anchor of the store, with the job
    #: and the name of the task or anchor that their tags say. An anchor of the store that was requeued is none.
    strays: tuple[tuple[RmJob, JobKey, str], ...] = ()


def match_listing(
    live: LiveJobs, jobs: Mapping[JobKey, Job], listing: RmListing, *, cluster: str, tasks_as_owner: bool = True
) -> Matches:
    """Find the tasks and anchors of the store in a listing.

    Parameters
    ----------
    live
        Elastic jobs and tasks that have not ended.
    jobs
        Those jobs, and ended ones whose anchor or tasks may still run.
    cluster
        Name of this cluster; tags of other clusters are ignored.
    tasks_as_owner
        Whether tasks run as the user who owns their job.
    """
    index = _Index(listing.jobs, jobs if tasks_as_owner else {})
    known = {task.handle for task in live.tasks} | {job.anchor for job in jobs.values()}
    found: dict[str, RmJob] = {}
    replaced: set[str] = set()
    requeued: dict[JobKey, RmJob] = {}
    unlisted: set[str] = set()
    for task in live.tasks:
        tag = task.tag
        if task.handle:
            listed = index.best(each for each in index.by_handle[task.handle] if index.is_task(each, task, tag))
            if listed is None and any(_is_later(each, task) for each in index.by_handle[task.handle]):
                replaced.add(tag)
                continue
        else:
            listed = index.by_tag(tag, task.job, known)
        if listed is not None:
            found[tag] = listed
        else:
            unlisted.add(tag)
    for key, job in jobs.items():
        tag = task_tag(key, ANCHOR)
        if job.anchor:
            listed = index.best(each for each in index.by_handle[job.anchor] if is_anchor(each, job))
            later = [each for each in index.by_handle[job.anchor] if _is_later_anchor(each, job)]
            if listed is None and later:
                replaced.add(tag)
                last = max(later, key=lambda each: each.submitted)
                if last.requeues and not last.state.ended and not job.state.ended:
                    requeued[key] = last
                continue
        else:
            listed = index.by_tag(tag, key, known)
        if listed is not None:
            found[tag] = listed
        elif not job.state.ended:
            unlisted.add(tag)
    matched = {listed.identity for listed in found.values()}
    strays = index.strays(cluster, matched, {(job.anchor, job.owner.user) for job in jobs.values()})
    return Matches(
        MappingProxyType(found), frozenset(replaced), MappingProxyType(requeued), frozenset(unlisted), strays
    )


def is_anchor(listed: RmJob, job: Job) -> bool:
    """Whether a job with the handle of a job's anchor is this anchor."""
    if listed.tag == task_tag(job.key, ANCHOR):
        return True
    return listed.submitted == job.key.submitted or (not listed.tag and not listed.submitted)


def may_stop(listed: RmJob, job: Job, tasks: Collection[tuple[JobKey, str, int]], *, tasks_as_owner: bool) -> bool:
    """Whether a listed job carries the tag of a job's task or anchor and belongs to the job's owner.

    An anchor without this tag needs the submit time with which it registered, and a task without any the handle and the
    submit time that ``tasks`` have: jobs, handles and submit times of the tasks of the store.
    """
    is_owners = listed.user == job.owner.user
    if is_owners and listed.handle == job.anchor and listed.submitted == job.key.submitted:
        return True
    if is_owners and not listed.tag and listed.submitted and (job.key, listed.handle, listed.submitted) in tasks:
        return True
    parsed = parse_tag(listed.tag)
    return parsed is not None and parsed[0] == job.key and (not tasks_as_owner or is_owners)


def _is_later(listed: RmJob, task: Task) -> bool:
    return listed.tag == task.tag and 0 < task.submitted < listed.submitted


def _is_later_anchor(listed: RmJob, job: Job) -> bool:
    other = listed.tag != task_tag(job.key, ANCHOR)
    return other and listed.user == job.owner.user and listed.submitted > job.key.submitted


class _Index:
    """Listed jobs by handle and by tag. A task must belong to the owner of its job, if that is one of ``jobs``."""

    def __init__(self, listed: Iterable[RmJob], jobs: Mapping[JobKey, Job]) -> None:
        self._owners = {key: job.owner.user for key, job in jobs.items()}
        self.by_handle: dict[str, list[RmJob]] = defaultdict(list)
        self._by_tag: dict[str, list[RmJob]] = defaultdict(list)
        for job in listed:
            self.by_handle[job.handle].append(job)
            if job.tag:
                self._by_tag[job.tag].append(job)

    def is_task(self, listed: RmJob, task: Task, tag: str) -> bool:
        """Whether a job with the task's handle is the task, which has this tag."""
        same_time = listed.submitted == task.submitted
        if listed.tag == tag:
            return same_time or not task.submitted or not listed.submitted
        return not listed.tag and same_time and bool(task.submitted) and self._is_owner(listed, task.job)

    def by_tag(self, tag: str, key: JobKey, known: Collection[str]) -> RmJob | None:
        """The job with a tag whose handle the store does not know."""
        return self.best(each for each in self._by_tag[tag] if each.handle not in known and self._is_owner(each, key))

    def best(self, candidates: Iterable[RmJob]) -> RmJob | None:
        """Of records of one task, one that has not ended, if there is one."""
        return min(candidates, key=lambda listed: listed.state.ended, default=None)

    def strays(
        self, cluster: str, matched: Collection[RmIdentity], anchors: Collection[tuple[str, str]]
    ) -> tuple[tuple[RmJob, JobKey, str], ...]:
        """Live jobs with a tag of this cluster that are not among ``matched``, nor by handle and user ``anchors``."""
        found = []
        for listed in (each for with_tag in self._by_tag.values() for each in with_tag):
            if listed.state.ended or listed.identity in matched or (listed.handle, listed.user) in anchors:
                continue
            parsed = parse_tag(listed.tag)
            if parsed is not None and parsed[0].cluster == cluster:
                found.append((listed, *parsed))
        return tuple({listed.identity: (listed, key, name) for listed, key, name in found}.values())

    def _is_owner(self, listed: RmJob, key: JobKey) -> bool:
        return self._owners.get(key, listed.user) == listed.user
