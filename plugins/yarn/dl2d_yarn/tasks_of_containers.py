"""Which container runs which task: assignments, answers to reports, and sizes of components. No I/O.

YARN starts containers of a component and numbers them; a shrinking component loses those with the highest numbers. A
container asks for its task (``ContainerReport``), so tasks keep their own ids, which are never used again, whatever
container or number they run in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from dl2d.core.cluster import task_tag
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resource_manager import ContainerOrder, ContainerReport, RmJobState
from dl2d_yarn.component_containers import Component, IdleContainer, IdlePeriod, start_order
from dl2d_yarn.tasks_and_anchors import Task, TaskRecords

#: Number of reports of all containers together that the daemon takes in a second: each costs it about 2 ms.
MAX_REPORTS_PER_SECOND = 200
#: A container is overdue if it has not reported for this many report intervals, and not for these seconds.
_OVERDUE_INTERVALS, _OVERDUE_SECONDS = 5, 15.0
#: Factor by which the report interval falls at most from one listing to the next.
_FALL = 0.8


class ContainerTasks:
    """Containers of all jobs, and the tasks in ``records`` that they run. Not thread-safe.

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
        self.records = TaskRecords(timer)
        self._components: dict[tuple[JobKey, Role], Component] = {}

    @property
    def overdue_seconds(self) -> float:
        """Time without a report after which a container is overdue, seconds."""
        return max(_OVERDUE_SECONDS, _OVERDUE_INTERVALS * self._report_seconds)

    def spread_reports(self, containers: int) -> None:
        """Set the report interval such that so many containers send at most ``MAX_REPORTS_PER_SECOND``.

        It falls by steps, so that containers that were told a longer one do not count as overdue. Before YARN has
        listed any, those count in which tasks run.
        """
        needed = max(containers, self.records.count_running()) / MAX_REPORTS_PER_SECOND
        self._report_seconds = max(self._min_report_seconds, needed, _FALL * self._report_seconds)

    def component(self, job: JobKey, role: Role) -> Component:
        """The component of a role."""
        return self._components.setdefault((job, role), Component())

    def answer(self, report: ContainerReport) -> ContainerOrder:
        """Record a container's report; returns what the container is to do.

        1. A newer container or process has reported from its position, so its node was lost, or the report is late: its
           task is killed.
        2. It reports a task that no daemon can have assigned to it, since YARN should not have its position: killed.
        3. Its task runs: continues, or is asked to stop. One that this daemon did not assign was assigned by an earlier
           one.
        4. Its task has ended: recorded, then as 6.
        5. YARN is ending the container: its task counts as ended, and it gets no other. An anchor continues in the next
           container.
        6. It has no task: it gets the one that it was assigned before, if that answer was lost, or else the first one
           that waits.
        """
        now = self._timer()
        component = self.component(report.job, report.role)
        kill = ContainerOrder(self._report_seconds, grace=0.0)
        if component.is_superseded(report):
            return kill if report.task else ContainerOrder(self._report_seconds)
        component.record_report(report, now)
        idle = component.idle.pop(report.position, None)
        self._end_predecessors(report, now)
        if report.task:
            task = self._reported_task(report, component, now)
            if task is None:
                return kill
            if report.exit_code is None:
                return self._continue_task(task, report, now)
            if task.incarnation in ("", report.incarnation):
                task.end(*_end_state(report.exit_code, ending=_ends_tasks(report)), now)
        if _ends_tasks(report):
            return ContainerOrder(self._report_seconds)
        task = self._assign_task(report, component, now)
        if task is None and component.is_usable(report.position):
            component.idle[report.position] = IdlePeriod(report.node, now if idle is None else idle.since, now)
        return ContainerOrder(self._report_seconds, task=task.id if task is not None else "")

    def _reported_task(self, report: ContainerReport, component: Component, now: float) -> Task | None:
        """The task that a report names, adopted if this daemon did not assign it; None where none can be there."""
        task = self.records.get(task_tag(report.job, report.task))
        if task is not None and (task.container or task.state is not RmJobState.PENDING):
            return task
        return None if component.is_beyond(report.position) else self._adopt(report, now)

    def _continue_task(self, task: Task, report: ContainerReport, now: float) -> ContainerOrder:
        """What a container is to do with a task that runs in it."""
        is_current = task.incarnation == report.incarnation
        if is_current and _ends_tasks(report):
            task.end(*_end_state(None, ending=True), now)
            return ContainerOrder(self._report_seconds)
        if not task.live or not is_current:
            return ContainerOrder(self._report_seconds, grace=0.0)
        task.last_report = now
        return ContainerOrder(self._report_seconds, grace=_remaining(task, now))

    def _assign_task(self, report: ContainerReport, component: Component, now: float) -> Task | None:
        """Assign a task to a container that has none; returns the task, or None if there is none for it."""
        task = next((task for task in self._tasks_at(report) if task.incarnation == report.incarnation), None)
        task = task or self._next_task(report, component)
        if task is None:
            return None
        if task.deadline is not None:
            task.end(RmJobState.CANCELLED, "stopped before it had begun", now)
            return None
        task.container, task.incarnation, task.node = report.container, report.incarnation, report.node
        task.position, task.last_report, task.reason = report.position, now, ""
        task.state = RmJobState.RUNNING
        return task

    def _next_task(self, report: ContainerReport, component: Component) -> Task | None:
        """First waiting task of a container's role; None if none waits or the container is to be removed."""
        if report.role is not Role.COORDINATOR and (
            not component.is_usable(report.position) or report.container in component.removal_times
        ):
            return None
        waiting = [
            task
            for task in self.records.of_job(report.job)
            if task.role is report.role and task.state is RmJobState.PENDING
        ]
        return min(waiting, key=lambda task: task.sort_key, default=None)

    def _tasks_at(self, report: ContainerReport) -> Iterable[Task]:
        """Live tasks that are assigned to the position of a report."""
        for task in self.records.of_job(report.job):
            if task.live and task.role is report.role and task.position == report.position:
                yield task

    def _end_predecessors(self, report: ContainerReport, now: float) -> None:
        """End tasks of earlier processes at the position of a report; a coordinator continues in the new process."""
        for task in self._tasks_at(report):
            if task.incarnation == report.incarnation:
                continue
            if report.role is Role.COORDINATOR and task.deadline is None:
                task.incarnation, task.container, task.node = report.incarnation, report.container, report.node
            elif task.container == report.container:
                task.end(RmJobState.FAILED, f"its process in {task.container} was killed", now)
            else:
                task.end(RmJobState.LOST, f"{task.container} was replaced by {report.container}", now)

    def _adopt(self, report: ContainerReport, now: float) -> Task:
        """Add a task that an earlier daemon assigned to the container of a report."""
        task = Task(
            job=report.job, id=report.task, role=report.role, user="", submitted=0.0, adopted=True,
            state=RmJobState.RUNNING,
            container=report.container, incarnation=report.incarnation, position=report.position, node=report.node,
            last_report=now,
        )  # fmt: skip
        self.records.add(task)
        return task

    def idle(self) -> Iterator[IdleContainer]:
        """Containers without a task that are not overdue, with their nodes' ids: free for their job's next task."""
        since = self._timer() - self.overdue_seconds
        for (job, _), component in self._components.items():
            for idle in component.usable_idle(since):
                yield IdleContainer(job, idle.node, component.demand)

    def count_reported(self, job: JobKey) -> int:
        """Number of a job's containers that have reported."""
        return sum(len(each.newest_containers) for each in self._of_all_roles(job))

    def has_unreported(self, job: JobKey) -> bool:
        """Whether YARN lists containers of a job that have not reported."""
        return any(each.unreported for each in self._of_all_roles(job))

    def _of_all_roles(self, job: JobKey) -> list[Component]:
        found = (self._components.get((job, role)) for role in Role)
        return [component for component in found if component is not None]

    def tasks_of_unreported(self, job: JobKey, containers: int) -> list[Task]:
        """Tasks of a job that wait although YARN has started a container for them, which has not reported yet.

        ``containers`` is the number of the job's containers that YARN has started.
        """
        tasks = self.records.of_job(job)
        waiting = sorted((task for task in tasks if task.waits), key=lambda task: task.sort_key)
        running = sum(bool(task.container) for task in tasks if task.live)
        idle = sum(len(self.component(job, role).idle) for role in Role)
        return waiting[: max(0, containers - running - idle)]

    def surplus(self, seconds: float) -> Mapping[JobKey, list[tuple[Role, int]]]:
        """By job: role and position of containers that have had no task for so long while no task of the role waits.

        They are below the highest position in use, so that a resize cannot remove them.
        """
        now = self._timer()
        waiting = {(task.job, task.role) for task in self.records.waiting()}
        found: dict[JobKey, list[tuple[Role, int]]] = {}
        for (job, role), component in self._components.items():
            for position, idle in component.idle.items():
                is_surplus = now - idle.last_report < self.overdue_seconds and now - idle.since >= seconds
                if is_surplus and position < component.positions and (job, role) not in waiting:
                    found.setdefault(job, []).append((role, position))
        return found

    def mark_decommissioned(self, job: JobKey, role: Role, position: int) -> bool:
        """Mark the position of a container without a task as decommissioned; returns False if the container is needed.

        It gets no further task. The number of containers is unknown until YARN has confirmed it.
        """
        component = self.component(job, role)
        if position not in component.idle or any(
            (task.job, task.role) == (job, role) for task in self.records.waiting()
        ):
            return False
        del component.idle[position]
        component.decommissioned.add(position)
        component.confirmed_size = None
        return True

    def update_component(
        self, job: JobKey, role: Role, size: int, decommissioned: Collection[int], containers: Mapping[int, str]
    ) -> None:
        """Update a component from its description in YARN.

        ``size`` is its number of containers, ``decommissioned`` has the positions that are not used again, and
        ``containers`` those whose processes may run. A task that was reported from a position that YARN does not have
        is lost: the report was wrong, or its container has been removed.
        """
        component = self.component(job, role)
        component.confirmed_size, component.decommissioned, component.has_unexpected = size, set(decommissioned), False
        component.removal_times = dict.fromkeys(component.removal_times, self._timer())
        positions = size + len(decommissioned)
        listed = {position: container for position, container in containers.items() if position < positions}
        for container in listed.values():
            component.removal_times.pop(container, None)
        component.unreported = {
            position: container
            for position, container in listed.items()
            if start_order(component.newest_containers.get(position, "")) < start_order(container)
        }
        for task in self.records.of_job(job):
            if task.role is role and task.adopted and task.position >= positions:
                task.end(RmJobState.LOST, f"YARN has no container {role.value}-{task.position}", self._timer())
        self.update_size(job, role)  # the positions of unreported containers are in use

    def update_size(self, job: JobKey, role: Role) -> Component:
        """Compute how many positions a component should have; returns the component.

        All up to the highest that has a task or an unreported container, and one more for each waiting task for which
        none of these is free. Decommissioned positions are not free.
        """
        component = self.component(job, role)
        tasks = [task for task in self.records.of_job(job) if task.role is role and task.live]
        taken = {task.position for task in tasks if task.position >= 0}
        waiting = sum(task.state is RmJobState.PENDING for task in tasks)
        count = max(taken | component.unreported.keys(), default=-1) + 1
        free = count - len(taken | {position for position in component.decommissioned if position < count})
        while free < waiting:
            free += count not in component.decommissioned
            count += 1
        if count < component.positions:
            component.idle = {position: idle for position, idle in component.idle.items() if position < count}
        component.positions = count
        return component

    def unverified_jobs(self, seconds: float) -> set[JobKey]:
        """Jobs whose containers in YARN may differ from those recorded, or whose tasks have waited for this time."""
        since = self._timer() - seconds
        components = self._components.items()
        found = {job for (job, _), component in components if component.unreported or component.has_unexpected}
        return found | {task.job for task in self.records.waiting() if task.added < since}

    def overdue(self) -> Mapping[JobKey, list[Task]]:
        """Running tasks, without anchors, whose containers are overdue, by job."""
        return self.records.silent(self._timer() - self.overdue_seconds)

    def forget(self, present: Collection[JobKey]) -> None:
        """Remove old tasks as ``TaskRecords.forget`` says, and components of jobs without any that are not present."""
        self.records.forget(present)
        kept = {*present, *self.records.jobs()}
        self._components = {key: component for key, component in self._components.items() if key[0] in kept}


def _remaining(task: Task, now: float) -> float | None:
    return None if task.deadline is None else max(0.0, task.deadline - now)


def _ends_tasks(report: ContainerReport) -> bool:
    """Whether YARN is ending the container, and its task with it: a coordinator continues in another container."""
    return report.ending and report.role is not Role.COORDINATOR


def _end_state(exit_code: int | None, *, ending: bool) -> tuple[RmJobState, str]:
    """State and reason of a task that has ended; ``ending`` says whether YARN is ending its container."""
    if exit_code == 0:
        return RmJobState.DONE, ""
    if ending or exit_code is None:
        return RmJobState.CANCELLED, "YARN ended its container: preempted, over its memory, or its node stops"
    how = f"exit status {exit_code}" if exit_code > 0 else f"killed by signal {-exit_code}"
    return RmJobState.FAILED, how
