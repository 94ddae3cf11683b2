from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from msgspec import structs
from policies.snapshots import NO_PS, a_job, a_snapshot, ask, cluster, given, snapshots

from dl2d.core.cluster import Node, NodeState, Snapshot, Task, TaskState
from dl2d.core.decision import Constraint, Decision
from dl2d.core.jobs import NOTHING, Allocation, JobKey, Progress, Role
from dl2d.core.json_codec import decode, encode
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.resources import Resources
from dl2d.placement.best_fit import BestFit
from dl2d.placement.load_balance import LoadBalance
from dl2d.placement.optimus import Optimus
from dl2d.policies.tetris import Tetris
from dl2d.simulation.replay import Rules, replay
from dl2d.simulation.simulation_presets import PresetName, TrueSpeeds, preset
from dl2d.simulation.workload.workload_file import read_workload
from dl2d.tick.policy_check.decision_check import check_decision

W, P = Role.WORKER, Role.PS


def a_worker(number: int, seconds: float, *, most: int = 1, **demand: float) -> Any:
    """A job of workers alone that has so many seconds left with one of them."""
    demands = {"worker": Resources.of(demand), **NO_PS, "max_workers": most}
    job = a_job(number, **demands, epochs=seconds, samples_per_epoch=1)
    return replace(job, progress=Progress(samples_per_second=1.0, workers=1))


def order(decision: Decision) -> list[str]:
    return [key.id for key, _ in decision.actions]


def nodes_of(decision: Decision) -> list[tuple[str, Role, str]]:
    return [(key.id, role, node) for key, role, node in decision.nodes]


@pytest.mark.parametrize(
    ("shortness", "expected", "scores"),
    [
        # Alignment 0.4 x 1 + 0.1 x 1 = 0.5 and 0.2 + 0.2 = 0.4, then what the other leaves of the node is 0.8 and 0.8
        # of it, or 0.6 and 0.9. Work 8 s x 0.5 = 4 and 5 s x 0.4 = 2.
        pytest.param(0.0, ["1", "2"], [0.5, 0.2 * 0.6 + 0.2 * 0.9], id="alignment alone"),
        # Weight 0.2 x 0.45 / 3 = 0.03: 0.5 - 0.12 = 0.38 against 0.4 - 0.06 = 0.34; alone, 0.2 x 0.3 / 2 x 2 less.
        pytest.param(0.2, ["1", "2"], [0.38, 0.3 * 0.8], id="a little for what is soon done"),
        # Weight 0.45 / 3 = 0.15: 0.5 - 0.6 = -0.1 against 0.4 - 0.3 = 0.1; alone, a job's score is 0.
        pytest.param(1.0, ["2", "1"], [0.0, 0.1], id="as much, as in the paper"),
    ],
)
def test_alignment_and_remaining_work_weigh_as_in_the_paper(shortness, expected, scores) -> None:
    jobs = [a_worker(1, 8, cpu=4, gpu=1), a_worker(2, 5, cpu=2, gpu=2)]
    decision = ask(Tetris(shortness=shortness), a_snapshot(jobs, cluster(1, cpu=10, gpu=10)))
    assert order(decision) == expected
    assert [entry.alternatives[0].score for entry in decision.jobs] == pytest.approx(scores)


def test_what_the_machine_has_left_decides_what_aligns() -> None:
    """Half of the GPUs are taken by others: what needs CPUs fits that best, 0.3 + 0.05 against 0.1 + 0.15."""
    jobs = [a_worker(1, 1, cpu=1, gpu=3), a_worker(2, 1, cpu=3, gpu=1)]
    node = Node("n", Resources.of(cpu=10, gpu=10), Resources.of(gpu=5))
    assert order(ask(Tetris(), a_snapshot(jobs, [node]))) == ["2", "1"]


