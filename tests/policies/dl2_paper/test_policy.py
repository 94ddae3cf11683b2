from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs
from policies.snapshots import NO_PS, a_job, a_snapshot, ask, cluster, snapshots
from simulation.drawn import drawn

from dl2d.core.cluster import Node, NodeSet, NodeState, Snapshot
from dl2d.core.decision import Constraint, Reason
from dl2d.core.errors import CheckpointError, PolicyError
from dl2d.core.jobs import NOTHING, Allocation, Progress
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.resources import Resources
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.common.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from dl2d.policies.dl2_paper.inference_network import Dense, Network, SharedJobs, chosen
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy, with_checkpoint
from dl2d.policies.dl2_paper.sizing_step_by_step import STEPS
from dl2d.simulation.replay import Rules, SimulationError, replay
from dl2d.simulation.vectorized.clusters import Clusters
from dl2d.simulation.vectorized.dl2_paper_sizing import Windows
from dl2d.simulation.vectorized.workload_arrays import Library
from dl2d.simulation.workload.workload_file import Workload
from dl2d.tick.policy_check.decision_check import check_decision

MODELS = ("holes", "m0", "m1", "m2", "ring")
RESOURCES = ("cpu", "gpu", "memory")


def a_checkpoint(seed: int = 0, *, network: str = "dense", scale: float = 1.0, **changes: Any) -> Checkpoint:
    """Random weights: large ones make up their mind."""
    given_ = {
        "network": network, "window": 4, "models": list(MODELS), "resources": list(RESOURCES),
        "first_bundles": True, "sampled": False, "slot_seconds": 1200.0, "extras": False,
    } | changes  # fmt: skip
    rng = np.random.default_rng(seed)
    jobs, free = given_["window"], len(given_["resources"])
    width = len(given_["models"]) + 5 + 4 * given_["extras"]
    width += 2 * bool(given_.get("usual_sizes")) + 2 * given_.get("remaining_times", False)
    if network == "dense":
        shapes = {"0": (jobs * width + free, 16), "1": (16, 16), "2": (16, 3 * jobs + 1)}
    else:
        shapes = {"0": (width + free, 16), "1": (32, 16), "job": (16, 3), "void": (16, 1)}
    weights: dict[str, Any] = {}
    for name, (inputs, outputs) in shapes.items():
        weights[f"policy.{name}.weight"] = scale * rng.normal(size=(outputs, inputs)).astype(np.float32)
        weights[f"policy.{name}.bias"] = scale * rng.normal(size=outputs).astype(np.float32)
    return Checkpoint(policy="dl2-original", weights=weights, settings=given_, training={})


