"""What must hold of every replay, whatever the workload, the policy and the options."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.test_replay import PAPER, make

from dl2d.core.cluster import NodeState
from dl2d.core.decision import Decision
from dl2d.core.json_codec import encode
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.optimus import Optimus
from dl2d.policies.srtf import Srtf
from dl2d.simulation.completion_time_lower_bound import lower_bound
from dl2d.simulation.realism import Realism
from dl2d.simulation.replay import Replayed, Rules, replay
from dl2d.simulation.workload.workload_file import Workload, read_workload

SPEEDS = {
    "m": {"table": [[1.0, 2.0], [1.0, 2.0]]},
    "sync": {"formula": "ps-sync", "theta": [0.5, 0.2, 0.1, 0.02, 0.02], "batch": 8},
    "async": {"formula": "ps-async", "theta": [1.0, 0.2, 0.05, 0.05], "batch": 2},
    "ring": {
        "formula": "allreduce", "batch": 8, "compute_seconds_per_sample": 0.5, "model_bytes": 1e8,
        "bandwidth_bytes_per_second": 1e9,
    },
}  # fmt: skip

jobs = st.lists(
    st.fixed_dictionaries(
        {
            "model": st.sampled_from(sorted(SPEEDS)),
            "submit_slot": st.integers(0, 4),
            "epochs": st.floats(0.5, 20),
            "cpu": st.integers(1, 6),
            "gpu": st.integers(0, 8),
            "most": st.integers(1, 6),
            "some": st.booleans(),
        }
    ),
    min_size=1,
    max_size=5,
)


def workload(shapes: list[dict[str, Any]], nodes: int, changes: list[tuple[int, int]] = ()) -> Workload:
    made = [
        {
            **{key: shape[key] for key in ("model", "submit_slot", "epochs")},
            "worker": {"cpu": shape["cpu"], "gpu": shape["gpu"]},
            "max_workers": shape["most"],
            "max_ps": shape["most"],
            **({"allowed_workers": sorted({1, shape["most"]})} if shape["some"] else {}),
        }
        for shape in shapes
    ]
    more = [{"slot": slot, "up": min(up, nodes)} for slot, up in dict(changes).items()]
    # In the end all nodes are there, so that every job can end.
    more.append({"slot": 99, "up": nodes})
    return read_workload(make(made, nodes=nodes, speeds=SPEEDS, capacity_changes=more))


#: Every option on, each drawn; failures so many that they matter within a short simulation.
options = st.builds(
    Realism,
    start_seconds=st.floats(0, 60),
    join_seconds=st.floats(0, 5),
    move_seconds_per_mb=st.floats(0, 0.2),
    restart_seconds=st.sampled_from([0.0, 0.0, 20.0]),
    speed_noise=st.floats(0, 0.5),
    job_spread=st.floats(0, 0.5),
    declared_error=st.floats(0, 0.5),
    loss_threshold=st.sampled_from([0.0, 0.01]),
    loss_noise=st.floats(0, 0.2),
    loss_outliers=st.floats(0, 0.2),
    locality=st.floats(0, 0.9),
    interference=st.floats(0, 0.5),
    straggler_probability=st.floats(0, 0.3),
    node_mtbf_hours=st.sampled_from([0.0, 0.2, 1.0]),
    node_repair_hours=st.floats(0.01, 0.2),
    failure_seconds=st.sampled_from([0.0, 30.0, 1e9]),
)
policies = st.sampled_from([Drf, Fifo, Srtf, Optimus])
changes = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=4)
slow = settings(max_examples=25)


class Watched:
    """A policy that is watched: every snapshot that it is shown is kept."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.name, self.version, self.needs = policy.name, policy.version, policy.needs
        self.seen: list[Any] = []

    def decide(self, snapshot, packing, rng) -> Decision:
        self.seen.append(snapshot)
        return self._policy.decide(snapshot, packing, rng)


def ran(
    known: Workload, policy: Any, *, empty: bool = False, realism: Realism | None = None, seed: int = 0
) -> Replayed:
    rules = Rules(empty_each_slot=empty, realism=realism or Realism(), most_slots=5000)
    placement = PAPER.placement if empty else LoadBalance()
    return replay(known, policy, placement, rules=rules, seed=seed, timer=lambda: 0.0, keep_series=True)