@pytest.mark.parametrize(
    ("progress", "first"),
    [
        pytest.param([{}, {}], "1", id="equal: who came first"),
        pytest.param([{}, {"epoch": 50.0}], "2", id="less left"),
        pytest.param([{"samples_per_second": 1.0}, {"samples_per_second": 2.0}], "2", id="faster"),
        pytest.param(
            [{"samples_per_second": 1.0, "workers": 1}, {"samples_per_second": 2.0, "workers": 4}], "1",
            id="faster, but with more: less work for the time it takes",
        ),
        pytest.param([{"samples_per_second": float("inf")}, {"samples_per_second": 1.0}], "1", id="no measurement"),
    ],
)  # fmt: skip
def test_of_jobs_alike_the_one_with_least_work_left_goes_first(progress, first) -> None:
    shape: dict[str, Any] = {"worker": Resources.of(cpu=1), **NO_PS, "epochs": 100, "samples_per_epoch": 1}
    jobs = [replace(a_job(number, **shape), progress=Progress(**said)) for number, said in enumerate(progress, 1)]
    assert set(order(ask(Tetris(), a_snapshot(jobs, cluster(1, cpu=3))))) == {first}


def test_machines_are_filled_one_after_the_other_with_whole_bundles() -> None:
    jobs = [a_job(1, max_workers=3, max_ps=3), a_job(2, epochs=2, max_workers=2, max_ps=2)]
    decision = ask(Tetris(), a_snapshot(jobs, cluster(3, cpu=6, gpu=2)))
    assert nodes_of(decision) == [
        ("1", W, "n0"), ("1", P, "n0"), ("1", W, "n0"), ("1", P, "n0"), ("1", W, "n1"), ("1", P, "n1"),
        ("2", W, "n1"), ("2", P, "n1"), ("2", W, "n2"), ("2", P, "n2"),
    ]  # fmt: skip


def test_a_worker_and_its_ps_lie_apart_where_no_machine_has_room_for_both() -> None:
    nodes = [Node("cpus", Resources.of(cpu=4)), Node("gpus", Resources.of(cpu=2, gpu=1))]
    decision = ask(Tetris(), a_snapshot([a_job(1)], nodes))
    assert nodes_of(decision) == [("1", W, "gpus"), ("1", P, "cpus")]


def test_a_minimum_larger_than_a_machine_goes_on_at_the_next_all_or_none() -> None:
    three = a_job(1, min_workers=3, max_ps=1)
    assert given(Tetris(), a_snapshot([three], cluster(1, cpu=9, gpu=2))) == [NOTHING]
    decision = ask(Tetris(), a_snapshot([three, a_job(2, max_workers=1, max_ps=1)], cluster(2, cpu=9, gpu=2)))
    assert decision.allocations() == {three.key: (3, 1), JobKey("c", "2", 1002): (1, 1)}
    assert Counter(nodes_of(decision))["1", W, "n0"] == 2
    # What it could not use as a whole is there for another.
    two = ask(Tetris(), a_snapshot([three, a_job(2)], cluster(1, cpu=9, gpu=2)))
    assert [entry.allocation for entry in two.jobs] == [NOTHING, (2, 2)]


def test_only_allowed_worker_counts_are_given() -> None:
    job = a_job(1, allowed_workers=(1, 4), max_ps=1)
    assert given(Tetris(), a_snapshot([job], cluster(3, cpu=8, gpu=1))) == [(1, 1)]
    assert given(Tetris(), a_snapshot([job], cluster(4, cpu=8, gpu=1))) == [(4, 1)]


def test_bundles_stay_whole_where_that_is_asked_for() -> None:
    snapshot = a_snapshot([a_job(1, max_ps=2)], cluster(1, cpu=20, gpu=4))
    assert given(Tetris(), snapshot) == [(4, 2)]
    assert given(Tetris(whole_bundles=True), snapshot) == [(2, 2)]


def test_tasks_that_run_stay_where_they_are_and_free_room_is_packed_around_them() -> None:
    jobs = [a_job(1, max_workers=3, max_ps=3), a_job(2, max_workers=1, max_ps=1)]
    snapshot = a_snapshot(jobs, cluster(2, cpu=9, gpu=2), {0: Allocation(2, 1)})
    before = Counter((task.job.id, task.role, task.node) for task in snapshot.tasks)
    decision = ask(Tetris(), snapshot)
    assert [entry.allocation for entry in decision.jobs] == [(3, 3), (1, 1)]
    assert before <= Counter(nodes_of(decision))


