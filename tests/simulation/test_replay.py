from __future__ import annotations

import random
from itertools import count
from typing import Any

import numpy as np
import pytest
from simulation.reference import average_jct
from tick.world import GivesNothing
from variants import nightly

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision
from dl2d.core.jobs import Allocation
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import Evidence
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.simulation.policy_by_name import find_policy
from dl2d.simulation.replay import Replayed, Rules, SimulationError, replay
from dl2d.simulation.simulation_presets import Preset, PresetName, preset
from dl2d.simulation.workload.workload_file import read_workload

PAPER = preset(PresetName.DL2_PAPER)


def make(jobs: list[dict[str, Any]], *, nodes: int = 4, **more: Any) -> dict[str, Any]:
    base = {
        "worker": {"cpu": 2, "gpu": 4},
        "ps": {"cpu": 2, "gpu": 0},
        "min_workers": 0,
        "max_workers": 16,
        "max_ps": 16,
    }
    complete = [
        {"id": str(number), "model": "m", "submit_slot": 0, "epochs": 10.0, "samples_per_epoch": 100.0, **base, **job}
        for number, job in enumerate(jobs, start=1)
    ]
    speeds = {"m": {"table": [[1.0, 2.0], [1.0, 2.0]]}}
    cluster = [{"count": nodes, "resources": {"cpu": 8, "gpu": 8}}]
    return {"slot_seconds": 100, "cluster": cluster, "speeds": speeds, "jobs": complete, **more}


def run(given: dict[str, Any], policy=None, placement=None, **more: Any) -> Replayed:
    ticks = count()
    return replay(read_workload(given), policy or Drf(), placement or LoadBalance(), timer=lambda: next(ticks), **more)


def test_a_lone_job_ends_when_its_speed_says() -> None:
    """One node: two bundles, 2 samples/s, 2 epochs a slot of 100 s: 5 epochs end in the middle of the third slot."""
    done = run(make([{"epochs": 5.0, "max_workers": 2, "max_ps": 2}], nodes=1))
    assert (done.jobs[0].last_slot, done.jobs[0].fraction) == (2, 0.5)
    assert (done.avg_jct, done.avg_jct_plain, done.makespan) == (2.5, 3.0, 2.5)


def test_a_job_that_ends_within_its_first_slot_has_reported_its_speed() -> None:
    """What comes next may go by it: one job in each slot, none of which sees the end of its slot."""
    seen = []

    class Looks(Drf):
        needs = frozenset({Evidence.SPEEDS})

        def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
            seen.append(tuple(point[:4] for kind in snapshot.speeds for point in kind.points))
            return super().decide(snapshot, packing, rng)

    jobs = [{"epochs": 1.0, "max_workers": 2, "max_ps": 2, "submit_slot": slot} for slot in range(3)]
    done = run(make(jobs, nodes=1), Looks())
    assert [job.jct for job in done.jobs] == [0.5, 0.5, 0.5]
    points = dict.fromkeys(seen)
    assert list(points) == [(), ((Allocation(2, 2), 2.0, 1, 1),), ((Allocation(2, 2), 2.0, 2, 2),)]


def test_a_job_that_comes_later_is_admitted_at_its_slot_and_counted_from_there() -> None:
    done = run(make([{"epochs": 4.0, "max_workers": 2, "max_ps": 2, "submit_slot": 7}], nodes=1))
    assert (done.jobs[0].submit_slot, done.jobs[0].last_slot, done.jobs[0].jct) == (7, 8, 2.0)


def test_what_an_ending_job_held_is_blocked_until_its_slot_is_over() -> None:
    """The second has nothing while the first ends in a tenth of the first slot; then it has the node."""
    jobs = [{"epochs": 0.2, "max_workers": 2, "max_ps": 2}, {"epochs": 2.0, "max_workers": 2, "max_ps": 2}]
    done = run(make(jobs, nodes=1), Fifo())
    assert [job.jct for job in done.jobs] == [0.1, 2.0]


def test_the_scheduler_sees_declared_epochs_and_the_job_ends_by_its_real_ones() -> None:
    done = run(make([{"epochs": 2.0, "declared_epochs": 9.0, "max_workers": 2, "max_ps": 2}], nodes=1))
    assert done.jobs[0].jct == 1.0


def workload(seed: int, *, nodes: int, jobs: int) -> dict[str, Any]:
    draw = random.Random(seed)
    theta = lambda: [
        draw.uniform(*span) for span in ((0.005, 0.02), (0.01, 0.1), (0.05, 0.3), (0.001, 0.02), (0.001, 0.02))
    ]
    speeds = {f"m{number}": {"formula": "ps-sync", "theta": theta(), "batch": 32} for number in range(8)}
    made = []
    for number in range(jobs):
        model = draw.choice(sorted(speeds))
        gpu = 0 if model in ("m5", "m6") else 4
        made.append(
            {
                "model": model, "submit_slot": number // 3, "epochs": draw.uniform(200, 2500),
                "samples_per_epoch": 115.0,
                "worker": {"cpu": 2, "gpu": gpu}, "max_workers": draw.choice([4, 16]),
            }
        )  # fmt: skip
    return make(made, nodes=nodes, speeds=speeds, slot_seconds=1200)


