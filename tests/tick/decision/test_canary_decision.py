"""Mode canary in whole ticks: the policy decides on the jobs of its group, the fallback on the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tick.world import GivesNothing, World

from dl2d.core.cluster import Node, Snapshot
from dl2d.core.daemon_mode_and_canary import Canary, Mode, fraction
from dl2d.core.decision import CANARY, Constraint, Decision
from dl2d.core.jobs import NOTHING, Allocation, JobKey, Owner
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import NO_EVIDENCE, Policy
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.srtf import Srtf
from dl2d.policies.tetris import Tetris
from dl2d.testing import make_job, make_nodes
from dl2d.tick.decision.decide import decide
from dl2d.tick.policy_check.policy_failures import SetAside
from dl2d.tick.tick_context import Context, Deciders

POLICIES: list[Policy] = [Drf(), Fifo(), Srtf(), Tetris()]


class Fails:
    """A policy that raises an error."""

    name, version, needs = "fails", "1", NO_EVIDENCE

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        raise ArithmeticError("no weights")


class CanaryWorld(World):
    """A cluster in mode canary. The group are the jobs of account ``new``; the fallback is FIFO."""

    canary: Canary
    withdrawn: SetAside | None = None

    def begin(self, **changes: Any) -> None:
        plain = {"policy": self.policy.name, "version": self.policy.version, "fallback": "fifo", "account": "new"}
        self.canary = self.store.keep_canary(Canary(began_at=self.now, **{**plain, **changes}))

    def context(self) -> Context:
        canary = None if self.withdrawn else self.canary
        return replace(super().context(), canary=canary, withdrawn=self.withdrawn)

    def add(self, account: str, **changes: Any) -> JobKey:
        self.number += 1
        job = make_job(self.number, submitted=int(self.now), **changes)
        self.store.add_job(replace(job, owner=Owner("ann", 1000, 1000, account)))
        self.tick(1.0)
        self.beat()
        return job.key


def world(policy: Policy, **more: Any) -> Iterator[CanaryWorld]:
    with closing(CanaryWorld(policy=policy, mode=Mode.CANARY, **more)) as made:
        made.begin()
        yield made


@pytest.fixture
def drf() -> Iterator[CanaryWorld]:
    yield from world(Drf())


@pytest.fixture
def nothing() -> Iterator[CanaryWorld]:
    """The policy never gives a job anything."""
    yield from world(GivesNothing())


@pytest.fixture
def failing() -> Iterator[CanaryWorld]:
    yield from world(Fails())


#: Jobs by account, with the most workers that each may have; and what they get on 4 nodes of 2 GPUs (a worker needs 1).
#: DRF decides on the jobs of ``new`` and would give all the same; FIFO on the others, as many as they may have each, in
#: submit order.
SHARED = """
jobs in submit order          | workers
new 4                         | 4
old 4                         | 4
new 8                         | 8
old 8                         | 8
new 8, new 8                  | 4 4
old 8, old 8                  | 8 0
old 4, new 8                  | 4 4
old 4, new 8, new 8           | 4 2 2
new 4, old 8                  | 4 4
new 2, old 8                  | 2 6
old 6, new 8                  | 6 2
old 6, new 8, new 8           | 6 1 1
old 4, old 4, new 4           | 4 4 0
new 4, new 4, old 4           | 4 4 0
"""


@pytest.mark.parametrize("row", SHARED.strip().splitlines()[1:])
def test_what_jobs_of_both_groups_get(drf: CanaryWorld, row: str) -> None:
    jobs, want = (part.strip() for part in row.split("|"))
    keys = []
    for text in jobs.split(", "):
        account, most = text.split()
        keys.append(drf.add(account, max_workers=int(most), min_ps=0, max_ps=0))
    drf.settle()
    report = drf.tick(1.0)
    given_to = report.decision.allocations()
    assert " ".join(str(given_to[key].workers) for key in keys) == want
    for entry, text in zip(report.decision.jobs, jobs.split(", "), strict=True):
        assert entry.by == (("drf", Drf().version) if text.startswith("new") else ("fifo", Fifo().version))


def test_the_slot_and_each_job_name_who_decided(drf: CanaryWorld) -> None:
    new, old = drf.add("new"), drf.add("old")
    drf.tick(1.0)
    (summary,) = drf.store.slots(limit=1)
    assert summary.policy == CANARY
    assert summary.policy_version == f"drf {Drf().version} beside fifo {Fifo().version}"
    assert [drf.store.decisions(key, limit=1)[0].policy for key in (new, old)] == ["drf", "fifo"]
    slot = drf.store.slot(summary.number)
    assert slot is not None
    assert slot.decision.allocations().keys() == {new, old}


def test_a_job_stays_in_the_group_that_is_recorded(drf: CanaryWorld) -> None:
    key = drf.add("new")
    drf.settle()
    drf.canary = replace(drf.canary, account="other")  # as if the rule had said something else when it came
    drf.tick(1.0)
    drf.add("old")
    report = drf.tick(1.0)
    assert [entry.by and entry.by.name for entry in report.decision.jobs] == ["drf", "fifo"]
    assert report.slot_decision.canary_jobs == {key}


def test_a_policy_that_gives_nothing_harms_its_own_group_only_and_is_set_aside(nothing: CanaryWorld) -> None:
    new, old = nothing.add("new"), nothing.add("old", max_workers=2)
    nothing.settle()
    assert nothing.has(old).workers == 2
    assert nothing.has(new) == NOTHING
    for _ in range(8):
        nothing.settle(1)
        report = nothing.tick(50.0)
    assert report.set_aside is not None
    assert report.set_aside.reason.startswith("left 1 job waiting for ")
    nothing.settle()
    assert nothing.has(new).workers > 0


def test_jobs_that_the_fallback_leaves_waiting_are_not_the_policys_fault(drf: CanaryWorld) -> None:
    drf.fallback = GivesNothing()
    drf.add("new", max_workers=1)
    drf.add("old")
    for _ in range(8):
        drf.settle(1)
        assert drf.tick(50.0).set_aside is None


def test_a_policy_that_fails_leaves_all_jobs_to_the_fallback_and_that_is_counted(failing: CanaryWorld) -> None:
    failing.add("new")
    failing.add("old")
    report = failing.tick(1.0)
    assert report.policy_failures.consecutive >= 1
    assert "no weights" in report.policy_failures.cause
    assert report.slot_decision.proposed.policy == "fifo"
    assert all(entry.guarded[0].constraint is Constraint.FALLBACK for entry in report.slot_decision.proposed.jobs)


def test_a_policy_whose_group_is_empty_is_not_asked(failing: CanaryWorld) -> None:
    failing.add("old")
    report = failing.tick(1.0)
    assert report.policy_failures.consecutive == 0
    assert [entry.by and entry.by.name for entry in report.decision.jobs] == ["fifo"]


def test_a_withdrawn_policy_is_not_asked_until_the_mode_or_version_changes(failing: CanaryWorld) -> None:
    failing.withdrawn = SetAside("fails", "1", "was withdrawn (canary 1): it is slow")
    failing.add("new")
    report = failing.tick(1.0)
    (entry,) = report.slot_decision.proposed.jobs
    assert entry.guarded[0].text == "policy fails is set aside: it was withdrawn (canary 1): it is slow"
    assert report.policy_failures.consecutive == 0
    assert failing.state.set_aside is None  # the next context says whether it still is


def test_the_jobs_of_a_partition_are_those_whose_tasks_may_run_there() -> None:
    canary = Canary(policy="a", version="1", fallback="b", began_at=0, partition="p")
    jobs = [replace(make_job(1), owner=Owner("ann", 1, 1, partition=name)) for name in ("p", "q,p", "pq", "")]
    assert [canary.includes(job) for job in jobs] == [True, True, False, False]


def test_a_share_is_a_part_of_every_larger_share() -> None:
    jobs = [make_job(number, submitted=1000 + number) for number in range(2000)]
    tenth, half = (
        {
            job.key
            for job in jobs
            if Canary(policy="a", version="1", fallback="b", began_at=0, share=share).includes(job)
        }
        for share in (0.1, 0.5)
    )
    assert tenth < half
    assert len(tenth) / len(jobs) == pytest.approx(0.1, abs=0.03)
    assert len(half) / len(jobs) == pytest.approx(0.5, abs=0.04)
    assert fraction(JobKey("main", "17", 1_700_000_000)) == 0.09810284858105403


@st.composite
def snapshots(draw: st.DrawFn) -> tuple[Snapshot, frozenset[JobKey]]:
    """Jobs of any sizes on a few nodes of which others use a part, and a group of them."""
    busy = draw(st.booleans())
    nodes = [
        Node(node.name, node.capacity, Resources.of(cpu=draw(st.integers(0, 8)), gpu=draw(st.integers(0, 2))))
        if busy
        else node
        for node in make_nodes(draw(st.integers(1, 4)))
    ]
    jobs = tuple(
        make_job(
            number, max_workers=draw(st.integers(1, 6)), min_ps=0, max_ps=draw(st.integers(0, 3)),
            worker=Resources.of(cpu=draw(st.integers(1, 8)), gpu=draw(st.integers(0, 1))),
            epochs=draw(st.integers(1, 50)),
        )
        for number in range(draw(st.integers(0, 7)))
    )  # fmt: skip
    group = frozenset(job.key for job in jobs if draw(st.booleans()))
    return Snapshot(at=1000.0, slot=1, nodes=tuple(nodes), jobs=jobs, tasks=()), group


def test_a_worker_that_has_room_on_no_node_alone_is_not_given_to_the_other_group_as_well() -> None:
    demands = ({"cpu": 2}, {"cpu": 7}, {"cpu": 1, "gpu": 1}, {"cpu": 4})
    jobs = tuple(
        make_job(number, max_workers=1, min_ps=0, max_ps=(2, 0, 0, 1)[number], worker=Resources.of(demand), epochs=1)
        for number, demand in enumerate(demands)
    )
    snapshot = Snapshot(at=1000.0, slot=1, nodes=tuple(make_nodes(2)), jobs=jobs, tasks=())
    decision = decide(snapshot, Deciders(Drf(), Drf(), LoadBalance()), 3, canary={jobs[0].key, jobs[1].key})
    total = Resources.total(
        job.request.demand_of(entry.allocation) for job, entry in zip(jobs, decision.jobs, strict=True)
    )
    assert total.fits_in(Resources.total(node.capacity for node in snapshot.nodes))


@given(snapshots(), st.sampled_from(POLICIES), st.sampled_from(POLICIES))
@settings(max_examples=60, deadline=None)
def test_one_policy_decides_on_each_job_and_both_stay_within_the_cluster(
    drawn: tuple[Snapshot, frozenset[JobKey]], policy: Policy, fallback: Policy
) -> None:
    snapshot, group = drawn
    decision = decide(snapshot, Deciders(policy, fallback, LoadBalance()), 3, canary=group)
    assert [entry.job for entry in decision.jobs] == [job.key for job in snapshot.jobs]
    requests = {job.key: job.request for job in snapshot.jobs}
    for entry in decision.jobs:
        decider = policy if entry.job in group else fallback
        assert entry.by == (decider.name, decider.version)
    total = Resources.total(requests[entry.job].demand_of(entry.allocation) for entry in decision.jobs)
    free = Resources.total(node.capacity.minus(node.used) for node in snapshot.nodes)
    assert total.fits_in(free)
    if snapshot.jobs and not any(node.used.thousandths for node in snapshot.nodes):
        assert total.thousandths, "all jobs wait on an idle cluster, on which each of them fits"


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=5),
    st.sampled_from(POLICIES),
)
@settings(max_examples=3, deadline=None)
def test_every_job_runs_in_the_end(jobs: list[tuple[bool, int, int]], policy: Policy) -> None:
    with closing(CanaryWorld(policy=policy, mode=Mode.CANARY, cluster_nodes=make_nodes(2))) as made:
        made.begin()
        keys = [
            made.add("new" if new else "old", max_workers=most, min_workers=min(least, most), max_ps=1)
            for new, most, least in jobs
        ]
        ended: set[JobKey] = set()
        for _ in range(4 * len(keys)):
            made.settle(3)
            made.tick(15.0)  # tasks of a job that ended are stopped
            made.settle(3)
            capacity = Resources.total(node.capacity for node in made.cluster_nodes)
            assert Resources.total(task.demand for task in made.store.tasks(live=True)).fits_in(capacity)
            running = [key for key in keys if key not in ended and made.has(key) > Allocation(0, 0)]
            if not running:
                break
            made.beat(running[0], state="finished")
            ended.add(running[0])
        assert ended == set(keys)
