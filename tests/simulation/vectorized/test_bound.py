from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.test_replay import PAPER, make, run, workload

from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.srtf import Srtf
from dl2d.simulation.replay import Rules
from dl2d.simulation.vectorized.bound import Bound, lower_bound
from dl2d.simulation.workload.format import read_workload


def bound(given) -> Bound:
    return lower_bound(read_workload(given))


def test_a_lone_job_is_bound_by_its_best_size() -> None:
    """2 samples/s with 2 workers, 100 s a slot, 100 samples an epoch: 2 epochs a slot."""
    found = bound(make([{"epochs": 5.0, "max_workers": 2, "max_ps": 2}]))
    assert found.best_size == found.avg_jct == 2.5


def test_jobs_that_share_too_little_are_bound_by_it() -> None:
    """An epoch costs at least 4 GPU x 1 slot / 1 epoch; one node has 8: two epochs of all jobs together in a slot.

    On that one machine the jobs of 2 epochs take a slot each: ends at 1, 2, 3, 4 slots.
    """
    found = bound(make([{"epochs": 2.0, "max_workers": 2, "max_ps": 2}] * 4, nodes=1))
    assert (found.capacity, found.resource) == (2.5, "gpu")
    assert found.best_size == 1.0
    assert found.avg_jct == 2.5


def test_a_short_job_that_comes_later_goes_first() -> None:
    """Lengths 3 and 1 slots on one machine, the short one a slot later: it ends at 2, the long one at 4."""
    jobs = [
        {"epochs": 6.0, "max_workers": 2, "max_ps": 2},
        {"epochs": 2.0, "max_workers": 2, "max_ps": 2, "submit_slot": 1},
    ]
    assert bound(make(jobs, nodes=1)).capacity == pytest.approx((4 + 1) / 2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("nodes", [7, 24])
def test_no_policy_beats_it(seed: int, nodes: int) -> None:
    given = workload(seed, nodes=nodes, jobs=40)
    limit = bound(given).avg_jct
    for policy in (Fifo(), Srtf(), Drf()):
        assert run(given, policy).avg_jct >= limit
        assert run(given, policy, PAPER.placement, rules=PAPER.rules).avg_jct >= limit


_shapes = st.lists(
    st.tuples(st.integers(0, 4), st.floats(0.5, 30), st.integers(1, 8), st.integers(0, 8), st.integers(1, 6)),
    min_size=1,
    max_size=6,
)


def _made(shapes, nodes):
    return make(
        [
            {
                "submit_slot": slot,
                "epochs": epochs,
                "worker": {"cpu": cpu, "gpu": gpu},
                "max_workers": most,
                "max_ps": most,
            }
            for slot, epochs, cpu, gpu, most in shapes
        ],
        nodes=nodes,
    )


@settings(max_examples=40)
@given(_shapes, st.integers(1, 6), st.integers(1, 6))
def test_more_capacity_never_raises_it_and_it_holds(shapes, nodes, more) -> None:
    smaller, larger = bound(_made(shapes, nodes + 1)), bound(_made(shapes, nodes + 1 + more))
    assert larger.avg_jct <= smaller.avg_jct * (1 + 1e-12)
    for empty in (False, True):
        assert run(_made(shapes, nodes + 1), Drf(), rules=Rules(empty_each_slot=empty)).avg_jct >= smaller.avg_jct * (
            1 - 1e-9
        )
