"""Coordinators that hold all room go back into the queue, so that some of their jobs can begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from msgspec import structs
from tick.world import World

from dl2d.core.cluster import NodeSet, Snapshot, Task, TaskState
from dl2d.core.errors import Rejected, ResourceManagerError, Unavailable
from dl2d.core.jobs import Job, JobKey, JobState, Progress, Role
from dl2d.core.resize_guard_state import Requeue
from dl2d.core.resource_manager import Claim, RmIdentity, RmJob, RmJobState, StartAllowance
from dl2d.core.resources import Resources
from dl2d.daemon.health_and_metrics import Health
from dl2d.placement.load_balance import LoadBalance
from dl2d.testing import make_job, make_nodes
from dl2d.tick.idle_coordinators import MAX_BENEFICIARY_SECONDS, IdleHistory, Requeues, find_requeues
from dl2d.tick.record_slot import Report
from dl2d.tick.tick_context import Context

CPU = Resources.of(cpu=1)
WAIT = 480.0


@dataclass
class Crowd(World):
    """A cluster of two nodes with four CPUs each, where anchors and tasks of one CPU wait in one queue."""

    node_count: int = 2
    #: Minimum number of workers of the first job.
    first_needs: int = 1
    starts: dict[str, float] = field(default_factory=dict)
    requeues: bool = True
    refuses: ResourceManagerError | None = None

    def __post_init__(self) -> None:
        self.url, self.queues_tasks, self.cluster_nodes = "", True, make_nodes(self.node_count, cpu=4)
        super().__post_init__()
        #: What was asked for: handles and seconds.
        self.asked: list[tuple[str, float]] = []

    def context(self) -> Context:
        requeue = self.requeue if self.requeues else None
        return replace(super().context(), starts_anchors=False, requeue=requeue)

    def requeue(self, anchor: RmIdentity, seconds: float) -> None:
        self.asked.append((anchor.handle, seconds))
        if self.refuses is not None:
            raise self.refuses
        (job,) = (each for each in self.manager.live() if each.identity == anchor)
        if job.state is RmJobState.RUNNING:
            job = structs.replace(job, node="", submitted=int(self.now), requeues=job.requeues + 1)
        self.starts[job.handle] = self.now + seconds
        self.put(structs.replace(job, state=RmJobState.PENDING, reason="BeginTime", begins_later=True))

    def put(self, job: RmJob) -> None:
        self.manager.put(job, ((job.node, CPU),) if job.node else ())

    def arrive(self, count: int) -> None:
        """So many anchors are submitted at once."""
        for number in range(1, count + 1):
            job = RmJob(handle=str(number), state=RmJobState.PENDING, user="ann", submitted=int(self.now), held=CPU)
            self.put(job)

    def schedule(self) -> None:
        """Start what waits and has room: anchors before tasks, which came later. Those that start register."""
        for job in self.anchors(RmJobState.PENDING):
            free = [node.name for node in self.manager.nodes if node.used.get("cpu") < node.capacity.get("cpu")]
            if free and self.starts.get(job.handle, 0.0) <= self.now:
                self.put(structs.replace(job, state=RmJobState.RUNNING, node=free[0], reason="", begins_later=False))
                key = JobKey("test", job.handle, job.submitted)
                if self.store.job(key) is None:
                    workers = self.first_needs if job.handle == "1" else 1
                    made = make_job(
                        job.handle, worker=CPU, ps=CPU, min_workers=workers, max_workers=workers + 1, max_ps=1
                    )
                    self.store.add_job(replace(made, key=key, anchor=job.handle))
        self.manager.start_queued()
        self.manager.claims = [
            Claim(handle=job.handle, user="ann", priority=9000, nodes=1, demand=CPU)
            for job in self.anchors(RmJobState.PENDING)
            if self.starts.get(job.handle, 0.0) <= self.now
        ]

    def anchors(self, state: RmJobState) -> list[RmJob]:
        found = [job for job in self.manager.live() if not job.tag and job.state is state]
        return sorted(found, key=lambda job: int(job.handle))

    def end_trained(self, seconds: float) -> None:
        """Anchors end whose jobs have trained for so long."""
        for job in self.store.jobs(live=True):
            if job.started_at is not None and self.now - job.started_at > seconds:
                self.manager.end(job.anchor)

    def go_on(self, seconds: float = 10.0) -> Report:
        self.schedule()
        report = self.tick(seconds)
        running = {job.handle: job.submitted for job in self.anchors(RmJobState.RUNNING)}
        self.beat(*(job.key for job in self.store.jobs(live=True) if running.get(job.anchor) == job.key.submitted))
        self.end_trained(60.0)
        return report


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    crowd = Crowd()
    yield crowd
    crowd.close()


def test_all_jobs_of_a_crowd_whose_coordinators_fill_the_cluster_end(crowd: Crowd) -> None:
    crowd.arrive(12)
    ended = set[str]()
    most = 0
    for _ in range(1000):
        crowd.go_on()
        live = crowd.store.jobs(live=True)
        most = max(most, sum(job.state is JobState.RUNNING for job in live))
        ended = {str(number) for number in range(1, 13)} - {job.handle for job in crowd.manager.live() if not job.tag}
        if len(ended) == 12:
            break
    assert len(ended) == 12
    assert most >= 2
    assert "1" not in {handle for handle, _ in crowd.asked}


def test_without_that_none_of_them_begins(crowd: Crowd) -> None:
    crowd.requeues = False
    crowd.arrive(12)
    for _ in range(300):
        crowd.go_on()
    assert {job.state for job in crowd.store.jobs(live=True)} == {JobState.READY}


def test_a_job_that_was_put_back_says_why_and_health_counts_it(crowd: Crowd) -> None:
    crowd.arrive(8)
    report = crowd.go_on()
    while not crowd.asked:
        report = crowd.go_on()
    # Two are enough for a worker and a parameter server.
    assert [handle for handle, _ in crowd.asked] == ["8", "7"]
    assert {seconds for _, seconds in crowd.asked} == {2 * WAIT}
    reason = "coordinators without tasks held the room that job 1 (job) needed to start; this job was "
    reason += "among those submitted last"
    before = JobKey("test", "8", 1_000_000)
    # They get no tasks meanwhile.
    assert before in report.snapshot.silent
    health = Health(lambda: 0.0)
    health.completed(report)
    (problem,) = health.status().problems
    assert problem.startswith("dl2d has requeued 2 coordinators without tasks")
    assert b"dl2d_postponed_coordinators 2.0" in health.metrics()
    # As a daemon that is started again.
    crowd.state = replace(crowd.state, idle_history=IdleHistory())
    crowd.go_on()
    ended = crowd.job(before)
    assert (ended.state, ended.end_reason) == (
        JobState.LOST,
        f"was requeued as test.8.{int(crowd.now) - 10}: {reason}",
    )
    crowd.go_on()
    (waits,) = (job for job in crowd.store.jobs(live=True) if job.key.id == "8")
    assert (waits.state, waits.end_reason) == (JobState.SUBMITTED, f"starts again later (BeginTime): {reason}")
    # When it has started again it is a job like any other.
    for _ in range(1000):
        crowd.go_on()
        if all(job.state is not JobState.SUBMITTED for job in crowd.store.jobs(live=True)):
            break
    crowd.go_on()
    assert not crowd.store.guard_state().requeued


def test_what_is_refused_is_not_asked_again_and_another_one_leaves(crowd: Crowd) -> None:
    crowd.arrive(8)
    crowd.refuses = Rejected("no", said="disabled")
    for _ in range(100):
        crowd.go_on()
    assert sorted(handle for handle, _ in crowd.asked) == [str(number) for number in range(2, 9)]
    assert {job.state for job in crowd.store.jobs(live=True)} == {JobState.READY}
    assert not crowd.store.guard_state().requeued


def test_a_resource_manager_that_does_not_answer_is_asked_again(crowd: Crowd) -> None:
    crowd.arrive(8)
    crowd.refuses = Unavailable("gone")
    while not crowd.asked:
        crowd.go_on()
    assert crowd.asked == [("8", 2 * WAIT)]
    assert [key.id for key in crowd.store.guard_state().requeued] == ["8"]
    crowd.refuses = None
    crowd.go_on()
    assert [handle for handle, _ in crowd.asked] == ["8", "7"]
    for _ in range(40):
        crowd.go_on()
    # Of the first it is not known whether the resource manager has put it back; the other was not asked.
    assert [handle for handle, _ in crowd.asked[:3]] == ["8", "7", "8"]
    assert any(job.state is JobState.RUNNING for job in crowd.store.jobs(live=True))


@pytest.mark.parametrize(
    ("allowed", "each_tick"), [(None, [32, 4]), (10, [10, 10, 10, 6])], ids=["any number", "rate limit"]
)
def test_a_tick_puts_back_few_at_once_and_the_next_ones_the_others(allowed: int | None, each_tick: list[int]) -> None:
    crowd = Crowd(node_count=11, first_needs=35)
    crowd.arrive(44)
    if allowed is not None:  # in each tick, by what was asked for before it
        crowd.start_allowance = lambda: StartAllowance(before + allowed - len(crowd.asked), "the rate of requests")
    asked = [0]
    while asked[-1] < 36 and len(asked) < 30:
        before = len(crowd.asked)
        crowd.go_on(50.0)
        asked.append(len(crowd.asked))
    assert [more for before, after in pairwise(asked) if (more := after - before)] == each_tick
    # As one round: the latest, each once.
    assert [handle for handle, _ in crowd.asked] == [str(number) for number in range(44, 8, -1)]
    assert crowd.state.idle_history.rounds == 1
    # No other job has taken the room meanwhile.
    crowd.go_on(50.0)
    states = {job.key.id: job.state for job in crowd.store.jobs(live=True)}
    assert [id_ for id_, state in states.items() if state is JobState.RUNNING] == ["1"]
    crowd.close()


# The rule

NODES = make_nodes(2, cpu=4)


def jobs_with_anchors(nodes: list[str]) -> tuple[list[Job], dict[JobKey, RmJob]]:
    """Ready jobs, of which the anchor of each holds a CPU of a node."""
    jobs = [
        replace(make_job(number, state=JobState.READY, worker=CPU, ps=CPU, max_workers=2, max_ps=1), anchor=str(number))
        for number in range(1, len(nodes) + 1)
    ]
    anchors = {
        job.key: RmJob(handle=job.anchor, state=RmJobState.RUNNING, submitted=1000, user="ann", node=node, held=CPU)
        for job, node in zip(jobs, nodes, strict=True)
    }
    return jobs, anchors


def snapshot_of(
    jobs: list[Job], anchors: dict[JobKey, RmJob], tasks: tuple[Task, ...] = (), **more: object
) -> Snapshot:
    held = [(anchor.node, anchor.held) for anchor in anchors.values() if anchor.state.holds_resources]
    held += [(task.node, task.demand) for task in tasks]
    nodes = tuple(
        structs.replace(node, used=Resources.total(room for name, room in held if name == node.name)) for node in NODES
    )
    given = {"nodes": nodes, "jobs": tuple(jobs), "tasks": tasks, **more}
    return Snapshot(at=2000.0, slot=1, **given)  # type: ignore[arg-type]


def found(
    snapshot: Snapshot, anchors: dict[JobKey, RmJob], history: IdleHistory | None = None, now: float = WAIT,
    submitted: tuple[Job, ...] = (), **more: object,
) -> tuple[Requeues, IdleHistory]:  # fmt: skip
    since = IdleHistory({job.key: 0.0 for job in snapshot.jobs})
    given = {
        "requeued": {}, "placement": LoadBalance(), "unable": (), "foreign_jobs_wait": False,
        "wait_seconds": WAIT, **more,
    }  # fmt: skip
    return find_requeues(snapshot, submitted, anchors, history or since, now=now, **given)  # type: ignore[arg-type]


def leaving(answer: tuple[Requeues, IdleHistory]) -> list[str]:
    return [each.job.key.id for each in answer[0].leaving]


FULL = ["n1"] * 4 + ["n2"] * 4


def test_the_latest_leave_after_the_time_and_no_more_than_needed() -> None:
    jobs, anchors = jobs_with_anchors(FULL)
    snapshot = snapshot_of(jobs, anchors)
    assert leaving(found(snapshot, anchors, now=WAIT - 1)) == []
    answer = found(snapshot, anchors)
    assert leaving(answer) == ["8", "7"]
    assert (answer[1].beneficiary, answer[1].rounds) == (jobs[0].key, 1)
    # A CPU is free: one is enough.
    assert leaving(found(snapshot_of(jobs[:-1], dict(list(anchors.items())[:-1])), anchors)) == ["7"]
    # Two are: nobody leaves, and the job begins.
    assert leaving(found(snapshot_of(jobs[:-2], dict(list(anchors.items())[:-2])), anchors)) == []


def test_a_job_of_another_user_is_not_named() -> None:
    jobs, anchors = jobs_with_anchors(FULL)
    jobs[0] = replace(jobs[0], owner=replace(jobs[0].owner, user="bob"))
    reasons = {each.requeue.reason for each in found(snapshot_of(jobs, anchors), anchors)[0].leaving}
    assert {reason.partition(" needed")[0] for reason in reasons} == {
        "coordinators without tasks held the room that another user's job"
    }


def test_nobody_leaves_for_a_job_while_others_leave_and_twice_as_many_if_the_room_is_lost() -> None:
    jobs, anchors = jobs_with_anchors(FULL)
    _, history = found(snapshot_of(jobs, anchors), anchors)
    entry = Requeue(2000.0, "because")
    away = {jobs[-1].key: entry, jobs[-2].key: entry}
    answer = found(snapshot_of(jobs, anchors), anchors, history, WAIT + 10, requeued=away)
    assert (leaving(answer), answer[1].beneficiary) == ([], jobs[0].key)
    # Others have taken it.
    assert leaving(found(snapshot_of(jobs, anchors), anchors, replace(history, rounds=2), WAIT + 20)) == [
        "8", "7", "6", "5",
    ]  # fmt: skip
    # Not for ever: then coordinators are put back for another one.
    late = found(snapshot_of(jobs, anchors), anchors, history, WAIT + MAX_BENEFICIARY_SECONDS + 1)
    assert (leaving(late), late[1].beneficiary) == (["8", "7"], jobs[1].key)


@pytest.mark.parametrize(
    "change",
    [
        {"progress": Progress(version=3)},
        {"started_at": 5.0},
        {"end_reason": "was ended by signal 15"},
        {"state": JobState.RUNNING},
    ],
)
def test_a_job_that_has_trained_stays(change: dict[str, object]) -> None:
    jobs, anchors = jobs_with_anchors(FULL)
    jobs[-1] = replace(jobs[-1], **change)  # type: ignore[arg-type]
    assert leaving(found(snapshot_of(jobs, anchors), anchors)) == ["7", "6"]


@pytest.mark.parametrize("change", [{"not_executing": True}, {"held": Resources()}, {"state": RmJobState.PENDING}])
def test_an_anchor_stays_that_does_not_run_or_of_which_it_is_not_known_what_it_holds(change: dict[str, object]) -> None:
    jobs, anchors = jobs_with_anchors(FULL)
    snapshot = snapshot_of(jobs, anchors)
    anchors[jobs[-1].key] = structs.replace(anchors[jobs[-1].key], **change)
    assert leaving(found(snapshot, anchors)) == ["7", "6"]


def test_a_job_with_a_task_stays_and_one_that_lacks_one_needs_the_room_of_that() -> None:
    jobs, anchors = jobs_with_anchors(FULL[:-1])
    task = Task(
        job=jobs[0].key, id="worker-0", role=Role.WORKER, node="n2", demand=CPU, state=TaskState.GRANTED
    )  # fmt: skip
    assert leaving(found(snapshot_of(jobs, anchors, (task,)), anchors)) == ["7"]
    of_last = structs.replace(task, job=jobs[-1].key)
    assert leaving(found(snapshot_of(jobs, anchors, (of_last,)), anchors)) == ["6", "5"]


def test_nobody_leaves_for_a_job_that_needs_nodes_where_they_are_not_or_that_gets_no_tasks() -> None:
    jobs, anchors = jobs_with_anchors(FULL)
    sets = (NodeSet((jobs[0].key,), frozenset({"n1"}), "partition small"),)
    # Of those on n1.
    assert leaving(found(snapshot_of(jobs, anchors, node_sets=sets), anchors)) == ["4", "3"]
    answer = found(snapshot_of(jobs, anchors), anchors, unable=[jobs[0].key])
    assert (leaving(answer), answer[1].beneficiary) == (["8", "7"], jobs[1].key)
    large = replace(jobs[0], request=replace(jobs[0].request, worker=CPU * 5))
    assert found(snapshot_of([large, *jobs[1:]], anchors), anchors)[1].beneficiary == jobs[1].key


def test_those_that_were_put_back_come_when_no_job_lacks_tasks_and_there_is_room() -> None:
    jobs, anchors = jobs_with_anchors(["n1", "n1", "n1", "n2", "n2"])
    waiting = tuple(replace(job, state=JobState.SUBMITTED) for job in jobs[1:])
    for job in waiting:
        anchors[job.key] = structs.replace(
            anchors[job.key], state=RmJobState.PENDING, node="", reason="BeginTime", begins_later=True
        )
    running = replace(jobs[0], state=JobState.RUNNING)
    away = {job.key: Requeue(0.0, "because") for job in waiting}
    snapshot = snapshot_of([running], anchors)

    def returning(**more: object) -> list[str]:
        given = {"submitted": waiting, "requeued": away, **more}
        return [key.id for key, _ in found(snapshot, anchors, **given)[0].returning]  # type: ignore[arg-type]

    # Seven CPUs are free, and each takes three.
    assert returning() == ["2", "3"]
    assert returning(foreign_jobs_wait=True) == []
    assert returning(requeued={}) == []
    # One is on its way: Slurm has not looked at it yet, or it has started and has not reported.
    for change in ({"reason": ""}, {"state": RmJobState.RUNNING, "reason": "", "node": "n2"}):
        waits = anchors[jobs[4].key]
        anchors[jobs[4].key] = structs.replace(waits, begins_later=False, **change)
        assert returning() == []
        anchors[jobs[4].key] = waits
    # One that somebody holds neither comes nor keeps the others waiting.
    anchors[jobs[1].key] = structs.replace(anchors[jobs[1].key], begins_later=False, reason="JobHeldUser")
    assert returning() == ["3", "4"]
    # Not within two minutes.
    assert [
        key.id
        for key, _ in found(structs.replace(snapshot, at=1100.0), anchors, submitted=waiting, requeued=away)[
            0
        ].returning
    ] == []


@pytest.mark.parametrize("shapes", [15, 16, 40])
def test_jobs_of_many_shapes_that_never_fit_do_not_keep_later_ones_from_being_examined(shapes: int) -> None:
    jobs, anchors = jobs_with_anchors(FULL)
    never = [
        make_job(
            f"e{number}", submitted=500 + number, state=JobState.READY, worker=Resources.of(cpu=1, memory=number),
            ps=CPU, min_workers=1000, max_workers=1000, max_ps=1,
        )
        for number in range(1, shapes + 1)
    ]  # fmt: skip
    snapshot = snapshot_of([*never, *jobs], anchors)
    answer = found(snapshot, anchors)
    for tick in range(1, 4):
        if answer[0].leaving:
            break
        answer = found(snapshot, anchors, answer[1], WAIT + 10 * tick)
    assert (leaving(answer), answer[1].beneficiary) == (["8", "7"], jobs[0].key)
    # It stays the one for which coordinators are put back, although all are examined anew.
    away = dict.fromkeys((jobs[-1].key, jobs[-2].key), Requeue(2000.0, "because"))
    answer = found(snapshot, anchors, answer[1], WAIT + 50, requeued=away)
    assert (leaving(answer), answer[1].beneficiary) == ([], jobs[0].key)


def test_tasks_above_a_minimum_size_leave_anyway_so_no_coordinator_does() -> None:
    jobs, anchors = jobs_with_anchors(["n1", "n1", "n1", "n1"])
    runs = replace(jobs[0], state=JobState.RUNNING)
    tasks = tuple(
        Task(job=runs.key, id=f"worker-{number}", role=Role.WORKER, node="n2", demand=CPU, state=TaskState.CONFIRMED)
        for number in range(4)
    )
    floors = ((runs.key, runs.request.min_size),)
    assert leaving(found(snapshot_of([runs, *jobs[1:]], anchors, tasks, floors=floors), anchors)) == []
    assert leaving(found(snapshot_of([runs, *jobs[1:]], anchors, tasks), anchors)) == ["4", "3"]
