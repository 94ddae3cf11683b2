"""Which container runs which task: tasks that wait for a container, assignments, ends, and sizes of components. No I/O.

YARN starts containers of a component and numbers them; a shrinking component loses those with the highest numbers. A
container asks for its task (``ContainerReport``), so tasks keep their own ids, which are never used again, whatever
container or number they run in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from dl2d.core.cluster import task_tag
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resource_manager import ContainerOrder, ContainerReport, RmIdentity, RmJob, RmJobState
from dl2d.core.resources import Resources
from dl2d_yarn.component import Component, Idle, start_order

#: Ended tasks stay listed for this long, as do tasks of jobs that YARN does not list, seconds.
KEEP_ENDED_SECONDS: Final = 900.0
#: Number of reports of all containers together that the daemon takes in a second: each costs it about 2 ms.
MAX_REPORTS_PER_SECOND: Final = 200
#: A container is overdue if it has not reported for this many report intervals, and not for these seconds.
_OVERDUE_INTERVALS, _OVERDUE_SECONDS = 5, 15.0
_NUMBERS: Final = re.compile(r"[0-9]+")


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
    #: An earlier daemon gave it out.
    adopted: bool = False
    #: When this daemon heard of it.
    added: float = 0.0
    state: RmJobState = RmJobState.PENDING
    #: Why it waits or how it ended.
    reason: str = ""
    #: Container, process in it, position in the component, and node; empty, or -1, until it has one.
    container: str = ""
    incarnation: str = ""
    instance: int = -1
    node: str = ""
    #: Node that dl2d had in mind for it; YARN chooses another.
    planned_node: str = ""
    #: When its container reported last.
    reported: float = 0.0
    #: When it is killed, where it was asked to stop.
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
    def order(self) -> tuple[int, str]:
        """Sort key of tasks that wait: those with the lowest number first."""
        numbers = _NUMBERS.findall(self.id)
        return int(numbers[-1]) if numbers else 0, self.id

    def end(self, state: RmJobState, reason: str, at: float) -> None:
        """Note its end; ``CANCELLED`` where it had been asked to stop."""
        if self.live:
            stopped = self.deadline is not None and state in (RmJobState.FAILED, RmJobState.LOST)
            self.state = RmJobState.CANCELLED if stopped else state
            self.reason = reason
            self.ended = at


class IdleContainer(NamedTuple):
    """A container without a task."""

    job: JobKey
    node: str
    demand: Resources


class ContainerTasks:
    """Tasks and containers of all jobs. Not thread-safe.

    Parameters
    ----------
    timer
        Seconds on a monotonic clock.
    report_seconds
        Minimum time between two reports of a container.
    """

    def __init__(self, timer: Callable[[], float], report_seconds: float) -> None:
        self._timer = timer
        self._min_report_seconds = self._report_seconds = report_seconds
        self._tasks: dict[str, Task] = {}
        self._by_job: dict[JobKey, list[Task]] = {}
        self._components: dict[tuple[JobKey, Role], Component] = {}

    @property
    def overdue_seconds(self) -> float:
        """Time without a report after which a container is overdue, seconds."""
        return max(_OVERDUE_SECONDS, _OVERDUE_INTERVALS * self._report_seconds)

    def spread_reports(self, containers: int) -> None:
        """Have so many containers report together no more often than ``MAX_REPORTS_PER_SECOND``."""
        self._report_seconds = max(self._min_report_seconds, containers / MAX_REPORTS_PER_SECOND)

    def add(self, task: Task) -> None:
        """Add a task that waits for a container."""
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

    def pending_anchors(self) -> list[Task]:
        """Anchors that wait for their container."""
        tasks = self._tasks.values()
        return [task for task in tasks if task.role is Role.COORDINATOR and task.state is RmJobState.PENDING]

    def jobs(self) -> set[JobKey]:
        """Jobs that have a task here."""
        return set(self._by_job)

    def waiting(self) -> list[Task]:
        """Tasks, without anchors, that wait for a container."""
        return [
            task
            for task in self._tasks.values()
            if task.state is RmJobState.PENDING and task.role is not Role.COORDINATOR
        ]

    def component(self, job: JobKey, role: Role) -> Component:
        """The component of a role."""
        return self._components.setdefault((job, role), Component())

    def report(self, report: ContainerReport) -> ContainerOrder:
        """Take a report of a container, and return what it is to do.

        1. An older container, or process, than the one that reported last from its position: its node was lost and
           another one has its place, so its task is killed; or the report has come late.
        2. Its task has ended: noted.
        3. It runs a task: goes on, or is asked to stop. One that is unknown was given out by an earlier daemon, as long
           as the position is one that YARN has; otherwise it is killed.
        4. YARN is ending it: its task counts as ended, and it gets no other. An anchor goes on in the next container.
        5. It has no task, although one was given to it: that answer was lost, so it is given again.
        6. It has no task: the first one that waits.
        """
        now = self._timer()
        ending = report.ending and report.role is not Role.COORDINATOR
        component = self.component(report.job, report.role)
        if component.is_former(report):
            return ContainerOrder(self._report_seconds, grace=0.0 if report.task else None)
        component.heard(report, now)
        was_idle = component.idle.pop(report.instance, None)
        self._end_predecessors(report, now)
        task = self._tasks.get(task_tag(report.job, report.task)) if report.task else None
        if report.task and (task is None or (task.state is RmJobState.PENDING and not task.container)):
            if component.confirmed_size is not None and report.instance >= component.wanted:
                return ContainerOrder(self._report_seconds, grace=0.0)
            task = self._adopt(report, now)
        if task is not None and report.exit_code is not None:
            if task.incarnation in ("", report.incarnation):
                task.end(*_verdict(report.exit_code, ending=ending), now)
        elif task is not None:
            if ending and task.incarnation == report.incarnation:
                task.end(*_verdict(None, ending=True), now)
                return ContainerOrder(self._report_seconds)
            if not task.live or task.incarnation != report.incarnation:
                return ContainerOrder(self._report_seconds, grace=0.0)
            task.reported = now
            return ContainerOrder(self._report_seconds, grace=_remaining(task, now))
        if ending:
            return ContainerOrder(self._report_seconds)
        order = self._next_order(report, component, now)
        if was_idle is not None and report.instance in component.idle:
            component.idle[report.instance].since = was_idle.since
        return order

    def _next_order(self, report: ContainerReport, component: Component, now: float) -> ContainerOrder:
        """What a container without a task is to do."""
        given = next((task for task in self._of_container(report) if task.incarnation == report.incarnation), None)
        if given is None:
            given = self._first_waiting(report, component)
        if given is not None and given.deadline is not None:
            given.end(RmJobState.CANCELLED, "stopped before it had begun", now)
            given = None
        if given is None:
            if component.is_usable(report.instance):
                component.idle[report.instance] = Idle(report.node, now, now)
            return ContainerOrder(self._report_seconds)
        given.container, given.incarnation, given.node = report.container, report.incarnation, report.node
        given.instance, given.reported, given.reason = report.instance, now, ""
        given.state = RmJobState.RUNNING
        return ContainerOrder(self._report_seconds, task=given.id)

    def _first_waiting(self, report: ContainerReport, component: Component) -> Task | None:
        if report.role is not Role.COORDINATOR and (
            not component.is_usable(report.instance) or report.container in component.removed
        ):
            return None
        waiting = [
            task for task in self.of_job(report.job) if task.role is report.role and task.state is RmJobState.PENDING
        ]
        return min(waiting, key=lambda task: task.order, default=None)

    def _of_container(self, report: ContainerReport) -> Iterable[Task]:
        """Live tasks that were given to the container's position."""
        for task in self.of_job(report.job):
            if task.live and task.role is report.role and task.instance == report.instance:
                yield task

    def _end_predecessors(self, report: ContainerReport, now: float) -> None:
        """End what ran in an earlier process of this position; a coordinator goes on in the new one."""
        for task in self._of_container(report):
            if task.incarnation == report.incarnation:
                continue
            if report.role is Role.COORDINATOR and task.deadline is None:
                task.incarnation, task.container, task.node = report.incarnation, report.container, report.node
            elif task.container == report.container:
                task.end(RmJobState.FAILED, f"its process in {task.container} was killed", now)
            else:
                task.end(RmJobState.LOST, f"{task.container} was replaced by {report.container}", now)

    def _adopt(self, report: ContainerReport, now: float) -> Task:
        """Take up a task that an earlier daemon gave out."""
        task = Task(
            job=report.job, id=report.task, role=report.role, user="", submitted=0.0, adopted=True,
            state=RmJobState.RUNNING,
            container=report.container, incarnation=report.incarnation, instance=report.instance, node=report.node,
            reported=now,
        )  # fmt: skip
        self.add(task)
        return task

    def idle(self) -> Iterator[IdleContainer]:
        """Containers without a task that are not overdue, with the ids of their nodes.

        They wait for their job's next task, so for this they are free.
        """
        since = self._timer() - self.overdue_seconds
        for (job, _), component in self._components.items():
            for idle in component.usable_idle(since):
                yield IdleContainer(job, idle.node, component.demand)

    def reported(self, job: JobKey) -> int:
        """Number of a job's containers that have reported."""
        return sum(len(each.newest) for each in self._of_all_roles(job))

    def has_silent(self, job: JobKey) -> bool:
        """Whether YARN lists containers of a job that have not reported."""
        return any(each.silent for each in self._of_all_roles(job))

    def _of_all_roles(self, job: JobKey) -> list[Component]:
        found = (self._components.get((job, role)) for role in Role)
        return [component for component in found if component is not None]

    def nodes(self) -> frozenset[str]:
        """Ids of the nodes on which tasks run."""
        return frozenset(task.node for task in self._tasks.values() if task.live and task.container)

    def unreported(self, job: JobKey, containers: int) -> list[Task]:
        """Tasks of a job that wait although YARN has started a container for them, which has not reported yet.

        ``containers`` is the number of the job's containers that YARN has started.
        """
        tasks = [task for task in self.of_job(job) if task.live]
        waiting = [task for task in tasks if task.state is RmJobState.PENDING and task.role is not Role.COORDINATOR]
        waiting.sort(key=lambda task: task.order)
        running = sum(bool(task.container) for task in tasks)
        idle = sum(len(self.component(job, role).idle) for role in Role)
        return waiting[: max(0, containers - running - idle)]

    def surplus(self, seconds: float) -> Mapping[JobKey, list[tuple[Role, int]]]:
        """Containers that have had no task for this time, below busy ones, while no task of their role waits."""
        now = self._timer()
        waiting = {(task.job, task.role) for task in self.waiting()}
        found: dict[JobKey, list[tuple[Role, int]]] = {}
        for (job, role), component in self._components.items():
            for position, idle in component.idle.items():
                is_surplus = now - idle.reported < self.overdue_seconds and now - idle.since >= seconds
                if is_surplus and position < component.wanted and (job, role) not in waiting:
                    found.setdefault(job, []).append((role, position))
        return found

    def give_up(self, job: JobKey, role: Role, position: int) -> bool:
        """Give a container that has no task no other one, since YARN is asked to remove it; False if it is needed.

        Until YARN has agreed, its number of containers is not known.
        """
        component = self.component(job, role)
        if position not in component.idle or any((task.job, task.role) == (job, role) for task in self.waiting()):
            return False
        del component.idle[position]
        component.decommissioned.add(position)
        component.confirmed_size = None
        return True

    def take_description(
        self, job: JobKey, role: Role, size: int, decommissioned: Collection[int], containers: Mapping[int, str]
    ) -> None:
        """Take what YARN says of a component: its number of containers, the positions that are not used again, and the
        containers whose processes may run.

        A task that was reported from a position that YARN does not have is lost: the report was wrong, or came from a
        container that has been removed.
        """
        component = self.component(job, role)
        component.confirmed_size, component.decommissioned, component.surprising = size, set(decommissioned), False
        component.removed = dict.fromkeys(component.removed, self._timer())
        positions = size + len(decommissioned)
        listed = {place: name for place, name in containers.items() if place < positions}
        for name in listed.values():
            component.removed.pop(name, None)
        component.silent = {
            place: name
            for place, name in listed.items()
            if start_order(component.newest.get(place, "")) < start_order(name)
        }
        for task in self.of_job(job):
            if task.role is role and task.adopted and task.instance >= positions:
                task.end(RmJobState.LOST, f"YARN has no container {role.value}-{task.instance}", self._timer())

    def stop(self, task: Task, grace: float) -> None:
        """Ask a task to end within some seconds. A repeat may shorten the time, never lengthen it."""
        now = self._timer()
        if task.state is RmJobState.PENDING:
            task.end(RmJobState.CANCELLED, "stopped before it had a container", now)
        elif task.live:
            task.deadline = min(now + max(grace, 0.0), task.deadline if task.deadline is not None else float("inf"))
            task.state = RmJobState.ENDING

    def update_wanted_size(self, job: JobKey, role: Role) -> Component:
        """Decide how many containers a component should have, note it, and return the component.

        Enough for the highest position that is taken, or whose container has not reported, plus one for each waiting
        task without a free position below.
        """
        component = self.component(job, role)
        tasks = [task for task in self.of_job(job) if task.role is role and task.live]
        taken = {task.instance for task in tasks if task.instance >= 0}
        waiting = sum(task.state is RmJobState.PENDING for task in tasks)
        size = max(taken | component.silent.keys(), default=-1) + 1
        given_up = component.decommissioned
        missing = max(0, waiting - (size - len(taken | {position for position in given_up if position < size})))
        while missing:
            missing -= size not in given_up
            size += 1
        if size < component.wanted:
            component.idle = {place: idle for place, idle in component.idle.items() if place < size}
        component.wanted = size
        return component

    def end_job(self, job: JobKey, state: RmJobState, reason: str) -> None:
        """Note that all tasks of a job have ended, since its containers have."""
        for task in self.of_job(job):
            task.end(state, reason, self._timer())

    def end_on(self, nodes: Collection[str]) -> None:
        """Note that the tasks on nodes (by id) that YARN has given up are lost; what is left of them is told to end.

        An anchor goes on in the container that YARN starts in place of the lost one.
        """
        for task in self._tasks.values():
            if task.node in nodes and task.role is not Role.COORDINATOR:
                task.end(RmJobState.LOST, f"{task.node} is down", self._timer())

    def doubtful(self, seconds: float) -> set[JobKey]:
        """Jobs of which YARN may have other containers than is known, or whose tasks have waited for this time."""
        since = self._timer() - seconds
        components = self._components.items()
        found = {job for (job, _), component in components if component.silent or component.surprising}
        return found | {task.job for task in self.waiting() if task.added < since}

    def overdue(self) -> Mapping[JobKey, list[Task]]:
        """Running tasks, without anchors, whose containers are overdue, by job.

        An anchor goes on in the container that YARN starts in place of a lost one.
        """
        limit = self._timer() - self.overdue_seconds
        late: dict[JobKey, list[Task]] = {}
        for task in self._tasks.values():
            if task.live and task.container and task.role is not Role.COORDINATOR and task.reported < limit:
                late.setdefault(task.job, []).append(task)
        return late

    def forget(self, present: Collection[JobKey]) -> None:
        """Forget tasks that ended long ago, and tasks and components of jobs that are not present any more.

        A task of such a job that has not ended was refused by YARN, or YARN forgot the job before its end was seen.
        """
        limit = self._timer() - KEEP_ENDED_SECONDS

        def is_old(task: Task) -> bool:
            last = max(task.added, task.reported) if task.job not in present else float("inf")
            return (last if task.ended is None else task.ended) <= limit

        for task in [task for task in self._tasks.values() if is_old(task)]:
            del self._tasks[task.tag]
            self._by_job[task.job].remove(task)
        self._by_job = {job: tasks for job, tasks in self._by_job.items() if tasks}
        kept = {*present, *self._by_job}
        self._components = {key: component for key, component in self._components.items() if key[0] in kept}

    def listed(self, names: Mapping[str, str]) -> Iterable[RmJob]:
        """The tasks, without anchors, as a resource manager lists them; ``names`` has the nodes' names by their ids."""
        for task in self._tasks.values():
            if task.role is not Role.COORDINATOR:
                handle, submitted, user, tag = task.identity
                yield RmJob(
                    handle=handle, state=task.state, tag=tag, user=user, node=names.get(task.node, task.node),
                    reason=task.reason, submitted=submitted, position=task.instance if task.instance >= 0 else None,
                )  # fmt: skip


def _remaining(task: Task, now: float) -> float | None:
    return None if task.deadline is None else max(0.0, task.deadline - now)


def _verdict(exit_code: int | None, *, ending: bool) -> tuple[RmJobState, str]:
    """State and reason of a task that ended; ``ending``: since its container is being ended."""
    if exit_code == 0:
        return RmJobState.DONE, ""
    if ending or exit_code is None:
        return RmJobState.CANCELLED, "YARN ended its container: preempted, or its node stops"
    how = f"exit status {exit_code}" if exit_code > 0 else f"killed by signal {-exit_code}"
    return RmJobState.FAILED, how