def test_a_long_job_that_runs_gives_its_room_to_a_short_one_down_to_its_floor() -> None:
    """The newest of its tasks leave: the room of worker-1 and worker-2, on one machine, goes to the other."""
    long, short = a_worker(1, 1000, most=3, cpu=1), a_worker(2, 1, most=2, cpu=1)
    snapshot = a_snapshot([long, short], cluster(1, cpu=3), {0: Allocation(3, 0)})
    decision = ask(Tetris(), snapshot)
    assert [entry.allocation for entry in decision.jobs] == [(1, 0), (2, 0)]
    reason = decision.jobs[0].reason
    assert reason.constraint is Constraint.QUEUE
    assert reason.text.startswith("next bundle of 1w+0ps: the room of a worker on n0 went to others; on n0, the last ")
    assert "2 (job 2) scored " in reason.text


def test_a_floor_stands_even_without_room() -> None:
    job = a_job(1, min_workers=2)
    snapshot = structs.replace(a_snapshot([job], cluster(1, cpu=8, gpu=1)), floors=((job.key, Allocation(2, 1)),))
    decision = ask(Tetris(), snapshot)
    assert [entry.allocation for entry in decision.jobs] == [(2, 1)]
    check_decision(decision, snapshot)


@pytest.mark.parametrize(
    ("jobs", "nodes", "constraint", "text"),
    [
        pytest.param(
            [a_worker(1, 9, cpu=2), a_worker(2, 1, cpu=2)], cluster(1, cpu=3), Constraint.CAPACITY,
            "next bundle of 1w+0ps: no room for a worker (cpu: wanted 2, had 1 on n0); "
            "on n0, the last with room for it, 2 (job 2) scored 0.533 and it -0.533",
            id="another went first",
        ),
        pytest.param(
            [a_worker(1, 9, cpu=4)], cluster(2, cpu=3), Constraint.INFEASIBLE,
            "next bundle of 1w+0ps: a worker is larger than any node (cpu: wanted 4, had 3 on n0)", id="too large",
        ),
        pytest.param(
            [a_job(1, min_workers=2, ps=Resources.of(cpu=4))], cluster(2, cpu=4, gpu=1), Constraint.FRAGMENTED,
            "next bundle of 2w+1ps: there is room for each of its tasks, but not for all together", id="in pieces",
        ),
        pytest.param([a_worker(1, 9, cpu=1)], cluster(1, cpu=3), Constraint.SATISFIED, "has its maximum of 1w+0ps",
                     id="all it may have"),
    ],
)  # fmt: skip
def test_reasons_name_what_stood_in_the_way_and_who_was_preferred(jobs, nodes, constraint, text) -> None:
    entry = ask(Tetris(), a_snapshot(jobs, nodes)).jobs[0]
    assert entry.reason.constraint is constraint
    assert entry.reason.text == text


def test_settings_are_checked_and_known_by_the_version() -> None:
    with pytest.raises(ValueError, match="shortness: must be 0 or more, not -1"):
        Tetris(shortness=-1)
    assert [Tetris().version, Tetris(shortness=0.5, whole_bundles=True).version] == [
        "2",
        "2 shortness=0.5 whole_bundles",
    ]


@hypothesis.given(snapshots, st.sampled_from([0.0, 1.0, 3.0]), st.booleans())
def test_whatever_it_is_shown_it_decides_within_bounds_and_room_and_always_the_same(snapshot, shortness, whole) -> None:
    policy = Tetris(shortness=shortness, whole_bundles=whole)
    decision = ask(policy, snapshot)
    holds_to_its_room(decision, snapshot)
    assert encode(decision) == encode(ask(policy, snapshot))
    assert decode(encode(decision), Decision) == decision


def holds_to_its_room(decision: Decision, snapshot: Snapshot) -> None:
    """Within bounds; each task has a node and each node the room; tasks that run are those first counted."""
    check_decision(decision, snapshot)
    ours = Counter[str]()
    by_node: dict[str, list[Resources]] = {node.name: [] for node in snapshot.nodes}
    jobs = {job.key: job for job in snapshot.jobs}
    for key, role, node in decision.nodes:
        by_node[node].append(jobs[key].request.demand(role))
        ours[f"{key} {role}"] += 1
    running = {node.name: [task.demand for task in snapshot.tasks if task.node == node.name] for node in snapshot.nodes}
    for node in snapshot.nodes:
        others = node.used.minus(Resources.total(running[node.name]))
        assert Resources.total((others, *by_node[node.name])).fits_in(node.capacity)
        stay = Counter((task.job, task.role) for task in snapshot.tasks if task.node == node.name)
        here = Counter((key, role) for key, role, name in decision.nodes if name == node.name)
        assert node.state is NodeState.UP or here <= stay
    for job in snapshot.jobs:
        for role in (W, P):
            has = decision.allocations()[job.key].count(role)
            assert ours[f"{job.key} {role}"] == has
            was = Counter(task.node for task in snapshot.tasks if (task.job, task.role) == (job.key, role))
            here = Counter(name for key, kind, name in decision.nodes if (key, kind) == (job.key, role))
            assert (was & here).total() == min(was.total(), has)
    assert Allocation(
        sum(step.workers for _, step in decision.actions), sum(step.ps for _, step in decision.actions)
    ) == (sum(entry.allocation.workers for entry in decision.jobs), sum(entry.allocation.ps for entry in decision.jobs))


