"""Tasks and anchors of all jobs, from their submission until they are forgotten: state, container and end. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from dl2d.core.cluster import task_tag
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resource_manager import RmIdentity, RmJob, RmJobState

#: Ended tasks stay listed for this long, as do tasks of jobs that YARN does not list, seconds.
KEEP_ENDED_SECONDS = 900.0
_NUMBERS = re.compile(r"[0-9]+")


@dataclass(slots=True)
class Task:
    """A task or anchor, from its submission on."""

    job: JobKey
    #: Id in its job: ``worker-3``.
    id: str
    role: Role
    user: str
    #: Seconds since 1970; other times are seconds on a monotonic clock.
    submitted: float
    #: Whether this daemon did not submit it: an earlier one, or a user, may have started it.
    adopted: bool = False
    #: Time at which this daemon added it.
    added: float = 0.0
    state: RmJobState = RmJobState.PENDING
    #: Why it waits or how it ended.
    reason: str = ""
    #: Its container, with the process in it, the position in the component, and the node; empty or -1 until assigned.
    container: str = ""
    incarnation: str = ""
    position: int = -1
    node: str = ""
    #: Node that dl2d's placement chose; YARN does not follow it.
    planned_node: str = ""
    #: When its container reported last.
    last_report: float = 0.0
    #: Time at which it is killed; None unless it was asked to stop.
    deadline: float | None = None
    ended: float | None = None

    @property
    def tag(self) -> str:
        """Its tag, which is its handle too."""
        return task_tag(self.job, self.id)

    @property
    def identity(self) -> RmIdentity:
        """Its identity; its tag is used for it alone."""
        return RmIdentity(self.tag, int(self.submitted), self.user, self.tag)

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return not self.state.ended

    @property
    def waits(self) -> bool:
        """Whether it is no anchor, and waits for a container."""
        return self.state is RmJobState.PENDING and self.role is not Role.COORDINATOR

    @property
    def sort_key(self) -> tuple[int, str]:
        """Sort key of waiting tasks, by the number in their id."""
        numbers = _NUMBERS.findall(self.id)
        return int(numbers[-1]) if numbers else 0, self.id

    def end(self, state: RmJobState, reason: str, at: float) -> None:
        """Record its end; a failure or loss counts as ``CANCELLED`` if it had been asked to stop."""
        if self.live:
            stopped = self.deadline is not None and state in (RmJobState.FAILED, RmJobState.LOST)
            self.state = RmJobState.CANCELLED if stopped else state
            self.reason = reason
            self.ended = at


class TaskRecords:
    """Tasks and anchors of all jobs. Not thread-safe.

    Parameters
    ----------
    timer
        Seconds on a monotonic clock.
    """

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer = timer
        self._tasks: dict[str, Task] = {}
        self._by_job: dict[JobKey, list[Task]] = {}

    def add(self, task: Task) -> None:
        """Add a task; it replaces one with the same tag."""
        if task.tag in self._tasks:
            self._by_job[task.job].remove(self._tasks[task.tag])
        task.added = self._timer()
        self._tasks[task.tag] = task
        self._by_job.setdefault(task.job, []).append(task)

    def get(self, tag: str) -> Task | None:
        """The task with this tag."""
        return self._tasks.get(tag)

    def of_job(self, job: JobKey) -> list[Task]:
        """All tasks of a job, its anchor included."""
        return self._by_job.get(job, [])

    def jobs(self) -> set[JobKey]:
        """Jobs that have a task here."""
        return set(self._by_job)

    def waiting(self) -> list[Task]:
        """Tasks, without anchors, that wait for a container."""
        return [task for task in self._tasks.values() if task.waits]

    def pending_anchors(self) -> list[Task]:
        """Anchors that wait for their container."""
        tasks = self._tasks.values()
        return [task for task in tasks if task.role is Role.COORDINATOR and task.state is RmJobState.PENDING]

    def count_running(self) -> int:
        """Number of live tasks that have a container."""
        return sum(bool(task.container) for task in self._tasks.values() if task.live)

    def nodes(self) -> frozenset[str]:
        """Ids of the nodes on which tasks run."""
        return frozenset(task.node for task in self._tasks.values() if task.live and task.container)

    def stop(self, task: Task, grace: float) -> None:
        """Ask a task to end within some seconds. A repeat may shorten the time, never lengthen it."""
        now = self._timer()
        if task.state is RmJobState.PENDING:
            task.end(RmJobState.CANCELLED, "stopped before it had a container", now)
        elif task.live:
            task.deadline = min(now + max(grace, 0.0), task.deadline if task.deadline is not None else float("inf"))
            task.state = RmJobState.ENDING

    def end_job(self, job: JobKey, state: RmJobState, reason: str) -> None:
        """Record the end of all tasks of a job whose containers have ended."""
        for task in self.of_job(job):
            task.end(state, reason, self._timer())

    def end_on_nodes(self, nodes: Collection[str]) -> None:
        """Record that the tasks on these nodes (ids) are lost; containers that still report from there are told to end.

        An anchor continues in the container that YARN starts in place of the lost one.
        """
        for task in self._tasks.values():
            if task.node in nodes and task.role is not Role.COORDINATOR:
                task.end(RmJobState.LOST, f"{task.node} is down", self._timer())

    def silent(self, since: float) -> Mapping[JobKey, list[Task]]:
        """Running tasks, without anchors, whose containers have not reported since that time, by job.

        An anchor continues in the container that YARN starts in place of a lost one.
        """
        silent: dict[JobKey, list[Task]] = {}
        for task in self._tasks.values():
            if task.live and task.container and task.role is not Role.COORDINATOR and task.last_report < since:
                silent.setdefault(task.job, []).append(task)
        return silent

    def forget(self, present: Collection[JobKey]) -> None:
        """Remove tasks that ended long ago, and old tasks of jobs that are not present any more.

        A task of such a job that has not ended was refused by YARN, or YARN forgot the job before its end was seen.
        """
        limit = self._timer() - KEEP_ENDED_SECONDS

        def is_old(task: Task) -> bool:
            last = max(task.added, task.last_report) if task.job not in present else float("inf")
            return (last if task.ended is None else task.ended) <= limit

        for task in [task for task in self._tasks.values() if is_old(task)]:
            del self._tasks[task.tag]
            self._by_job[task.job].remove(task)
        self._by_job = {job: tasks for job, tasks in self._by_job.items() if tasks}

    def listed(self, names: Mapping[str, str]) -> Iterable[RmJob]:
        """The tasks, without anchors, as a resource manager lists them; ``names`` has the nodes' names by their ids."""
        for task in self._tasks.values():
            if task.role is not Role.COORDINATOR:
                handle, submitted, user, tag = task.identity
                yield RmJob(
                    handle=handle, state=task.state, tag=tag, user=user, node=names.get(task.node, task.node),
                    reason=task.reason, submitted=submitted, position=task.position if task.position >= 0 else None,
                )  # fmt: skip
