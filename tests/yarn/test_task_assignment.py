"""Which container gets which task, and how many containers a component needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dl2d.core.jobs import JobKey, Role
from dl2d.core.resource_manager import ContainerOrder, ContainerReport, RmJobState
from dl2d_yarn.component_containers import REMOVAL_SECONDS
from dl2d_yarn.tasks_and_anchors import KEEP_ENDED_SECONDS, Task
from dl2d_yarn.tasks_of_containers import MAX_REPORTS_PER_SECOND, ContainerTasks

JOB = JobKey("yarn", "1", 1_795_581_700)
FIRST = "container_1795581702976_0001_01_%06d"


class Trial:
    """``ContainerTasks`` with a clock that tests set, and short forms of its calls."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.tasks = ContainerTasks(lambda: self.now, 3.0)

    def add(self, *names: str) -> list[Task]:
        tasks = []
        for name in names:
            role = Role.COORDINATOR if name == "anchor" else Role(name.partition("-")[0])
            tasks.append(Task(JOB, name, role, "ml", self.now))
            self.tasks.records.add(tasks[-1])
        for role in (Role.WORKER, Role.PS):
            self.tasks.update_size(JOB, role)
        return tasks

    def report(self, position: int, number: int, *, role: Role = Role.WORKER, **more: Any) -> ContainerOrder:
        """Report of process ``a`` in a container with this number."""
        given = {"container": FIRST % number, "incarnation": "a", "node": "n:1", **more}
        return self.tasks.answer(ContainerReport(job=JOB, role=role, position=position, **given))

    def size(self, role: Role = Role.WORKER) -> int:
        return self.tasks.update_size(JOB, role).positions


@pytest.fixture
def trial() -> Trial:
    return Trial()


def test_a_task_of_a_container_that_yarn_ends_is_cancelled_and_the_container_gets_no_other(trial: Trial) -> None:
    preempted, drained, waits = trial.add("worker-1", "worker-2", "worker-3")
    assert [trial.report(place, 5 + place).task for place in (0, 1)] == ["worker-1", "worker-2"]
    order = trial.report(0, 5, task="worker-1", ending=True)
    assert (preempted.state, order.grace) == (RmJobState.CANCELLED, None)
    assert trial.report(0, 5, task="worker-1", exit_code=-15, ending=True).task == ""
    assert trial.report(1, 6, task="worker-2", exit_code=0, ending=True).task == ""
    assert (preempted.state, drained.state, waits.state) == (
        RmJobState.CANCELLED, RmJobState.DONE, RmJobState.PENDING
    )  # fmt: skip
    assert preempted.reason == "YARN ended its container: preempted, over its memory, or its node stops"
    # Its position is free for the container that YARN starts instead.
    assert trial.report(0, 9).task == "worker-3"


def test_tasks_are_given_in_order_and_only_to_their_role(trial: Trial) -> None:
    trial.add("worker-10", "worker-9", "ps-1")
    assert trial.report(1, 5).task == "worker-9"
    assert trial.report(0, 4).task == "worker-10"
    assert trial.report(2, 6).task == ""
    assert trial.report(0, 7, role=Role.PS).task == "ps-1"
    assert (trial.size(), trial.size(Role.PS)) == (2, 1)


def test_an_answer_that_was_lost_is_given_again(trial: Trial) -> None:
    (task,) = trial.add("worker-1")
    assert trial.report(0, 4).task == "worker-1"
    assert trial.report(0, 4).task == "worker-1"
    assert trial.report(0, 4, task="worker-1") == ContainerOrder(3.0)
    assert (task.state, task.container, task.node) == (RmJobState.RUNNING, FIRST % 4, "n:1")


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        (0, RmJobState.DONE, ""),
        (3, RmJobState.FAILED, "exit status 3"),
        (-9, RmJobState.FAILED, "killed by signal 9"),
    ],
)
def test_an_end_is_noted_and_the_next_task_given(trial: Trial, code: int, state: RmJobState, reason: str) -> None:
    first, _ = trial.add("worker-1", "worker-2")
    trial.report(0, 4)
    assert trial.report(0, 4, task="worker-1", exit_code=code).task == "worker-2"
    assert (first.state, first.reason) == (state, reason)


def test_a_task_whose_process_was_killed_has_failed(trial: Trial) -> None:
    first, _ = trial.add("worker-1", "worker-2")
    trial.report(0, 4)
    assert trial.report(0, 4, incarnation="b").task == "worker-2"
    assert (first.state, first.reason) == (RmJobState.FAILED, f"its process in {FIRST % 4} was killed")


