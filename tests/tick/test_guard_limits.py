from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policies.snapshots import a_job, a_snapshot, ask, cluster, snapshots

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import PolicyError
from dl2d.core.jobs import NOTHING, Allocation, Owner
from dl2d.core.packing import Packing
from dl2d.core.policy import NO_EVIDENCE
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.tick import policy_call
from dl2d.tick.decide import decide
from dl2d.tick.guard_limits import ResizeHistory, check_decision, guard
from dl2d.tick.policy_call import Deadline
from dl2d.tick.tick_context import Deciders, GuardRules

WHY = Reason(Constraint.SATISFIED, "because")
BIG = cluster(1, cpu=999, gpu=999)
NO_HISTORY = ResizeHistory()


def a_decision(snapshot: Snapshot, *allocations: tuple[int, int]) -> Decision:
    held = snapshot.held()
    jobs = [
        JobDecision(job.key, Allocation(*allocation), WHY, previous=held[job.key])
        for job, allocation in zip(snapshot.jobs, allocations, strict=True)
    ]
    return Decision("test", "1", tuple(jobs))


def guarded(
    snapshot: Snapshot, *allocations: tuple[int, int], history: ResizeHistory = NO_HISTORY, **rules: Any
) -> Any:
    """Allocations and constraints after the guard."""
    return outcome(guard(a_decision(snapshot, *allocations), snapshot, GuardRules(**rules), history))


def outcome(decision: Decision) -> list[tuple[Allocation, list[Constraint]]]:
    return [(entry.allocation, [reason.constraint for reason in entry.guarded]) for entry in decision.jobs]


@pytest.mark.parametrize(
    ("allocation", "change"),
    [
        ((5, 4), {}),
        ((4, 5), {}),
        ((0, 1), {}),
        ((1, 0), {}),
        ((3, 3), {"allowed_workers": (1, 2, 4)}),
        ((-1, 0), {}),
    ],
)
def test_an_allocation_out_of_bounds_is_none(allocation, change) -> None:
    snapshot = a_snapshot([a_job(1, **change)], BIG)
    with pytest.raises(PolicyError, match="policy test gave job 1"):
        check_decision(a_decision(snapshot, allocation), snapshot)


def test_a_running_job_may_not_fall_below_its_floor() -> None:
    snapshot = a_snapshot([a_job(1, min_workers=2)], BIG, held={0: Allocation(3, 1)})
    with pytest.raises(PolicyError, match=r"and not less than 2w\+1ps"):
        check_decision(a_decision(snapshot, (0, 0)), snapshot)


def test_a_job_decided_on_twice_or_not_at_all() -> None:
    snapshot = a_snapshot([a_job(1), a_job(2)], BIG)
    decision = a_decision(snapshot, (1, 1), (1, 1))
    for jobs in (decision.jobs[:1], (*decision.jobs, decision.jobs[0]), ()):
        with pytest.raises(PolicyError, match="did not decide for every job exactly once"):
            check_decision(replace(decision, jobs=jobs), snapshot)


def test_a_limit_counts_all_jobs_of_a_user_and_nobody_elses() -> None:
    jobs = [a_job(1), a_job(2), replace(a_job(3), owner=Owner("bob", 2, 2))]
    snapshot = a_snapshot(jobs, BIG)
    rules = GuardRules(per_user=Resources.of(gpu=5))
    decision = guard(a_decision(snapshot, (4, 4), (4, 4), (4, 4)), snapshot, rules, ResizeHistory())
    assert outcome(decision) == [((4, 4), []), ((1, 1), [Constraint.LIMIT]), ((4, 4), [])]
    assert decision.jobs[1].guarded[0].text == "jobs of ann may hold gpu=5 together"


def test_a_limit_never_breaks_a_floor() -> None:
    snapshot = a_snapshot([a_job(1, min_workers=2)], BIG, held={0: Allocation(4, 2)})
    assert guarded(snapshot, (4, 2), per_user=Resources.of(gpu=1)) == [((2, 2), [Constraint.LIMIT])]


@pytest.mark.parametrize(
    ("has", "wanted", "limit", "gets"),
    [
        # A floor of 4 workers and 1 PS: only PSs can go.
        ((4, 1), (4, 8), {"cpu": 11}, (4, 3)),
        ((4, 1), (4, 8), {"cpu": 1}, (4, 1)),
        ((4, 1), (4, 8), {"gpu": 1}, (4, 8)),  # its PSs need no GPU
        # Without a floor
        (None, (4, 8), {"cpu": 13}, (4, 5)),
        (None, (4, 8), {"cpu": 11}, (4, 3)),
        (None, (4, 8), {"cpu": 8}, NOTHING),
        (None, (4, 4), {"gpu": 3}, NOTHING),
    ],
)
def test_in_which_order_a_limit_takes_tasks_away(has, wanted, limit, gets) -> None:
    job = a_job(1, min_workers=4, max_ps=8)
    snapshot = a_snapshot([job], BIG, held={0: Allocation(*has)} if has else {})
    assert guarded(snapshot, wanted, per_user=Resources.of(**limit))[0][0] == gets


