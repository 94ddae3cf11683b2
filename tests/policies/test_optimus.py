from __future__ import annotations

import random
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray
from policies.snapshots import a_job, a_snapshot, ask, cluster, given, snapshots
from policies.speeds import Told, Truth, measured

from dl2d.core.cluster import Node, Snapshot
from dl2d.core.decision import Constraint
from dl2d.core.jobs import NOTHING, Allocation, Architecture, Consistency, Job, JobKey
from dl2d.core.json_codec import encode
from dl2d.core.measured_speeds_and_losses import LossPoint, MeasuredLoss, MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.policy import Evidence
from dl2d.core.resources import Resources
from dl2d.plugins import load_policy
from dl2d.policies.lookahead import Lookahead
from dl2d.policies.optimus import Optimus
from dl2d.simulation.speeds.speed_models import AllReduce, PsAsync, PsSync
from dl2d.tick.policy_check.decision_check import check_decision

CPU = {"worker": Resources.of(cpu=2), "ps": Resources.of(cpu=1), "max_workers": 2, "max_ps": 2}
# One CPU of 10 is a share of 0.1. A has 100 samples left: 100 s at 1w+1ps, 50 at 2w+1ps, 80 at 1w+2ps, 40 at 2w+2ps.
A = a_job(1, model="a", samples_per_epoch=100, **CPU)
# B has 9: 36 s at 1w+1ps, 18 at 2w+1ps, 27 at 1w+2ps, 18 at 2w+2ps.
B = a_job(2, model="b", samples_per_epoch=9, **CPU)
TOLD = Told(a=[[1.0, 2.0], [1.25, 2.5]], b=[[1 / 4, 1 / 2], [1 / 3, 1 / 2]])
TEN = cluster(1, cpu=10)


def test_gains_by_hand_for_two_jobs() -> None:
    """A's worker: (100 - 50)/0.2 = 250, its PS (100 - 80)/0.1 = 200. B's: 18/0.2 = 90 and 9/0.1 = 90: the PS.

    A takes a worker; then its PS, (50 - 40)/0.1 = 100; then B takes its PS. Of 10 CPUs none is left for B's worker,
    (27 - 18)/0.2 = 45.
    """
    decision = ask(Optimus(known=TOLD), a_snapshot([A, B], TEN))
    steps = [(key.id, tuple(step)) for key, step in decision.actions]
    assert steps == [("1", (1, 1)), ("2", (1, 1)), ("1", (1, 0)), ("1", (0, 1)), ("2", (0, 1))]
    first, second = decision.jobs
    assert (first.allocation, second.allocation) == ((2, 2), (1, 2))
    assert first.reason.constraint is Constraint.SATISFIED
    assert first.reason.text == "has its maximum of 2w+2ps"
    assert second.reason.constraint is Constraint.CAPACITY
    assert second.reason.text.startswith("1 worker more would save 9 s of 27 s: no room for a worker")
    assert [(short.wanted, short.had) for short in second.reason.shortfalls] == [(2, 0)]
    assert [(option.allocation, option.score) for option in second.alternatives] == [
        ((1, 2), 0.0),
        ((2, 2), pytest.approx(45)),
    ]
    assert decision.measure == "seconds saved per unit of dominant share"
    assert (decision.policy, decision.policy_version) == ("optimus-true", "2")


def test_without_dividing_by_resources_seconds_alone_count() -> None:
    """A's worker saves 50 s, B's 18, A's PS then 10, which has no room."""
    policy = Optimus(known=TOLD, by_resources=False)
    assert given(policy, a_snapshot([A, B], TEN)) == [(2, 1), (2, 1)]
    assert ask(policy, a_snapshot([A, B], TEN)).measure == "seconds saved"


def test_remaining_work_counts_not_all_of_it() -> None:
    """A did 90 %: its gains are a tenth, 25 and 20, and B goes first: its PS, then its worker, 9/0.2 = 45."""
    nearly = replace(A, progress=replace(A.progress, epoch=0.9))
    decision = ask(Optimus(known=TOLD), a_snapshot([nearly, B], TEN))
    assert [(key.id, tuple(step)) for key, step in decision.actions[2:]] == [("2", (0, 1)), ("2", (1, 0))]