@pytest.mark.parametrize("role", [Role.WORKER, Role.COORDINATOR])
def test_a_report_of_a_former_process_that_comes_late_changes_nothing(trial: Trial, role: Role) -> None:
    first = "anchor" if role is Role.COORDINATOR else "worker-1"
    second = "anchor" if role is Role.COORDINATOR else "worker-2"
    trial.add(first)
    assert trial.report(0, 4, role=role, incarnation="p0").task == first
    processes = [f"p{number}" for number in range(8)]
    for process in processes[1:]:  # killed again and again before it had a task
        trial.report(0, 4, role=role, incarnation=process)
    if second != first:
        trial.add(second)
    assert trial.report(0, 4, role=role, incarnation="b") == ContainerOrder(3.0, task=second)
    for late in processes:
        assert trial.report(0, 4, role=role, incarnation=late) == ContainerOrder(3.0)
        for code in (None, 0, 1):
            order = trial.report(0, 4, role=role, incarnation=late, task=first, exit_code=code)
            assert order == ContainerOrder(3.0, grace=0.0)
    assert trial.report(0, 4, role=role, incarnation="b", task=second) == ContainerOrder(3.0)
    running = trial.tasks.records.get(f"dl2:{JOB.slug}:{second}")
    assert running is not None
    assert running.state is RmJobState.RUNNING


def test_a_task_of_a_lost_container_is_killed_once_another_container_has_its_position(trial: Trial) -> None:
    (task,) = trial.add("worker-1")
    trial.report(0, 4)
    assert trial.report(0, 9, incarnation="b").task == ""
    assert task.state is RmJobState.LOST
    # The processes on the lost node still run, and report again.
    assert trial.report(0, 4, task="worker-1").grace == 0
    assert trial.report(0, 4).task == ""
    # A second attempt of the service's ApplicationMaster numbers containers anew.
    trial.add("worker-2")
    assert trial.report(0, 2, container="container_1795581702976_0001_02_000002", incarnation="c").task == "worker-2"
    assert trial.report(0, 10).task == ""


def test_a_coordinator_goes_on_in_a_new_process(trial: Trial) -> None:
    (task,) = trial.add("anchor")
    assert trial.report(0, 2, role=Role.COORDINATOR).task == "anchor"
    assert trial.report(0, 2, role=Role.COORDINATOR, incarnation="b").task == "anchor"
    assert trial.report(0, 7, role=Role.COORDINATOR, incarnation="c").task == "anchor"
    assert trial.report(0, 7, role=Role.COORDINATOR, incarnation="c", task="anchor", exit_code=1).task == ""
    assert (task.state, task.reason) == (RmJobState.FAILED, "exit status 1")
    assert trial.report(0, 7, role=Role.COORDINATOR, incarnation="d").task == ""


def test_a_coordinator_goes_on_when_its_container_ends_or_does_not_report(trial: Trial) -> None:
    (task,) = trial.add("anchor")
    assert trial.report(0, 2, role=Role.COORDINATOR).task == "anchor"
    assert trial.report(0, 2, role=Role.COORDINATOR, task="anchor", ending=True) == ContainerOrder(3.0)
    trial.now += 3600
    assert trial.tasks.overdue() == {}
    assert task.state is RmJobState.RUNNING
    assert trial.report(0, 7, role=Role.COORDINATOR, incarnation="b").task == "anchor"


def test_a_container_that_has_not_reported_counts_as_taken_as_long_as_yarn_lists_it(trial: Trial) -> None:
    trial.add("worker-9")
    assert trial.report(0, 2).task == "worker-9"
    listed = {0: FIRST % 2, 1: FIRST % 3, 3: FIRST % 5}
    trial.tasks.update_component(JOB, Role.WORKER, 4, {2}, listed | {9: FIRST % 6})
    assert trial.tasks.unverified_jobs(5) == {JOB}
    assert trial.size() == 4
    # It may turn out to have a task, or none; a task that waits may get its place.
    trial.add("worker-10")
    assert trial.size() == 4
    assert trial.report(3, 5, task="worker-4").grace is None
    assert trial.report(1, 3).task == "worker-10"
    assert trial.tasks.unverified_jobs(5) == set()
    trial.report(3, 5, task="worker-4", exit_code=0)
    assert trial.size() == 2
    # Another container runs at its place than the one that reported.
    trial.tasks.update_component(JOB, Role.WORKER, 4, {2}, listed | {1: FIRST % 8})
    assert trial.tasks.unverified_jobs(5) == {JOB}
    trial.tasks.update_component(JOB, Role.WORKER, 4, {2}, {})
    assert trial.tasks.unverified_jobs(5) == set()


