from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from simulation.drawn import drawn
from variants import first

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision
from dl2d.core.errors import CheckpointError
from dl2d.core.packing.bin_packing import Packing
from dl2d.learning.dl2.evolution_strategy import Search, Step, advance
from dl2d.learning.dl2.rollout import Measurements, RolloutWorkloads, measuring, rollout
from dl2d.learning.dl2.training import State, Trainer, TrainingSettings, load_state, save_state, shrunk
from dl2d.policies.dl2.policy import Dl2
from dl2d.policies.dl2.scoring import initial_weights
from dl2d.simulation.replay import replay
from dl2d.simulation.simulation_presets import PresetName, preset
from dl2d.simulation.vectorized.clusters import Clusters
from dl2d.simulation.workload.workload_file import Workload, read_workload
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.training_data import by_kind

PAPER = preset(PresetName.DL2_PAPER)
QUICK = TrainingSettings(
    seed=3, iterations=8, every=2, parts=(1.0, 0.5), batch=4, rounds=3, explored=6, step=Step(pairs=4)
)


def tiny(seed: int, jobs: int = 8) -> Workload:
    rng = np.random.default_rng(seed)
    speeds = {"a": {"formula": "ps-sync", "theta": [0.02, 0.1, 0.2, 0.01, 0.01], "batch": 32}}
    speeds["b"] = {"formula": "ps-sync", "theta": [0.05, 0.01, 0.02, 0.001, 0.002], "batch": 32}
    made = [
        {
            "id": str(number), "model": "ab"[int(rng.integers(2))], "submit_slot": number // 4,
            "epochs": float(rng.integers(1, 8)), "samples_per_epoch": 2000.0, "worker": {"cpu": 2, "gpu": 2},
            "ps": {"cpu": 2}, "min_workers": 0, "max_workers": 6, "max_ps": 6,
        }
        for number in range(jobs)
    ]  # fmt: skip
    return read_workload(
        {
            "slot_seconds": 60,
            "cluster": [{"count": 4, "resources": {"cpu": 8, "gpu": 8}}],
            "speeds": speeds,
            "jobs": made,
        }
    )


def trained(settings: TrainingSettings = QUICK) -> State:
    trainer = Trainer([tiny(1), tiny(2)], [tiny(9)], settings)
    state = trainer.explore()
    for reached in trainer.search(state):
        state = reached
    return state


def test_the_same_seed_gives_the_same_weights_and_another_does_not() -> None:
    one, two, other = trained(), trained(), trained(replace(QUICK, seed=4))
    assert one.search.weights.tobytes() == two.search.weights.tobytes()
    assert one.looks == two.looks
    assert one.measured == two.measured
    assert one.search.weights.tolist() != other.search.weights.tolist()


def test_going_on_leads_where_it_would_have_led(tmp_path: Path) -> None:
    trainer = Trainer([tiny(1), tiny(2)], [tiny(9)], QUICK)
    state = next(trainer.search(trainer.explore()))
    save_state(state, QUICK, "inputs", tmp_path)
    again = Trainer([tiny(1), tiny(2)], [tiny(9)], QUICK)
    state = load_state(QUICK, "inputs", tmp_path)
    for reached in again.search(state):
        state = reached
    whole = trained()
    assert state.search.weights.tobytes() == whole.search.weights.tobytes()
    assert state.best.tobytes() == whole.best.tobytes()
    assert state.looks == whole.looks
    with pytest.raises(CheckpointError, match=r"other settings \(seed\): give the same ones"):
        load_state(replace(QUICK, seed=9), "inputs", tmp_path)
    with pytest.raises(CheckpointError, match="other workloads"):
        load_state(QUICK, "others", tmp_path)
    with pytest.raises(CheckpointError, match="cannot resume"):
        load_state(QUICK, "inputs", tmp_path / "elsewhere")


def test_training_finds_better_weights_than_it_began_with() -> None:
    """It begins with none: then jobs are served whole, in submit order."""
    settings = replace(QUICK, iterations=12, every=4, step=Step(pairs=8, rate=0.3, least_rate=0.1))
    trainer = Trainer([tiny(1, 12), tiny(2, 12)], [tiny(9, 12)], settings)
    state = trainer.explore()
    nothing = np.zeros_like(state.search.weights)
    state = trainer._validate(replace(state, search=Search.at(nothing), best=nothing, looks=()), None)
    start = state.looks[0].score
    for reached in trainer.search(state):
        state = reached
    assert state.best_look.score < start - 0.02


