from __future__ import annotations

import random

import pytest
from msgspec import structs
from policies.snapshots import a_job, a_snapshot, ask, cluster, given
from policies.speeds import Told, Truth

from dl2d.core.decision import Constraint
from dl2d.core.jobs import NOTHING, Allocation, Architecture
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.policy import Evidence
from dl2d.core.resources import Resources
from dl2d.policies.lookahead import Lookahead
from dl2d.policies.optimus import Optimus
from dl2d.simulation.speeds.speed_models import AllReduce

CPU = {
    "worker": Resources.of(cpu=2),
    "ps": Resources.of(cpu=1),
    "samples_per_epoch": 100,
    "max_workers": 3,
    "max_ps": 3,
}


def test_it_jumps_over_a_dip_where_optimus_stops() -> None:
    told = Told(m=[[1.0, 0.9, 0.9], [0.9, 0.8, 0.9], [0.9, 4.0, 3.0]])
    snapshot = a_snapshot([a_job(1, model="m", **CPU)], cluster(1, cpu=20))
    assert given(Optimus(known=told), snapshot) == [(1, 1)]
    decision = ask(Lookahead(known=told), snapshot)
    assert [tuple(step) for _, step in decision.actions] == [(1, 1), (1, 2)]
    assert decision.jobs[0].reason.text == "no larger size would save 1 % of its time at 4 samples/s"
    assert decision.jobs[0].reason.constraint is Constraint.SATISFIED
    assert (decision.policy, decision.policy_version) == ("lookahead-true", "2")
    assert Lookahead().needs == {Evidence.SPEEDS, Evidence.JOB_SPEEDS}
    assert Lookahead(known=told).needs == frozenset()


def test_jumps_by_hand_for_two_jobs() -> None:
    """Of 10 CPUs, two jobs hold 3 each; 100 samples at 1 a second are 100 s.

    Job 1: one worker more saves 50 s for a share of 0.2, 250; all the way to 2w+3ps saves 75 s for 0.4, 187.5; so the
    worker first. Then two PSs save 25 of 50 s for 0.2: 125. Job 2: two PSs, 60 s for 0.2: 300, first of all.
    """
    told = Told(
        one=[[1.0, 2.0, 2.0], [1.0, 2.0, 2.0], [1.0, 4.0, 4.0]],
        two=[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [2.5, 2.5, 2.5]],
    )
    snapshot = a_snapshot([a_job(1, model="one", **CPU), a_job(2, model="two", **CPU)], cluster(1, cpu=10))
    decision = ask(Lookahead(known=told), snapshot)
    steps = [(key.id, tuple(step)) for key, step in decision.actions]
    assert steps == [("1", (1, 1)), ("2", (1, 1)), ("2", (0, 2)), ("1", (1, 0))]
    first, second = decision.jobs
    assert first.reason.text.startswith("2w+3ps would save 25 s of 50 s: no room for a ps")
    assert [(option.allocation, option.score) for option in first.alternatives] == [
        ((2, 1), 0.0),
        ((2, 3), pytest.approx(125)),
    ]
    assert second.reason.constraint is Constraint.SATISFIED


def test_a_jump_that_saves_less_than_one_percent_is_not_made() -> None:
    told = Told(m=[[100.0, 100.9, 100.9]])
    snapshot = a_snapshot([a_job(1, model="m", **{**CPU, "max_ps": 1})], cluster(1, cpu=20))
    assert given(Lookahead(known=told), snapshot) == [(1, 1)]
    told = Told(m=[[100.0, 100.9, 103.0]])
    assert given(Lookahead(known=told), snapshot) == [(3, 1)]


def test_a_jump_without_room_is_cut_by_a_task_of_the_role_that_had_none() -> None:
    """6w+1ps is best for what it takes, but 12 CPUs have room for five workers: then 3w+1ps is best of what is left."""
    told = Told(m=[[1.0, 1.1, 2.0, 2.01, 2.2, 9.0]])
    job = a_job(1, model="m", **{**CPU, "max_workers": 6, "max_ps": 1})
    decision = ask(Lookahead(known=told), a_snapshot([job], cluster(1, cpu=12)))
    # From 3w+1ps, 2.2 is again worth a jump of two workers.
    assert [tuple(step) for _, step in decision.actions] == [(1, 1), (2, 0), (2, 0)]
    assert decision.jobs[0].reason.constraint is Constraint.CAPACITY
    assert decision.jobs[0].reason.text.startswith("6w+1ps would save")


def test_only_allowed_counts_of_workers_are_jumped_to() -> None:
    told = Told(m=[[1.0, 5.0, 2.0, 3.0]])
    job = a_job(1, model="m", **{**CPU, "max_workers": 4, "max_ps": 1}, allowed_workers=(1, 3, 4))
    assert given(Lookahead(known=told), a_snapshot([job], cluster(1, cpu=20))) == [(4, 1)]
    assert given(Lookahead(known=told), a_snapshot([job], cluster(1, cpu=8))) == [(3, 1)]


def test_from_a_size_that_does_not_train_any_that_does_is_the_first_to_go_to() -> None:
    told = Told(m=[[0.0, 0.0, 0.0], [0.0, 0.5, 0.4], [0.0, 0.4, 0.9]], fast=[[1.0, 9.0, 9.0]])
    jobs = [a_job(1, model="fast", **{**CPU, "max_ps": 1}), a_job(2, model="m", **CPU)]
    decision = ask(Lookahead(known=told), a_snapshot(jobs, cluster(1, cpu=9)))
    assert [entry.allocation for entry in decision.jobs] == [(1, 1), (2, 2)]


