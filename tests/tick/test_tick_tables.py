"""Tables of whole ticks: what the store has and what the resource manager lists, and what the tick makes of it.

Each cell is the outcome of ticks of a cluster of its own: the state that the task or job enters, ``.`` where it stays,
and ``!`` where the resource manager is told to stop it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs
from tick.scripted_manager import ScriptedManager
from tick.world import GivesNothing, World

from dl2d.core.cluster import ANCHOR, Task, TaskState, task_tag
from dl2d.core.jobs import JobKey, JobState, Launch, Progress, Role
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.resource_manager import RmJob, RmJobState, RmListing
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange, TaskChange
from dl2d.daemon.health_and_metrics import Health
from dl2d.testing import MemoryStore, make_job, make_nodes
from dl2d.tick.observation.observe import NO_NODES
from dl2d.tick.tick_context import Timeouts
from dl2d.tick.tick_state import ReconcileHistory, TickState

#: When the resource manager accepted the task or anchor; its user is ann.
SUBMITTED = 999_000
KEY = JobKey("test", "1", SUBMITTED)
TIMEOUTS = Timeouts(
    unseen_listings=3, unseen_seconds=30, start_seconds=600, drain_seconds=60, end_seconds=10, silent_seconds=1e6
)


@dataclass(frozen=True)
class Listed:
    """A listing: records of the task or anchor in question, and when it comes."""

    records: tuple[RmJob, ...] = ()
    #: Seconds since the listing before, and by how much the clock of the daemon's machine was set meanwhile.
    after: float = 10.0
    clock: float = 0.0
    incomplete: bool = False
    #: Whether it is the listing before, returned once more.
    again: bool = False
    #: Whether containers of the job run that have not reported.
    unreported: bool = False


def record(state: RmJobState = RmJobState.RUNNING, **changes: Any) -> RmJob:
    plain = {"handle": "17", "tag": "mark", "user": "ann", "node": "n1", "submitted": SUBMITTED}
    return RmJob(state=state, reason=f"is {state}", **{**plain, **changes})


def once(*records: RmJob, **more: Any) -> list[Listed]:
    return [Listed(records, **more)]


def later(*records: RmJob, **more: Any) -> list[Listed]:
    """Listed as before, some time after the first listing."""
    return [Listed(records), Listed(records, **more)]


def incomplete(*records: RmJob, **more: Any) -> list[Listed]:
    """``later``, in incomplete listings."""
    return [replace(listed, incomplete=True) for listed in later(*records, **more)]


RUNS = record()
WAITS = record(RmJobState.PENDING)
REFUSED = structs.replace(WAITS, reason="ReqNodeNotAvail", node_refused=True)
#: What the resource manager says, as the tables have it.
SAYS: Mapping[str, list[Listed]] = {
    # Nothing
    "not listed": once(),
    "not listed, twice in an hour": [Listed(), Listed(after=3600)],
    "not listed, 4 times in 29 s": [Listed(), Listed(after=9), Listed(after=10), Listed(after=10)],
    "not listed, 3 times, clock set forward": [Listed(), Listed(after=1, clock=1e6), Listed(after=1)],
    "not listed, 2 times, listed, 2 times": [Listed(), Listed(after=60), *once(RUNS), Listed(), Listed(after=60)],
    "not listed, 4 times, incomplete": [Listed(after=60, incomplete=True)] * 4,
    "not listed, 2 times, then incomplete": [Listed(), Listed(after=20), *[Listed(after=60, incomplete=True)] * 2],
    "not listed, 3 times in 30 s": [Listed(), Listed(after=15), Listed(after=15)],
    "not listed, 3 times, clock set back": [Listed(), Listed(after=15, clock=-1e5), Listed(after=15)],
    "not listed, 3 times, not reported yet": [Listed(after=15, unreported=True)] * 3,
    # Its state
    "pending": once(record(RmJobState.PENDING)),
    "pending, after 601 s": later(record(RmJobState.PENDING), after=601),
    "pending, after 601 s, incomplete": incomplete(record(RmJobState.PENDING), after=601),
    "pending, clock set forward": later(record(RmJobState.PENDING), clock=1e6),
    "refused, twice in 31 s": [Listed((REFUSED,)), Listed((REFUSED,), after=31)],
    "pending, refused once after 31 s": [Listed((WAITS,)), Listed((REFUSED,), after=31), Listed((WAITS,))],
    "pending, refused once, listed again": [
        *(Listed((WAITS,)), Listed((REFUSED,), after=31), Listed((REFUSED,), again=True)),
    ],
    "pending, refused twice after 31 s": [Listed((WAITS,)), Listed((REFUSED,), after=31), Listed((REFUSED,))],
    "running": once(RUNS),
    "running, after 11 s": later(RUNS, after=11),
    "running, after 61 s": later(RUNS, after=61),
    "running, after 61 s, incomplete": incomplete(RUNS, after=61),
    "running, clock set forward": later(RUNS, clock=1e6),
    "running, clock set back": later(RUNS, after=11, clock=-5000),
    "ending": once(record(RmJobState.ENDING)),
    "ending, after 11 s": later(record(RmJobState.ENDING), after=11),
    "ending, after 11 s, incomplete": incomplete(record(RmJobState.ENDING), after=11),
    "running, after 11 s ending": [*later(RUNS, after=11), *once(record(RmJobState.ENDING))],
    "done": once(record(RmJobState.DONE)),
    "failed": once(record(RmJobState.FAILED)),
    "time-limit": once(record(RmJobState.TIME_LIMIT)),
    "out-of-memory": once(record(RmJobState.OUT_OF_MEMORY)),
    "cancelled": once(record(RmJobState.CANCELLED)),
    "preempted": once(record(RmJobState.PREEMPTED)),
    "lost": once(record(RmJobState.LOST)),
    "failed, in an incomplete listing": once(record(RmJobState.FAILED), incomplete=True),
    # Its identity
    "doubled": later(RUNS, RUNS, after=61),
    "doubled, as failed too": once(RUNS, record(RmJobState.FAILED)),
    "an older failed one with its id": once(record(RmJobState.FAILED, submitted=SUBMITTED - 500, tag="")),
    "its id is another user's": [Listed((record(user="eve", submitted=SUBMITTED + 500, tag=""),), after=61)] * 3,
    "its id is ann's other job's": [Listed((record(submitted=SUBMITTED + 500, tag=""),), after=61)] * 3,
    "its id is another task's": [Listed((record(submitted=SUBMITTED + 500, tag="other"),), after=61)] * 3,
    "requeued": once(record(submitted=SUBMITTED + 500)),
    "its mark was removed": later(record(tag=""), after=61),
    "its user is not known": later(record(user="1000"), after=61),
}


class FactoryArguments(ScriptedManager):
    """Lists what the row says beside the anchor."""

    said = Listed()
    listed_at = 0.0
    anchor: tuple[RmJob, ...] = ()
    marks: Mapping[str, str] = {}

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        records = tuple(structs.replace(each, tag=self.marks.get(each.tag, "")) for each in self.said.records)
        listing = super().listing(ended_since, tasks)
        self.listed_at = self.listed_at if self.said.again else listing.at
        return replace(
            listing, at=self.listed_at, jobs=(*self.anchor, *records),
            incomplete=("torn record",) if self.said.incomplete else (),
            unreported=frozenset({"a"} if self.said.unreported else ()),
        )  # fmt: skip


class KeptStore(MemoryStore):
    """Remembers how tasks ended."""

    ended: Task | None = None

    def change_tasks(self, changes: Sequence[TaskChange], at: float) -> tuple[Task, ...]:
        moved = super().change_tasks(changes, at)
        self.ended = next((task for task in moved if task.state.ended), self.ended)
        return moved


def cluster(job_state: JobState, **job: Any) -> World:
    """A cluster with one job, whose coordinator calls and whose anchor runs."""
    world = World(cluster_nodes=make_nodes(2), policy=GivesNothing(), timeouts=TIMEOUTS, idle_seconds=math.inf)
    world.store.close()
    world.store = KeptStore()
    world.manager = FactoryArguments(world.cluster_nodes, lambda: world.now)
    world.store.add_job(replace(make_job(1, submitted=SUBMITTED, min_ps=0), anchor="a", address="h:1", **job))
    if job_state is not JobState.SUBMITTED:
        world.store.change_job(KEY, JobChange(state=job_state), world.now)
    world.manager.anchor = (RmJob(handle="a", state=RmJobState.RUNNING, user="ann", submitted=SUBMITTED),)
    world.state = TickState(reconcile_history=ReconcileHistory(calling_since={KEY: 0.0}))
    return world


def played(world: World, said: Iterable[Listed], *, calls: bool = True) -> None:
    for listed in said:
        world.manager.said = listed
        world.now += listed.clock
        if calls:
            world.store.report_progress(KEY, Progress(at=world.now + listed.after))
        world.tick(listed.after)


def outcome(before: str, after: str, world: World, handle: str) -> str:
    assert set(world.manager.stopped) <= {handle}, "something else was stopped"
    return ("." if before == after else after) + ("!" if handle in world.manager.stopped else "")


# Tasks


def task_cell(said: list[Listed], column: str, job_state: JobState = JobState.READY) -> tuple[str, str]:
    """The outcome for a task in the state that a column names, and its note."""
    state, handle = TaskState(column.rstrip("?")), "" if column.endswith("?") else "17"
    world = cluster(JobState.READY)
    (task,) = world.store.ask_tasks([Start(KEY, Role.WORKER, "n1", Resources.of(cpu=1))], world.now)
    submitted = SUBMITTED if handle else None
    world.store.change_tasks([TaskChange(KEY, task.id, state, handle=handle, submitted=submitted)], world.now)
    if job_state.ended:
        world.store.change_job(KEY, JobChange(state=job_state), world.now)
        world.manager.anchor = ()
    world.manager.marks = {"mark": task.tag, "other": task_tag(KEY, "worker-9")}
    played(world, said, calls=not job_state.ended)
    # Another one is started in the place of one that has ended.
    after = world.store.ended or world.tasks(KEY)[0]
    return outcome(state, after.state, world, "17"), after.note


def anchor_cell(said: list[Listed], column: str, *, marked: bool, calls: bool = False) -> tuple[str, str]:
    """The outcome for a job and its anchor, which its user submitted (Slurm) or which dl2d started (``marked``)."""
    state = JobState(column.rstrip("?"))
    world = cluster(state)
    world.store.change_job(KEY, JobChange(anchor="17"), world.now)
    world.manager.anchor = ()
    world.manager.marks = {"mark": task_tag(KEY, ANCHOR) if marked else "", "other": task_tag(KEY, "worker-9")}
    played(world, said, calls=calls)
    after = world.job(KEY)
    return outcome(state, after.state, world, "17"), after.end_reason


#: A task of a job whose coordinator runs. ``asked?``: the answer to its start was lost, so the store has no handle.
TASKS = """
the resource manager has it            | asked?    | asked     | granted  | joined   | draining | drained  | confirmed
not listed                             | .         | .         | .        | .        | .        | .        | .
not listed, twice in an hour           | .         | .         | .        | .        | .        | .        | .
not listed, 4 times in 29 s            | .         | .         | .        | .        | .        | .        | .
not listed, 3 times, clock set forward | .         | .         | .        | .        | .        | .        | .
not listed, 2 times, listed, 2 times   | granted   | granted   | .        | .        | .!       | .!       | .
not listed, 4 times, incomplete        | .         | .         | .        | .        | .        | .        | .
not listed, 2 times, then incomplete   | .         | .         | .        | .        | .        | .        | .
not listed, 3 times in 30 s            | failed    | failed    | failed   | failed   | released | released | failed
not listed, 3 times, clock set back    | failed    | failed    | failed   | failed   | released | released | failed
not listed, 3 times, not reported yet  | failed    | failed    | .        | .        | .        | .        | .
pending                                | .         | .         | .        | .        | .!       | .!       | .
pending, after 601 s                   | draining! | draining! | .        | .        | .!       | .!       | .
pending, after 601 s, incomplete       | .         | .         | .        | .        | .        | .        | .
refused, twice in 31 s                 | draining! | draining! | .        | .        | .!       | .!       | .
pending, refused once after 31 s       | .         | .         | .        | .        | .!       | .!       | .
pending, refused once, listed again    | .         | .         | .        | .        | .!       | .!       | .
pending, refused twice after 31 s      | draining! | draining! | .        | .        | .!       | .!       | .
running                                | granted   | granted   | .        | .        | .        | .        | .
running, after 11 s                    | granted   | granted   | .        | .        | .        | .!       | .
running, after 61 s                    | granted   | granted   | .        | .        | .!       | .!       | .
running, after 61 s, incomplete        | granted   | granted   | .        | .        | .        | .        | .
pending, clock set forward             | .         | .         | .        | .        | .!       | .!       | .
running, clock set forward             | granted   | granted   | .        | .        | .        | .        | .
running, clock set back                | granted   | granted   | .        | .        | .        | .!       | .
ending                                 | granted   | granted   | .        | .        | .        | .        | .
ending, after 11 s                     | granted   | granted   | .        | draining | .        | .!       | draining
ending, after 11 s, incomplete         | granted   | granted   | .        | .        | .        | .        | .
running, after 11 s ending             | granted   | granted   | .        | .        | .        | .!       | .
done                                   | released  | released  | released | released | released | released | released
failed                                 | failed    | failed    | failed   | failed   | released | released | failed
time-limit                             | failed    | failed    | failed   | failed   | released | released | failed
out-of-memory                          | failed    | failed    | failed   | failed   | released | released | failed
cancelled                              | failed    | failed    | failed   | failed   | released | released | failed
preempted                              | failed    | failed    | failed   | failed   | released | released | failed
lost                                   | failed    | failed    | failed   | failed   | released | released | failed
failed, in an incomplete listing       | failed    | failed    | failed   | failed   | released | released | failed
doubled                                | granted   | granted   | .        | .        | .!       | .!       | .
doubled, as failed too                 | granted   | granted   | .        | .        | .        | .        | .
an older failed one with its id        | .         | .         | .        | .        | .        | .        | .
its id is another user's               | failed    | failed    | failed   | failed   | released | released | failed
its id is ann's other job's            | failed    | failed    | failed   | failed   | released | released | failed
its id is another task's               | failed    | failed    | failed   | failed   | released | released | failed
requeued                               | granted   | failed    | failed   | failed   | released | released | failed
its mark was removed                   | .         | granted   | .        | .        | .!       | .!       | .
its user is not known                  | .         | granted   | .        | .        | .        | .        | .
"""
#: A job by its anchor, which its user submitted (Slurm); its coordinator does not call.
ANCHORS = """
the resource manager has it            | submitted | ready     | finished | cancelled | running
not listed                             | .         | .         | .        | .         | .
not listed, twice in an hour           | .         | .         | .        | .         | .
not listed, 3 times, clock set forward | .         | .         | .        | .         | .
not listed, 2 times, listed, 2 times   | .         | .         | .        | .!        | .
not listed, 4 times, incomplete        | .         | .         | .        | .         | .
not listed, 2 times, then incomplete   | .         | .         | .        | .         | .
not listed, 3 times in 30 s            | lost      | lost      | .        | .         | lost
not listed, 3 times, clock set back    | lost      | lost      | .        | .         | lost
pending                                | .         | .         | .        | .!        | .
running                                | .         | .         | .        | .!        | .
running, after 11 s                    | .         | .         | .        | .!        | .
running, after 61 s, incomplete        | .         | .         | .        | .!        | .
ending                                 | .         | .         | .        | .!        | .
done                                   | failed    | finished  | .        | .         | finished
failed                                 | failed    | failed    | .        | .         | failed
time-limit                             | failed    | failed    | .        | .         | failed
out-of-memory                          | failed    | failed    | .        | .         | failed
cancelled                              | cancelled | cancelled | .        | .         | cancelled
preempted                              | cancelled | cancelled | .        | .         | cancelled
lost                                   | lost      | lost      | .        | .         | lost
doubled                                | .         | .         | .        | .!        | .
an older failed one with its id        | .         | .         | .        | .         | .
its id is another user's               | lost      | lost      | .        | .         | lost
its id is ann's other job's            | lost      | lost      | .        | .         | lost
its id is another task's               | lost      | lost      | .        | .         | lost
requeued                               | lost      | lost      | .        | .         | lost
its user is not known                  | .         | .         | .        | .         | .
"""
#: A job by its anchor, which dl2d started.
MARKED_ANCHORS = """
the resource manager has it | submitted | ready | finished | cancelled | running
not listed, 3 times in 30 s | lost      | lost  | .        | .         | lost
running, after 11 s         | .         | .     | .!       | .!        | .
its mark was removed        | .         | .     | .        | .!        | .
its user is not known       | .         | .     | .        | .         | .
its id is another user's    | lost      | lost  | .        | .         | lost
its id is another task's    | lost      | lost  | .        | .         | lost
"""
#: A task of a job that has ended.
TASKS_OF_FINISHED_JOBS = """
the resource manager has it     | asked?   | asked    | granted  | joined   | draining | drained  | confirmed
pending                         | draining | draining | draining | draining | .!       | .!       | draining
running                         | draining | draining | draining | draining | .        | .        | draining
running, after 11 s             | draining | draining | draining | draining | .!       | .!       | draining
running, after 61 s, incomplete | draining | draining | draining | draining | .        | .        | draining
running, clock set back         | draining | draining | draining | draining | .!       | .!       | draining
failed                          | released | released | released | released | released | released | released
not listed                      | .        | .        | .        | .        | .        | .        | .
not listed, 3 times in 30 s     | failed   | released | released | released | released | released | released
its id is another user's        | failed   | released | released | released | released | released | released
"""
TASKS_OF_CANCELLED_JOBS = """
the resource manager has it     | asked?    | asked     | granted   | joined    | draining | drained  | confirmed
pending                         | draining! | draining! | draining! | draining! | .!       | .!       | draining!
running                         | draining! | draining! | draining! | draining! | .!       | .!       | draining!
running, after 61 s, incomplete | draining! | draining! | draining! | draining! | .!       | .!       | draining!
requeued                        | draining! | released  | released  | released  | released | released | released
its user is not known           | .         | draining  | draining  | draining  | .        | .        | draining
"""

Cell = Callable[[list[Listed], str], tuple[str, str]]
TABLES: dict[str, tuple[str, Cell]] = {
    "task": (TASKS, task_cell),
    "anchor": (ANCHORS, partial(anchor_cell, marked=False)),
    "marked anchor": (MARKED_ANCHORS, partial(anchor_cell, marked=True)),
    "task of a finished job": (TASKS_OF_FINISHED_JOBS, partial(task_cell, job_state=JobState.FINISHED)),
    "task of a cancelled job": (TASKS_OF_CANCELLED_JOBS, partial(task_cell, job_state=JobState.CANCELLED)),
}
ROWS = [
    pytest.param(cell, header.split("|")[1:], *row.split("|", 1), id=f"{name}: {row.split('|')[0].strip()}")
    for name, (table, cell) in TABLES.items()
    for header, *rows in [table.strip().splitlines()]
    for row in rows
]


@pytest.mark.parametrize(("cell", "columns", "label", "want"), ROWS)
def test_what_a_tick_makes_of_a_listing(cell: Cell, columns: list[str], label: str, want: str) -> None:
    outcomes = [cell(SAYS[label.strip()], column.strip())[0] for column in columns]
    assert outcomes == [each.strip() for each in want.split("|")]


@pytest.mark.parametrize(
    ("label", "task", "job"),
    [
        ("not listed, 3 times in 30 s", "is not listed any more", "its coordinator is not listed any more"),
        ("its id is another user's", "is not listed any more", "its coordinator is not listed any more"),
        ("requeued", "was requeued, or its id was reused", "its coordinator was requeued, or its id was reused"),
        ("pending", "is pending", ""),
        ("failed", "is failed", "its coordinator ended: is failed"),
        ("lost", "is lost", "its coordinator ended: is lost"),
    ],
)
def test_the_reason_is_recorded(label: str, task: str, job: str) -> None:
    assert task_cell(SAYS[label], "confirmed")[1] == task
    assert anchor_cell(SAYS[label], "running", marked=False)[1] == job


def test_every_pair_of_a_tasks_state_and_what_the_resource_manager_says_has_a_cell() -> None:
    columns = {column.strip() for column in TASKS.strip().splitlines()[0].split("|")[1:]}
    assert columns == {"asked?", *(state for state in TaskState if not state.ended)}
    assert {row.split("|")[0].strip() for row in TASKS.strip().splitlines()[1:]} == SAYS.keys()
    assert {str(state) for state in RmJobState} <= SAYS.keys()


def test_an_anchor_whose_coordinator_calls_runs_whatever_listings_lack() -> None:
    assert anchor_cell(SAYS["not listed, 3 times in 30 s"], "running", marked=False, calls=True) == (".", "")


@pytest.mark.parametrize("is_marked", [False, True], ids=["", "its user gave its anchor the tag of its task"])
def test_a_requeued_job_goes_on_as_another_job_with_what_it_was_started_with(is_marked: bool) -> None:
    world = cluster(JobState.RUNNING, launch=Launch(("python", "train.py"), "/home/ann", (("SEED", "7"),)))
    (task,) = world.store.ask_tasks([Start(KEY, Role.WORKER, "n1", Resources.of(cpu=1))], world.now)
    world.store.change_tasks(
        [TaskChange(KEY, task.id, TaskState.CONFIRMED, handle="17", submitted=SUBMITTED)], world.now
    )
    world.manager.marks = {"mark": task.tag}
    before = world.job(KEY)
    tag = task.tag if is_marked else ""
    later = RmJob(handle="a", state=RmJobState.PENDING, user="ann", submitted=SUBMITTED + 500, requeues=1, tag=tag)
    world.manager.anchor = (structs.replace(later, reason="BeginTime"),)
    played(world, [Listed((RUNS,)), Listed((RUNS,)), Listed((RUNS,), after=11)], calls=False)
    key = KEY._replace(submitted=SUBMITTED + 500)
    ended, new = world.job(KEY), world.job(key)
    assert (ended.state, ended.launch.env) == (JobState.LOST, ())
    assert ended.end_reason == f"was requeued by the resource manager, and goes on from its checkpoint as {key.slug}"
    assert (new.state, new.end_reason, new.address) == (JobState.SUBMITTED, "BeginTime", "")
    assert (new.request, new.owner, new.launch, new.anchor) == (before.request, before.owner, before.launch, "a")
    assert world.manager.stopped == ["17"], "the task that its first run has left, and not the anchor"
    # It is requeued again, and twice between two ticks; then the id is given to another job.
    again = structs.replace(later, submitted=SUBMITTED + 900, requeues=3, state=RmJobState.RUNNING)
    world.manager.anchor = (again,)
    played(world, once(), calls=False)
    last = KEY._replace(submitted=SUBMITTED + 900)
    assert (world.job(key).state, world.job(last).state) == (JobState.LOST, JobState.SUBMITTED)
    world.manager.anchor = (structs.replace(again, submitted=SUBMITTED + 1500, requeues=0),)
    played(world, once(), calls=False)
    assert world.job(last).end_reason == "its coordinator was requeued, or its id was reused"
    assert world.store.job(KEY._replace(submitted=SUBMITTED + 1500)) is None
    played(world, once(), calls=False)
    assert world.manager.stopped == ["17"], "nothing that has the id of the anchor"


def test_what_has_the_id_of_an_ended_jobs_anchor_is_not_stopped_for_the_tag_that_its_user_gave_it() -> None:
    world = cluster(JobState.RUNNING)
    (task,) = world.store.ask_tasks([Start(KEY, Role.WORKER, "n1", Resources.of(cpu=1))], world.now)
    change = TaskChange(KEY, task.id, TaskState.CONFIRMED, handle="17", submitted=SUBMITTED)
    world.store.change_tasks([change], world.now)
    world.store.change_job(KEY, JobChange(state=JobState.FINISHED), world.now)
    world.manager.marks = {"mark": task.tag}
    requeued = record(handle="a", submitted=SUBMITTED + 500, tag=task.tag, requeues=1)
    world.manager.anchor = (requeued, structs.replace(requeued, submitted=SUBMITTED + 900, requeues=0))
    stray = structs.replace(RUNS, handle="99", submitted=SUBMITTED + 500)
    played(world, [Listed((RUNS, stray)), Listed((RUNS, stray), after=11)], calls=False)
    assert world.manager.stopped == ["99"]


@pytest.mark.parametrize(
    ("listed", "state", "reason"),
    [
        (record(RmJobState.RUNNING), JobState.RUNNING, "got SIGTERM"),
        (record(RmJobState.ENDING), JobState.RUNNING, "got SIGTERM"),
        (record(RmJobState.CANCELLED), JobState.CANCELLED, "its coordinator ended: is cancelled"),
        (record(RmJobState.FAILED), JobState.FAILED, "its coordinator ended: is failed"),
        (record(RmJobState.DONE), JobState.CANCELLED, "got SIGTERM"),
        (
            record(RmJobState.PENDING, submitted=SUBMITTED + 500, requeues=1),
            JobState.LOST,
            "goes on from its checkpoint",
        ),
    ],
)
def test_a_coordinator_that_was_ended_from_outside_gets_no_tasks_and_its_anchor_says_how_the_job_ends(
    listed: RmJob, state: JobState, reason: str
) -> None:
    world = cluster(JobState.RUNNING)
    world.store.report_progress(KEY, Progress(at=world.now))
    world.store.change_job(KEY, JobChange(end_reason="got SIGTERM"), world.now)
    world.manager.anchor = (structs.replace(listed, handle="a", tag=""),)
    played(world, once(), calls=False)
    assert world.job(KEY).state is state
    assert reason in world.job(KEY).end_reason
    assert world.tasks() == ()
    assert world.manager.stopped == []
    if state is JobState.RUNNING:  # the script does something else now: it is not stopped
        played(world, [Listed(after=TIMEOUTS.silent_seconds + 1)], calls=False)
        assert world.job(KEY).state is (JobState.FAILED if listed.state is RmJobState.RUNNING else JobState.RUNNING)
        assert world.manager.stopped == []


def test_a_requeued_job_that_registered_before_the_tick_saw_it_is_kept_as_it_is() -> None:
    world = cluster(JobState.RUNNING)
    key = KEY._replace(submitted=SUBMITTED + 500)
    world.store.add_job(replace(make_job(1, submitted=SUBMITTED + 500, min_ps=0), anchor="a", address="h:2"))
    world.manager.anchor = (
        RmJob(handle="a", state=RmJobState.RUNNING, user="ann", submitted=key.submitted, requeues=1),
    )
    played(world, once(), calls=False)
    assert (world.job(KEY).state, world.job(key).address) == (JobState.LOST, "h:2")


def test_an_incomplete_listing_carries_out_no_decision_to_resize_and_is_shown() -> None:
    """Nodes may be missing from it, so that jobs would seem to fit no more, and tasks, so that they would run twice."""
    world = World(cluster_nodes=make_nodes(4))
    try:
        first = world.settled(max_workers=8, max_ps=8)
        second = world.submit(max_workers=8, max_ps=8)
        health = Health(lambda: world.elapsed)
        world.manager.incomplete = ("squeue: cannot read '17|RUN'",)
        world.manager.set_node(structs.replace(make_nodes(4)[3], capacity=Resources.of(cpu=8)))
        world.settle()
        health.completed(world.tick(400.0))
        assert (world.has(first), world.manager.stopped) == ((8, 8), [])
        assert {task.job for task in world.store.tasks(live=False)} == {first}
        assert "listing is incomplete" in health.status().problems[0]
        assert "1 record cannot be read; the daemon's log says which" in health.status().problems[0]
        assert "17" not in health.status().problems[0], "everybody may read it"
        for more, words in (
            ((), ""),
            (world.manager.incomplete, " and 1 record cannot be read; the daemon's log says which"),
        ):
            health.completed(replace(world.tick(1.0), incomplete=(*more, NO_NODES)))
            assert health.status().problems[0].endswith(f"ended or stopped: it has no nodes{words}")
        world.manager.incomplete = ()
        world.settle()
        health.completed(world.tick(400.0))
        assert world.has(first) < (8, 8)
        assert world.has(second) != (0, 0)
        assert health.status().problems == ()
    finally:
        world.close()