def test_search_finds_the_least_of_a_bowl() -> None:
    search = Search.at(np.array([2.0, -1.0, 0.5]))
    least = np.array([1.0, 1.0, 1.0])
    for number in range(300):
        rng = np.random.default_rng(number)
        search, costs = advance(search, Step(), rng, lambda members: ((members - least) ** 2).sum(axis=1))
        assert costs.shape == (32,)
    assert search.weights == pytest.approx(least, abs=0.1)


def test_where_members_are_alike_nothing_moves() -> None:
    search = Search.at(np.ones(3))
    after, _ = advance(search, Step(), np.random.default_rng(0), lambda members: np.ones(len(members)))
    assert after.weights.tolist() == [1.0, 1.0, 1.0]


class Deaf:
    """The policy without what a replay measures: it then knows what the clusters' player knows."""

    def __init__(self, policy: Dl2) -> None:
        self._policy = policy
        self.name, self.version, self.needs = policy.name, policy.version, frozenset[Any]()

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        return self._policy.decide(structs.replace(snapshot, speeds=()), packing, rng)


@pytest.mark.parametrize("seed", first(1, (2, 3, 0, 1, 4, 5)))
def test_on_clusters_it_is_played_as_in_a_replay(seed: int) -> None:
    workloads = [shrunk(drawn(seed, nodes=4, plain=True), 1.0), tiny(seed, jobs=16)]
    trainer = Trainer(workloads, workloads, replace(QUICK, parts=(1.0,), hidden=2))
    state = trainer.explore()
    policy = Dl2(trainer.checkpoint(state, {}), slot_seconds=60.0, optimism=0.0)
    for workload in (*workloads, drawn(seed, jobs=8)):  # nodes of the last one are not alike
        compiled = RolloutWorkloads([replace(workload, slot_seconds=60.0)])
        frontiers = compiled.frontiers(GaussianProcess(by_kind(state.measured)), 0.0)
        seen: list[Clusters] = []
        jct = rollout(
            compiled, frontiers, np.zeros(1, int), state.best[None],
            seen=lambda clusters, report, seen=seen: seen.append(clusters),
        )  # fmt: skip
        again = replace(workload, slot_seconds=60.0)
        told = replay(again, Deaf(policy), PAPER.placement, rules=PAPER.rules, timer=time.perf_counter)
        times = seen[-1].completion()[0, : len(workload.jobs)]
        assert times == pytest.approx([job.jct for job in told.jobs], rel=1e-9)
        assert jct[0] == pytest.approx(told.avg_jct, rel=1e-9)


def test_speeds_are_what_jobs_showed_and_the_table_is_not_read() -> None:
    """With what the clusters report scaled by 3, the belief is too: it comes from nowhere else."""
    compiled = RolloutWorkloads([tiny(1)])
    believed = []
    for factor in (1.0, 3.0):
        measurements = Measurements()
        count = measuring(compiled, measurements)

        def seen(clusters: Any, report: Any, count: Any = count, factor: float = factor) -> None:
            count(clusters, replace(report, rate=report.rate * factor))

        frontiers = compiled.frontiers(GaussianProcess(by_kind(())), 2.0)
        rollout(
            compiled,
            frontiers,
            np.zeros(1, int),
            initial_weights(0, np.random.default_rng(0))[None],
            seen=seen,
        )
        believed.append(
            {
                (kind.kind, *point.allocation): point.samples_per_second
                for kind in measurements.speeds()
                for point in kind.points
            }
        )
    assert believed[0].keys() == believed[1].keys() != set()
    for key, speed in believed[0].items():
        assert believed[1][key] == pytest.approx(3.0 * speed)
    true = tiny(1).speeds
    for (kind, workers, ps), speed in believed[0].items():
        assert speed == pytest.approx(true[kind.model].samples_per_second(workers, ps))


def test_a_part_of_the_nodes_still_holds_every_job() -> None:
    assert [group.count for group in shrunk(tiny(1), 0.5).cluster] == [2]
    assert [group.count for group in shrunk(tiny(1), 0.01).cluster] == [1]
