"""What whole ticks ask of Slurm when it has a thousand jobs."""

from __future__ import annotations

from collections import Counter

import pytest
from slurm_fakes import REQUEST, Clock, FakeSlurm, Managers, context_of, job_row, node_row

from dl2d.core.cluster import TaskState
from dl2d.core.jobs import Job, JobKey, JobState, Launch, Owner, Progress, Role
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.resource_manager import Yields
from dl2d.core.store import JobChange, TaskChange
from dl2d.store.sql_store import SqlStore
from dl2d.tick.tick import tick
from dl2d.tick.tick_state import TickState

#: Of the thousand jobs in Slurm, this many are anchors and this many tasks; the rest is none of our business.
ANCHORS, TASKS, OTHERS = 200, 400, 400


@pytest.fixture
def store(slurm: FakeSlurm):
    """A store and a Slurm that agree on two hundred jobs of a worker and a PS each."""
    store = SqlStore("sqlite://")
    rows = [job_row(number, Comment="(null)") for number in range(1, ANCHORS + 1)]
    keys = [JobKey("fake", str(number), 1_795_253_932) for number in range(1, ANCHORS + 1)]
    for key in keys:
        store.add_job(
            Job(key=key, request=REQUEST, owner=Owner("alice", 1001, 1002), launch=Launch(("x",), "/"), anchor=key.id)
        )
        store.change_job(key, JobChange(state=JobState.RUNNING), 1.0)
    starts = [
        Start(key, role, f"n{1 + place % 100}", REQUEST.worker)
        for place, key in enumerate(keys)
        for role in (Role.WORKER, Role.PS)
    ]
    changes = []
    for number, task in enumerate(store.ask_tasks(starts, 1.0), start=1000):
        changes.append(TaskChange(task.job, task.id, TaskState.CONFIRMED, handle=str(number)))
        rows.append(job_row(number, Comment=task.tag, NodeList=task.node))
    store.change_tasks(changes, 1.0)
    rows += [job_row(5000 + number, UserName="bob") for number in range(OTHERS)]
    assert len(rows) == ANCHORS + TASKS + OTHERS == 1000
    slurm.answer("squeue", rows=rows)
    slurm.answer("sinfo", rows=[node_row(f"n{number}", CPUsState="4/4/0/8") for number in range(1, 101)])
    yield store
    store.close()


def test_a_tick_with_a_thousand_jobs_asks_slurm_once_for_jobs_and_once_for_nodes(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, store: SqlStore
) -> None:
    context = context_of(manager_on(), store)
    state = TickState()
    for more in ({"squeue": 2, "scontrol": 5}, {}, {}):
        clock.now += 15
        slurm.forget()
        state, report = tick(context, state)
        assert len(report.snapshot.jobs) == ANCHORS
        assert report.plan.starts == report.plan.stops == ()
        # At first, excluded nodes are asked for as well; reservations and limits are once a minute, and
        # slurm.conf is every ten minutes.
        assert Counter(call.name for call in slurm.calls()) == {"squeue": 1, "sinfo": 1} | more


SUBMITTED = 1_795_253_932


def add_job(store: SqlStore, number: int) -> JobKey:
    """A running job of alice in the store, whose anchor has this number."""
    key = JobKey("fake", str(number), SUBMITTED)
    owner = Owner("alice", 1001, 1002)
    store.add_job(Job(key=key, request=REQUEST, owner=owner, launch=Launch(("x",), "/"), anchor=key.id))
    store.change_job(key, JobChange(state=JobState.RUNNING), 1.0)
    return key