@hypothesis.given(snapshots, st.data())
def test_whatever_runs_already(snapshot, data) -> None:
    """Tasks of some jobs run, put anywhere with room, in any count; some are about to leave."""
    packing, tasks = Packing(snapshot.nodes, BestFit()), []
    for job in snapshot.jobs:
        for role, most in ((W, job.request.max_workers), (P, job.request.max_ps)):
            demand = job.request.demand(role)
            for number in range(data.draw(st.integers(0, most))):
                node = packing.place(demand, role)
                if isinstance(node, str):
                    tasks.append(a_task(job, role, number, node))
    by_node = {node.name: [task.demand for task in tasks if task.node == node.name] for node in snapshot.nodes}
    states = st.sampled_from([NodeState.UP, NodeState.UP, NodeState.UP, NodeState.DRAINING])
    nodes = tuple(
        structs.replace(node, used=Resources.total(by_node[node.name]), state=data.draw(states))
        for node in snapshot.nodes
    )
    seen = structs.replace(snapshot, nodes=nodes, tasks=tuple(tasks))
    holds_to_its_room(ask(Tetris(), seen), seen)
    leaving = tuple(
        structs.replace(task, state=data.draw(st.sampled_from([TaskState.DRAINING, task.state]))) for task in tasks
    )
    check_decision(ask(Tetris(), structs.replace(seen, tasks=leaving)), seen)


def a_task(job: Any, role: Role, number: int, node: str) -> Any:
    return Task(
        job=job.key, id=f"{role}-{number}", role=role, node=node, demand=job.request.demand(role),
        state=TaskState.CONFIRMED,
    )  # fmt: skip


