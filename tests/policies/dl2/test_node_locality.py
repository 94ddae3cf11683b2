from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray
from policies.dl2.checkpoints import policy
from policies.snapshots import NO_PS, a_job, a_snapshot, cluster

from dl2d.core.cluster import NodeState, Snapshot
from dl2d.core.decision import Decision
from dl2d.core.jobs import Allocation, Architecture, JobRequest
from dl2d.core.measured_speeds_and_losses import JobSpeeds, MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import Policy
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.placement.optimus import Optimus
from dl2d.policies.dl2.node_locality import Locality, min_worker_seconds, share_inside

#: Two workers and two PSs, or one worker and four PSs, fill a node of six CPUs.
NODE = Resources.of(cpu=6)
WORKER, PS = Resources.of(cpu=2), Resources.of(cpu=1)
SIZES = {"model": "m", "worker": WORKER, "ps": PS, "max_workers": 8, "max_ps": 8}


def slow_talk(computing: float, talk: float, spared: float) -> NDArray[np.float64]:
    """Samples per second where a sample takes a worker so long, and all of them so long to talk of; (9, 9)."""
    share = spared * share_inside(Architecture.PS, WORKER, PS, NODE, 8, 8)
    workers = np.maximum(np.arange(9), 1)
    speeds: NDArray[np.float64] = 1 / (computing / workers + talk * (1 - share))
    speeds[0], speeds[:, 0] = 0.0, 0.0
    return speeds


def points(speeds: NDArray[np.float64], *sizes: tuple[int, int]) -> tuple[SpeedPoint, ...]:
    return tuple(SpeedPoint(Allocation(w, p), float(speeds[p, w]), 10) for w, p in sorted(sizes))


def seen(*shown: SpeedPoint) -> Snapshot:
    job = a_job(1, **SIZES)
    speeds = MeasuredSpeeds(TrainingKind.of(job.request), shown)
    return structs.replace(
        a_snapshot([job], cluster(4, cpu=6)), speeds=(speeds,), job_speeds=(JobSpeeds(job.key, shown),)
    )


def test_what_stays_on_a_node() -> None:
    share = share_inside(Architecture.PS, WORKER, PS, NODE, 8, 8)
    assert share[2, 2] == share[4, 1] == 1.0
    assert share[3, 2] == share[4, 4] == 0.5  # one node holds neither: half of the pairs are on one
    assert share[8, 8] == 0.25
    ring = share_inside(Architecture.ALLREDUCE, WORKER, NO_RESOURCES, NODE, 8, 0)
    assert ring[0, 1:].tolist() == [1.0, 1.0, 1.0, 1 - 2 / 4, 1 - 2 / 5, 1 - 2 / 6, 1 - 3 / 7, 1 - 3 / 8]


def test_what_no_node_holds_gains_nothing() -> None:
    share = share_inside(Architecture.PS, Resources.of(gpu=1), PS, NODE, 2, 2)
    assert (share[:, 1:] == 0).all()


def test_speeds_apart_are_those_together_less_what_talk_was_spared() -> None:
    """A sample takes a worker 1 s, half of which counts as computing; 0.7 of the talk on a node is spared."""
    here = seen(SpeedPoint(Allocation(1, 1), 1.0, 5), SpeedPoint(Allocation(4, 4), 2.0, 5, 1, 9.0, 8.0, 1.0))
    layouts = Locality(here, {}, lambda request: np.zeros((request.max_ps + 1, request.max_workers + 1)))
    apart = layouts.to_different_nodes()
    one, four = apart.speeds[0].points
    assert one.samples_per_second == pytest.approx(1 / (0.5 + 0.5 / (1 - 0.7)))
    assert four.samples_per_second == pytest.approx(1 / (0.125 + 0.375 / (1 - 0.35)))
    assert four.previous_speed / four.samples_per_second == pytest.approx(0.5)
    assert apart.job_speeds[0].points == (one, four)
    rates = np.zeros((9, 9))
    rates[1, 1], rates[4, 4] = one.samples_per_second, four.samples_per_second
    together = layouts.to_few_nodes(here.jobs[0].request, rates)
    assert (together[1, 1], together[4, 4]) == pytest.approx((1.0, 2.0))
    assert np.count_nonzero(together) == 2