def test_it_stops_where_no_task_more_is_faster_however_much_room_there_is() -> None:
    """Flat from 1w+1ps on, and a dip in front of a peak: one task at a time never gets there."""
    told = Told(flat=[[5.0] * 4] * 4, dip=[[5.0, 4.0, 9.0, 9.0], [4.0, 4.0, 9.0, 9.0], [4.0] * 4, [4.0] * 4])
    snapshot = a_snapshot([a_job(1, model="flat"), a_job(2, model="dip")], cluster(9, cpu=8, gpu=8))
    decision = ask(Optimus(known=told), snapshot)
    assert [entry.allocation for entry in decision.jobs] == [(1, 1), (1, 1)]
    assert {entry.reason.constraint for entry in decision.jobs} == {Constraint.SATISFIED}
    assert decision.jobs[0].reason.text == "one task more would not make it faster than 5 samples/s"


def test_a_job_without_room_for_its_best_task_leaves_the_rest_to_others() -> None:
    """A wants one GPU of ten more, but others have them; its PS would have room but is not its best. B goes on."""
    gpu = replace(A, request=replace(A.request, worker=Resources.of(gpu=1)))
    node = Node("n0", Resources.of(cpu=10, gpu=10), Resources.of(gpu=9))
    snapshot = a_snapshot([gpu, B], [node])
    assert given(Optimus(known=TOLD), snapshot) == [(1, 1), (2, 2)]
    ended = ask(Optimus(known=TOLD, end_at_first_failure=True, by_resources=False), snapshot)
    assert [entry.allocation for entry in ended.jobs] == [(1, 1), (1, 1)]
    assert [entry.reason.constraint for entry in ended.jobs] == [Constraint.CAPACITY, Constraint.QUEUE]


def test_where_the_next_allowed_count_is_two_workers_more_the_step_is_both() -> None:
    """1, 3 or 4 workers: two more save 60 of 100 s, 60/(2 x 0.1) = 300; a PS saves nothing."""
    told = Told(m=[[1.0, 9.9, 2.5, 2.0]])
    job = a_job(1, model="m", samples_per_epoch=100, worker=Resources.of(cpu=1), allowed_workers=(1, 3, 4), max_ps=1)
    decision = ask(Optimus(known=told), a_snapshot([job], TEN))
    assert [tuple(step) for _, step in decision.actions] == [(1, 1), (2, 0)]
    job = replace(job, request=replace(job.request, allowed_workers=(1, 3)))
    one = ask(Optimus(known=told), a_snapshot([job], cluster(1, cpu=3)))
    assert one.jobs[0].reason.text.startswith("2 workers more would save 60 s of 100 s")
    assert one.jobs[0].alternatives[1].allocation == (3, 1)
    assert one.jobs[0].alternatives[1].score == pytest.approx(60 / (2 / 3))


def test_all_reduce_jobs_grow_by_workers() -> None:
    ring = AllReduce(batch=64, compute=0.01, model_bytes=1e8, bandwidth=1e9)
    job = a_job(1, architecture=Architecture.ALLREDUCE, ps=Resources(), min_ps=0, max_ps=0, max_workers=6, model="ring")
    assert given(Optimus(known=Truth(ring)), a_snapshot([job], cluster(4, cpu=8, gpu=8))) == [(6, 0)]
    assert given(Optimus(known=Truth(ring)), a_snapshot([job], cluster(2, cpu=8, gpu=2))) == [(4, 0)]


def test_a_size_that_does_not_train_at_all_is_left_first() -> None:
    """At 1w+1ps nothing happens: any speed at all is worth more than every other gain."""
    told = Told(a=[[1.0, 2.0], [1.25, 2.5]], b=[[0.0, 0.0], [0.5, 0.0]])
    decision = ask(Optimus(known=told), a_snapshot([A, B], TEN))
    assert decision.actions[2] == (B.key, (0, 1))
    assert [entry.allocation for entry in decision.jobs] == [(2, 2), (1, 2)]


