from __future__ import annotations

import hypothesis
import pytest
from policies.snapshots import NO_PS, a_job, a_snapshot, ask, cluster, given, snapshots

from dl2d.core.decision import Constraint
from dl2d.core.jobs import NOTHING, Allocation
from dl2d.core.json_codec import encode
from dl2d.core.resources import Resources
from dl2d.policies.drf import Drf
from dl2d.tick.policy_check.decision_check import check_decision

# Ghodsi et al., NSDI 2011, section 4.1 and table 1: 9 CPUs and 18 GB; user A's tasks want <1 CPU, 4 GB>, B's <3, 1>.
A = {"worker": Resources.of(cpu=1, memory=4), **NO_PS}
B = {"worker": Resources.of(cpu=3, memory=1), **NO_PS}
ONE = {"worker": Resources.of(cpu=1), **NO_PS}
FOUR = cluster(4, cpu=8, gpu=2)
NINE = {"cpu": 9, "memory": 18}


def test_the_papers_example_step_by_step() -> None:
    # In table 1, B is chosen first: of equal shares the one that came first.
    snapshot = a_snapshot([a_job(1, **B), a_job(2, **A)], cluster(1, **NINE))
    decision = ask(Drf(), snapshot)
    assert [("", "B", "A")[int(key.id)] for key, _ in decision.actions] == ["B", "A", "A", "B", "A"]
    assert [entry.allocation for entry in decision.jobs] == [(2, 0), (3, 0)]
    assert {entry.reason.constraint for entry in decision.jobs} == {Constraint.CAPACITY}
    # Dominant shares 2/3 and 2/3; one more task would give 1 (3 x 3 of 9 CPUs) and 8/9 (4 x 4 of 18 GB).
    scores = [[option.score for option in entry.alternatives] for entry in decision.jobs]
    assert scores == [[pytest.approx(2 / 3), pytest.approx(1)], [pytest.approx(2 / 3), pytest.approx(8 / 9)]]
    assert decision.measure == "dominant share"


@pytest.mark.parametrize(
    ("jobs", "nodes", "want"),
    [
        pytest.param([A, B], cluster(1, **NINE), [(3, 0), (2, 0)], id="the order of submission does not matter here"),
        pytest.param(
            # 3x/30 = y/30 of memory, all memory used: 3x + y = 30 with y = 3x. Of CPU 20 of 30 are used.
            [{"worker": Resources.of(cpu=1, memory=3), **NO_PS}, {"worker": Resources.of(cpu=1, memory=1), **NO_PS}],
            cluster(1, cpu=30, memory=30),
            [(5, 0), (15, 0)],
            id="demands in proportion",
        ),
        pytest.param(
            # Each is alone with its resource: nobody is held back for fairness' sake (Pareto efficiency).
            [{"worker": Resources.of(cpu=1), **NO_PS}, {"worker": Resources.of(gpu=1), **NO_PS}],
            cluster(1, cpu=4, gpu=10),
            [(4, 0), (10, 0)],
            id="different resources",
        ),
        pytest.param(
            # One resource: DRF is max-min fairness, 12 = 2 + 5 + 5 where the first wants 2 only.
            [{**ONE, "max_workers": 2}, ONE, ONE],
            cluster(1, cpu=12),
            [(2, 0), (5, 0), (5, 0)],
            id="one resource",
        ),
        pytest.param(
            # Shares count against the whole cluster, not against a node.
            [{"worker": Resources.of(cpu=2), **NO_PS}, {"worker": Resources.of(cpu=1), **NO_PS}],
            cluster(3, cpu=4),
            [(3, 0), (6, 0)],
            id="several nodes",
        ),
        pytest.param([{}, {}, {}], FOUR, [(3, 3), (3, 3), (2, 2)], id="ties by submit order"),
        pytest.param([{"allowed_workers": (1, 3)}], FOUR, [(3, 4)], id="allowed sizes"),
        pytest.param(
            [{"min_workers": 3, "max_workers": 9}] * 3, FOUR, [(4, 2), (4, 2), NOTHING], id="whole minimum"
        ),
        pytest.param([{"worker": Resources.of(tpu=1)}, {}], FOUR, [NOTHING, (4, 4)], id="no such thing"),
        pytest.param([], cluster(1, cpu=1), [], id="no jobs"),
        pytest.param([{}], [], [NOTHING], id="no nodes"),
    ],
)  # fmt: skip
def test_by_hand(jobs, nodes, want) -> None:
    snapshot = a_snapshot([a_job(number, **job) for number, job in enumerate(jobs, start=1)], nodes)
    assert given(Drf(), snapshot) == want


def test_a_running_job_keeps_its_floor_whoever_else_wants_it() -> None:
    jobs = [a_job(1, **A), a_job(2, **{**B, "min_workers": 2})]
    snapshot = a_snapshot(jobs, cluster(1, **NINE), held={1: Allocation(3, 0)})
    assert given(Drf(), snapshot) == [(3, 0), (2, 0)]
    decision = ask(Drf(), snapshot)
    assert decision.actions[0] == (jobs[1].key, (2, 0))
    assert [entry.previous for entry in decision.jobs] == [(0, 0), (3, 0)]


@hypothesis.given(snapshots)
def test_whatever_is_shown_the_answer_is_one_and_always_the_same(snapshot) -> None:
    decision = ask(Drf(), snapshot)
    check_decision(decision, snapshot)
    assert encode(decision) == encode(ask(Drf(), snapshot))


@hypothesis.given(snapshots)
def test_no_job_could_have_more_without_another_having_less(snapshot) -> None:
    """What is given has room on the nodes, and every job was stopped by a reason that holds."""
    decision = ask(Drf(), snapshot)
    total = Resources.total(job.request.demand_of(decision.allocations()[job.key]) for job in snapshot.jobs)
    assert total.fits_in(snapshot.capacity)
    for entry, job in zip(decision.jobs, snapshot.jobs, strict=True):
        most = Allocation(job.request.largest_allowed(job.request.max_workers), job.request.max_ps)
        assert (entry.reason.constraint is Constraint.SATISFIED) == (entry.allocation == most)
        assert entry.reason.text