def test_after_a_report_from_a_position_that_yarn_should_not_have_the_job_is_unverified(trial: Trial) -> None:
    trial.tasks.update_component(JOB, Role.WORKER, 1, (), {})
    trial.report(0, 2)
    assert trial.tasks.unverified_jobs(5) == set()
    trial.report(1, 3)
    assert trial.tasks.unverified_jobs(5) == {JOB}


def test_while_a_container_stays_that_yarn_was_asked_to_remove_the_job_is_unverified(trial: Trial) -> None:
    tasks = trial.add("worker-1", "worker-2")
    component = trial.tasks.component(JOB, Role.WORKER)
    for position in (0, 1):
        trial.report(position, 3 + position)
    trial.tasks.records.stop(tasks[1], 0)
    trial.report(1, 4, task="worker-2", exit_code=0)
    assert trial.size() == 1
    component.begin_change(trial.now)
    component.confirmed_size = 1  # YARN has agreed
    for after, unverified in ((1, set()), (REMOVAL_SECONDS, {JOB})):
        trial.now += after
        trial.report(0, 3, task="worker-1")
        trial.report(1, 4)
        assert trial.tasks.unverified_jobs(5) == unverified
    trial.tasks.update_component(JOB, Role.WORKER, 1, (), {0: FIRST % 3})
    trial.report(1, 4)
    assert trial.tasks.unverified_jobs(5) == set()


def test_stops(trial: Trial) -> None:
    waiting, running = trial.add("worker-2", "worker-1")
    trial.report(0, 4)
    trial.tasks.records.stop(waiting, 30)
    trial.tasks.records.stop(running, 30)
    assert (waiting.state, running.state) == (RmJobState.CANCELLED, RmJobState.ENDING)
    trial.now += 10
    assert trial.report(0, 4, task="worker-1").grace == 20
    trial.tasks.records.stop(running, 5)
    trial.tasks.records.stop(running, 3600)
    assert trial.report(0, 4, task="worker-1").grace == 5
    trial.report(0, 4, task="worker-1", exit_code=-9)
    assert running.state is RmJobState.CANCELLED
    assert trial.size() == 0


def test_a_task_that_is_stopped_before_its_container_gets_it_never_starts(trial: Trial) -> None:
    (task,) = trial.add("worker-1")
    trial.report(0, 4)
    trial.tasks.records.stop(task, 30)
    assert trial.report(0, 4).task == ""
    assert task.state is RmJobState.CANCELLED


def test_a_free_position_is_kept_and_used_before_a_component_grows(trial: Trial) -> None:
    tasks = trial.add("worker-1", "worker-2", "worker-3")
    for place in range(3):
        trial.report(place, 4 + place)
    trial.report(1, 5, task="worker-2", exit_code=0)
    assert trial.size() == 3  # YARN removes the highest positions only
    trial.add("worker-4")
    assert trial.size() == 3
    assert trial.report(1, 5).task == "worker-4"
    for place, name in ((2, "worker-3"), (1, "worker-4")):
        trial.report(place, 4 + place, task=name, exit_code=0)
    assert trial.size() == 1
    assert tasks[0].live


def test_a_container_that_is_long_without_a_task_may_be_decommissioned(trial: Trial) -> None:
    trial.add(*(f"worker-{number}" for number in range(3)))
    assert trial.size() == 3
    for place in range(3):
        assert trial.report(place, place + 2).task == f"worker-{place}"
    trial.report(0, 2, task="worker-0", exit_code=1)
    trial.now += 20
    trial.report(0, 2)
    assert trial.tasks.surplus(30) == {}
    trial.now += 20
    trial.report(0, 2)
    assert trial.tasks.surplus(30) == {JOB: [(Role.WORKER, 0)]}
    component = trial.tasks.component(JOB, Role.WORKER)
    component.decommissioned.add(0)
    assert (trial.size(), component.size) == (3, 2)
    # The position is not used again, so two more tasks need five positions.
    trial.add("worker-3")
    assert trial.tasks.surplus(30) == {}
    trial.add("worker-4")
    assert (trial.size(), component.size) == (5, 4)


