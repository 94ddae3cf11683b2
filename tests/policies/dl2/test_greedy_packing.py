from __future__ import annotations

from collections import Counter

import hypothesis
import numpy as np
from hypothesis import strategies as st
from policies.snapshots import a_job, a_snapshot, cluster, snapshots

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Reason
from dl2d.core.jobs import NOTHING, Role
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.resources import Resources
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.policies.common.greedy_allocation import GreedyAllocation
from dl2d.policies.dl2.greedy_packing import FirstNodeOnlyPacking
from dl2d.policies.drf import Drf
from dl2d.tick.place.place import place

SMALL, LARGE = Resources.of(cpu=2), Resources.of(cpu=2, gpu=4)


def given(
    snapshot: Snapshot, sizes: list[tuple[int, int]], weight: list[tuple[float, float]]
) -> tuple[FirstNodeOnlyPacking, GreedyAllocation, Packing, list[int]]:
    packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, Dl2Paper())
    filling = GreedyAllocation(snapshot, packing)
    heads = FirstNodeOnlyPacking(filling, packing)
    blocked = heads.give(snapshot.jobs, np.array(sizes), np.array(weight))
    return heads, filling, packing, sorted(blocked)


@hypothesis.given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8), st.booleans()), min_size=1, max_size=8))
def test_of_tasks_of_two_cpus_what_fits_in_total_fits_on_nodes(wanted: list[tuple[int, int, bool]]) -> None:
    """On nodes with 8 CPUs and 8 GPUs; a worker with GPUs takes half of them. Nodes are just enough in total."""
    jobs = [
        a_job(number, worker=LARGE if gpu else SMALL, ps=SMALL, max_workers=4, max_ps=8)
        for number, (_, _, gpu) in enumerate(wanted)
    ]
    sizes = [(workers, ps) for workers, ps, _ in wanted]
    tasks = sum(map(sum, sizes))
    large = sum(workers for workers, _, gpu in wanted if gpu)
    snapshot = a_snapshot(jobs, cluster(max(-(-tasks // 4), -(-large // 2)), cpu=8, gpu=8))
    weight = [(0.75 if gpu else 0.25, 0.25) for _, _, gpu in wanted]
    heads, filling, _, blocked = given(snapshot, sizes, weight)
    assert not blocked
    assert [filling.allocations[job.key] for job in jobs] == sizes
    assert Counter((key, role) for key, role, _ in heads.nodes) == {
        (job.key, role): size[place]
        for job, size in zip(jobs, sizes, strict=True)
        for place, role in enumerate((Role.WORKER, Role.PS))
    }


def test_where_small_tasks_would_keep_a_job_out_minimum_sizes_go_first() -> None:
    """Ten PSs with a CPU each leave no node with the four that the other's worker takes."""
    small = a_job(1, worker=Resources.of(cpu=1), ps=Resources.of(cpu=1), max_workers=4, max_ps=10)
    large = a_job(2, worker=Resources.of(cpu=4), ps=Resources.of(cpu=1))
    snapshot = a_snapshot([small, large], cluster(2, cpu=8))
    _, filling, packing, blocked = given(snapshot, [(1, 10), (1, 1)], [(0.1, 0.1), (0.4, 0.1)])
    assert filling.allocations[large.key] == (1, 1)
    assert filling.allocations[small.key] == (1, 10)
    assert not blocked
    assert Resources.total(packing.room().values()) == Resources()


def test_a_job_without_room_for_its_minimum_size_gets_nothing_and_is_told_why() -> None:
    jobs = [a_job(number, worker=Resources.of(cpu=4), ps=Resources.of(cpu=1)) for number in (1, 2)]
    _, filling, _, _ = given(a_snapshot(jobs, cluster(1, cpu=8)), [(1, 2), (1, 1)], [(0.5, 0.1), (0.5, 0.1)])
    assert [filling.allocations[job.key] for job in jobs] == [(1, 2), NOTHING]
    packing = Packing.for_decision(cluster(1, cpu=8), (), Dl2Paper())
    heads = FirstNodeOnlyPacking(GreedyAllocation(a_snapshot(jobs, cluster(1, cpu=8)), packing), packing)
    blocked = heads.give(jobs, np.array([(1, 2), (1, 1)]), np.array([(0.5, 0.1), (0.5, 0.1)]))
    assert {number: why.constraint for number, why in blocked.items()} == {1: Constraint.CAPACITY}


def test_workers_beyond_a_count_that_is_allowed_are_taken_back() -> None:
    job = a_job(1, worker=Resources.of(cpu=2), ps=Resources.of(cpu=1), max_workers=4, allowed_workers=(1, 2, 4))
    heads, filling, packing, blocked = given(a_snapshot([job], cluster(1, cpu=8)), [(4, 1)], [(0.2, 0.1)])
    assert filling.allocations[job.key] == (2, 1)
    assert len(heads.nodes) == 3
    assert Resources.total(packing.room().values()) == Resources.of(cpu=3)
    assert blocked == [0]


@hypothesis.given(snapshots, st.integers(0, 10**6))
@hypothesis.settings(max_examples=80)
def test_placing_puts_every_task_on_its_node(snapshot: Snapshot, seed: int) -> None:
    draw = np.random.default_rng(seed)
    bare = a_snapshot(list(snapshot.jobs), list(snapshot.nodes))
    sizes = []
    for job in bare.jobs:
        counts = [count for count in range(1, job.request.max_workers + 1) if job.request.allows(count)]
        sizes.append((int(draw.choice(counts)), int(draw.integers(job.request.min_ps, job.request.max_ps + 1))))
    weight = [tuple(draw.random(2)) for _ in bare.jobs]
    heads, filling, _, _ = given(bare, sizes, weight)
    for job in bare.jobs:
        filling.refuse(job, Reason(Constraint.SATISFIED, "has what it was to have"))
    plan = place(bare, filling.decision(Drf(), nodes=heads.nodes), Dl2Paper())
    assert not plan.deferred
    assert Counter((start.job, start.role, start.node) for start in plan.starts) == Counter(heads.nodes)
    for job, size in zip(bare.jobs, sizes, strict=True):
        has = filling.allocations[job.key]
        assert has == NOTHING or (job.request.min_workers <= has.workers <= size[0])
        assert has == NOTHING or (job.request.min_ps <= has.ps <= size[1])
