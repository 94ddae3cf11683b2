"""A job that has waited for long starts although smaller jobs keep coming, and holds nobody back in vain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from policies.snapshots import a_snapshot
from tick.world import World

from dl2d.core.cluster import HeldBack, Node, NodeSet, SharedLimit, Snapshot
from dl2d.core.jobs import NOTHING, Allocation, Architecture, Job, JobKey, JobState, Progress
from dl2d.core.policy import Policy
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.policies.drf import Drf
from dl2d.policies.optimus import Optimus
from dl2d.policies.tetris import Tetris
from dl2d.testing import make_job
from dl2d.tick.decision.decide import decide
from dl2d.tick.decision.long_waiting_jobs import held_back
from dl2d.tick.tick_context import Deciders, GuardRules

GPUS = [Node(f"n{number}", Resources.of(cpu=8, gpu=4)) for number in range(2)]
#: Of the jobs in these tests, later ones are held back after this time.
AFTER = 100.0


def of_size(workers: int) -> dict[str, Any]:
    return {
        "worker": Resources.of(cpu=1, gpu=1), "ps": NO_RESOURCES, "architecture": Architecture.ALLREDUCE,
        "min_workers": workers, "max_workers": workers, "min_ps": 0, "max_ps": 0,
    }  # fmt: skip


def report_all(world: World, began: dict[JobKey, float], *, without_end: JobKey | None) -> None:
    """Each job reports its state; it trains from its first tasks on, all but one for 40 s."""
    for job in world.store.jobs(live=True):
        if world.has(job.key) != NOTHING:
            began.setdefault(job.key, world.now)
        ends = job.key != without_end and world.now - began.get(job.key, world.now) >= 40.0
        state = "finished" if ends else "running" if job.key in began else "waiting"
        world.coordinator.beat(job.key, world.now, state=state)


@pytest.mark.parametrize(
    ("policy", "rule", "starts"),
    [
        (Drf(), 0.0, False), (Drf(), AFTER, True), (with_checkpoint(), 0.0, False), (with_checkpoint(), AFTER, True),
        (Optimus(), AFTER, True), (Tetris(), AFTER, True),
    ],
)  # fmt: skip
def test_a_job_that_needs_the_whole_cluster_starts_beside_a_stream_of_small_ones(
    policy: Policy, rule: float, starts: bool
) -> None:
    """Four small jobs run at any time, each for 40 s; one needs all eight GPUs."""
    world = World(
        cluster_nodes=GPUS,
        url="",
        policy=policy,
        fallback=Drf(),
        slot_seconds=10.0,
        rules=GuardRules(hold_back_after=rule),
    )
    began: dict[JobKey, float] = {}
    large: JobKey | None = None
    reasons = set[str]()
    for step in range(40):
        world.submit(**of_size(1))
        if step == 5:
            large = world.submit(**of_size(8))
        report = world.tick(10.0)
        reasons.update(entry.binding_reason.text for entry in report.slot_decision.in_force.jobs)
        report_all(world, began, without_end=large)
    assert (large in began) is starts
    assert any(text.startswith("waits until job 7 (") for text in reasons) is starts, reasons


def waiting(number: int, submitted: float, workers: int) -> Job:
    return make_job(number, submitted=int(submitted), state=JobState.READY, **of_size(workers))


def running(number: int, *, for_seconds: float = 1.0, steps_left: int | None = None) -> Job:
    """A job that has run for a while and does one step a second, as it said last at 900."""
    total = None if steps_left is None else 10 + steps_left
    progress = Progress(at=900.0, version=10, total_versions=total, epoch=0.5, steps_per_second=1.0)
    job = make_job(number, submitted=0, state=JobState.RUNNING, **of_size(1))
    return replace(job, progress=progress, started_at=1000.0 - for_seconds)


def asked(snapshot: Snapshot, after: float = AFTER, unable: tuple[JobKey, ...] = ()) -> HeldBack | None:
    return held_back(snapshot, LoadBalance(), after_seconds=after, unable=unable)


@pytest.mark.parametrize(
    ("waited", "holds"), [(99, False), (100, True), (149, True), (150, False), (199, False), (200, True), (301, False)]
)
def test_others_are_held_back_in_the_first_half_of_each_doubling(waited: int, holds: bool) -> None:
    jobs = [running(0), waiting(1, 1000 - waited, 8), waiting(2, 999, 1)]
    found = asked(a_snapshot(jobs, GPUS, {0: Allocation(1, 0)}))
    assert found == (HeldBack(jobs[1].key, (jobs[2].key,)) if holds else None)


@pytest.mark.parametrize(
    ("for_seconds", "steps_left", "holds"),
    [
        (49, None, True), (51, None, False), (1000, None, False), (1000, 0, False), (1, 100, True), (1, 149, True),
        (1, 151, False),
    ],
)  # fmt: skip
def test_nobody_is_held_back_for_a_job_that_would_have_no_room_all_the_same(
    for_seconds: float, steps_left: int | None, holds: bool
) -> None:
    """The period ends at 1050, when it has waited for 1.5 times as long."""
    jobs = [running(0, for_seconds=for_seconds, steps_left=steps_left), waiting(1, 900, 8), waiting(2, 950, 1)]
    assert (asked(a_snapshot(jobs, GPUS, {0: Allocation(1, 0)})) is not None) is holds


def test_a_job_without_end_does_not_keep_the_remainder_of_the_cluster_idle() -> None:
    """However long it and a job that needs all GPUs wait for each other, small jobs use the other GPUs."""
    world = World(
        cluster_nodes=GPUS, url="", fallback=Drf(), slot_seconds=10.0, rules=GuardRules(hold_back_after=AFTER)
    )
    endless = world.submit(**of_size(1))
    began: dict[JobKey, float] = {}
    busy = []
    for step in range(100):
        if step == 2:
            large = world.submit(**of_size(8))
        if step > 2:
            world.submit(**of_size(1))
        world.tick(10.0)
        report_all(world, began, without_end=endless)
        busy.append(sum(world.has(job.key).workers for job in world.store.jobs(live=True)))
    assert large not in began
    assert min(busy[10:]) > 2


def test_many_jobs_that_can_never_start_do_not_hide_one_that_can() -> None:
    endless = [waiting(number, 890, 100 + number) for number in range(1, 9)]
    jobs = [*endless, waiting(10, 900, 8), waiting(11, 950, 1), running(12)]
    assert asked(a_snapshot(jobs, GPUS, {10: Allocation(1, 0)})) == HeldBack(jobs[8].key, (jobs[9].key,))


def test_a_silent_job_reserves_no_room() -> None:
    jobs = [waiting(1, 900, 6), waiting(2, 910, 2), waiting(3, 920, 2)]
    assert asked(a_snapshot(jobs, GPUS), unable=(jobs[1].key,)) is None


def test_jobs_of_others_are_not_waited_for() -> None:
    nodes = [Node("n0", Resources.of(cpu=8, gpu=4), Resources.of(gpu=1)), GPUS[1]]
    assert asked(a_snapshot([waiting(1, 900, 8), waiting(2, 950, 1)], nodes)) is None


def test_a_job_that_has_room_leaves_the_remainder_to_later_ones() -> None:
    jobs = [waiting(1, 900, 6), waiting(2, 910, 1), waiting(3, 920, 1), waiting(4, 930, 1)]
    assert asked(a_snapshot(jobs, GPUS)) == HeldBack(jobs[0].key, (jobs[3].key,))


def test_earlier_jobs_and_those_on_other_nodes_are_not_held_back() -> None:
    other = Node("other", Resources.of(cpu=8, gpu=4))
    jobs = [waiting(1, 890, 9), running(2), waiting(3, 900, 8), waiting(4, 910, 1), waiting(5, 920, 1)]
    snapshot = structs.replace(
        a_snapshot(jobs, [*GPUS, other], {1: Allocation(1, 0)}),
        node_sets=(
            NodeSet(tuple(job.key for job in jobs[:4]), frozenset({"n0", "n1"}), "partition a"),
            NodeSet((jobs[4].key,), frozenset({"other"}), "partition b"),
        ),
    )
    assert asked(snapshot) == HeldBack(jobs[2].key, (jobs[3].key,))


def test_a_job_that_cannot_start_holds_nobody_back() -> None:
    jobs = [running(0), waiting(1, 900, 8), waiting(2, 950, 1)]
    snapshot = a_snapshot(jobs, GPUS, {0: Allocation(1, 0)})
    limit = SharedLimit((jobs[1].key,), (("gpu", 4000),), "jobs of ann may hold gpu=4 together")
    assert asked(snapshot, unable=(jobs[1].key,)) is None
    assert asked(structs.replace(snapshot, limits=(limit,))) is None
    assert asked(snapshot, after=0.0) is None


def test_others_are_held_back_until_it_trains() -> None:
    """A policy may take its tasks away again before that."""
    jobs = [waiting(1, 900, 8), waiting(2, 950, 1)]
    has_tasks = structs.replace(a_snapshot(jobs, GPUS, {0: Allocation(8, 0)}), floors=())
    assert asked(has_tasks) == HeldBack(jobs[0].key, (jobs[1].key,))
    assert asked(structs.replace(has_tasks, at=1070.0)) == HeldBack(jobs[0].key, (jobs[1].key,)), "its period is over"
    trains = replace(jobs[0], progress=Progress(at=990.0, epoch=0.1))
    assert asked(structs.replace(has_tasks, jobs=(trains, jobs[1]))) is None


def test_the_decision_on_a_recorded_snapshot_is_the_same() -> None:
    jobs = [running(0), waiting(1, 900, 8), waiting(2, 950, 1)]
    snapshot = a_snapshot(jobs, GPUS, {0: Allocation(1, 0)})
    snapshot = structs.replace(snapshot, held_back=asked(snapshot))
    decision = decide(snapshot, Deciders(Drf(), Drf(), LoadBalance()), 1)
    assert [str(entry.allocation) for entry in decision.jobs] == ["1w+0ps", "0w+0ps", "0w+0ps"]
    assert decision.jobs[2].binding_reason.text == (
        "waits until job 1 (job), which was submitted earlier, has started: that has waited for its minimum size of "
        "8w+0ps for 0.0 h"
    )
