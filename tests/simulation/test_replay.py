from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation.reference import average_jct

from dl2d.core.codec import encode
from dl2d.core.errors import Dl2dError
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.simulation.preset import PresetName, preset
from dl2d.simulation.replay import Replayed, Rules, SimulationError, replay
from dl2d.simulation.workload import read_workload

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


@pytest.mark.parametrize("policy", ["fifo", "srtf", "drf"])
@pytest.mark.parametrize(("seed", "nodes"), [(1, 96), (2, 24), (3, 12), (4, 7)])
def test_the_preset_agrees_with_an_independent_simulator(policy: str, seed: int, nodes: int) -> None:
    given = workload(seed, nodes=nodes, jobs=60)
    done = run(given, PAPER.policies[policy](None), PAPER.placement, rules=PAPER.rules)
    assert done.avg_jct == pytest.approx(average_jct(given, policy, speed_of(given)), rel=1e-9)


@pytest.mark.parametrize("policy", [Fifo(), Drf()])
def test_keeping_tasks_where_they_are_comes_to_much_the_same(policy) -> None:
    """Without emptying the cluster, fragmentation may cost something, but not a lot with tasks of this kind."""
    given = workload(2, nodes=24, jobs=60)
    kept, emptied = run(given, policy), run(given, policy, rules=Rules(empty_each_slot=True))
    assert kept.avg_jct == pytest.approx(emptied.avg_jct, rel=0.05)


def test_the_same_seed_gives_the_same_bytes() -> None:
    given = workload(5, nodes=24, jobs=30)
    assert encode(run(given, seed=3).jobs) == encode(run(given, seed=3).jobs)


def test_a_workload_that_never_ends_is_given_up() -> None:
    with pytest.raises(SimulationError, match=r"not ended after 3 slots: 1"):
        run(make([{"epochs": 1e6}]), rules=Rules(most_slots=3))


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    run(make([{}, {"epochs": 30.0}]), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (2, 2)
    assert told == sorted(told)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.floats(0.5, 30), st.integers(1, 8), st.integers(0, 8), st.integers(1, 6)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([Drf(), Fifo()]),
    st.booleans(),
)
def test_every_job_ends_and_none_faster_than_at_its_best_size(shapes, policy, empty) -> None:
    """No job loses progress: its completion time is never below its length at the best speed."""
    jobs = [
        {"submit_slot": slot, "epochs": epochs, "worker": {"cpu": cpu, "gpu": gpu}, "max_workers": most, "max_ps": most}
        for slot, epochs, cpu, gpu, most in shapes
    ]
    given = make(jobs)
    done = run(given, policy, rules=Rules(empty_each_slot=empty))
    known = read_workload(given)
    assert [job.id for job in done.jobs] == [job.id for job in known.jobs]
    for job, outcome in zip(known.jobs, done.jobs, strict=True):
        best = max(
            known.epochs_in_slot(job, n, m) for n in range(1, job.max_workers + 1) for m in range(1, job.max_ps + 1)
        )
        assert outcome.jct >= job.epochs / best * (1 - 1e-9)


def test_a_simulation_error_is_one_of_ours() -> None:
    assert issubclass(SimulationError, Dl2dError)
