from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawing
from hypothesis import settings
from hypothesis import strategies as st
from simulation.drawn import drawn

from dl2d.core.errors import WorkloadError
from dl2d.simulation.replay import replay
from dl2d.simulation.simulation_presets import PresetName, preset
from dl2d.simulation.speeds.speed_models import PsSync
from dl2d.simulation.vectorized.clusters import Clusters, in_bundles
from dl2d.simulation.vectorized.workload_arrays import Library
from dl2d.simulation.workload.workload_file import Workload, read_workload

PAPER = preset(PresetName.DL2_PAPER)


def begun(workloads: list[Workload], **more: float) -> Clusters:
    """One cluster for each workload, in its first slot."""
    clusters = Clusters(Library.of(workloads), len(workloads), **more)
    everywhere = np.arange(len(workloads))
    clusters.reset(everywhere, everywhere, [np.random.default_rng(number) for number in range(len(workloads))])
    return clusters


def bundles_left(clusters: Clusters) -> tuple[np.ndarray, np.ndarray]:
    """What each job gets next under whole bundles, (N, J, 2); and whether it may have it."""
    least, has = clusters.least, clusters.sizes
    step = np.where(has.any(axis=2)[:, :, None], np.minimum(least, 1), least)
    return step, clusters.present & (has + step <= clusters.most).all(axis=2)