def test_floors_come_first_and_starts_in_submit_order() -> None:
    held = {1: Allocation(2, 2)}
    snapshot = a_snapshot([A, B], cluster(1, cpu=6), held)
    assert given(Optimus(known=TOLD), snapshot) == [(1, 1), (1, 1)]
    small = a_snapshot([A, B], cluster(1, cpu=5), {1: Allocation(1, 1)})
    decision = ask(Optimus(known=TOLD), small)
    assert [entry.allocation for entry in decision.jobs] == [NOTHING, (1, 2)]
    assert decision.jobs[0].reason.text.startswith("next bundle of 1w+1ps: no room for a ps")


def test_where_the_better_step_is_beyond_what_it_may_have_the_job_gets_no_more() -> None:
    """As in the DL2 authors' simulator: with a third worker 25 s, so a PS, 40 s, is not even looked at."""
    table = Told(a=[[1.0, 2.0, 4.0], [1.25, 2.5, 2.5], [1.0, 1.0, 1.0]])
    far = lambda job: table.grid(replace(job, request=replace(job.request, max_workers=3, max_ps=3)))
    policy = Optimus(known=table, by_resources=False, beyond=far)
    decision = ask(policy, a_snapshot([A], TEN))
    assert decision.jobs[0].allocation == (2, 1)
    assert decision.jobs[0].reason.text == "has its maximum of workers, and one more of them would help more than a PS"
    assert [option.allocation for option in decision.jobs[0].alternatives] == [(2, 1), (2, 2)]
    assert given(Optimus(known=table, by_resources=False), a_snapshot([A], TEN)) == [(2, 2)]


SYNC = PsSync((0.02, 0.1, 0.3, 0.005, 0.01), 32)
LARGE = cluster(40, cpu=8, gpu=8)
SIX = [a_job(number, max_workers=16, max_ps=16, samples_per_epoch=1000 * number) for number in range(1, 7)]


def test_an_unknown_kind_is_sampled_at_sizes_that_are_spread_over_workers_and_servers() -> None:
    """From the smallest to the largest, then the corners, then the middle; jobs that are not needed wait."""
    decision = ask(Optimus(), a_snapshot(SIX, LARGE))
    sizes = [tuple(entry.allocation) for entry in decision.jobs]
    assert sizes == [(1, 1), (16, 16), (1, 16), (16, 1), (4, 4), (1, 1)]
    reason = "runs at 4w+4ps to measure its speed, because speeds of other are known at only 0 sizes"
    assert decision.jobs[4].reason.text == reason
    assert decision.jobs[5].reason.constraint is Constraint.QUEUE
    assert decision.policy == "optimus"
    assert Optimus().needs == {Evidence.SPEEDS}


@pytest.mark.parametrize("model", [SYNC, PsAsync((0.2, 0.1, 0.03, 0.004), 8)])
def test_once_sampled_it_decides_as_if_it_were_told(model) -> None:
    consistency = Consistency.SYNC if isinstance(model, PsSync) else Consistency.ASYNC
    jobs = [replace(job, request=replace(job.request, consistency=consistency)) for job in SIX]
    fresh = a_snapshot(jobs, LARGE)
    sampled = measured(fresh, model, given(Optimus(), fresh))
    assert given(Optimus(), sampled) == given(Optimus(known=Truth(model)), fresh)


def test_sampling_goes_on_from_slot_to_slot_with_a_single_job() -> None:
    fresh = a_snapshot(SIX[:1], LARGE)
    sizes: list[Allocation] = []
    for _ in range(5):
        sizes += given(Optimus(), measured(fresh, SYNC, sizes))
    assert len(set(sizes)) == 5
    assert given(Optimus(), measured(fresh, SYNC, sizes)) == given(Optimus(known=Truth(SYNC)), fresh)


def test_a_job_stays_at_a_size_until_it_was_measured_there() -> None:
    running = a_snapshot(SIX[:2], LARGE, held={1: Allocation(3, 2)})
    assert given(Optimus(), running) == [(16, 16), (3, 2)]
    after = given(Optimus(), measured(running, SYNC, [(3, 2)]))
    assert (3, 2) not in after