@pytest.mark.parametrize(
    ("wanted", "limit", "gets"),
    [
        ((4, 4), {"cpu": 11}, (3, 3)),
        ((4, 3), {"cpu": 10}, (3, 3)),
        ((4, 4), {"memory": 2}, (4, 2)),
        ((4, 4), {"memory": 1, "gpu": 2}, (2, 1)),
        ((1, 4), {"cpu": 4}, (1, 2)),
        ((1, 4), {"cpu": 2}, NOTHING),
    ],
)
def test_a_limit_takes_away_tasks_that_need_what_is_limited(wanted, limit, gets) -> None:
    snapshot = a_snapshot([a_job(1, ps=Resources.of(cpu=1, memory=1))], BIG)
    assert guarded(snapshot, wanted, per_user=Resources.of(**limit))[0][0] == gets


@pytest.mark.parametrize(
    ("wanted", "up", "down", "expected"),
    [
        ((4, 4), 100, 0, [((2, 2), [Constraint.COOLDOWN])]),
        ((4, 4), 0, 100, [((4, 4), [])]),
        ((1, 1), 0, 100, [((2, 2), [Constraint.COOLDOWN])]),
        ((1, 1), 100, 0, [((1, 1), [])]),
        ((4, 4), 10, 0, [((4, 4), [])]),
        ((2, 2), 100, 100, [((2, 2), [])]),
        ((3, 1), 0, 100, [((2, 2), [Constraint.COOLDOWN])]),
    ],
)
def test_cool_downs(wanted, up, down, expected) -> None:
    snapshot = a_snapshot([a_job(1)], BIG, held={0: Allocation(2, 2)})
    history = ResizeHistory({snapshot.jobs[0].key: snapshot.at - 50})
    assert guarded(snapshot, wanted, history=history, cooldown_up=up, cooldown_down=down) == expected


def test_churn_is_used_up_in_submit_order() -> None:
    snapshot = a_snapshot([a_job(1), a_job(2), a_job(3)], BIG, held={1: Allocation(1, 1)})
    # The first takes 4 of 5 starts; the second wants 2 and keeps what it has; the third has nothing and waits.
    want = [((2, 2), []), ((1, 1), [Constraint.CHURN]), (NOTHING, [Constraint.CHURN])]
    assert guarded(snapshot, (2, 2), (3, 1), (1, 1), churn=5) == want


def test_a_first_bundle_larger_than_the_whole_budget_is_not_kept_out_for_ever() -> None:
    assert guarded(a_snapshot([a_job(1, min_workers=4)], BIG), (4, 1), churn=2) == [((4, 1), [])]


def test_a_job_whose_coordinator_is_silent_stays_as_it_is() -> None:
    jobs = [a_job(1), a_job(2)]
    snapshot = a_snapshot(jobs, BIG, held={0: Allocation(3, 2), 1: Allocation(1, 1)})
    decision = guard(
        a_decision(snapshot, (1, 1), (4, 4)), snapshot, GuardRules(), ResizeHistory(), silent={job.key for job in jobs}
    )
    assert outcome(decision) == [((3, 2), [Constraint.SILENT]), ((1, 1), [Constraint.SILENT])]
    assert decision.jobs[0].guarded[0].text == (
        "coordinator silent for 1000 s: allocation unchanged until it reports again"
    )


def test_what_is_gone_is_forgotten() -> None:
    snapshot = a_snapshot([a_job(1), a_job(2)], BIG)
    history = ResizeHistory().after(a_decision(snapshot, (1, 1), (1, 1)), 5.0)
    assert set(history.resized_at) == {job.key for job in snapshot.jobs}
    left = replace(snapshot, jobs=snapshot.jobs[:1])
    assert set(history.after(a_decision(left, (1, 1)), 6.0).resized_at) == {snapshot.jobs[0].key}


_rules = st.builds(
    GuardRules,
    per_user=st.builds(lambda gpu: Resources.of(gpu=gpu), st.integers(0, 8)),
    cooldown_up=st.sampled_from([0.0, 100.0]),
    cooldown_down=st.sampled_from([0.0, 100.0]),
    churn=st.integers(0, 6),
)


