"""What the scheduler in charge gave, in the form of a decision: recorded where dl2d does not act. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Final

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, Role
from dl2d.core.resource_manager import RmSnapshot

#: Stands in records in the place of a policy's name; the scheduler's name and version in that of its version.
OBSERVED: Final = "observed"
#: Nodes that a reason names.
MAX_NODES_NAMED: Final = 8


def observed_decision(snapshot: Snapshot, listing: RmSnapshot, scheduler: str) -> Decision:
    """What each job has, and for jobs that have nothing why, in the scheduler's own words."""
    reasons = {listed.handle: listed.reason for listed in listing.jobs}
    held = snapshot.held()
    before = Counter((task.job, task.role) for task in snapshot.tasks if task.asked_at < snapshot.at)
    nodes: dict[JobKey, list[str]] = {job.key: [] for job in snapshot.jobs}
    for task in snapshot.tasks:
        if task.job in nodes and task.node not in nodes[task.job]:
            nodes[task.job].append(task.node)

    def reason(job: Job) -> str:
        if held[job.key] != NOTHING:
            names = nodes[job.key]
            more = f" and {len(names) - MAX_NODES_NAMED} more" if len(names) > MAX_NODES_NAMED else ""
            return f"observed: what {scheduler} gave, on {', '.join(names[:MAX_NODES_NAMED])}{more}"
        if job.static and not job.unreported:
            return "observed: its coordinator has started no tasks yet"
        waits = reasons.get(job.anchor, "")
        return f"observed: {scheduler} gave nothing yet" + (f": {waits}" if waits else "")

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