def test_many_sizes_of_one_ratio_are_not_enough() -> None:
    """Where every job had as many PSs as workers nothing is known of w/p: that is sampled before anything else."""
    equal = measured(a_snapshot(SIX, LARGE), SYNC, [(count, count) for count in range(1, 10)])
    decision = ask(Optimus(), equal)
    sampled = [entry.allocation for entry in decision.jobs if entry.reason.text.startswith("runs at")]
    assert all(workers != ps for workers, ps in sampled)
    assert given(Optimus(), measured(equal, SYNC, [*((n, n) for n in range(1, 10)), *sampled])) == given(
        Optimus(known=Truth(SYNC)), a_snapshot(SIX, LARGE)
    )


def test_more_samples_may_be_wanted() -> None:
    decision = ask(Optimus(sample_sizes=6), a_snapshot(SIX, LARGE))
    assert len({entry.allocation for entry in decision.jobs}) == 6
    assert decision.policy_version == "2 sample_sizes=6"


def test_samples_keep_to_bounds_to_counts_that_are_allowed_and_to_the_room() -> None:
    jobs = [
        replace(job, request=replace(job.request, allowed_workers=(2, 4, 8), min_ps=2, min_workers=2)) for job in SIX
    ]
    snapshot = a_snapshot(jobs, LARGE)
    decision = ask(Optimus(), snapshot)
    check_decision(decision, snapshot)
    sizes = given(Optimus(), snapshot)
    assert sizes[:2] == [(2, 2), (8, 16)]
    assert len(set(sizes[:5])) == 5
    # Eight GPUs: the largest has no room beside the others, so what has room and lies farthest is taken.
    tight = a_snapshot(SIX[:2], cluster(1, cpu=64, gpu=8))
    assert given(Optimus(), tight) == [(1, 1), (7, 16)]


def test_a_measured_size_has_the_speed_that_it_had() -> None:
    """The fit says that 2w+1ps is faster than 1w+1ps; it was measured, and is not."""
    sizes = [(1, 1), (4, 4), (1, 4), (4, 1), (2, 2), (3, 3)]
    fitted = measured(a_snapshot([replace(A, request=replace(A.request, max_ps=1))], LARGE), SYNC, sizes)
    assert given(Optimus(), fitted) == [(2, 1)]
    (speeds,) = fitted.speeds
    slow = structs.replace(
        fitted, speeds=(replace(speeds, points=(*speeds.points, SpeedPoint(Allocation(2, 1), 0.01, 3))),)
    )
    assert given(Optimus(), slow) == [(1, 1)]


def test_a_job_ends_when_its_loss_settles() -> None:
    """Loss 1/(k + 1), threshold 1/13: it settles at epoch 3 of 100 declared, and B, with more left, goes first."""
    policy = Optimus(known=TOLD, convergence=1 / 13)
    long = replace(A, request=replace(A.request, epochs=100), progress=replace(A.progress, epoch=2.0))
    snapshot = a_snapshot([long, replace(B, request=replace(B.request, samples_per_epoch=90))], TEN)
    losses = MeasuredLoss(A.key, tuple(LossPoint(k / 4, 1 / (k / 4 + 1)) for k in range(9)))
    fitted = ask(policy, structs.replace(snapshot, losses=(losses,)))
    assert fitted.policy == "optimus-true-loss"
    assert policy.needs == {Evidence.LOSSES}
    assert Optimus(convergence=0.1).needs == {Evidence.LOSSES, Evidence.SPEEDS}
    assert [key.id for key, _ in fitted.actions[2:]] == ["2", "2"]
    assert "estimated until epoch 3, when its loss is predicted to settle" in fitted.jobs[0].reason.text
    declared = ask(policy, snapshot)
    assert [key.id for key, _ in declared.actions[2:]] == ["1", "1", "2"]
    assert "because its losses fit no falling curve yet" in declared.jobs[0].reason.text
    past = replace(long, progress=replace(A.progress, epoch=5.0))
    settled = ask(policy, structs.replace(snapshot, jobs=(past, snapshot.jobs[1]), losses=(losses,)))
    assert "although its loss was predicted to settle at epoch 3" in settled.jobs[0].reason.text
    assert [key.id for key, _ in settled.actions[2:]] == ["1", "1", "2"]


def test_a_threshold_must_be_more_than_nothing() -> None:
    with pytest.raises(ValueError, match="convergence"):
        Optimus(convergence=0.0)


