"""A coordinator that does at once what its targets say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dl2d.core.jobs import JobKey
from dl2d.core.resource_manager import RmJobState
from dl2d.daemon.api.heartbeat import Heartbeat, receive, targets
from dl2d.simulation.in_memory_resource_manager import MemoryManager

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore


class PromptCoordinator:
    """Plays the coordinators of all jobs on a ``MemoryManager``: granted tasks join, unwanted ones leave."""

    def __init__(self, store: SqlStore, manager: MemoryManager) -> None:
        self._store = store
        self._manager = manager
        self._members: dict[JobKey, set[str]] = {}

    def beat(self, key: JobKey, at: float, *, state: str = "", **said: object) -> list[str]:
        """Send one heartbeat for a job and carry out the answer; returns the targets."""
        job = self._store.job(key)
        if job is None or job.state.ended:
            return []
        tasks = self._store.tasks(live=False, job=key)
        running = {rm.tag for rm in self._manager.live() if rm.state is RmJobState.RUNNING}
        wanted = [task for task in tasks if task.state.wanted and task.tag in running]
        before = self._members.get(key, set())
        members = [{"task": task.id, "role": task.role.value, "state": "active"} for task in wanted]
        left = [task for task in tasks if task.id in before and not task.state.wanted and not task.state.ended]
        members += [{"task": task.id, "role": task.role.value, "state": "left"} for task in left]
        self._members[key] = {task.id for task in wanted}
        roles = {task.role for task in wanted}
        beat = Heartbeat.model_validate(
            {
                "address": "127.0.0.1:1",
                "state": state or ("running" if len(roles) == 2 else "waiting"),
                "members": members,
                **said,
            }
        )
        reception = receive(job, tasks, beat, at)
        if reception.plans:
            self._store.add_runtime_plans(key, reception.plans)
        self._store.change_tasks(reception.tasks, at)
        self._store.report_progress(key, reception.progress)
        if reception.job is not None:
            self._store.change_job(key, reception.job, at)
        tags = {task.tag for task in left}
        for listed in self._manager.live():
            if listed.tag in tags:  # the store may not know its handle yet
                self._manager.end(listed.handle)
        return targets(self._store.tasks(live=True, job=key))