@hypothesis.given(
    st.dictionaries(
        st.tuples(st.integers(1, 10), st.integers(0, 10)), st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1
    )
)
def test_apart_and_together_are_inverse(speeds: dict[tuple[int, int], float]) -> None:
    here = seen(*(SpeedPoint(Allocation(*size), speed, 1) for size, speed in sorted(speeds.items())))
    layouts = Locality(here, {}, lambda request: np.zeros((request.max_ps + 1, request.max_workers + 1)))
    rates = np.zeros((9, 9))
    within = [point for point in layouts.to_different_nodes().speeds[0].points if max(point.allocation) < 9]
    for point in within:
        rates[point.allocation.ps, point.allocation.workers] = point.samples_per_second
    together = layouts.to_few_nodes(here.jobs[0].request, rates)
    for point in within:
        was = speeds[point.allocation]
        assert together[point.allocation.ps, point.allocation.workers] == pytest.approx(was, rel=1e-6)


@pytest.mark.parametrize("spared", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("level", [0.6, 1.0, 1.5])
def test_how_much_is_spared_shows_in_how_the_sizes_of_a_known_kind_differ(spared: float, level: float) -> None:
    """As fast as known but for what is spared, and for a cluster that is faster or slower altogether."""
    jobs = [a_job(number, **SIZES | {"model": f"m{number}"}) for number in range(4)]
    kinds = [TrainingKind.of(job.request) for job in jobs]
    sizes = [(1, 1), (2, 2), (1, 4), (3, 3), (4, 4), (6, 6), (8, 8)]
    known = slow_talk(1.5, 1.5, 0.0)
    least = min_worker_seconds(points(known, *sizes))
    assert least == 3.0  # half of which counts as computing
    measured = tuple(MeasuredSpeeds(kind, points(level * slow_talk(1.5, 1.5, spared), *sizes)) for kind in kinds)
    snapshot = structs.replace(a_snapshot(jobs, cluster(4, cpu=6)), speeds=measured)
    layouts = Locality(snapshot, dict.fromkeys(kinds, least), lambda _: known)
    rates = layouts.to_few_nodes(jobs[0].request, known)
    assert 1 / rates[4, 4] == pytest.approx(1.5 / 4 + 1.5 * (1 - spared / 2), abs=1.5 * 0.11 / 2)  # it goes in tenths


def test_nodes_that_are_down_do_not_count() -> None:
    here = seen(SpeedPoint(Allocation(2, 2), 1.0, 5))
    large = [structs.replace(node, capacity=Resources.of(cpu=60), state=NodeState.DOWN) for node in cluster(9)]
    both = structs.replace(here, nodes=(*large, *here.nodes))

    def nothing(request: JobRequest) -> NDArray[np.float64]:
        return np.zeros((request.max_ps + 1, request.max_workers + 1))

    request = here.jobs[0].request
    rates = slow_talk(1.0, 1.0, 0.0)
    expected = Locality(here, {}, nothing).to_few_nodes(request, rates)
    assert Locality(both, {}, nothing).to_few_nodes(request, rates) == pytest.approx(expected)
    assert Locality(structs.replace(here, nodes=()), {}, nothing).to_few_nodes(request, rates) == pytest.approx(rates)


def asked(chosen: Policy, snapshot: Snapshot, placement: LoadBalance | Optimus) -> Decision:
    packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, placement)
    return chosen.decide(snapshot, packing, np.random.default_rng(1))


def test_a_job_gets_what_fits_on_a_node_where_it_will_be_laid_there() -> None:
    """Four workers are 3 % faster than two where all talk goes from node to node."""
    job = a_job(1, **NO_PS | {"model": "m", "worker": WORKER, "max_workers": 4, "architecture": Architecture.ALLREDUCE})
    speeds = {1: 1.0, 2: 1.19, 3: 1.2, 4: 1.22}
    known = MeasuredSpeeds(
        TrainingKind.of(job.request), tuple(SpeedPoint(Allocation(w, 0), s, 100) for w, s in speeds.items())
    )
    snapshot = a_snapshot([job], cluster(4, cpu=4))
    [spread] = asked(policy(known), snapshot, LoadBalance()).jobs
    [laid] = asked(policy(known), snapshot, Optimus()).jobs
    assert (spread.allocation, laid.allocation) == ((4, 0), (2, 0))