def given(clusters: Clusters, which: np.ndarray, jobs: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Lay what is asked for, (k, 2), as bundles, then workers, then PSs; whether each job got all of it."""
    kinds, amounts = zip(*in_bundles(asked), strict=True)
    wanted = np.stack(amounts, axis=1)
    return (clusters.lay(which, jobs[:, None] * 3 + np.array(kinds), wanted) == wanted).all(axis=1)


def drf(clusters: Clusters) -> np.ndarray:
    """Keys of jobs: the dominant share, exactly as DRF has it."""
    held = (clusters.sizes[:, :, :, None] * clusters.demand).sum(axis=2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(held / clusters.capacity[:, None, :]).max(axis=2)


def fifo(clusters: Clusters) -> np.ndarray:
    return np.zeros(clusters.present.shape)


def play(clusters: Clusters, key: Callable[[Clusters], np.ndarray]) -> np.ndarray:
    """Whole bundles to the job with the least key, the first of equals; a slot's filling ends at the first refusal."""
    everywhere = np.arange(clusters.count)
    while not clusters.over.all():
        filling = ~clusters.over
        while filling.any():
            step, may = bundles_left(clusters)
            keys = np.where(may, key(clusters), np.inf)
            filling &= may.any(axis=1)
            which = everywhere[filling]
            jobs = keys.argmin(axis=1)[filling]
            filling[which] = given(clusters, which, jobs, step[which, jobs])
        clusters.end_slot(everywhere)
    return clusters.completion()


@pytest.mark.parametrize(("policy", "key"), [("drf", drf), ("fifo", fifo)])
@pytest.mark.parametrize("first", [0, 10, 20])
def test_completion_times_are_those_of_the_replay(policy: str, key, first: int) -> None:
    """Ten at once, of different sizes: overload, gaps, uneven nodes, fractions, all-reduce, holes in tables."""
    workloads = [drawn(seed, jobs=6 + seed % 9) for seed in range(first, first + 10)]
    times = play(begun(workloads), key)
    ticks = count()
    for own, workload in zip(times, workloads, strict=True):
        told = replay(
            workload, PAPER.policies[policy](None), PAPER.placement, rules=PAPER.rules, timer=lambda: next(ticks)
        )
        expected = [job.jct for job in told.jobs]
        np.testing.assert_allclose(own[: len(expected)], expected, rtol=1e-9, atol=0)
        assert np.isnan(own[len(expected) :]).all()


def one_node(*, epochs: list[float], **more: Any) -> Workload:
    """A node of 8 CPUs and 8 GPUs; bundles of (4, 4) at s(1 w) = 1 and s(2 w) = 2 samples/s: 1 and 2 epochs a slot."""
    jobs = [
        {"id": str(number), "model": "m", "submit_slot": 0, "epochs": length, "samples_per_epoch": 100.0,
         "worker": {"cpu": 2, "gpu": 4}, "ps": {"cpu": 2}, "max_workers": 2, "max_ps": 2, **more}
        for number, length in enumerate(epochs, start=1)
    ]  # fmt: skip
    return read_workload(
        {
            "slot_seconds": 100,
            "cluster": [{"count": 1, "resources": {"cpu": 8, "gpu": 8}}],
            "speeds": {"m": {"table": [[1.0, 2.0], [1.0, 2.0]]}},
            "jobs": jobs,
        }
    )


HERE = np.zeros(1, dtype=np.int64)


def give(clusters: Clusters, job: int, workers: int, ps: int) -> bool:
    return bool(given(clusters, HERE, HERE + job, np.array([[workers, ps]]))[0])


def test_a_slot_tells_what_was_done_and_what_could_have_been() -> None:
    """5 epochs, 2 a slot: the third slot ends in its middle; its rate is still that of a whole slot."""
    clusters = begun([one_node(epochs=[5.0])])
    reports = []
    for _ in range(3):
        assert give(clusters, 0, 2, 2)
        reports.append(clusters.end_slot(HERE))
    assert [float(report.rate[0, 0]) for report in reports] == [0.4, 0.4, 0.4]
    assert [float(report.progress[0, 0]) for report in reports] == [0.4, 0.4, 0.2]
    assert [bool(report.ended[0, 0]) for report in reports] == [False, False, True]
    assert [float(report.fraction[0, 0]) for report in reports] == [1.0, 1.0, 0.5]
    assert (reports[2].workers[0, 0], reports[2].ps[0, 0], int(reports[2].slot[0])) == (2, 2, 2)
    assert clusters.over.all()
    assert clusters.completion()[0, 0] == 2.5


def test_a_job_gets_its_minimum_size_or_nothing() -> None:
    clusters = begun([one_node(epochs=[5.0, 5.0], min_workers=2)])
    clusters.give_one(2, HERE, HERE, clusters.heads())
    assert not give(clusters, 1, 2, 1), "the second worker has no GPUs left"
    assert clusters.sizes[0].tolist() == [[1, 1], [0, 0]]
    assert clusters.free[:, 0, 0].tolist() == [4000, 4000]
    assert clusters.used[:, 0].tolist() == [4000, 4000]
    assert clusters.load[0].tolist() == [8000]


def test_a_job_below_its_minimum_size_does_not_run() -> None:
    clusters = begun([one_node(epochs=[5.0], min_workers=2)])
    clusters.fill(np.array([[[1, 1]]]), HERE)
    assert clusters.sizes[0].tolist() == [[1, 1]]
    assert clusters.end_slot(HERE).rate[0, 0] == 0.0
    assert give(clusters, 0, 2, 1)
    assert clusters.end_slot(HERE).rate[0, 0] == 0.4


def test_slots_without_jobs_are_passed_over() -> None:
    workload = one_node(epochs=[1.0], submit_slot=7)
    clusters = begun([workload])
    assert (clusters.slot[0], clusters.played[0]) == (7, 0)
    assert give(clusters, 0, 1, 1)
    clusters.end_slot(HERE)
    assert (clusters.slot[0], clusters.played[0], clusters.completion()[0, 0]) == (8, 1, 1.0)


def test_a_cluster_that_is_over_stays_as_it_is() -> None:
    clusters = begun([one_node(epochs=[1.0])])
    give(clusters, 0, 1, 1)
    clusters.end_slot(HERE)
    report = clusters.end_slot(HERE)
    assert not report.present.any()
    assert not report.rate.any()
    assert (clusters.slot[0], clusters.played[0]) == (1, 1)


def plainly(clusters: Clusters, cluster: int, turns: list[tuple[int, int]], *, ends: bool) -> tuple[list[int], list]:
    """Task by task to the least used node, on a copy; what each turn got, and the nodes' free amounts after it.

    A turn ends at the first task that does not fit there, with ``ends`` all do.
    """
    nodes = int(clusters.library.nodes[clusters.workload[cluster]])
    free = clusters.free[:, cluster, :nodes].T.copy()
    load = clusters.load[cluster, :nodes].copy()
    placed = [0] * len(turns)
    for number, (task, amount) in enumerate(turns):
        demand = clusters.asks[cluster, task // 3, task % 3]
        while placed[number] < amount and (demand <= free[load.argmin()]).all():
            head = load.argmin()
            free[head] -= demand
            load[head] += demand.sum()
            placed[number] += 1
        if ends and placed[number] < amount:
            break
    return placed, free.tolist()


def free_of(clusters: Clusters, cluster: int) -> list:
    return clusters.free[:, cluster, : int(clusters.library.nodes[clusters.workload[cluster]])].T.tolist()


@settings(max_examples=60)
@drawing(st.integers(0, 10**6), st.integers(0, 3))
def test_filling_goes_as_if_task_by_task(seed: int, slots: int) -> None:
    draw = np.random.default_rng(seed)
    clusters = begun([drawn(seed + number, jobs=int(draw.integers(1, 12))) for number in range(3)])
    for _ in range(slots + 1):
        targets = draw.integers(0, 20, (*clusters.present.shape, 2))
        wanted = np.minimum(targets, clusters.most) * clusters.present[:, :, None]
        turns = [
            [(job * 3 + kind, int(amount)) for job in range(len(own)) for kind, amount in in_bundles(own[job])]
            for own in wanted
        ]
        expected = [plainly(clusters, number, own, ends=True) for number, own in enumerate(turns)]
        clusters.fill(targets, np.arange(3))
        for number, (placed, free) in enumerate(expected):
            amounts = np.array(placed).reshape(-1, 3)  # of each job: bundles, workers, PSs
            assert clusters.sizes[number].tolist() == (amounts[:, :1] + amounts[:, 1:]).tolist()
            assert free_of(clusters, number) == free
        clusters.end_slot(np.arange(3))


@settings(max_examples=80)
@drawing(st.integers(0, 10**6))
def test_laying_goes_as_if_task_by_task_or_not_at_all(seed: int) -> None:
    draw = np.random.default_rng(seed)
    workloads = [drawn(seed + number, jobs=int(draw.integers(1, 9)), most_least=1) for number in range(4)]
    clusters = begun(workloads)
    some = np.flatnonzero(draw.random(4) < 0.8)
    for part in (0.3, 1.0):  # the second time there is something already
        room = np.where(clusters.present[:, :, None], clusters.most - clusters.sizes, 0)
        wanted = draw.integers(0, (room * part).astype(int) + 1)
        wanted = np.maximum(wanted, np.minimum(room, clusters.least - clusters.sizes))
        turns = np.stack([draw.permutation(2 * wanted.shape[1]) for _ in range(4)])
        amounts = np.take_along_axis(wanted.reshape(4, -1), turns, axis=1)
        tasks = turns // 2 * 3 + turns % 2
        before = {number: (clusters.sizes[number].tolist(), free_of(clusters, number)) for number in range(4)}
        expected = {}
        for number in some.tolist():
            own = list(zip(tasks[number].tolist(), amounts[number].tolist(), strict=True))
            counts, free = plainly(clusters, number, own, ends=False)
            sizes = clusters.sizes[number].copy()
            np.add.at(sizes, (tasks[number] // 3, tasks[number] % 3), counts)
            short = (sizes < clusters.least[number]).any(axis=1)
            undone = any(short[task // 3] for task, amount in own if amount)
            expected[number] = ([-1] * len(own), *before[number]) if undone else (counts, sizes.tolist(), free)
        placed = clusters.lay(some, tasks[some], amounts[some])
        for number, got in zip(some.tolist(), placed.tolist(), strict=True):
            assert (got, clusters.sizes[number].tolist(), free_of(clusters, number)) == expected[number]
        for number in {*range(4)} - {*some.tolist()}:
            assert (clusters.sizes[number].tolist(), free_of(clusters, number)) == before[number]
        held = (clusters.sizes[:, :, :, None] * clusters.demand).sum(axis=(1, 2))
        assert held.tolist() == clusters.used.T.tolist()
        if (placed < 0).any():
            return


def test_tasks_of_two_cpus_that_fit_in_total_fit_on_nodes_the_small_ones_first() -> None:
    """15 PSs with 2 CPUs and 9 workers with 4 GPUs as well, on 6 nodes of 8 and 8: all that there is."""
    workload = one_node(epochs=[5.0], worker={"cpu": 2, "gpu": 4}, ps={"cpu": 2}, max_workers=16, max_ps=16)
    workload = replace(workload, cluster=(replace(workload.cluster[0], count=6),))
    workload = replace(workload, speeds={"m": PsSync((0.01, 0.01, 0.01, 0.01, 0.01), 32)})
    clusters = begun([workload])
    assert clusters.lay(HERE, np.array([[1, 0]]), np.array([[15, 9]])).tolist() == [[15, 9]]
    assert clusters.used[:, 0].tolist() == [48_000, 36_000]
    clusters.end_slot(HERE)
    assert clusters.lay(HERE, np.array([[0, 1]]), np.array([[9, 15]])).tolist() == [[9, 12]], "the large ones first"


def filled_slots(clusters: Clusters, slots: int) -> list[list[np.ndarray]]:
    everywhere = np.arange(clusters.count)
    rates: list[list[np.ndarray]] = [[] for _ in everywhere]
    for _ in range(slots):
        clusters.fill(clusters.most, everywhere)
        report = clusters.end_slot(everywhere)
        for own, rate in zip(rates, report.rate, strict=True):
            own.append(rate)
    return rates


def test_what_a_cluster_draws_does_not_depend_on_its_neighbours() -> None:
    """Alone, or among others with more jobs and nodes: the same draws, the same rates, bit for bit."""
    workloads = [drawn(seed, jobs=4 + 3 * seed) for seed in range(4)]
    together = begun(workloads, speed_noise=0.2, epochs_error=0.3)
    rates = filled_slots(together, 12)
    for number, workload in enumerate(workloads):
        alone = Clusters(Library.of([workload]), 1, speed_noise=0.2, epochs_error=0.3)
        alone.reset(HERE, HERE, [np.random.default_rng(number)])
        own = filled_slots(alone, 12)[0]
        jobs = len(workload.jobs)
        assert alone.declared[0].tobytes() == together.declared[number, :jobs].tobytes()
        assert [rate.tobytes() for rate in own] == [rate[:jobs].tobytes() for rate in rates[number]]


def test_noise_stays_within_its_bounds_and_differs_from_slot_to_slot() -> None:
    plain, noisy = begun([one_node(epochs=[1e6])]), begun([one_node(epochs=[1e6])], speed_noise=0.2)
    exact = float(filled_slots(plain, 1)[0][0][0])
    factors = np.array([rate[0] / exact for rate in filled_slots(noisy, 400)[0]])
    assert factors.min() > 0.8
    assert factors.max() < 1.2
    assert factors.std() == pytest.approx(0.2 / 3**0.5, rel=0.1)
    assert abs(factors.mean() - 1) < 0.02


def test_declared_epochs_err_and_real_ones_do_not() -> None:
    workloads = [drawn(3, jobs=60)]
    clusters = begun(workloads, epochs_error=0.3)
    real = np.array([job.epochs for job in workloads[0].jobs])
    assert clusters.epochs[0].tolist() == real.tolist()
    factors = clusters.declared[0] / real
    assert 0.7 <= factors.min() < 0.8
    assert 1.2 < factors.max() <= 1.3
    assert begun(workloads).declared[0].tolist() == [job.declared_epochs for job in workloads[0].jobs]


def test_workloads_are_drawn_by_seed_where_none_is_named() -> None:
    library = Library.of([drawn(seed, jobs=3) for seed in range(5)])

    def chosen(seed: int) -> list[int]:
        clusters = Clusters(library, 40)
        clusters.reset(np.arange(40), generators=[np.random.default_rng([seed, number]) for number in range(40)])
        return clusters.workload.tolist()

    assert chosen(1) == chosen(1) != chosen(2)
    assert set(chosen(1)) == set(range(5))


def test_a_cluster_draws_from_a_generator_that_it_was_given() -> None:
    with pytest.raises(ValueError, match="cluster 0 has none yet"):
        Clusters(Library.of([drawn(0)]), 1).reset(HERE)


def test_some_may_begin_anew_while_others_go_on() -> None:
    workloads = [drawn(seed) for seed in range(3)]
    clusters = begun(workloads)
    filled_slots(clusters, 3)
    kept = clusters.done[0].copy()
    clusters.reset(np.array([1]), np.array([1]))
    assert clusters.done[0].tolist() == kept.tolist()
    assert clusters.played.tolist() == [3, 0, 3]
    assert not clusters.done[1].any()


def test_equal_speeds_are_kept_once() -> None:
    workloads = [drawn(4, jobs=20), drawn(4, jobs=20), drawn(5, jobs=20)]
    library = Library.of(workloads)
    distinct = {workload.speeds[job.model] for workload in workloads for job in workload.jobs}
    assert len(library.speeds) == len(distinct)


def test_types_are_numbered_as_one_says() -> None:
    workload = drawn(1)
    models = ["ring", "other", "m2", "m1", "m0", "holes"]
    library = Library.of([workload], models=models)
    assert [models[number] for number in library.model[0]] == [job.model for job in workload.jobs]
    with pytest.raises(WorkloadError, match="models: the list lacks"):
        Library.of([workload], models=["ring"])


def test_a_library_needs_something_in_it() -> None:
    with pytest.raises(WorkloadError, match="a library needs a workload"):
        Library.of([])


@pytest.mark.parametrize(
    ("bad", "said"),
    [({"count": 0}, "count"), ({"speed_noise": 1.0}, "speed_noise"), ({"epochs_error": -0.1}, "epochs_error")],
)
def test_numbers_out_of_bounds_are_refused(bad: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Clusters(Library.of([drawn(0)]), **{"count": 1, **bad})