class Watched:
    """A network that writes down what it is shown."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.shown: list[bytes] = []

    def __call__(self, observations: Any) -> Any:
        self.shown.append(observations.tobytes())
        return self.network(observations)


@pytest.mark.parametrize(
    ("network", "extras", "times"),
    [("dense", False, False), ("shared", False, False), ("shared", True, False), ("shared", True, True)],
)
@pytest.mark.parametrize("seed", range(6))
def test_it_sees_and_does_what_it_was_trained_on_to_the_last_bit(
    seed: int, network: str, extras: bool, times: bool
) -> None:
    """Overload, uneven nodes, fractions of GPUs, all-reduce, more jobs than the window has."""
    workload = drawn(seed, jobs=14, most_least=1)
    policy = Dl2PaperPolicy(a_checkpoint(seed, network=network, extras=extras, remaining_times=times))
    watched = policy.network = Watched(policy.network)
    replayed = replay(workload, policy, Dl2Paper(), rules=Rules(empty_each_slot=True), timer=time.perf_counter)
    shown, ends = played(workload, watched.network, first_bundles=True, extras=extras, remaining_times=times)
    assert shown == watched.shown
    assert ends == pytest.approx([job.jct for job in replayed.jobs], rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_it_sees_the_sizes_that_users_ask_for_as_it_was_trained_on_them(seed: int) -> None:
    """Some ask for none, of models with a usual size or without one, and some for more than a job may have."""
    rng, drawn_ = np.random.default_rng(seed), drawn(seed, jobs=14, most_least=1)
    asked = [NOTHING if rng.random() < 0.4 else Allocation(*rng.integers(0, 9, size=2).tolist()) for _ in drawn_.jobs]
    jobs = tuple(replace(job, asked_size=size) for job, size in zip(drawn_.jobs, asked, strict=True))
    usual = tuple(Allocation(*size) for size in ((2, 1), NOTHING, (3, 3), (1, 0), (4, 0)))
    workload = replace(drawn_, jobs=jobs)
    policy = Dl2PaperPolicy(
        a_checkpoint(seed, network="shared", extras=True, usual_sizes=[list(size) for size in usual])
    )
    watched = policy.network = Watched(policy.network)
    replay(workload, policy, Dl2Paper(), rules=Rules(empty_each_slot=True), timer=time.perf_counter)
    shown, _ = played(workload, watched.network, first_bundles=True, extras=True, usual_sizes=usual)
    assert shown == watched.shown


@pytest.mark.parametrize("seed", range(6))
def test_without_first_bundles_it_sees_the_same_in_a_slot(seed: int) -> None:
    """In the first: what the daemon then places may be less, for it lays the tasks of a job in an order of its own."""
    workload = drawn(seed, jobs=14, most_least=1)
    policy = Dl2PaperPolicy(a_checkpoint(seed, network="shared", first_bundles=False))
    watched = policy.network = Watched(policy.network)
    with pytest.raises(SimulationError):
        replay(workload, policy, Dl2Paper(), rules=Rules(empty_each_slot=True, most_slots=1), timer=time.perf_counter)
    shown, _ = played(workload, watched.network, first_bundles=False, slots=1)
    assert shown == watched.shown


def played(
    workload: Workload, network: Network, *, first_bundles: bool, extras: bool = False, slots: int = 1000,
    usual_sizes: tuple[Allocation, ...] = (), remaining_times: bool = False,
) -> tuple[list[bytes], list[float]]:  # fmt: skip
    """What is seen in ``Windows``, and when the jobs end."""
    clusters = Clusters(Library.of([workload], models=MODELS, usual_sizes=usual_sizes), 1)
    clusters.reset(np.array([0]), np.array([0]), [np.random.default_rng(0)])
    windows = Windows(clusters, 4, first_bundles=first_bundles, extras=extras, remaining_times=remaining_times)
    windows.begin(np.array([0]))
    windows.refresh()
    shown = []
    while not clusters.over.all() and clusters.played[0] < slots:
        observation = windows.observation()
        shown.append(observation.tobytes())
        windows.step(chosen(network(observation), windows.mask(), None))
        windows.refresh()
    return shown, clusters.completion()[0].tolist()


@pytest.mark.parametrize("sampled", [False, True])
@settings(max_examples=60)
@given(snapshot=snapshots, seed=st.integers(0, 5))
def test_its_decisions_are_ones(snapshot: Snapshot, seed: int, sampled: bool) -> None:
    policy = Dl2PaperPolicy(a_checkpoint(seed, resources=["cpu", "gpu"], first_bundles=seed % 2 == 0), sampled=sampled)
    decision = ask(policy, snapshot)
    check_decision(decision, snapshot)
    assert ask(policy, snapshot) == decision


_UNITS = {"worker": Resources.of(gpu=1), "ps": Resources.of(cpu=1)}
_elastic_jobs = st.lists(
    st.fixed_dictionaries(
        {
            "min_workers": st.integers(1, 3),
            "max_workers": st.integers(3, 9),
            "max_ps": st.integers(1, 6),
            "allowed_workers": st.sampled_from([(), (1, 2, 4, 8), (2, 3, 9), (3,)]),
            "asked_size": st.sampled_from([NOTHING, Allocation(5, 2), Allocation(1, 1), Allocation(9, 9)]),
        }
    ),
    min_size=1, max_size=7,
)  # fmt: skip


@pytest.mark.parametrize("sampled", [False, True])
@settings(max_examples=60)
@given(
    requests=_elastic_jobs, gpus=st.lists(st.integers(0, 9), min_size=1, max_size=3), seed=st.integers(0, 5),
    how=st.sampled_from(["first", "last", "asked", "fixed"]), explores=st.booleans(), runs=st.booleans(),
)  # fmt: skip
def test_what_is_said_to_have_no_room_has_none_beside_what_is_decided(
    requests: list[dict[str, Any]], gpus: list[int], seed: int, how: str, explores: bool, runs: bool, sampled: bool
) -> None:
    """Steps between allowed worker counts were once taken back at the end, and their room was left to nobody."""
    jobs = [a_job(number, **_UNITS | request) for number, request in enumerate(requests)]
    assume(all(job.request.min_size.workers for job in jobs))  # other requests are refused
    nodes = [Node(f"n{number}", Resources.of(cpu=5, gpu=count)) for number, count in enumerate(gpus)]
    held = {0: jobs[0].request.min_size} if runs and sum(gpus) >= jobs[0].request.min_size.workers else {}
    snapshot = a_snapshot(jobs, nodes, held=held)
    asked = {"usual_sizes": [[3, 1]], "fixed_sizes": how == "fixed"} if how in ("asked", "fixed") else {}
    checkpoint = a_checkpoint(
        seed, network="shared", resources=["cpu", "gpu"], models=["other"], first_bundles=how == "first",
        last_bundles=how != "first", sampled=sampled, **asked,
    )  # fmt: skip
    decision = ask(Dl2PaperPolicy(checkpoint, exploration=0.5 if explores else None), snapshot)
    check_decision(decision, snapshot)
    packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, LoadBalance())
    given_ = dict.fromkeys((job.key for job in jobs), NOTHING)
    for key, step in decision.actions:
        given_[key] = given_[key].plus(step)
    assert given_ == decision.allocations()
    for job in jobs:
        assert packing.add(job, given_[job.key]) is None
    for job, entry in zip(jobs, decision.jobs, strict=True):
        if (said := re.search(r"next step of (\d+)w\+(\d+)ps: no", entry.reason.text)) is not None:
            assert not packing.fits(job, Allocation(int(said[1]), int(said[2]))), entry.reason.text


@pytest.mark.parametrize("seed", range(4))
def test_a_step_of_workers_leads_to_the_next_count_that_the_job_allows(seed: int) -> None:
    """As one bundle more does that of DRF: all or none, with as many PSs."""
    policy = Dl2PaperPolicy(a_checkpoint(seed, network="shared", resources=["cpu", "gpu"], sampled=True))
    jobs = [a_job(number, **_UNITS, max_workers=9, max_ps=9, allowed_workers=(1, 4, 8)) for number in range(3)]
    decision = ask(policy, a_snapshot(jobs, cluster(2, cpu=10, gpu=10)))
    assert {step for _, step in decision.actions} <= {(1, 1), (3, 0), (3, 3), (4, 0), (4, 4), (0, 1)}
    sizes = [option.allocation.workers for entry in decision.jobs for option in entry.alternatives]
    assert set(sizes) <= {0, 1, 4, 8}


def test_running_jobs_keep_their_least_and_unknown_models_are_no_trouble() -> None:
    jobs = [a_job(number, min_workers=2, max_workers=3) for number in range(6)]
    snapshot = a_snapshot(jobs, cluster(2, cpu=8, gpu=4), held={4: Allocation(2, 1), 5: Allocation(3, 2)})
    for seed in range(4):
        decision = ask(Dl2PaperPolicy(a_checkpoint(seed, resources=["cpu", "gpu"])), snapshot)
        check_decision(decision, snapshot)
        assert decision.allocations()[jobs[4].key] >= (2, 1)


def test_an_all_reduce_job_is_given_workers_alone() -> None:
    jobs = [a_job(number, **NO_PS | {"max_workers": 5}) for number in range(3)]
    snapshot = a_snapshot(jobs, cluster(8, cpu=8, gpu=4))
    for seed in range(4):
        policy = Dl2PaperPolicy(a_checkpoint(seed, resources=["cpu", "gpu"]))
        sizes = [entry.allocation for entry in ask(policy, snapshot).jobs]
        assert all(size.ps == 0 and 1 <= size.workers <= 5 for size in sizes)


def test_void_is_kept_to_and_reasons_are_given() -> None:
    """Without hidden values the biases decide: void before anything else, or a worker for the first job."""
    jobs = [a_job(1), a_job(2, max_workers=100)]
    snapshot = a_snapshot(jobs, cluster(1, cpu=8, gpu=4))
    checkpoint = a_checkpoint(scale=0.0, resources=["cpu", "gpu"], window=2)
    weights = dict(checkpoint.weights)
    weights["policy.2.bias"] = np.array([0, 0, 0, 0, 0, 0, 1], dtype=np.float32)
    lazy = Checkpoint(policy="dl2-original", weights=weights, settings=checkpoint.settings, training={})
    decision = ask(Dl2PaperPolicy(lazy), snapshot)
    assert [entry.allocation for entry in decision.jobs] == [(1, 1), (1, 1)]
    assert decision.jobs[0].reason.text == "the learned policy gives it no more than 1w+1ps"
    assert sum(option.score for entry in decision.jobs for option in entry.alternatives) == pytest.approx(
        1.0 + np.exp(1) / (6 + np.exp(1)), abs=1e-6
    )
    weights["policy.2.bias"] = np.array([0, 0, 0, 2, 0, 0, 1], dtype=np.float32)
    greedy = Checkpoint(policy="dl2-original", weights=weights, settings=checkpoint.settings, training={})
    decision = ask(Dl2PaperPolicy(greedy), snapshot)
    # 8 CPUs: 3 for the first bundle, 3 for the second, and one worker more of 2 CPUs.
    assert [entry.allocation for entry in decision.jobs] == [(1, 1), (2, 1)]
    assert decision.jobs[1].reason.constraint is Constraint.CAPACITY


def test_with_fixed_sizes_a_job_gets_what_its_user_asks_for_or_waits_for_room() -> None:
    """It once grew task by task from its minimum size, and so took the room of jobs that would have started whole."""
    settings = {"resources": ["cpu", "gpu"], "models": ["other"], "first_bundles": False, "last_bundles": True,
                "network": "shared", "usual_sizes": [[3, 0]], "fixed_sizes": True}  # fmt: skip
    checkpoint = a_checkpoint(scale=0.0, **settings)
    weights = {**checkpoint.weights, "policy.job.bias": np.array([1, 0, 0], dtype=np.float32)}
    eager, lazy = Dl2PaperPolicy(replace(checkpoint, weights=weights)), Dl2PaperPolicy(checkpoint)
    plain = {**NO_PS, "model": "other", "max_workers": 16, "worker": Resources.of(cpu=1, gpu=1)}
    asked = (4, 0, 6, 40)  # the second has the usual size; the last asks for more than there is
    jobs = [a_job(number, **plain, asked_size=Allocation(count, 0)) for number, count in enumerate(asked)]
    nodes = cluster(1, cpu=16, gpu=10)

    def sizes(policy: Dl2PaperPolicy, count: int, held: dict[int, Allocation]) -> list[int]:
        decision = ask(policy, a_snapshot(jobs[:count], nodes, held=held))
        return [entry.allocation.workers for entry in decision.jobs]

    assert sizes(eager, 2, {}) == [4, 3]
    # The third has no room for six beside the others: it has what is left of ten, and grows when they have ended.
    assert sizes(eager, 3, {0: Allocation(4, 0), 1: Allocation(3, 0)}) == [4, 3, 3]
    assert ask(eager, a_snapshot(jobs[2:3], nodes)).jobs[0].reason.text == "has the 6w+0ps that its user asks for"
    # What runs at its size keeps it, whatever the network says; what runs below it has no right to more.
    assert sizes(lazy, 2, {0: Allocation(4, 0), 1: Allocation(1, 0)}) == [4, 3]
    assert sizes(lazy, 3, {2: Allocation(6, 0)})[2] == 6
    assert sizes(eager, 4, {})[3] > 0


@pytest.mark.parametrize("bundles", ["first_bundles", "last_bundles"])
@pytest.mark.parametrize("eager", [True, False], ids=["gives workers", "gives nothing"])
def test_static_jobs_beside_elastic_ones_have_the_size_that_their_users_ask_for_or_nothing(
    bundles: str, eager: bool
) -> None:
    """Such a job was given workers one by one, and had 3 of 4, or 9 of 4 on an idle cluster."""
    settings = {"resources": ["cpu", "gpu"], "models": ["other"], "network": "shared", "usual_sizes": [[3, 0]],
                "first_bundles": False, bundles: True}  # fmt: skip
    checkpoint = a_checkpoint(scale=0.0, **settings)
    bias = np.array([1 if eager else -1, 0, 0], dtype=np.float32)
    policy = Dl2PaperPolicy(replace(checkpoint, weights={**checkpoint.weights, "policy.job.bias": bias}))
    plain = {**NO_PS, "model": "other", "max_workers": 16, "worker": Resources.of(cpu=1, gpu=1)}
    jobs = [a_job(number, static=True, **plain, asked_size=Allocation(4, 0)) for number in range(2)]
    jobs += [a_job(2, **plain), a_job(3, static=True, **plain, asked_size=Allocation(4, 0))]

    def sizes(gpus: int, held: dict[int, Allocation]) -> list[int]:
        decision = ask(policy, a_snapshot(jobs, cluster(1, cpu=32, gpu=gpus), held=held))
        return [entry.allocation.workers for entry in decision.jobs]

    given = sizes(32, {})
    assert [given[0], given[1], given[3]] == [4, 4, 4]
    assert given[2] == (16 if eager else 1)
    # The second runs and keeps its size, although the first was submitted before it.
    assert sizes(7, {1: Allocation(4, 0)})[:2] == [0, 4]
    # Where no cluster is large enough for them they have nothing, and keep no elastic job waiting.
    given = sizes(3, {})
    assert [given[0], given[1], given[3]] == [0, 0, 0]
    assert given[2] > 0


def test_with_last_bundles_jobs_that_the_network_gives_nothing_have_their_minimum_size_where_there_is_room() -> None:
    """In submit order, until one has no room."""
    jobs = [a_job(1), a_job(2, **NO_PS | {"min_workers": 2}), a_job(3)]
    checkpoint = a_checkpoint(scale=0.0, resources=["cpu", "gpu"], window=2, first_bundles=False, last_bundles=True)
    weights = {**checkpoint.weights, "policy.2.bias": np.array([0, 0, 0, 0, 0, 0, 1], dtype=np.float32)}
    lazy = Dl2PaperPolicy(replace(checkpoint, weights=weights))
    for cpus, sizes in ((100, [(1, 1), (2, 0), (1, 1)]), (6, [(1, 1), (0, 0), (0, 0)])):
        decision = ask(lazy, a_snapshot(jobs, cluster(1, cpu=cpus, gpu=8)))
        assert [entry.allocation for entry in decision.jobs] == sizes
        text = "has its minimum size of 1w+1ps since there was room left; the learned policy gave it nothing"
        assert decision.jobs[0].reason.text == text
    assert decision.jobs[1].reason.constraint is Constraint.CAPACITY


@pytest.mark.parametrize(
    ("small", "large", "sizes"),
    [
        ("n0", "n1", [(1, 1), (0, 0), (0, 0), (1, 1), (1, 1)]),
        ("n0", None, [(1, 1), (0, 0), (0, 0), (1, 1), (1, 1)]),
        (None, "n1", [(1, 1), (1, 1), (0, 0), (0, 0), (0, 0)]),
    ],
    ids=["other nodes", "all nodes", "some of all nodes"],
)
def test_a_job_without_room_keeps_those_waiting_that_may_use_the_same_nodes(
    small: str | None, large: str | None, sizes: list[tuple[int, int]]
) -> None:
    """A partition was full, and jobs of another waited beside its idle nodes behind the one for which it was full."""
    jobs = [a_job(number, max_workers=1, max_ps=1) for number in range(5)]
    asks = Resources.of(cpu=6, gpu=3)
    jobs[2] = a_job(2, worker=asks if small is None else jobs[0].request.worker)
    names = {"n0": ("n0",), "n1": ("n1",), None: ()}
    sets = tuple(
        NodeSet(tuple(job.key for job in some), frozenset(names[name]), f"partition {name}")
        for name, some in ((small, jobs[:3]), (large, jobs[3:]))
        if name is not None
    )
    checkpoint = a_checkpoint(scale=0.0, resources=["cpu", "gpu"], window=2, first_bundles=False, last_bundles=True)
    weights = {**checkpoint.weights, "policy.2.bias": np.array([0, 0, 0, 0, 0, 0, 1], dtype=np.float32)}
    nodes = [Node("n0", Resources.of(cpu=4, gpu=1)), Node("n1", Resources.of(cpu=8, gpu=3))]
    decision = ask(
        Dl2PaperPolicy(replace(checkpoint, weights=weights)), structs.replace(a_snapshot(jobs, nodes), node_sets=sets)
    )
    assert [entry.allocation for entry in decision.jobs] == sizes


LAZY = {"policy.2.bias": np.eye(1, 13, 12, dtype=np.float32)[0]}


@pytest.mark.parametrize("first", [True, False], ids=["first bundles", "last bundles"])
@pytest.mark.parametrize("least", [3, 5])
def test_a_job_without_room_keeps_others_waiting_if_the_teacher_keeps_an_order_and_it_can_have_room(
    first: bool, least: int
) -> None:
    """Four GPUs. A network that was learned from DRF let jobs wait behind a large one that DRF would have started."""
    checkpoint = a_checkpoint(scale=0.0, resources=["cpu", "gpu"], first_bundles=first, last_bundles=not first)
    policy = Dl2PaperPolicy(replace(checkpoint, weights={**checkpoint.weights, **LAZY}))
    jobs = [a_job(1), a_job(2, min_workers=least, max_workers=5), a_job(3)]
    snapshot = a_snapshot(jobs, cluster(1, cpu=9, gpu=4))
    decision = ask(policy, snapshot)
    assert decision.jobs[1].reason.constraint is Constraint.CAPACITY
    if first or least == 5:
        assert [entry.allocation for entry in decision.jobs] == [(1, 1), NOTHING, (1, 1)]
        return
    reason = Reason(Constraint.QUEUE, "waits behind 2 (job 2), for which there is no room")
    assert (decision.jobs[2].allocation, decision.jobs[2].reason) == (NOTHING, reason)


def test_a_job_that_has_nothing_although_there_is_room_is_told_why() -> None:
    checkpoint = a_checkpoint(scale=0.0, resources=["cpu", "gpu"], first_bundles=False)
    policy = Dl2PaperPolicy(replace(checkpoint, weights={**checkpoint.weights, **LAZY}))
    decision = ask(policy, a_snapshot([a_job(1)], cluster(1, cpu=8, gpu=4)))
    text = "the learned policy gives it nothing although there is room"
    assert (decision.jobs[0].allocation, decision.jobs[0].reason) == (NOTHING, Reason(Constraint.QUEUE, text))


def test_a_job_that_cannot_run_with_what_it_got_has_nothing() -> None:
    """Only a PS: a worker has no room anywhere."""
    job = a_job(1, worker=Resources.of(cpu=20), ps=Resources.of(cpu=1))
    snapshot = a_snapshot([job], cluster(1, cpu=8, gpu=4))
    decision = ask(Dl2PaperPolicy(a_checkpoint(resources=["cpu", "gpu"], first_bundles=False)), snapshot)
    assert decision.jobs[0].allocation == NOTHING
    assert decision.jobs[0].reason.constraint is Constraint.INFEASIBLE


def test_weights_that_do_not_belong_to_the_settings_are_refused() -> None:
    with pytest.raises(CheckpointError, match="do not belong together"):
        Dl2PaperPolicy(a_checkpoint(window=4, models=["a"]).__class__(
            policy="dl2-original", weights=a_checkpoint().weights, settings=a_checkpoint(models=["a"]).settings,
            training={},
        ))  # fmt: skip
    with pytest.raises(CheckpointError, match="do not belong together"):
        Dl2PaperPolicy(Checkpoint(policy="dl2-original", weights={}, settings=a_checkpoint().settings, training={}))


def test_a_network_that_overflows_says_so_and_a_job_with_no_number_of_epochs_is_as_one_that_has_begun_none() -> None:
    """The daemon then asks the fallback, and every reason says why."""
    snapshot = a_snapshot([a_job(1), a_job(2)], cluster(2, cpu=8, gpu=4))
    policy = Dl2PaperPolicy(a_checkpoint(resources=["cpu", "gpu"]))
    network = policy.network
    policy.network = lambda observations: network(observations) * np.float32(np.inf)
    with np.errstate(all="ignore"), pytest.raises(PolicyError, match="output is not a finite number"):
        ask(policy, snapshot)
    policy.network = network
    odd = replace(snapshot.jobs[1], progress=Progress(epoch=float("nan")))
    fresh = replace(snapshot.jobs[1], progress=Progress())
    decisions = [ask(policy, structs.replace(snapshot, jobs=(snapshot.jobs[0], job))) for job in (odd, fresh)]
    assert decisions[0] == decisions[1]


def test_weights_that_overflow_for_any_observation_are_refused() -> None:
    with pytest.raises(CheckpointError, match="the weights are too large: overflow"):
        Dl2PaperPolicy(a_checkpoint(resources=["cpu", "gpu"], scale=1e25))


@pytest.mark.parametrize("count", [0, 1, 9])
def test_an_empty_cluster_and_an_empty_queue_are_decided_on(count: int) -> None:
    jobs = [a_job(number) for number in range(count)]
    for nodes in ((), cluster(1, cpu=8, gpu=4)):
        snapshot = a_snapshot(jobs, nodes)
        decision = ask(Dl2PaperPolicy(a_checkpoint(resources=["cpu", "gpu"])), snapshot)
        check_decision(decision, snapshot)
        assert len(decision.jobs) == count
        assert all(entry.reason.text for entry in decision.jobs)
        assert nodes or all(entry.allocation == NOTHING for entry in decision.jobs)


def test_ten_thousand_jobs_are_decided_on() -> None:
    jobs = [a_job(number) for number in range(10_000)]
    snapshot = a_snapshot(jobs, cluster(50, cpu=8, gpu=4))
    decision = ask(Dl2PaperPolicy(a_checkpoint(network="shared", resources=["cpu", "gpu"], window=20)), snapshot)
    check_decision(decision, snapshot)
    sizes = [entry.allocation for entry in decision.jobs]
    assert len(sizes) == 10_000
    assert 50 <= sum(size != NOTHING for size in sizes) <= 200
    assert decision.jobs[-1].reason.constraint is Constraint.FRAGMENTED


def test_capacity_that_changes_under_it_is_made_the_best_of() -> None:
    """Half of the nodes go down, with tasks on them, and come back."""
    jobs = [a_job(number, max_workers=3) for number in range(6)]
    nodes = cluster(6, cpu=8, gpu=4)
    policy = Dl2PaperPolicy(a_checkpoint(3, network="shared", resources=["cpu", "gpu"]))
    before = a_snapshot(jobs, nodes, held={0: Allocation(3, 2), 1: Allocation(2, 2)})
    fewer = tuple(
        structs.replace(node, state=NodeState.DOWN) if place % 2 else node for place, node in enumerate(before.nodes)
    )
    for seen in (before, structs.replace(before, nodes=fewer), structs.replace(before, nodes=before.nodes[:1]), before):
        decision = ask(policy, seen)
        check_decision(decision, seen)
        assert all(entry.reason.text for entry in decision.jobs)


class Indifferent:
    """A network that likes all actions alike, but for the last, and counts how often it is asked."""

    def __init__(self, actions: int) -> None:
        self.asked = 0
        self._logits = np.zeros((1, actions), dtype=np.float32)
        self._logits[0, -1] = -4.0

    def __call__(self, observations: Any) -> Any:
        self.asked += 1
        return self._logits


@pytest.mark.parametrize("seed", range(8))
def test_actions_are_drawn_with_the_noise_of_the_generator_one_step_after_the_other(seed: int) -> None:
    """By hand: the best of logits and Gumbel noise that is allowed; there is room for all."""
    policy = Dl2PaperPolicy(a_checkpoint(seed, resources=["cpu", "gpu"], first_bundles=False, sampled=True))
    jobs = [a_job(number, max_workers=40, max_ps=30) for number in range(4)]
    nodes = cluster(200, cpu=8, gpu=4)
    network = policy.network = Indifferent(13)
    rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
    decision = policy.decide(a_snapshot(jobs, nodes), Packing(nodes, LoadBalance()), rng)
    has, taken = [[0, 0] for _ in jobs], []
    while True:
        scores = np.array([0.0] * 12 + [-4.0]) + again.gumbel(size=13)
        for place, (workers, ps) in enumerate(has):
            full = workers == 40, ps == 30
            scores[3 * place : 3 * place + 3][[full[0], full[1], any(full)]] = -np.inf
        action = int(scores.argmax())
        if action == 12:
            break
        # A job's first step is its minimum size.
        step = STEPS[action % 3] if any(has[action // 3]) else Allocation(1, 1)
        has[action // 3][0] += step.workers
        has[action // 3][1] += step.ps
        taken.append((jobs[action // 3].key, step))
    assert list(decision.actions) == taken
    assert network.asked == len(taken) + 1
    assert rng.random() == again.random(), "nothing more was drawn than what was used"


def test_probabilities_are_those_before_it_was_found_out_that_there_is_no_room() -> None:
    """By hand: the job runs, and neither a worker nor both have room, which shows as they are tried; a PS has."""
    policy = Dl2PaperPolicy(a_checkpoint(resources=["cpu", "gpu"], first_bundles=False))
    policy.network = Indifferent(13)
    decision = ask(policy, a_snapshot([a_job(0)], cluster(1, cpu=4, gpu=1), held={0: Allocation(1, 1)}))
    assert decision.jobs[0].allocation == Allocation(1, 2)
    rest = 2 + np.exp(-4.0)
    assert [option.score for option in decision.jobs[0].alternatives] == pytest.approx(
        [np.exp(-4.0) / rest, 0.0, 1 / rest, 1 / rest]
    )


@pytest.mark.parametrize("action", range(3), ids=["worker", "ps", "both"])
def test_the_first_step_of_a_job_is_its_minimum_size_whatever_the_network_says(action: int) -> None:
    """A network that gave workers alone left jobs below the size at which they can run, for ever."""
    policy = Dl2PaperPolicy(a_checkpoint(resources=["cpu", "gpu"], first_bundles=False))
    policy.network = lambda _: np.array(
        [[float(place % 3 == action) for place in range(12)] + [-4.0]], dtype=np.float32
    )
    ring = NO_PS | {"max_workers": 3}
    jobs = [a_job(0, min_workers=2, min_ps=2), a_job(1, **ring), a_job(2, allowed_workers=(3, 4))]
    snapshot = a_snapshot(jobs, cluster(8, cpu=8, gpu=4))
    decision = ask(policy, snapshot)
    check_decision(decision, snapshot)
    first = dict(reversed(decision.actions))
    assert [first[job.key] for job in jobs] == [(2, 2), (1, 0), (3, 1)]
    assert all(entry.allocation >= job.request.min_size for entry, job in zip(decision.jobs, jobs, strict=True))


def test_it_is_read_from_a_folder(tmp_path: Path) -> None:
    checkpoint = a_checkpoint(resources=["cpu", "gpu"])
    write_checkpoint(checkpoint, tmp_path / "c")
    snapshot = a_snapshot([a_job(1), a_job(2)], cluster(2, cpu=8, gpu=4))
    read = read_checkpoint(tmp_path / "c", policy="dl2-original")
    assert ask(with_checkpoint(read), snapshot) == ask(Dl2PaperPolicy(checkpoint), snapshot)
    with pytest.raises(CheckpointError, match="name a checkpoint"):
        with_checkpoint()


@pytest.mark.parametrize("network", ["dense", "shared"])
def test_many_at_once_are_as_one_by_one(network: str) -> None:
    checkpoint = a_checkpoint(network=network)
    rng = np.random.default_rng(1)
    observations = rng.random((5, 4 * 10 + 3)).astype(np.float32)
    observations[2, 10:40] = 0.0
    observations[3, :40] = 0.0
    made = Dense(checkpoint.weights, "policy") if network == "dense" else SharedJobs(checkpoint.weights, "policy", 10)
    alone = np.concatenate([made(observations[row : row + 1]) for row in range(5)])
    assert made(observations) == pytest.approx(alone, abs=1e-5)