def test_a_container_that_yarn_removes_gets_nothing_more(trial: Trial) -> None:
    trial.add("worker-1")
    trial.report(0, 4)
    trial.report(0, 4, task="worker-1", exit_code=0)
    assert trial.size() == 0
    trial.tasks.component(JOB, Role.WORKER).begin_change(trial.now)
    trial.add("worker-2")
    assert trial.report(0, 4).task == ""
    assert trial.report(0, 5, incarnation="b").task == "worker-2"


def test_a_task_of_an_earlier_daemon_is_adopted(trial: Trial) -> None:
    assert trial.report(2, 6, task="worker-7") == ContainerOrder(3.0)
    (task,) = trial.tasks.records.of_job(JOB)
    assert (task.id, task.state, trial.size()) == ("worker-7", RmJobState.RUNNING, 3)
    trial.report(1, 5, task="worker-6", exit_code=4)
    ended = trial.tasks.records.get(f"dl2:{JOB.slug}:worker-6")
    assert ended is not None
    assert (ended.state, ended.reason) == (RmJobState.FAILED, "exit status 4")


def test_a_report_from_a_position_that_yarn_does_not_have_takes_no_containers(trial: Trial) -> None:
    assert trial.report(100_000, 6, task="worker-7").grace is None
    assert trial.report(1, 5, task="worker-8").grace is None
    # An earlier daemon gave these out, or none; YARN's number of containers tells.
    trial.tasks.update_component(JOB, Role.WORKER, 2, {0}, {})
    assert trial.size() == 2
    assert trial.report(100_000, 6, task="worker-7").grace == 0.0
    # Now the number is known.
    trial.add("worker-9")
    assert trial.size() == 3
    for name in ("worker-9", "worker-10"):
        assert trial.report(99_999, 7, task=name).grace == 0.0
    assert trial.size() == 3
    assert trial.report(2, 8, task="worker-11").grace is None


def test_a_container_that_is_decommissioned_gets_no_task_and_one_that_is_needed_is_kept(trial: Trial) -> None:
    trial.add("worker-1", "worker-2")
    for place in (0, 1):
        trial.report(place, 4 + place)
    component = trial.tasks.component(JOB, Role.WORKER)
    component.confirmed_size = 2
    assert not trial.tasks.mark_decommissioned(JOB, Role.WORKER, 0)
    trial.report(0, 4, task="worker-1", exit_code=0)
    (waits,) = trial.add("worker-3")
    assert not trial.tasks.mark_decommissioned(JOB, Role.WORKER, 0)
    trial.tasks.records.stop(waits, 0)
    assert trial.tasks.mark_decommissioned(JOB, Role.WORKER, 0)
    assert component.confirmed_size is None  # until YARN has said that it is removed
    trial.add("worker-4")
    assert trial.report(0, 4).task == ""
    assert not trial.tasks.mark_decommissioned(JOB, Role.WORKER, 0)
    assert (trial.size(), component.size) == (3, 2)


def test_tasks_of_a_job_that_yarn_does_not_list_are_forgotten(trial: Trial) -> None:
    trial.add("anchor")
    trial.now += KEEP_ENDED_SECONDS + 1
    trial.tasks.forget([JOB])
    assert trial.tasks.records.pending_anchors()
    trial.tasks.forget([])
    assert not trial.tasks.records.jobs()


def test_many_containers_report_less_often(trial: Trial) -> None:
    trial.add("worker-1")
    assert trial.report(0, 3) == ContainerOrder(3.0, task="worker-1")
    trial.tasks.spread_reports(10 * MAX_REPORTS_PER_SECOND)
    assert trial.report(0, 3, task="worker-1").report_seconds == 10.0
    trial.now += 49
    assert trial.tasks.overdue() == {}
    trial.now += 2
    assert list(trial.tasks.overdue()) == [JOB]
    # Containers that were told 10 s still wait for it when others have ended.
    trial.tasks.spread_reports(1)
    assert trial.report(0, 3, task="worker-1").report_seconds == 8.0
    for _ in range(10):
        trial.tasks.spread_reports(1)
    assert trial.report(0, 3, task="worker-1").report_seconds == 3.0


