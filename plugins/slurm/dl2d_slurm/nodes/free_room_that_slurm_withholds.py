"""Detection of room that sinfo shows as free but Slurm gives to no job: a task has waited for it for too long.

A node may keep cores (``CoreSpecCount``) and memory (``MemSpecLimit``) for the system itself. sinfo counts them as
idle; only ``scontrol show node``, which would be asked for all nodes, tells of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from dl2d.core.cluster import Node, NodeState
from dl2d.core.resource_manager import RmJob
from dl2d.core.resources import Resources

#: How long a task may wait beside free room; Slurm looks at jobs that wait at least once a minute by default.
_MAX_SECONDS = 120.0
#: How much of the time between two listings counts: while slurmctld lists nothing, it may start nothing either.
_MAX_STEP_SECONDS = 60.0
_REASON = "Resources (Slurm does not give it the room that sinfo shows)"


class WithheldRoom:
    """Tasks that wait although their nodes have room, and since when. ``timer``: seconds on a monotonic clock."""

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer = timer
        self._listed_at = timer()
        #: Seconds by the tasks' handles.
        self._waited: dict[str, float] = {}

    def with_refused_tasks(
        self, jobs: Iterable[RmJob], waiting: Mapping[str, tuple[str, Resources]], nodes: Iterable[Node]
    ) -> tuple[RmJob, ...]:
        """The jobs of a listing; those tasks for which the node has had room for long count as refused there.

        ``waiting`` has the node and the room of each task that waits for nothing but room, by handle.
        """
        now = self._timer()
        step = min(now - self._listed_at, _MAX_STEP_SECONDS)
        self._listed_at = now
        asked = {node for node, _ in waiting.values()}
        free = {
            node.name: node.capacity.minus(node.used)
            for node in nodes
            if node.name in asked and node.state is NodeState.UP
        }
        self._waited = {
            handle: self._waited[handle] + step if handle in self._waited else 0.0
            for handle, (node, room) in waiting.items()
            if node in free and room.fits_in(free[node])
        }
        refused = {handle for handle, seconds in self._waited.items() if seconds >= _MAX_SECONDS}
        return tuple(replace(job, node_refused=True, reason=_REASON) if job.handle in refused else job for job in jobs)