def test_all_reduce_jobs_grow_by_workers() -> None:
    ring = AllReduce(batch=64, compute=0.01, model_bytes=1e8, bandwidth=1e9)
    job = a_job(1, architecture=Architecture.ALLREDUCE, ps=Resources(), min_ps=0, max_ps=0, max_workers=6)
    nodes = cluster(4, cpu=8, gpu=8)
    assert given(Lookahead(known=Truth(ring)), a_snapshot([job], nodes)) == [(6, 0)]


@pytest.mark.parametrize("seed", range(60))
def test_a_plain_lookahead_comes_to_the_same(seed: int) -> None:
    """Every size of every job looked at anew in each round, on one node, so that room is a matter of sums."""
    draw = random.Random(seed)
    most = draw.choice([3, 5, 9])
    names = ["a", "b", "c"]
    speeds = {
        name: [[draw.choice([0.0, *[draw.uniform(1, 9)] * 4]) for _ in range(most)] for _ in range(most)]
        for name in names
    }
    for table in speeds.values():
        table[0][0] = 1.0
    room = draw.choice([12, 25, 60])
    jobs = [
        a_job(
            number, model=draw.choice(names), samples_per_epoch=draw.uniform(50, 500), max_workers=most, max_ps=most,
            worker=Resources.of(cpu=draw.choice([1, 2])), ps=Resources.of(cpu=1),
        )
        for number in range(draw.randint(1, 5))
    ]  # fmt: skip
    want = _plain(jobs, speeds, room)
    assert given(Lookahead(known=Told(**speeds)), a_snapshot(jobs, cluster(1, cpu=room))) == want


def _plain(jobs, speeds, room) -> list[Allocation]:
    free = float(room)
    has: list[Allocation] = []
    for job in jobs:
        cost = job.request.worker.get("cpu") + job.request.ps.get("cpu")
        has.append(Allocation(1, 1) if cost <= free else NOTHING)
        free -= cost if has[-1] != NOTHING else 0
    limits = [[job.request.max_workers, job.request.max_ps] for job in jobs]
    while True:
        best = None
        for place, job in enumerate(jobs):
            if has[place] == NOTHING:
                continue
            time = lambda w, p, job=job: (
                job.request.samples_per_epoch / speed if (speed := speeds[job.request.model][p - 1][w - 1]) else None
            )
            now = time(*has[place])
            for p in range(has[place].ps, limits[place][1] + 1):
                for w in range(has[place].workers, limits[place][0] + 1):
                    then = time(w, p)
                    if (w, p) == has[place] or then is None or now - then < 0.01 * now:
                        continue
                    cost = job.request.worker.get("cpu") * (w - has[place].workers) + p - has[place].ps
                    gain = (now - then) / cost
                    if best is None or gain > best[0] * (1 + 1e-12):
                        best = (gain, place, w, p, cost)
        if best is None:
            return has
        _, place, w, p, cost = best
        if cost <= free:
            free -= cost
            has[place] = Allocation(w, p)
            continue
        one = jobs[place].request.worker.get("cpu")
        worker_blocked = one * (w - has[place].workers) > free
        added = w - has[place].workers if worker_blocked else p - has[place].ps
        kept = added - max(added // 8, 1)
        if worker_blocked:
            limits[place][0] = has[place].workers + kept
        else:
            limits[place][1] = has[place].ps + kept


def test_a_resize_has_to_pay_within_a_slot() -> None:
    """Three workers are 20 % faster than two, as was measured; a tenth, or a third, of the slot is lost."""
    job = a_job(1, model="m", **CPU | {"max_ps": 1})
    snapshot = a_snapshot([job], cluster(1, cpu=20), {0: Allocation(2, 1)})
    points = [SpeedPoint(Allocation(w, 1), speed, 16, 3) for w, speed in ((1, 1.0), (2, 2.0), (3, 2.4))]
    snapshot = structs.replace(snapshot, speeds=(MeasuredSpeeds(TrainingKind.of(job.request), tuple(points)),))
    settings = {"optimism": 0.0, "slot_seconds": 300.0}
    assert given(Lookahead(resize_seconds=30, **settings), snapshot) == [(3, 1)]
    stays = Lookahead(resize_seconds=100, **settings)
    assert given(stays, snapshot) == [(2, 1)]
    assert stays.version == "4 optimism=0 resize_seconds=100 slot_seconds=300"


def test_pessimism_keeps_to_what_was_measured() -> None:
    job = a_job(1, model="m", **CPU | {"max_workers": 16, "max_ps": 16})
    snapshot = a_snapshot([job], cluster(1, cpu=200))
    points = tuple(SpeedPoint(Allocation(n, n), 2.0 + n / 100, 16, 3) for n in (1, 4))
    snapshot = structs.replace(snapshot, speeds=(MeasuredSpeeds(TrainingKind.of(job.request), points),))
    assert given(Lookahead(optimism=-3), snapshot) == [(4, 4)]
    [hopes] = given(Lookahead(optimism=3), snapshot)
    assert hopes not in {(1, 1), (4, 4)}


@pytest.mark.parametrize("settings", [{"optimism": float("nan")}, {"resize_seconds": -1.0}, {"slot_seconds": 0.0}])
def test_settings_that_mean_nothing_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Lookahead(**settings)
