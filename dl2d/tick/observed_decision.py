"""What the scheduler in charge gave, in the form of a decision: recorded where dl2d only looks on. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, Role

#: Stands in records where a policy's name does.
OBSERVED: Final = "observed"
#: Nodes that are named in a reason.
_MOST_NODES: Final = 8


@dataclass(frozen=True, slots=True)
class Observer:
    """Signs what was observed. ``scheduler``: the resource manager's name and version."""

    scheduler: str

    @property
    def name(self) -> str:
        """In the place of a policy's."""
        return OBSERVED

    @property
    def version(self) -> str:
        """The scheduler in charge."""
        return self.scheduler

    def decision(self, snapshot: Snapshot, waits: Mapping[JobKey, str]) -> Decision:
        """What each job has. ``waits``: the scheduler's own words on jobs that have nothing."""
        held = snapshot.held()
        before = Counter((task.job, task.role) for task in snapshot.tasks if task.asked_at < snapshot.at)
        nodes: dict[JobKey, list[str]] = {job.key: [] for job in snapshot.jobs}
        for task in snapshot.tasks:
            if task.job in nodes and task.node not in nodes[task.job]:
                nodes[task.job].append(task.node)
        entries = tuple(
            JobDecision(
                job=job.key,
                allocation=held[job.key],
                reason=self._reason(job, held[job.key], nodes[job.key], waits.get(job.key, "")),
                previous=Allocation(before[job.key, Role.WORKER], before[job.key, Role.PS]),
            )
            for job in snapshot.jobs
        )
        return Decision(OBSERVED, self.scheduler, entries)

    def _reason(self, job: Job, has: Allocation, nodes: list[str], waits: str) -> Reason:
        if has != NOTHING:
            more = f" and {len(nodes) - _MOST_NODES} more" if len(nodes) > _MOST_NODES else ""
            text = f"observed: what {self.scheduler} gave, on {', '.join(nodes[:_MOST_NODES])}{more}"
        elif job.static and not job.unreported:
            text = "observed: its coordinator has started no tasks yet"
        else:
            text = f"observed: {self.scheduler} gave nothing yet" + (f": {waits}" if waits else "")
        return Reason(Constraint.OBSERVED, text)
