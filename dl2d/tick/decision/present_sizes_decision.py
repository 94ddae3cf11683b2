"""Decision made of the present sizes: what the scheduler in charge gave each job; recorded where dl2d does not act."""

from __future__ import annotations

from collections import Counter

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import some_of
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, Role
from dl2d.core.resource_manager import RmListing

#: Policy name of such a decision; its policy version is the scheduler's name and version.
OBSERVED = "observed"


def present_sizes_decision(snapshot: Snapshot, listing: RmListing, scheduler: str) -> Decision:
    """Each job's allocation now, and for jobs that have nothing the scheduler's own reason.

    ``scheduler`` is its name and version.
    """
    reasons = {listed.shown_id: listed.reason for listed in listing.jobs}
    held = snapshot.held()
    before = Counter(task.group for task in snapshot.tasks if task.asked_at < snapshot.at)
    nodes: dict[JobKey, list[str]] = {job.key: [] for job in snapshot.jobs}
    for task in snapshot.tasks:
        if task.job in nodes and task.node and task.node not in nodes[task.job]:
            nodes[task.job].append(task.node)

    def reason(job: Job) -> str:
        if held[job.key] != NOTHING:
            names = nodes[job.key]
            where = f", on {some_of(names)}" if names else ""
            return f"observed: what {scheduler} gave{where}"
        if job.static and not job.unreported:
            return "observed: its coordinator has started no tasks yet"
        wait_reason = reasons.get(job.key.id) or reasons.get(job.anchor, "")
        return f"observed: {scheduler} gave nothing yet" + (f": {wait_reason}" if wait_reason else "")

    entries = tuple(
        JobDecision(
            job=job.key,
            allocation=held[job.key],
            reason=Reason(Constraint.OBSERVED, reason(job)),
            previous=Allocation(before[job.key, Role.WORKER], before[job.key, Role.PS]),
        )
        for job in snapshot.jobs
    )
    return Decision(OBSERVED, scheduler, entries)