@slow
@given(jobs, st.integers(1, 4), changes, policies, options, st.integers(0, 3))
def test_with_every_option_on_all_jobs_end_and_nothing_is_lost_or_overbooked(
    shapes, nodes, moves, policy, realism, seed
) -> None:
    known = workload(shapes, nodes, moves)
    watched = Watched(policy())
    done = ran(known, watched, realism=realism, seed=seed)
    # Every job ends, after it came.
    assert [job.id for job in done.jobs] == [job.id for job in known.jobs]
    assert all(job.last_slot >= job.submit_slot and 0 < job.fraction <= 1 for job in done.jobs)
    # Capacity: on no node, and with nodes that are down not at all.
    for snapshot in watched.seen:
        held: dict[str, list[Resources]] = {}
        for task in snapshot.tasks:
            held.setdefault(task.node, []).append(task.demand)
        for node in snapshot.nodes:
            assert node.used == Resources.total(held.get(node.name, []))
            assert node.used.fits_in(node.capacity)
            assert node.state is NodeState.UP or node.used == Resources()
    assert done.series is not None
    assert all(0 <= share <= 1 for shares in done.series.utilisation.values() for share in shares)
    # Progress never falls.
    reported: dict[Any, list[float]] = {}
    for snapshot in watched.seen:
        for job in snapshot.jobs:
            reported.setdefault(job.key, []).append(job.progress.epoch)
    assert all(before <= after for epochs in reported.values() for before, after in pairwise(epochs))


@slow
@given(jobs, st.integers(1, 4), policies, options)
def test_work_is_conserved(shapes, nodes, policy, realism) -> None:
    """The epochs of all slots add up to the job's: those reported before the last slot, and the rest at its speed.

    Noise, failures and costs may take time, but neither give nor take epochs.
    """
    realism = dataclasses.replace(realism, declared_error=0.0)
    known = workload(shapes, nodes)
    watched = Watched(policy())
    done = ran(known, watched, realism=realism)
    best = {
        job.id: max(
            known.epochs_in_slot(job, workers, ps)
            for workers in range(1, job.max_workers + 1)
            for ps in range(max(job.max_ps, 1) + 1)
        )
        for job in known.jobs
    }
    fastest = (1 + realism.speed_noise) / (1 - realism.locality)
    for job, outcome in zip(known.jobs, done.jobs, strict=True):
        reported = [(0.0, 0.0)] + [
            (shown.progress.at / known.slot_seconds, shown.progress.epoch)
            for snapshot in watched.seen
            for shown in snapshot.jobs
            if shown.key.id == job.id and shown.progress.at
        ]
        assert all(epoch < job.epochs for _, epoch in reported)
        if not realism.job_spread:
            for (earlier, fewer), (later, more) in pairwise(reported):
                assert more - fewer <= best[job.id] * fastest * (later - earlier) * (1 + 1e-9)
            left = job.epochs - reported[-1][1]
            assert left <= best[job.id] * fastest * (outcome.last_slot + outcome.fraction - reported[-1][0]) * (
                1 + 1e-9
            )


@slow
@given(jobs, st.integers(1, 4), changes, policies, options, st.booleans())
def test_the_same_seed_gives_the_same_bytes(shapes, nodes, moves, policy, realism, empty) -> None:
    known = workload(shapes, nodes, moves)
    once, again = (ran(known, policy(), realism=realism, seed=2, empty=empty) for _ in range(2))
    assert encode(once) == encode(again)


@slow
@given(jobs, st.integers(1, 4), policies, st.booleans())
def test_the_bound_holds_for_every_policy_and_more_nodes_never_raise_it(shapes, nodes, policy, empty) -> None:
    known = workload(shapes, nodes)
    limit = lower_bound(known)
    assert ran(known, policy(), empty=empty).avg_jct >= limit.avg_jct * (1 - 1e-9)
    larger = lower_bound(workload(shapes, nodes + 2))
    assert larger.avg_jct <= limit.avg_jct * (1 + 1e-12)


@slow
@given(jobs, st.integers(1, 4), st.integers(0, 3))
def test_a_seed_alone_changes_nothing_without_options(shapes, nodes, seed) -> None:
    known = workload(shapes, nodes)
    assert encode(ran(known, Drf(), seed=seed)) == encode(ran(known, Drf(), realism=Realism(), seed=seed + 1))