class Watched(Tetris):
    """Sees that what it decided is what ran in the slot."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.slots = self.shrunk = 0
        self.last: dict[JobKey, Allocation] = {}

    def decide(self, snapshot: Snapshot, packing: Packing, rng: Any) -> Decision:
        ran = {job.key: Allocation(job.progress.workers, job.progress.ps) for job in snapshot.jobs}
        for key, has in self.last.items():
            if key in ran:
                assert ran[key] == has
                self.slots += 1
        decision = super().decide(snapshot, packing, rng)
        holds_to_its_room(decision, snapshot)
        self.shrunk += sum(entry.allocation.workers < entry.previous.workers for entry in decision.jobs)
        self.last = decision.allocations()
        return decision


_workloads = st.fixed_dictionaries(
    {
        "nodes": st.lists(
            st.fixed_dictionaries({"count": st.integers(1, 3), "cpu": st.integers(4, 9), "gpu": st.integers(0, 5)}),
            min_size=1, max_size=3,
        ),
        "jobs": st.lists(
            st.fixed_dictionaries(
                {
                    "submit_slot": st.integers(0, 4), "epochs": st.integers(1, 12), "worker_cpu": st.integers(1, 2),
                    "worker_gpu": st.integers(0, 3), "ps_cpu": st.integers(1, 3), "least": st.integers(0, 2),
                    "max_workers": st.integers(2, 5), "max_ps": st.integers(2, 5),
                }
            ),
            min_size=1, max_size=6,
        ),
    }
)  # fmt: skip


@hypothesis.settings(max_examples=60)
@hypothesis.given(_workloads, st.booleans(), st.sampled_from([LoadBalance(), BestFit(), Optimus()]))
def test_what_is_decided_is_what_runs(given_workload, empties, placement) -> None:
    cluster_of = [
        {"count": group["count"], "name": f"g{number}", "resources": {"cpu": group["cpu"], "gpu": group["gpu"]}}
        for number, group in enumerate(given_workload["nodes"])
    ]
    # Somewhere every job can run.
    cluster_of.append({"count": 2, "name": "large", "resources": {"cpu": 8, "gpu": 6}})
    jobs = [
        {
            "id": str(number), "model": "m", "submit_slot": job["submit_slot"], "epochs": float(job["epochs"]),
            "samples_per_epoch": 100.0, "worker": {"cpu": job["worker_cpu"], "gpu": job["worker_gpu"]},
            "ps": {"cpu": job["ps_cpu"]}, "min_workers": job["least"], "max_workers": job["max_workers"],
            "max_ps": job["max_ps"],
        }
        for number, job in enumerate(given_workload["jobs"])
    ]  # fmt: skip
    speeds = {"m": {"formula": "ps-sync", "theta": [0.01, 0.1, 0.05, 0.001, 0.001], "batch": 32}}
    workload = read_workload({"slot_seconds": 20, "cluster": cluster_of, "speeds": speeds, "jobs": jobs})
    policy = Watched(whole_bundles=empties)
    ticks = count()
    replay(workload, policy, placement, rules=Rules(empty_each_slot=empties), timer=lambda: next(ticks))


def test_the_preset_has_it_and_packs_node_after_node_in_whole_bundles() -> None:
    """By load alone, the placement of the preset, the two bundles would lie on two nodes."""
    chosen = preset(PresetName.DL2_PAPER)
    policy = chosen.policies["tetris"](TrueSpeeds(_LONE))
    decision = ask(policy, a_snapshot([a_job(1, max_workers=2, max_ps=3)], cluster(3, cpu=8, gpu=8)))
    assert {node for *_, node in nodes_of(decision)} == {"n0"}
    assert decision.jobs[0].allocation == (2, 2)
    watched = Watched(whole_bundles=True)
    ticks = count()
    done = replay(_LONE, watched, chosen.placement, rules=chosen.rules, timer=lambda: next(ticks))
    assert watched.slots == done.slots - 1 > 5


_LONE = read_workload(
    {
        "slot_seconds": 20, "cluster": [{"count": 3, "resources": {"cpu": 8, "gpu": 8}}],
        "speeds": {"m": {"formula": "ps-sync", "theta": [0.01, 0.1, 0.05, 0.001, 0.001], "batch": 32}},
        "jobs": [{"id": "1", "model": "m", "submit_slot": 0, "epochs": 500.0, "samples_per_epoch": 100.0,
                  "worker": {"cpu": 2, "gpu": 4}, "ps": {"cpu": 2}, "max_workers": 8, "max_ps": 8}],
    }
)  # fmt: skip


@pytest.mark.parametrize("placement", [LoadBalance(), BestFit(), Optimus()], ids=lambda placement: placement.name)
def test_in_a_crowd_jobs_shrink_and_grow_just_as_decided(placement) -> None:
    shrunk = checked = 0
    for seed in range(8):
        draw = random.Random(seed)
        jobs = [
            {
                "id": str(number), "model": "m", "submit_slot": draw.randint(0, 8),
                "epochs": draw.choice([1.0, 5.0, 40.0, 120.0]), "samples_per_epoch": 100.0,
                "worker": {"cpu": draw.randint(1, 2), "gpu": draw.randint(0, 3)}, "ps": {"cpu": draw.randint(1, 3)},
                "min_workers": draw.randint(0, 2), "max_workers": draw.randint(2, 9), "max_ps": draw.randint(2, 9),
            }
            for number in range(14)
        ]  # fmt: skip
        groups = [{"count": 2, "resources": {"cpu": draw.randint(4, 12), "gpu": draw.randint(0, 6)}} for _ in range(3)]
        groups.append({"count": 2, "resources": {"cpu": 8, "gpu": 6}})
        speeds = {"m": {"formula": "ps-sync", "theta": [0.01, 0.1, 0.05, 0.001, 0.001], "batch": 32}}
        policy, ticks = Watched(), count()
        replay(
            read_workload({"slot_seconds": 20, "cluster": groups, "speeds": speeds, "jobs": jobs}),
            policy, placement, timer=lambda ticks=ticks: next(ticks),
        )  # fmt: skip
        checked += policy.slots
        shrunk += policy.shrunk
    assert checked > 200
    assert shrunk > 5