def test_a_task_whose_comment_its_user_removed_before_it_was_listed_is_found(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    store = SqlStore("sqlite://")
    key = add_job(store, 7)
    (task,) = store.ask_tasks([Start(key, Role.WORKER, "n1", REQUEST.worker)], SUBMITTED)
    store.change_tasks([TaskChange(key, task.id, TaskState.ASKED, handle="8")], SUBMITTED)
    slurm.answer("squeue", rows=[job_row(7), job_row(8, ReqNodes="n1")])
    slurm.answer("sinfo", rows=[node_row("n1")])
    tick(context_of(manager_on(), store), TickState())
    (found,) = store.tasks(live=True, job=key)[:1]
    assert (found.state, found.submitted) == (TaskState.GRANTED, SUBMITTED)
    store.close()


@pytest.mark.parametrize(
    "comment",
    [f"dl2:fake.7.{SUBMITTED}:anchor", "dl2:a.1.1:b", f"dl2:fake.8.{SUBMITTED}:worker-0"],
)
def test_what_a_user_writes_into_the_comment_of_an_anchor_frees_its_job_of_no_rule(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, comment: str
) -> None:
    store = SqlStore("sqlite://")
    key, _ = add_job(store, 7), add_job(store, 8)
    slurm.answer("squeue", rows=[job_row(7, Comment=comment), job_row(8, Partition="other")])
    slurm.answer("sinfo", rows=[node_row("n1"), node_row("n2", PartitionName="other")])
    manager = manager_on(sharing=[{"partition": "gpu", "yield": "always", "max_share": 0.5}])
    context = context_of(manager, store)
    state, report = tick(context, TickState())
    assert [nodes.nodes for nodes in report.snapshot.node_sets if key in nodes.jobs] == [{"n1"}]
    listing = manager.listing()
    assert (listing.jobs[0].yields, listing.jobs[0].priority) == (Yields.ALWAYS, 4000)
    assert "7" in listing.growth_limits[0].anchors
    store.change_job(key, JobChange(state=JobState.CANCELLED), clock.now)
    tick(context, state)
    assert slurm.calls("scancel")[0].argv[-1] == "7"
    store.close()


def test_an_anchor_with_a_comment_of_its_user_ends_and_is_requeued_like_any(
    slurm: FakeSlurm, manager_on: Managers
) -> None:
    store = SqlStore("sqlite://")
    ended, requeued = add_job(store, 7), add_job(store, 8)
    again = {"SubmitTime": SUBMITTED + 9, "RestartCnt": 1, "State": "PENDING", "NodeList": ""}
    slurm.answer(
        "squeue",
        rows=[
            job_row(7, State="COMPLETED", Comment="dl2:a.1.1:b"),
            job_row(8, Comment=f"dl2:fake.8.{SUBMITTED}:anchor", **again),
        ],
    )
    tick(context_of(manager_on(), store), TickState())
    states = {key: job.state for key in (ended, requeued) if (job := store.job(key)) is not None}
    assert states == {ended: JobState.FINISHED, requeued: JobState.LOST}
    assert [job.key.submitted for job in store.jobs(live=True)] == [SUBMITTED + 9]
    store.close()


def test_a_node_whose_free_room_slurm_gives_to_no_task_is_left_to_others_for_a_while(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    """By sinfo the node has room; it keeps these cores for the system (CoreSpecCount)."""
    store = SqlStore("sqlite://")
    key = add_job(store, 7)
    idle = {"Gres": "(null)", "GresUsed": "(null)"}
    slurm.answer("sinfo", rows=[node_row("n2", CPUsState="6/2/0/8", **idle), node_row("n3", **idle)])
    anchor = job_row(7, NodeList="n9")
    waiting = {"State": "PENDING", "Reason": "Resources", "NodeList": "", "ReqNodes": "n2"}
    store.ask_tasks([Start(key, Role.WORKER, "n2", REQUEST.worker)], clock.now)
    (task,) = store.tasks(live=True)
    store.change_tasks([TaskChange(key, task.id, TaskState.ASKED, handle="100", submitted=SUBMITTED)], clock.now)
    context, state = context_of(manager_on(), store, timer=clock.timer), TickState()
    kept_out = []
    for room in ("6/2/0/8", "8/0/0/8", *["6/2/0/8"] * 4):  # full meanwhile, for which it waits
        slurm.answer("squeue", rows=[anchor, job_row(100, Comment=task.tag, **waiting)])
        slurm.answer("sinfo", rows=[node_row("n2", CPUsState=room, **idle), node_row("n3", **idle)])
        store.report_progress(key, Progress(at=clock.now))
        state, report = tick(context, state)
        kept_out.append([nodes.reason for nodes in report.snapshot.node_sets if "n2" not in nodes.nodes])
        clock.now += 100
    said = "not n2, refused: Resources (Slurm does not give it the room that sinfo shows)"
    assert kept_out == [*[[]] * 5, [said]]
    assert slurm.calls("scancel")[-1].argv[-1] == "100"
    store.close()


def test_time_in_which_slurm_listed_nothing_is_not_taken_for_waiting_beside_free_room(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    waiting = {"State": "PENDING", "Reason": "Resources", "NodeList": "", "ReqNodes": "n2"}
    slurm.answer("squeue", rows=[job_row(7), job_row(100, Comment=f"dl2:fake.7.{SUBMITTED}:worker-1", **waiting)])
    slurm.answer("sinfo", rows=[node_row("n2", CPUsState="6/2/0/8", Gres="(null)", GresUsed="(null)")])
    manager = manager_on()
    refused = []
    for seconds in (1000, 59, 1, 0):
        refused.append([job.node_refused for job in manager.listing().jobs])
        clock.now += seconds
    assert refused == [[False, False], [False, False], [False, False], [False, True]]


def test_room_of_a_job_that_is_ending_on_several_nodes_is_not_taken_for_withheld(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    """Its epilog takes minutes, and it holds more on n2 than on the other nodes."""
    tag = f"dl2:fake.7.{SUBMITTED}:worker-1"
    waiting = {"State": "PENDING", "Reason": "Resources", "NodeList": "", "ReqNodes": "n2", "Comment": tag}
    ending = job_row(9, State="COMPLETING", NodeList="n[2-4]", **{"tres-alloc": "cpu=10,mem=300M,node=3"})
    slurm.answer("sinfo", rows=[node_row("n2", Gres="(null)", GresUsed="(null)")])
    manager = manager_on()
    refused = []
    for others in [[ending]] * 5 + [[]] * 4:
        slurm.answer("squeue", rows=[job_row(100, **waiting), *others])
        refused.append(manager.listing().jobs[0].node_refused)
        clock.now += 60
    assert refused == [False] * 7 + [True] * 2