@given(snapshots, _rules, st.floats(0, 200), st.booleans())
def test_what_the_guard_lets_through_is_still_a_decision(snapshot, rules, ago, silent) -> None:
    """And it never adds to what the policy gave a job that can be reached, nor takes below the floor."""
    history = ResizeHistory({job.key: snapshot.at - ago for job in snapshot.jobs})
    proposed = ask(Drf(), snapshot)
    keys = {job.key for job in snapshot.jobs} if silent else set()
    decision = guard(proposed, snapshot, rules, history, silent=keys)
    check_decision(decision, snapshot)
    assert guard(proposed, snapshot, rules, history, silent=keys) == decision
    for before, after in zip(proposed.jobs, decision.jobs, strict=True):
        assert (before.allocation == after.allocation) or after.guarded
        smaller = after.allocation.workers <= before.allocation.workers and after.allocation.ps <= before.allocation.ps
        assert smaller or after.allocation == before.previous


# Deciding


class Scripted:
    """A policy that does what a test says."""

    name, version, needs = "scripted", "1", NO_EVIDENCE

    def __init__(self, action: Any) -> None:
        self._action = action

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        return self._action(snapshot, packing, rng)


def choose(snapshot: Snapshot, action: Any) -> Decision:
    return decide(snapshot, Deciders(Scripted(action), Fifo(), LoadBalance()), 7)


def test_what_a_job_has_is_not_the_policys_to_say() -> None:
    snapshot = a_snapshot([a_job(1)], BIG, held={0: Allocation(3, 2)})
    decision = choose(snapshot, lambda *_: replace(a_decision(snapshot, (4, 4)), jobs=(
        JobDecision(snapshot.jobs[0].key, Allocation(4, 4), WHY),)))  # fmt: skip
    assert decision.jobs[0].previous == (3, 2)


def fails(*_: Any) -> Decision:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (fails, "ZeroDivisionError: division by zero"),
        (lambda *_: None, "AttributeError"),
        (lambda snapshot, *_: a_decision(snapshot, (float("nan"), 1)), "PolicyError: policy test gave job 1"),
        (lambda snapshot, *_: a_decision(snapshot, (99, 99)), "PolicyError: policy test gave job 1"),
    ],
)
def test_a_policy_that_fails_is_replaced_and_every_job_is_told(action, words) -> None:
    snapshot = a_snapshot([a_job(1)], BIG)
    decision = choose(snapshot, action)
    assert (decision.policy, outcome(decision)) == ("fifo", [((4, 4), [Constraint.FALLBACK])])
    assert words in decision.jobs[0].guarded[0].text


def test_a_policy_that_returns_late_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it kept the caller from noticing in time, as one does that does not release Python's global lock."""
    snapshot = a_snapshot([a_job(1)], BIG)
    clock = iter([0.0, 5.5])
    monkeypatch.setattr(policy_call, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    decision = decide(snapshot, Deciders(Scripted(Drf().decide), Fifo(), LoadBalance(), call=Deadline(5.0)), 7)
    assert decision.jobs[0].guarded[0].text == (
        "policy scripted failed: PolicyError: the call did not return within 5 s"
    )


def test_a_policy_that_never_comes_back_is_left_behind() -> None:
    snapshot = a_snapshot([a_job(1)], BIG)
    comes_back = threading.Event()
    call = Deadline(0.2)

    def hangs(*arguments: Any) -> Decision:
        comes_back.wait(timeout=60)
        return Drf().decide(*arguments)

    def told() -> str:
        deciders = Deciders(Scripted(hangs), Fifo(), LoadBalance(), call=call)
        entry = decide(snapshot, deciders, 7).jobs[0]
        assert entry.allocation == (4, 4)
        return entry.guarded[0].text if entry.guarded else ""

    assert told().endswith("PolicyError: the call did not return within 0.2 s")
    threads = threading.active_count()
    assert told().endswith("PolicyError: an earlier call has not returned yet")
    assert threading.active_count() == threads
    comes_back.set()
    deadline = time.monotonic() + 30
    while told():
        assert time.monotonic() < deadline


def test_what_a_policy_raises_comes_through_a_deadline() -> None:
    def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        Deadline(5.0)(late)


def test_when_the_fallback_fails_too_nothing_is_decided() -> None:
    snapshot = a_snapshot([a_job(1)], BIG)
    with pytest.raises(
        PolicyError, match=r"policy scripted failed \(ZeroDivisionError: .*\) and the fallback scripted too"
    ):
        decide(snapshot, Deciders(Scripted(fails), Scripted(fails), LoadBalance()), 7)


def test_the_generator_depends_on_seed_and_slot_alone() -> None:
    snapshot = a_snapshot([a_job(1)], BIG)
    drawn: list[float] = []

    def draws(seen: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        drawn.append(rng.random())
        return Drf().decide(seen, packing, rng)

    for seed, slot in ((7, 1), (7, 1), (7, 2), (8, 1)):
        deciders = Deciders(Scripted(draws), Fifo(), LoadBalance())
        decide(replace(snapshot, slot=slot), deciders, seed)
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3