def _shown(snapshot: Snapshot, seed: int) -> tuple[Snapshot, Told]:
    """A snapshot with jobs of three kinds, one an all-reduce, and any speeds, measured here and there."""
    draw = random.Random(seed)
    jobs = []
    for number, job in enumerate(snapshot.jobs):
        request = replace(job.request, model=f"m{number % 3}")
        if number % 3 == 2:
            request = replace(request, architecture=Architecture.ALLREDUCE, min_ps=0, max_ps=0, ps=Resources())
        jobs.append(replace(job, request=request))
    speed = lambda: draw.choice([0.0, draw.uniform(0.1, 9.0), draw.uniform(0.1, 9.0)])
    tables = {f"m{number}": [[speed() for _ in range(6)] for _ in range(6)] for number in range(3)}
    kinds = sorted({TrainingKind.of(job.request) for job in jobs})
    speeds = tuple(
        MeasuredSpeeds(
            kind,
            tuple(
                SpeedPoint(Allocation(w, p if kind.architecture is Architecture.PS else 0), speed(), 1)
                for w, p in sorted({(draw.randint(1, 6), draw.randint(1, 6)) for _ in range(draw.randint(0, 12))})
            ),
        )
        for kind in kinds
    )
    return structs.replace(snapshot, jobs=tuple(jobs), speeds=speeds), Told(**tables)


POLICIES = [
    lambda told: Optimus(known=told),
    lambda told: Optimus(known=told, by_resources=False, end_at_first_failure=True),
    lambda _: Optimus(),
    lambda _: Optimus(convergence=0.01, end_at_first_failure=True),
    lambda told: Lookahead(known=told),
    lambda _: Lookahead(),
]


@pytest.mark.parametrize("make", POLICIES)
@hypothesis.given(snapshots, st.integers(0, 10**6))
def test_whatever_is_shown_the_answer_is_one_and_always_the_same(make, snapshot, seed) -> None:
    shown, told = _shown(snapshot, seed)
    decision = ask(make(told), shown)
    check_decision(decision, shown)
    assert encode(decision) == encode(ask(make(told), shown))
    total = Resources.total(job.request.demand_of(decision.allocations()[job.key]) for job in shown.jobs)
    assert total.fits_in(shown.capacity)
    assert all(entry.reason.text for entry in decision.jobs)
    given_in_steps = dict.fromkeys((job.key for job in shown.jobs), NOTHING)
    for key, step in decision.actions:
        has = given_in_steps[key]
        given_in_steps[key] = Allocation(has.workers + step.workers, has.ps + step.ps)
    assert given_in_steps == decision.allocations()


@pytest.mark.parametrize("make", POLICIES)
@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4), st.integers(0, 10**6)
)
def test_running_jobs_never_fall_below_their_floors(make, held, seed) -> None:
    jobs = [a_job(number) for number in range(len(held) + 2)]
    running = {number: Allocation(*size) for number, size in enumerate(held)}
    snapshot = a_snapshot(jobs, cluster(4, cpu=14, gpu=4), running)
    shown, told = _shown(snapshot, seed)
    # Which of the running jobs are all-reduce was chosen after their tasks were; those have no floor of PSs.
    floors = tuple((key, Allocation(1, 0 if int(key.id) % 3 == 2 else 1)) for key, _ in shown.floors)
    shown = structs.replace(shown, floors=floors)
    decision = ask(make(told), shown)
    check_decision(decision, shown)
    assert all(decision.allocations()[key].workers >= 1 for key, _ in floors)


@pytest.mark.parametrize("name", ["optimus", "optimus-loss", "lookahead"])
def test_they_are_installed_by_name(name: str) -> None:
    assert load_policy(name).name == name


def test_speeds_that_come_as_a_new_array_each_time_are_not_mixed_up() -> None:
    class Fresh:
        def grid(self, job: Job) -> NDArray[np.float64]:
            return TOLD.grid(job).copy()

    jobs = [replace(A if number % 2 else B, key=JobKey("c", str(number), number)) for number in range(40)]
    snapshot = a_snapshot(jobs, cluster(20, cpu=9))
    assert ask(Optimus(known=Fresh()), snapshot) == ask(Optimus(known=TOLD), snapshot)
    assert ask(Lookahead(known=Fresh()), snapshot) == ask(Lookahead(known=TOLD), snapshot)