def speed_of(given: dict[str, Any]):
    def speed(job: dict[str, Any], workers: int, ps: int) -> float:
        a, b, c, d, e = given["speeds"][job["model"]]["theta"]
        return 32 / (a * 32 / workers + b + c * workers / ps + d * workers + e * ps)

    return speed


def by_preset(policy: str, given: dict[str, Any]) -> Replayed:
    chosen = find_policy(policy, read_workload(given), PAPER)
    return run(given, chosen, PAPER.placement_of(policy), rules=PAPER.rules)


@pytest.mark.parametrize("policy", ["fifo", "srtf", "drf", "optimus"])
@pytest.mark.parametrize(("seed", "nodes"), [(1, 96), (2, 24), (3, 12), (4, 7)])
def test_the_preset_agrees_with_an_independent_simulator(policy: str, seed: int, nodes: int) -> None:
    given = workload(seed, nodes=nodes, jobs=60)
    assert by_preset(policy, given).avg_jct == pytest.approx(average_jct(given, policy, speed_of(given)), rel=1e-9)


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize(("seed", "nodes"), [(6, 96), (7, 24), (8, 12), (9, 5)])
def test_optimus_climbs_rough_tables_as_the_independent_simulator_does(seed: int, nodes: int, beyond: int) -> None:
    """Tables with failed runs (zeros), dips and flat parts, measured up to the jobs' caps or by one task more."""
    given, draw = workload(seed, nodes=nodes, jobs=40), random.Random(seed)
    smooth, most = speed_of(given), 16 + beyond

    def rough(model: str, workers: int, ps: int) -> float:
        failed = draw.random() < 0.08 and workers * ps > 1
        return 0.0 if failed else round(smooth({"model": model}, workers, ps) * draw.uniform(0.7, 1.3))

    given["speeds"] = {
        model: {"table": [[rough(model, w, p) for w in range(1, most + 1)] for p in range(1, most + 1)]}
        for model in given["speeds"]
    }

    def speed(job: dict[str, Any], workers: int, ps: int) -> float:
        table = given["speeds"][job["model"]]["table"]
        return table[ps - 1][workers - 1] if max(workers, ps) <= len(table) else 0.0

    done = by_preset("optimus", given)
    assert done.avg_jct == pytest.approx(average_jct(given, "optimus", speed), rel=1e-9)
    assert by_preset("optimus-true", given).jobs == done.jobs


@pytest.mark.parametrize(("policy", "most"), [("optimus", 1.05), nightly("lookahead", 1.08)])
def test_measuring_speeds_costs_little_when_jobs_are_long(policy: str, most: float) -> None:
    """Nothing is known at first: samples, fits and beliefs come from what the simulated jobs themselves report."""
    given = workload(3, nodes=96, jobs=40)
    for job in given["jobs"]:
        job["epochs"] *= 8
    read = read_workload(given)
    measuring, told, fair = (
        run(given, find_policy(name, read, Preset(Rules(), LoadBalance(), {}))).avg_jct
        for name in (policy, f"{policy}-true", "drf")
    )
    assert told < measuring < most * told
    assert measuring < 0.9 * fair


@pytest.mark.parametrize("policy", [Fifo(), Drf()])
def test_keeping_tasks_where_they_are_comes_to_much_the_same(policy) -> None:
    """Without emptying the cluster, fragmentation may cost something, but not a lot with tasks of this kind."""
    given = workload(2, nodes=24, jobs=60)
    kept, emptied = run(given, policy), run(given, policy, rules=Rules(empty_each_slot=True))
    assert kept.avg_jct == pytest.approx(emptied.avg_jct, rel=0.05)


def test_a_workload_that_never_ends_is_given_up() -> None:
    with pytest.raises(SimulationError, match=r"not ended after 3 slots: 1"):
        run(make([{"epochs": 1e6}]), rules=Rules(most_slots=3))


def test_a_replay_that_awaits_some_jobs_stops_when_they_have_ended() -> None:
    jobs = [{"epochs": epochs, "max_workers": 2, "max_ps": 2} for epochs in (5.0, 1e9, 1.0)]
    done = run(make(jobs), awaited=["1", "3"])
    assert [job.id for job in done.jobs] == ["1", "3"]
    assert done.slots == 3


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    run(make([{}, {"epochs": 30.0}]), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (2, 2)
    assert told == sorted(told)


def test_by_the_papers_rules_a_bundle_goes_to_one_node_as_one() -> None:
    """Two bundles of (4, 4) fill a node of (8, 8), so 4 nodes hold 8; placed apart, PSs would crowd workers out."""
    speeds = {"m": {"table": [[float(w * (w == ps)) for w in range(1, 17)] for ps in range(1, 17)]}}
    done = run(make([{"epochs": 8.0}], speeds=speeds), PAPER.policies["fifo"](None), PAPER.placement, rules=PAPER.rules)
    assert (done.jobs[0].last_slot, done.jobs[0].fraction) == (0, 1.0)


def test_a_policy_that_starts_no_job_ends_the_simulation_with_words() -> None:
    """It went on for 100,000 slots."""
    with pytest.raises(SimulationError) as raised:
        run(make([{}, {"submit_slot": 3}]), GivesNothing())
    assert str(raised.value) == (
        "no job can start: for 50 slots policy nothing (version 1) has given nothing to 2 jobs (1, 2) "
        "on an idle cluster that has room for them"
    )