def test_ended_tasks_stay_listed_for_a_while(trial: Trial) -> None:
    trial.add("worker-1")
    trial.report(0, 4)
    trial.report(0, 4, task="worker-1", exit_code=0)
    trial.tasks.forget([])
    (listed,) = trial.tasks.records.listed({"n:1": "n"})
    assert (listed.state, listed.node, listed.handle) == (RmJobState.DONE, "n", listed.tag)
    trial.now += KEEP_ENDED_SECONDS + 1
    trial.tasks.forget([])
    assert list(trial.tasks.records.listed({})) == []


class Containers(RuleBasedStateMachine):
    """Tasks and containers start and end, reports are late and answers lost: no task that counts runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.trial = Trial()
        self.serial = 0
        self.number = 1
        #: By position: container number, incarnation, task that runs.
        self.containers: dict[int, tuple[int, str, str]] = {}
        self.started: Counter[str] = Counter()
        #: Processes that another one has replaced, and whose place has reported since.
        self.former: list[tuple[int, int, str, str]] = []
        self.last_reports: dict[int, tuple[int, str, str]] = {}

    @rule()
    def submit(self) -> None:
        self.serial += 1
        self.trial.add(f"worker-{self.serial}")

    @rule(place=st.integers(0, 4), fresh=st.booleans())
    def container_starts(self, place: int, *, fresh: bool) -> None:
        self.number += 1
        old = self.containers.get(place)
        number = self.number if fresh or old is None else old[0]
        self.containers[place] = (number, f"i{self.number}", "")

    @precondition(lambda self: self.containers)
    @rule(data=st.data(), lost=st.booleans())
    def container_reports(self, data: st.DataObject, *, lost: bool) -> None:
        place = data.draw(st.sampled_from(sorted(self.containers)))
        number, incarnation, task = self.containers[place]
        order = self.trial.report(place, number, incarnation=incarnation, task=task)
        before = self.last_reports.get(place)
        if before is not None and before[1] != incarnation:
            self.former = [*self.former, (place, *before)][-8:]
        self.last_reports[place] = (number, incarnation, task)
        if order.task and not lost:
            assert not task
            self.started[order.task] += 1
            self.containers[place] = (number, incarnation, order.task)

    @precondition(lambda self: self.former)
    @rule(data=st.data(), code=st.sampled_from([None, 0, 1]))
    def report_comes_late(self, data: st.DataObject, code: int | None) -> None:
        place, number, incarnation, task = data.draw(st.sampled_from(self.former))
        states = [(each.id, each.state) for each in self.trial.tasks.records.of_job(JOB)]
        given = {"task": task, "exit_code": code} if task else {}
        assert not self.trial.report(place, number, incarnation=incarnation, **given).task
        assert [(each.id, each.state) for each in self.trial.tasks.records.of_job(JOB)] == states

    @precondition(lambda self: any(task for _, _, task in self.containers.values()))
    @rule(data=st.data(), code=st.sampled_from([0, 1, -9]))
    def task_ends(self, data: st.DataObject, code: int) -> None:
        place = data.draw(st.sampled_from([place for place, (_, _, task) in self.containers.items() if task]))
        number, incarnation, task = self.containers[place]
        self.containers[place] = (number, incarnation, "")
        self.trial.report(place, number, incarnation=incarnation, task=task, exit_code=code)

    @precondition(lambda self: self.serial)
    @rule(data=st.data(), grace=st.sampled_from([0.0, 30.0]))
    def stop(self, data: st.DataObject, grace: float) -> None:
        serial = data.draw(st.integers(1, self.serial))
        task = self.trial.tasks.records.get(f"dl2:{JOB.slug}:worker-{serial}")
        assert task is not None
        self.trial.tasks.records.stop(task, grace)
        self.trial.size()

    @invariant()
    def no_task_is_started_twice(self) -> None:
        assert all(count == 1 for count in self.started.values())

    @invariant()
    def what_runs_has_a_place_of_its_own_below_the_size(self) -> None:
        live = [task for task in self.trial.tasks.records.of_job(JOB) if task.live and task.position >= 0]
        assert len({task.position for task in live}) == len(live)
        size = self.trial.size()
        assert all(task.position < size for task in live)
        waiting = sum(task.state is RmJobState.PENDING for task in self.trial.tasks.records.of_job(JOB))
        assert size <= max((task.position for task in live), default=-1) + 1 + waiting


TestContainers = Containers.TestCase
TestContainers.settings = settings(max_examples=60, stateful_step_count=30)
