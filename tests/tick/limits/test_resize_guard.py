from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from policies.snapshots import NO_PS, a_job, a_snapshot, ask, cluster, snapshots

from dl2d.core.backoff_after_failed_starts import StartFailures
from dl2d.core.cluster import Node, NodeSet, NodeState, Snapshot, Task, TaskState
from dl2d.core.decision import Alternative, Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import PolicyError
from dl2d.core.jobs import NOTHING, Allocation, Job, Owner, Role
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import NO_EVIDENCE
from dl2d.core.resize_guard_state import GuardState
from dl2d.core.resource_manager import GrowthLimit
from dl2d.core.resources import Resources, Shortfall
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.common.checkpoint import read_checkpoint
from dl2d.policies.common.training_input_ranges import INPUT_RANGES, out_of_range, training_ranges
from dl2d.policies.dl2.policy import DEFAULT_CHECKPOINT
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.tick.decision.decide import decide
from dl2d.tick.limits.resize_guard import guard
from dl2d.tick.policy_check import policy_call
from dl2d.tick.policy_check.decision_check import check_decision
from dl2d.tick.policy_check.policy_call import Deadline
from dl2d.tick.policy_check.policy_failures import PolicyFailures, SetAside
from dl2d.tick.reconciliation.unlisted_tasks_and_silent_coordinators import KeptSize
from dl2d.tick.tick_context import Deciders, GuardRules

WHY = Reason(Constraint.SATISFIED, "because")
BIG = cluster(1, cpu=999, gpu=999, memory=999)
NO_GUARD_STATE = GuardState()
SILENT = KeptSize("its coordinator is silent")


def a_decision(snapshot: Snapshot, *allocations: tuple[int, int]) -> Decision:
    held = snapshot.held()
    jobs = [
        JobDecision(job.key, Allocation(*allocation), WHY, previous=held[job.key])
        for job, allocation in zip(snapshot.jobs, allocations, strict=True)
    ]
    return Decision("test", "1", tuple(jobs))


def guarded(
    snapshot: Snapshot, *allocations: tuple[int, int], guard_state: GuardState = NO_GUARD_STATE, **rules: Any
) -> Any:
    """Allocations and constraints after the guard."""
    return outcome(guard(a_decision(snapshot, *allocations), snapshot, GuardRules(**rules), guard_state))


def outcome(decision: Decision) -> list[tuple[Allocation, list[Constraint]]]:
    return [(entry.allocation, [reason.constraint for reason in entry.guarded]) for entry in decision.jobs]


_NAN, _UNKNOWN = float("nan"), a_job(9).key


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alternatives": (Alternative(Allocation(1, 1), _NAN),)}, "score nan, which is not a finite number"),
        ({"alternatives": (Alternative(Allocation(1, 1), -math.inf),)}, "score -inf"),
        ({"alternatives": (Alternative(Allocation(1, 1), np.float64(1.0)),)}, "np.float64"),
        ({"alternatives": (Alternative(Allocation(-1, 1), 1.0),)}, "-1w\\+1ps, which is no allocation"),
        ({"reason": Reason(Constraint.CAPACITY, "", (Shortfall("gpu", _NAN, 0.0),))}, "a shortfall of gpu"),
        ({"reason": "because"}, "a reason 'because'"),
        ({"allocation": Allocation(2.0, 1)}, "2.0w\\+1ps; it may have"),  # type: ignore[arg-type]
        ({"allocation": Allocation(np.int64(2), 1)}, "it may have"),  # type: ignore[arg-type]
        ({"job": _UNKNOWN}, f"exactly once; it named jobs that do not wait or run here: {_UNKNOWN.slug}"),
    ],
)
def test_a_decision_that_cannot_be_recorded_is_refused_whole(change, words) -> None:
    snapshot = a_snapshot([a_job(1), a_job(2)], BIG)
    decision = a_decision(snapshot, (1, 1), (1, 1))
    with pytest.raises(PolicyError, match=words):
        check_decision(replace(decision, jobs=(decision.jobs[0], replace(decision.jobs[1], **change))), snapshot)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": ((a_job(1).key, Role.WORKER, "elsewhere"),)}, "on 'elsewhere', and there is no such node"),
        ({"nodes": ((_UNKNOWN, Role.WORKER, "n0"),)}, "no such job"),
        ({"nodes": ((a_job(1).key, Role.COORDINATOR, "n0"),)}, "no such role"),
        ({"actions": ((_UNKNOWN, Allocation(1, 1)),)}, "no such job"),
        ({"actions": ((a_job(1).key, Allocation(-1, 1)),)}, "which is no allocation"),
    ],
)
def test_a_decision_names_known_jobs_and_nodes_alone(change, words) -> None:
    snapshot = a_snapshot([a_job(1)], BIG)
    with pytest.raises(PolicyError, match=words):
        check_decision(replace(a_decision(snapshot, (1, 1)), **change), snapshot)


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


def test_the_allowed_worker_counts_are_told() -> None:
    snapshot = a_snapshot([a_job(1, allowed_workers=(1, 2, 4))], BIG)
    with pytest.raises(PolicyError, match=r"it may have 1, 2, 4 workers and 1 to 4 PSs, or 0w\+0ps, and not less than"):
        check_decision(a_decision(snapshot, (3, 3)), snapshot)


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
    decision = guard(a_decision(snapshot, (4, 4), (4, 4), (4, 4)), snapshot, rules, GuardState())
    assert outcome(decision) == [((4, 4), []), ((1, 1), [Constraint.LIMIT]), ((4, 4), [])]
    assert decision.jobs[1].guarded[0].text == "jobs of ann may hold gpu=5 together"


def test_a_job_whose_tasks_may_run_in_several_partitions_counts_in_each() -> None:
    partitions = ("p", "p,q", "q", "other")
    jobs = [replace(a_job(n + 1), owner=Owner("ann", 1, 1, partition=name)) for n, name in enumerate(partitions)]
    snapshot = a_snapshot(jobs, BIG)
    rules = GuardRules(per_partition=Resources.of(gpu=5))
    decision = guard(a_decision(snapshot, *[(4, 4)] * 4), snapshot, rules, GuardState())
    assert [entry.allocation.workers for entry in decision.jobs] == [4, 1, 4, 4]
    assert decision.jobs[1].guarded[0].text == "jobs in partition p may hold gpu=5 together"


def test_only_the_limit_in_which_a_job_yields_to_the_minimum_size_of_another_names_that() -> None:
    jobs = [replace(a_job(number), anchor=f"anchor-{number}") for number in (1, 2, 3)]
    snapshot = a_snapshot(jobs, BIG, held={0: Allocation(2, 1), 2: Allocation(1, 1)})
    limits = [
        GrowthLimit(frozenset({"anchor-1", "anchor-2"}), {"gpu": 0}, "no GPU is left"),
        GrowthLimit(frozenset({"anchor-1", "anchor-3"}), {"cpu": 0}, "no CPU is left"),
    ]
    wanted = a_decision(snapshot, (4, 4), (4, 4), (1, 1))
    decision = guard(wanted, snapshot, GuardRules(), NO_GUARD_STATE, growth_limits=limits)
    assert [entry.allocation for entry in decision.jobs] == [(1, 1), (1, 1), (1, 1)]
    assert {reason.text for reason in decision.jobs[0].guarded} == {
        "no CPU is left", "no GPU is left; the job yields to the minimum size 1w+1ps of job 2"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("left", "gets"),
    [
        ({"cpu": 99}, [(4, 4), (4, 4)]),
        # The first job has 2 workers and 1 PS: what is left is a PS more, and the minimum size of the second one.
        ({"cpu": 4, "gpu": 1}, [(2, 2), (1, 1)]),
        # It gives a worker up for the minimum size of the second one.
        ({"gpu": 0}, [(1, 1), (1, 1)]),
        # It keeps what it has, as its minimum size would not leave enough.
        ({"cpu": 0, "gpu": 0}, [(2, 1), (0, 0)]),
        ({"gpu": -1}, [(2, 2), (0, 0)]),
    ],
)
def test_jobs_grow_by_no_more_than_the_resource_manager_leaves_them(left: dict[str, float], gets: list[Any]) -> None:
    jobs = [replace(a_job(number), anchor=f"anchor-{number}") for number in (1, 2, 3)]
    snapshot = a_snapshot(jobs, BIG, held={0: Allocation(2, 1)})
    limit = GrowthLimit(frozenset({"anchor-1", "anchor-2"}), left, "queue root.a leaves no more to ann")
    wanted = a_decision(snapshot, (4, 4), (4, 4), (4, 4))
    decision = guard(wanted, snapshot, GuardRules(), NO_GUARD_STATE, growth_limits=[limit])
    assert [entry.allocation for entry in decision.jobs] == [*gets, (4, 4)]
    texts = {reason.text for entry in decision.jobs for reason in entry.guarded}
    assert texts <= {limit.reason, f"{limit.reason}; the job yields to the minimum size 1w+1ps of job 2"}
    check_decision(decision, snapshot)


#: Sizes that jobs have (None: the job waits), sizes that the policy gives, rules or what else counts, and sizes after
#: the guard with, for each job, the numbers of the jobs to which it yields. A limit of gpu=6 holds for all of them.
_MINIMUM_SIZES: dict[str, tuple[list[Any], list[Any], dict[str, Any], list[Any]]] = {
    "running tasks above the minimum size yield": (
        [(6, 2), None], [(6, 2), (6, 2)], {}, [((5, 2), "2"), ((1, 1), "")],
    ),
    "they yield as much as the minimum size needs": (
        [(6, 2), None], [(6, 2), (6, 2)], {"min_workers": 3}, [((3, 2), "2"), ((3, 2), "")],
    ),
    "growth of a job that was submitted before comes later": (
        [(4, 2), None], [(8, 2), (6, 2)], {}, [((5, 2), "2"), ((1, 1), "")],
    ),
    "not below the minimum size, so the last job waits": (
        [(6, 2), None, None], [(6, 2), (3, 1), (3, 1)], {"min_workers": 3},
        [((3, 2), "2"), ((3, 1), ""), (NOTHING, "")],
    ),
    "of several jobs the one that was submitted last yields": (
        [(3, 1), (3, 1), None], [(3, 1), (3, 1), (3, 1)], {}, [((3, 1), ""), ((2, 1), "3"), ((1, 1), "")],
    ),
    "one to several": (
        [(6, 2), None, None], [(6, 2), (3, 1), (3, 1)], {}, [((4, 2), "23"), ((1, 1), ""), ((1, 1), "")],
    ),
    "not one that cools down": (
        [(3, 1), (3, 1), None], [(3, 1), (3, 1), (3, 1)], {"resized": 1}, [((2, 1), "3"), ((3, 1), ""), ((1, 1), "")],
    ),
    "not one whose coordinator is silent": (
        [(6, 2), None], [(6, 2), (6, 2)], {"silent": 0}, [((6, 2), ""), (NOTHING, "")],
    ),
    "not to one that cannot start": (
        [(6, 2), None], [(6, 2), (6, 2)], {"silent": 1}, [((6, 2), ""), (NOTHING, "")],
    ),
    "not to one that the policy gives nothing": (
        [(6, 2), None], [(6, 2), (0, 0)], {}, [((6, 2), ""), (NOTHING, "")],
    ),
    "not for starts that churn does not allow": (
        [(6, 2), None], [(6, 2), (6, 2)], {"churn": 3, "started": 2}, [((6, 2), ""), (NOTHING, "")],
    ),
    "for starts that it allows": (
        [(6, 2), None], [(6, 2), (6, 2)], {"churn": 3, "started": 1}, [((5, 2), "2"), ((1, 1), "")],
    ),
    "not to one that the nodes have no room for": (
        [(6, 2), None], [(6, 2), (1, 1)], {"nodes": cluster(1, cpu=14, gpu=9)}, [((6, 2), ""), (NOTHING, "")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("by", ["guard", "resource manager"])
@pytest.mark.parametrize(("has", "wants", "given", "expected"), _MINIMUM_SIZES.values(), ids=_MINIMUM_SIZES)
def test_in_an_exceeded_limit_minimum_sizes_come_before_what_other_jobs_have_above_theirs(
    has: list[Any], wants: list[Any], given: dict[str, Any], expected: list[Any], by: str
) -> None:
    jobs = [
        replace(a_job(number + 1, max_workers=8, min_workers=given.get("min_workers", 1)), anchor=f"anchor-{number}")
        for number in range(len(has))
    ]
    held = {number: Allocation(*size) for number, size in enumerate(has) if size is not None}
    nodes = given.get("nodes", BIG)
    snapshot = a_snapshot(jobs, nodes, held=held)
    guard_state = GuardState(
        resized_at={jobs[given["resized"]].key: snapshot.at - 50} if "resized" in given else {},
        started_at={f"task {number}": snapshot.at - 10 for number in range(given.get("started", 0))},
    )
    rules = GuardRules(
        cooldown_down=100, churn=given.get("churn", 0), per_user=Resources.of(gpu=6) if by == "guard" else Resources()
    )

    def guard_once(snapshot: Snapshot) -> Decision:
        left = 6 - sum(size.workers for size in snapshot.held().values())
        limit = GrowthLimit(frozenset(job.anchor for job in jobs), {"gpu": left}, "queue root.a leaves no more to ann")
        silent = {jobs[given["silent"]].key: SILENT} if "silent" in given else {}
        return guard(
            a_decision(snapshot, *wants), snapshot, rules, guard_state, kept_sizes=silent,
            growth_limits=() if by == "guard" else (limit,),
        )  # fmt: skip

    decision = guard_once(snapshot)
    check_decision(decision, snapshot)
    yields_to = [
        "".join(number for why in entry.guarded for number in re.findall(r"the minimum size \S+ of job (\d)", why.text))
        for entry in decision.jobs
    ]
    sizes = [entry.allocation for entry in decision.jobs]
    assert list(zip(sizes, yields_to, strict=True)) == expected
    # Once the jobs have these sizes, they keep them.
    now_held = {number: size for number, size in enumerate(sizes) if size != NOTHING}
    assert [entry.allocation for entry in guard_once(a_snapshot(jobs, nodes, held=now_held)).jobs] == sizes


@pytest.mark.parametrize(("churn", "second"), [(4, (1, 1)), (3, NOTHING)])
def test_starts_of_a_minimum_size_for_which_a_job_shrinks_are_kept_from_jobs_outside_the_limit(
    churn: int, second: tuple[int, int]
) -> None:
    jobs = [replace(a_job(number, max_workers=8), anchor=f"anchor-{number}") for number in (1, 2, 3)]
    limit = GrowthLimit(frozenset({"anchor-1", "anchor-3"}), {"gpu": 0.0}, "queue root.a leaves no more to ann")
    snapshot = a_snapshot(jobs, BIG, held={0: Allocation(6, 2)})
    proposed = a_decision(snapshot, (6, 2), (6, 2), (6, 2))
    decision = guard(proposed, snapshot, GuardRules(churn=churn), NO_GUARD_STATE, growth_limits=[limit])
    assert [entry.allocation for entry in decision.jobs] == [(5, 2), second, (1, 1)]


def test_for_a_minimum_size_jobs_yield_what_they_have_beyond_a_limit_that_has_become_less() -> None:
    jobs = [replace(a_job(number, max_workers=8), anchor=f"anchor-{number}") for number in (1, 2)]
    snapshot = a_snapshot(jobs, BIG, held={0: Allocation(6, 2)})
    limit = GrowthLimit(frozenset({"anchor-1", "anchor-2"}), {"gpu": -2.0}, "elastic jobs may hold 50 %")
    for wanted, gets in (((0, 0), [(6, 2), (0, 0)]), ((1, 1), [(3, 2), (1, 1)])):
        proposed = a_decision(snapshot, (6, 2), wanted)
        decision = guard(proposed, snapshot, GuardRules(), NO_GUARD_STATE, growth_limits=[limit])
        assert [entry.allocation for entry in decision.jobs] == gets


def test_what_a_job_gives_up_of_its_excess_over_a_limit_no_other_job_gets() -> None:
    """The limit is 4 GPUs by now. The policy lets one of 6 go; the other job could not start without two more."""
    jobs = [replace(a_job(number, max_workers=8), anchor=f"anchor-{number}") for number in (1, 2)]
    snapshot = a_snapshot(jobs, BIG, held={0: Allocation(6, 1)})
    limit = GrowthLimit(frozenset({"anchor-1", "anchor-2"}), {"gpu": -2.0}, "QOS small")
    decision = guard(
        a_decision(snapshot, (5, 1), (1, 1)), snapshot, GuardRules(), NO_GUARD_STATE, growth_limits=[limit]
    )
    assert [entry.allocation for entry in decision.jobs] == [(3, 1), (1, 1)]


def test_a_limit_that_shrinks_a_job_which_cools_down_says_so_where_starts_failed_too() -> None:
    snapshot = a_snapshot([a_job(1)], BIG, held={0: Allocation(3, 3)})
    key = snapshot.jobs[0].key
    guard_state = GuardState(
        resized_at={key: snapshot.at}, start_failures={key: StartFailures(1, "no node", snapshot.at)}
    )
    rules = GuardRules(per_user=Resources.of(gpu=2), cooldown_down=100, backoff=10)
    (entry,) = guard(a_decision(snapshot, (4, 4)), snapshot, rules, guard_state).jobs
    assert entry.allocation == (2, 2)
    assert [(why.constraint, why.gave_way) for why in entry.guarded] == [
        (Constraint.BACKOFF, None), (Constraint.LIMIT, Constraint.COOLDOWN)
    ]  # fmt: skip


def test_a_limit_never_breaks_a_floor() -> None:
    snapshot = a_snapshot([a_job(1, min_workers=2)], BIG, held={0: Allocation(4, 2)})
    assert guarded(snapshot, (4, 2), per_user=Resources.of(gpu=1)) == [((2, 2), [Constraint.LIMIT, Constraint.FLOOR])]


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
    guard_state = GuardState(resized_at={snapshot.jobs[0].key: snapshot.at - 50})
    assert guarded(snapshot, wanted, guard_state=guard_state, cooldown_up=up, cooldown_down=down) == expected


@pytest.mark.parametrize(
    ("has", "last", "expected"),
    [
        ((2, 3), (2, 2), ((2, 2), [])),
        ((2, 3), (2, 3), ((2, 3), [Constraint.COOLDOWN])),
        # After a restart of the daemon: the last decision is not known, but no job may have more than its maximum.
        ((2, 5), None, ((2, 4), [Constraint.COOLDOWN])),
        # Its coordinator was silent at the last decision, and nothing of it changed.
        ((2, 5), (2, 5), ((2, 4), [Constraint.COOLDOWN])),
    ],
)
def test_the_replacement_of_a_task_that_is_moved_may_end_while_the_job_cools_down(has, last, expected) -> None:
    snapshot = a_snapshot([a_job(1)], BIG, held={0: Allocation(*has)})
    guard_state = GuardState(resized_at={snapshot.jobs[0].key: snapshot.at - 50})
    before = a_decision(snapshot, last) if last else None
    decision = guard(a_decision(snapshot, (2, 2)), snapshot, GuardRules(cooldown_down=100), guard_state, last=before)
    assert outcome(decision) == [expected]


def test_churn_is_used_up_in_submit_order() -> None:
    snapshot = a_snapshot([a_job(1), a_job(2), a_job(3)], BIG, held={1: Allocation(1, 1)})
    # The first takes 4 of 5 starts; the second wants 2 and gets one; the third has nothing and waits.
    want = [((2, 2), []), ((2, 1), [Constraint.CHURN]), (NOTHING, [Constraint.CHURN])]
    assert guarded(snapshot, (2, 2), (3, 1), (1, 1), churn=5) == want


def test_a_first_bundle_larger_than_the_whole_budget_is_not_kept_out_for_ever() -> None:
    assert guarded(a_snapshot([a_job(1, min_workers=4)], BIG), (4, 1), churn=2) == [((4, 1), [])]
    assert guarded(a_snapshot([a_job(1, min_workers=4)], BIG), (4, 4), churn=2) == [((4, 1), [Constraint.CHURN])]


def test_a_job_that_wants_more_than_a_slots_starts_gets_what_a_slot_has() -> None:
    assert guarded(a_snapshot([a_job(1)], BIG), (4, 4), churn=3) == [((1, 1), [Constraint.CHURN])]
    snapshot = a_snapshot([a_job(1)], BIG, held={0: Allocation(1, 1)})
    assert guarded(snapshot, (4, 4), churn=3) == [((2, 2), [Constraint.CHURN])]


def test_a_job_whose_coordinator_is_silent_stays_as_it_is() -> None:
    jobs = [a_job(1), a_job(2)]
    snapshot = a_snapshot(jobs, BIG, held={0: Allocation(3, 2), 1: Allocation(1, 1)})
    decision = guard(
        a_decision(snapshot, (1, 1), (4, 4)),
        snapshot,
        GuardRules(),
        GuardState(),
        kept_sizes={job.key: SILENT for job in jobs},
    )
    assert outcome(decision) == [((3, 2), [Constraint.SILENT]), ((1, 1), [Constraint.SILENT])]
    assert decision.jobs[0].guarded[0].text == "its coordinator is silent: allocation unchanged meanwhile"


# Every pair of rules, from hard to soft: silent, back-off, capacity, floor, limit, cool-down, churn.
# In each row what two jobs have and what the policy gives them; what they get, and "rule" or "rule>rule that gave way".
# The demand of a worker is cpu=2 gpu=1, that of a PS cpu=1. The first job is ann's in account a, the second bob's.
_PAIRS: dict[str, tuple[dict[str, Any], list[tuple[tuple[int, int], list[str]]]]] = {
    "silent, back-off: both keep what they have": (
        {"has": [(1, 1), (1, 1)], "wants": [(2, 2), (2, 2)], "silent": {0}, "failed": {0, 1}},
        [((1, 1), ["silent"]), ((1, 1), ["backoff"])],
    ),
    "silent, capacity: what the silent job has is not given away": (
        {"has": [(2, 2), (1, 1)], "wants": [(1, 1), (3, 3)], "silent": {0}, "nodes": cluster(1, cpu=12, gpu=4)},
        [((2, 2), ["silent"]), ((2, 2), ["capacity"])],
    ),
    "silent, floor: what it lacks of its floor has to wait": (
        {"has": [(1, 1)], "wants": [(2, 1)], "silent": {0}, "min_workers": 2},
        [((1, 1), ["silent"])],
    ),
    "silent, limit: the limit gives way": (
        {"has": [(4, 4), (1, 1)], "wants": [(1, 1), (1, 1)], "silent": {0}, "per_account": {"gpu": 3}},
        [((4, 4), ["silent", "silent>limit"]), ((1, 1), ["floor>limit"])],
    ),
    "silent, cool-down: one reason is enough": (
        {"has": [(2, 2)], "wants": [(3, 3)], "silent": {0}, "resized": {0}, "cooldown_up": 100.0},
        [((2, 2), ["silent"])],
    ),
    "silent, churn: a job that starts nothing leaves the starts to others": (
        {"has": [(1, 1), (1, 1)], "wants": [(2, 2), (2, 2)], "silent": {0}, "churn": 2},
        [((1, 1), ["silent"]), ((2, 2), [])],
    ),
    "back-off, capacity: the resources go to others until then": (
        {"has": [(1, 1), (1, 1)], "wants": [(3, 3), (3, 3)], "failed": {0}, "nodes": cluster(1, cpu=12, gpu=4)},
        [((1, 1), ["backoff"]), ((3, 3), [])],
    ),
    "back-off, floor: the floor gives way": (
        {"has": [(1, 1)], "wants": [(2, 1)], "failed": {0}, "min_workers": 2},
        [((1, 1), ["backoff>floor"])],
    ),
    "back-off, limit: the limit takes what it has": (
        {"has": [(3, 3), (1, 1)], "wants": [(4, 4), (1, 1)], "failed": {0}, "per_account": {"gpu": 2}},
        [((1, 1), ["backoff", "limit"]), ((1, 1), [])],
    ),
    "back-off, cool-down": (
        {"has": [(1, 1)], "wants": [(2, 2)], "failed": {0}, "resized": {0}, "cooldown_up": 100.0},
        [((1, 1), ["backoff"])],
    ),
    "back-off, churn: it leaves the starts to others": (
        {"has": [(1, 1), (1, 1)], "wants": [(2, 2), (2, 2)], "failed": {0}, "churn": 2},
        [((1, 1), ["backoff"]), ((2, 2), [])],
    ),
    "capacity, floor: what it lacks of its floor waits": (
        {"has": [(1, 1)], "wants": [(2, 1)], "min_workers": 2, "nodes": cluster(1, cpu=9, gpu=1)},
        [((2, 1), ["capacity>floor"])],
    ),
    "capacity, limit: the smaller one counts for each": (
        {"has": [None, None], "wants": [(4, 4), (4, 4)], "per_user": {"gpu": 2}, "nodes": cluster(1, cpu=12, gpu=9)},
        [((2, 2), ["limit"]), ((2, 2), ["capacity", "limit"])],
    ),
    "capacity, cool-down: what a job may not give back yet is not given to another": (
        {"has": [(3, 3), (1, 1)], "wants": [(1, 1), (3, 3)], "resized": {0}, "cooldown_down": 100.0,
         "nodes": cluster(1, cpu=12, gpu=4)},
        [((3, 3), ["cooldown"]), ((1, 1), ["capacity"])],
    ),
    "capacity, churn: starts that do not fit are not counted": (
        {"has": [(1, 1), (1, 1)], "wants": [(4, 1), (1, 2)], "churn": 2, "nodes": cluster(1, cpu=9, gpu=3)},
        [((2, 1), ["capacity"]), ((1, 2), [])],
    ),
    "floor, limit: the limit gives way": (
        {"has": [(3, 1), (3, 1)], "wants": [(3, 1), (3, 1)], "min_workers": 2, "per_account": {"gpu": 3}},
        [((2, 1), ["limit", "floor>limit"]), ((2, 1), ["limit", "floor>limit"])],
    ),
    "floor, cool-down: the cool-down gives way for what it lacks": (
        {"has": [(1, 1)], "wants": [(3, 3)], "min_workers": 2, "resized": {0}, "cooldown_up": 100.0},
        [((2, 1), ["cooldown", "floor>cooldown"])],
    ),
    "floor, churn: the churn gives way for what it lacks": (
        {"has": [(1, 1)], "wants": [(4, 1)], "min_workers": 3, "churn": 1},
        [((3, 1), ["churn", "floor>churn"])],
    ),
    "limit, cool-down: a job that may not shrink yet leaves less to the others": (
        {"has": [(3, 3), (1, 1)], "wants": [(1, 1), (3, 3)], "resized": {0}, "cooldown_down": 100.0,
         "per_account": {"gpu": 4}},
        [((3, 3), ["cooldown"]), ((1, 1), ["limit"])],
    ),
    "limit, cool-down: the cool-down gives way": (
        {"has": [(3, 3), (1, 1)], "wants": [(1, 1), (1, 1)], "resized": {0}, "cooldown_down": 100.0,
         "per_account": {"gpu": 2}},
        [((1, 1), ["cooldown", "limit>cooldown"]), ((1, 1), [])],
    ),
    "limit, churn: starts that the limit takes away are not counted": (
        {"has": [(1, 1), (1, 1)], "wants": [(4, 1), (1, 2)], "churn": 2, "per_user": {"gpu": 2}},
        [((2, 1), ["limit"]), ((1, 2), [])],
    ),
    "cool-down, churn: a job that may not grow yet leaves the starts to others": (
        {"has": [(1, 1), (1, 1)], "wants": [(2, 2), (2, 2)], "resized": {0}, "cooldown_up": 100.0, "churn": 2},
        [((1, 1), ["cooldown"]), ((2, 2), [])],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), _PAIRS.values(), ids=_PAIRS)
def test_pairs_of_rules(row: dict[str, Any], expected: list[Any]) -> None:
    given = dict(row)
    has, wants, nodes = given.pop("has"), given.pop("wants"), given.pop("nodes", BIG)
    silent, failed, resized = (given.pop(name, set()) for name in ("silent", "failed", "resized"))
    owners = [Owner("ann", 1, 1, account="a"), Owner("bob", 2, 2, account="a")]
    jobs = [
        replace(a_job(number + 1, min_workers=given.get("min_workers", 1)), owner=owners[number])
        for number in range(len(has))
    ]
    given.pop("min_workers", None)
    held = {number: Allocation(*size) for number, size in enumerate(has) if size is not None}
    snapshot = a_snapshot(jobs, nodes, held=held)
    guard_state = GuardState(
        resized_at={jobs[number].key: snapshot.at - 50 for number in resized},
        start_failures={jobs[number].key: StartFailures(1, "exit status 1", snapshot.at - 1) for number in failed},
    )
    rules = GuardRules(
        **{key: Resources.of(value) if isinstance(value, dict) else value for key, value in given.items()}
    )
    proposed = a_decision(snapshot, *wants)
    check_decision(proposed, snapshot)
    decision = guard(proposed, snapshot, rules, guard_state, kept_sizes={jobs[number].key: SILENT for number in silent})
    shown = [
        (entry.allocation, [f"{why.constraint}>{why.gave_way}" if why.gave_way else str(why.constraint)
                            for why in entry.guarded])
        for entry in decision.jobs
    ]  # fmt: skip
    assert shown == expected


#: Two jobs that have a worker each, and want their minimum size of one worker and one server: what the rules are, and
#: what each job gets.
_PART_OF_MINIMUM: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "nothing is in the way": ({}, [((1, 1), []), ((1, 1), [])]),
    "a limit has room for one": ({"per_user": Resources.of(cpu=5)}, [((1, 1), []), (NOTHING, ["limit"])]),
    "a limit has room for none": ({"per_user": Resources.of(cpu=2)}, [(NOTHING, ["limit"]), (NOTHING, ["limit"])]),
    "the nodes have room for one": ({"nodes": cluster(1, cpu=5, gpu=2)}, [((1, 1), []), (NOTHING, ["capacity"])]),
    "they have run: floors": (
        {"per_user": Resources.of(cpu=5), "run": True}, [((1, 1), ["floor"]), ((1, 1), ["floor"])]
    ),
    "churn: the next slot has starts": ({"churn": 1}, [((1, 1), []), ((1, 0), ["churn"])]),
    "a start failed a short while ago": ({"failed": True}, [((1, 0), ["backoff"]), ((1, 0), ["backoff"])]),
    "their coordinators are silent": (
        {"per_user": Resources.of(cpu=5), "silent": True}, [((1, 0), ["silent"]), ((1, 0), ["silent"])]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), _PART_OF_MINIMUM.values(), ids=_PART_OF_MINIMUM)
def test_a_job_that_has_never_run_keeps_no_part_of_its_minimum_size_without_room_for_all_of_it(given, expected) -> None:
    rules, jobs = dict(given), [a_job(1), a_job(2)]
    nodes, run, failed, silent = (rules.pop(name, None) for name in ("nodes", "run", "failed", "silent"))
    snapshot = a_snapshot(jobs, nodes or BIG, held={0: Allocation(1, 0), 1: Allocation(1, 0)})
    if not run:
        snapshot = structs.replace(snapshot, floors=())
    failures = {job.key: StartFailures(1, "exit status 1", snapshot.at - 1) for job in jobs if failed}
    decision = guard(
        a_decision(snapshot, (1, 1), (1, 1)), snapshot, GuardRules(**rules), GuardState(start_failures=failures),
        kept_sizes={job.key: SILENT for job in jobs if silent},
    )  # fmt: skip
    assert outcome(decision) == expected


#: Of two jobs with workers of one CPU and no servers, the first lacks one of the two of its floor: nodes (name, CPUs,
#: state), the nodes that the first job may use, the nodes of the workers of both, and how many the second gets.
_UP, _CLOSED = NodeState.UP, NodeState.DRAINING
_FLOOR_LACKED: dict[str, tuple[list[tuple[str, int, NodeState]], set[str] | None, str, str, dict[str, Any], int]] = {
    "a worker leaves": ([("u", 5, _UP)], None, "u", "uuuu", {}, 3),
    "none leaves where the node takes no new tasks": ([("c", 5, _CLOSED)], None, "c", "cccc", {}, 4),
    "those there stay": ([("u", 2, _UP), ("c", 3, _CLOSED)], None, "u", "uccc", {}, 3),
    "those there stay while others leave": ([("u", 3, _UP), ("c", 2, _CLOSED)], None, "u", "uucc", {}, 3),
    "where fewer are not allowed, all stay": (
        [("u", 2, _UP), ("c", 3, _CLOSED)], None, "u", "uccc", {"allowed_workers": (2, 4)}, 4
    ),
    "none leaves for a worker that may not start there": (
        [("u", 4, _UP), ("c", 1, _CLOSED)], {"c"}, "c", "uuuu", {}, 4
    ),
    "none leaves where the job has the whole of its nodes": (
        [("u", 4, _UP), ("v", 1, _UP)], {"v"}, "v", "uuuu", {}, 4
    ),
    "one leaves where the job has room elsewhere": ([("u", 4, _UP), ("v", 1, _UP)], {"u"}, "v", "uuuu", {}, 3),
}  # fmt: skip


def _workers_on(jobs: list[Job], nodes: Sequence[str]) -> tuple[Task, ...]:
    """Workers of jobs, each on a node whose name is one letter."""
    return tuple(
        Task(job=job.key, id=f"worker-{number}", role=Role.WORKER, node=name, demand=job.request.worker,
             state=TaskState.CONFIRMED)
        for job, names in zip(jobs, nodes, strict=True) for number, name in enumerate(names)
    )  # fmt: skip


@pytest.mark.parametrize(("nodes", "may_use", "first", "second", "change", "gets"), _FLOOR_LACKED.values(),
                         ids=_FLOOR_LACKED)  # fmt: skip
def test_for_a_floor_tasks_leave_that_have_room_for_it(nodes, may_use, first, second, change, gets) -> None:
    request: dict[str, Any] = NO_PS | {"worker": Resources.of(cpu=1)}
    jobs = [a_job(1, min_workers=2, **request), a_job(2, **request | change)]
    tasks = _workers_on(jobs, (first, second))
    used = Counter(task.node for task in tasks)
    snapshot = structs.replace(
        a_snapshot(jobs, [Node(name, Resources.of(cpu=cpus), Resources.of(cpu=used[name]), state)
                          for name, cpus, state in nodes]),
        tasks=tasks, floors=tuple((job.key, job.request.min_size) for job in jobs),
        node_sets=() if may_use is None else (NodeSet((jobs[0].key,), frozenset(may_use), "feature a"),),
    )  # fmt: skip
    proposed = a_decision(snapshot, (2, 0), (4, 0))
    decision = guard(proposed, snapshot, GuardRules(), GuardState())
    check_decision(decision, snapshot)
    assert [entry.allocation.workers for entry in decision.jobs] == [2, gets]


_Nodes = tuple[
    list[tuple[str, int, NodeState]], tuple[set[str] | None, set[str] | None], tuple[str, str], set[str], int
]
#: Of three jobs with workers of one CPU, the first two have two of the three workers of their floors, and the third has
#: four on u: nodes (name, CPUs, state), the nodes that the first two may use, those of their workers, which of them are
#: told that there is no room, and how many workers the third gets.
_FLOORS_LACKED: dict[str, _Nodes] = {
    "two leave for both": ([("u", 8, _UP)], (None, None), ("uu", "uu"), set(), 2),
    "none leaves where the first has room": ([("u", 4, _UP), ("v", 5, _UP)], ({"v"}, {"v"}), ("vv", "vv"), {"2"}, 4),
    "none leaves where neither has": ([("u", 4, _UP), ("v", 4, _UP)], ({"v"}, {"v"}), ("vv", "vv"), {"1", "2"}, 4),
    "none leaves where the second may use fewer nodes": (
        [("u", 4, _UP), ("v", 3, _UP), ("w", 2, _UP)], ({"v", "w"}, {"v"}), ("ww", "vv"), {"2"}, 4
    ),
    "none leaves where both may use other closed nodes": (
        [("u", 4, _UP), ("v", 5, _UP), ("b", 1, _CLOSED), ("c", 1, _CLOSED)],
        ({"v", "b"}, {"v", "c"}), ("vv", "vv"), {"2"}, 4
    ),
    "none leaves where workers of both run elsewhere": (
        [("u", 4, _UP), ("v", 2, _UP), ("c", 3, _CLOSED)], ({"v"}, {"v"}), ("cc", "vc"), {"2"}, 4
    ),
    "one leaves where the second has room on its node": (
        [("u", 6, _UP), ("v", 3, _UP)], ({"u"}, {"v"}), ("uu", "vv"), set(), 3
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "may_use", "names", "without_room", "gets"), _FLOORS_LACKED.values(),
                         ids=_FLOORS_LACKED)  # fmt: skip
def test_for_floors_that_have_no_room_together_no_task_leaves(nodes, may_use, names, without_room, gets) -> None:
    request: dict[str, Any] = NO_PS | {"worker": Resources.of(cpu=1)}
    jobs = [a_job(1, min_workers=3, **request), a_job(2, min_workers=3, **request), a_job(3, **request)]
    tasks = _workers_on(jobs, (*names, "uuuu"))
    used = Counter(task.node for task in tasks)
    snapshot = structs.replace(
        a_snapshot(jobs, [Node(name, Resources.of(cpu=cpus), Resources.of(cpu=used[name]), state)
                          for name, cpus, state in nodes]),
        tasks=tasks, floors=tuple((job.key, job.request.min_size) for job in jobs),
        node_sets=tuple(NodeSet((job.key,), frozenset(names), "feature a")
                        for job, names in zip(jobs, may_use, strict=False) if names is not None),
    )  # fmt: skip
    decision = guard(a_decision(snapshot, (3, 0), (3, 0), (4, 0)), snapshot, GuardRules(), GuardState())
    check_decision(decision, snapshot)
    assert [entry.allocation.workers for entry in decision.jobs] == [3, 3, gets]
    told = {entry.job.id for entry in decision.jobs for reason in entry.guarded if reason.gave_way is Constraint.FLOOR}
    assert told == without_room


def test_no_server_ends_for_a_worker_where_floors_have_all_gpus() -> None:
    """The first job lacks a worker; the second has the GPUs with its floor, and servers above that."""
    jobs = [a_job(1, max_workers=1, max_ps=1), a_job(2, min_workers=2, max_workers=2)]
    snapshot = a_snapshot(jobs, cluster(1, cpu=8, gpu=2), held={0: Allocation(0, 1), 1: Allocation(2, 3)})
    assert guarded(snapshot, (1, 1), (2, 3)) == [((1, 1), [Constraint.CAPACITY]), ((2, 3), [])]


def test_all_pairs_of_rules_have_a_row() -> None:
    rules = ("silent", "back-off", "capacity", "floor", "limit", "cool-down", "churn")
    rows = {name.partition(":")[0] for name in _PAIRS}
    assert rows == {f"{hard}, {soft}" for hard, soft in combinations(rules, 2)}


def test_starts_of_earlier_decisions_in_the_slot_count() -> None:
    """Otherwise each job that comes would bring a whole budget of its own."""
    snapshot = a_snapshot([a_job(1), a_job(2)], BIG, held={0: Allocation(1, 1)})
    guard_state = GuardState(started_at={f"task {number}": snapshot.at - 10 for number in range(3)})
    assert guarded(snapshot, (2, 2), (1, 1), guard_state=guard_state, churn=4) == [
        ((1, 1), [Constraint.CHURN]), (NOTHING, [Constraint.CHURN])
    ]  # fmt: skip


_LIMITS = st.sampled_from([Resources(), Resources.of(gpu=3), Resources.of(cpu=9), Resources.of(gpu=5, cpu=12)])
_RULES = st.builds(
    GuardRules,
    per_user=_LIMITS,
    per_account=_LIMITS,
    per_partition=_LIMITS,
    cooldown_up=st.sampled_from([0.0, 100.0]),
    cooldown_down=st.sampled_from([0.0, 100.0]),
    churn=st.integers(0, 6),
)


@st.composite
def _situations(draw: st.DrawFn) -> tuple[Snapshot, Decision, GuardState, dict[Any, str]]:
    """Jobs of several owners, some of which run, a valid decision, and what happened before."""
    jobs, held, wanted = [], {}, []
    for number in range(draw(st.integers(1, 6))):
        job = a_job(
            number + 1,
            min_workers=draw(st.integers(1, 2)),
            allowed_workers=draw(st.sampled_from([(), (), (1, 2, 4), (2, 4)])),
            ps=draw(st.sampled_from([Resources.of(cpu=1), Resources.of(cpu=1, gpu=1), Resources.of(memory=1)])),
        )
        owner = Owner(draw(st.sampled_from("xy")), 1, 1, draw(st.sampled_from(["", "a", "b"])),
                      draw(st.sampled_from(["", "p"])))  # fmt: skip
        jobs.append(replace(job, owner=owner))
        sizes = [Allocation(w, p) for w in range(1, 5) if job.request.allows(w) for p in range(1, 5)]
        if draw(st.booleans()):
            held[number] = draw(st.one_of(st.sampled_from(sizes), st.just(Allocation(1, 1))))
            wanted.append(draw(st.sampled_from(sizes)))
        else:
            wanted.append(draw(st.sampled_from([NOTHING, *sizes])))
    nodes = [
        *cluster(1, cpu=60, gpu=48, memory=30),
        Node("n9", Resources.of(gpu=draw(st.integers(0, 9)), cpu=20, memory=20),
             used=Resources.of(cpu=draw(st.integers(0, 20)))),
    ]  # fmt: skip
    snapshot = a_snapshot(jobs, nodes, held)
    if draw(st.booleans()):  # a node that had jobs is gone, with all that others could have had of it
        first = structs.replace(snapshot.nodes[0], state=draw(st.sampled_from([NodeState.DRAINING, NodeState.DOWN])))
        snapshot = structs.replace(snapshot, nodes=(first, *snapshot.nodes[1:]))
    keys = [job.key for job in jobs]
    ago = st.sampled_from([0.0, 50.0, 150.0])
    guard_state = GuardState(
        resized_at={key: snapshot.at - draw(ago) for key in keys if draw(st.booleans())},
        started_at={f"task {number}": snapshot.at - 1 for number in range(draw(st.integers(0, 4)))},
        start_failures={
            key: StartFailures(draw(st.integers(1, 3)), "x", snapshot.at - draw(ago))
            for key in keys if draw(st.integers(0, 4)) == 0
        },
    )  # fmt: skip
    silent = {key: SILENT for key in keys if draw(st.integers(0, 4)) == 0}
    reasons = st.sampled_from([WHY, Reason(Constraint.QUEUE, "waits for its turn")])
    decision = a_decision(snapshot, *wanted)
    entries = tuple(replace(entry, reason=draw(reasons)) for entry in decision.jobs)
    return snapshot, replace(decision, jobs=entries), guard_state, silent


def _broken(
    snapshot: Snapshot, decision: Decision, rules: GuardRules, guard_state: GuardState, silent: Mapping[Any, str]
) -> set[tuple[Any, Constraint]]:
    """Rules that a decision breaks, with a job of each: computed anew, in the plainest way."""
    jobs, floors, held = {job.key: job for job in snapshot.jobs}, dict(snapshot.floors), snapshot.held()
    given = decision.allocations()
    found: set[tuple[Any, Constraint]] = set()

    def grows(key: Any) -> bool:
        return given[key].workers > held[key].workers or given[key].ps > held[key].ps

    def shrinks(key: Any) -> bool:
        return given[key].workers < held[key].workers or given[key].ps < held[key].ps

    for key in given:
        floor, elapsed = floors.get(key, NOTHING), snapshot.at - guard_state.resized_at.get(key, -math.inf)
        failures = guard_state.start_failures.get(key)
        if key in silent and given[key] != held[key]:
            found.add((key, Constraint.SILENT))
        if failures is not None and snapshot.at < failures.retry_at(rules.backoff) and grows(key):
            found.add((key, Constraint.BACKOFF))
        if given[key].workers < floor.workers or given[key].ps < floor.ps:
            found.add((key, Constraint.FLOOR))
        cools = (grows(key) and elapsed < rules.cooldown_up) or (shrinks(key) and elapsed < rules.cooldown_down)
        if cools and held[key] != NOTHING:
            found.add((key, Constraint.COOLDOWN))

    def total(keys: Collection[Any]) -> Resources:
        return Resources.total(jobs[key].request.demand_of(given[key]) for key in keys)

    for limit, name_of in (
        (rules.per_user, lambda owner: owner.user),
        (rules.per_account, lambda owner: owner.account),
        (rules.per_partition, lambda owner: owner.partition),
    ):
        for name in {name_of(job.owner) for job in snapshot.jobs} - {""}:
            members = [key for key in given if name_of(jobs[key].owner) == name]
            names = dict(limit.thousandths)
            if any(short.resource in names for short in total(members).shortfalls(limit)):
                found.add((tuple(members), Constraint.LIMIT))
    running = [task for task in snapshot.tasks if task.state.wanted]
    others = {
        node.name: node.used.minus(Resources.total(task.demand for task in snapshot.tasks if task.node == node.name))
        for node in snapshot.nodes
    }
    capacity = Resources.total([
        *(node.capacity.minus(others[node.name]) for node in snapshot.nodes if node.state is NodeState.UP),
        *(task.demand for task in running
          if task.node not in {node.name for node in snapshot.nodes if node.state is NodeState.UP}),
    ])  # fmt: skip
    if not total(given).fits_in(capacity):
        found.add((tuple(given), Constraint.CAPACITY))
    starts = sum(max(given[key].workers - held[key].workers, 0) + max(given[key].ps - held[key].ps, 0) for key in given)
    if rules.churn and starts > max(rules.churn - len(guard_state.started_at), 0):
        found.add((tuple(given), Constraint.CHURN))
    return found


@settings(max_examples=100, deadline=None)
@given(_situations(), _RULES)
def test_all_rules_hold_or_the_reason_names_which_gave_way(situation: Any, rules: GuardRules) -> None:
    snapshot, proposed, guard_state, silent = situation
    decision = guard(proposed, snapshot, rules, guard_state, kept_sizes=silent)
    entries = {entry.job: entry for entry in decision.jobs}
    hardness = (Constraint.SILENT, Constraint.BACKOFF, Constraint.CAPACITY, Constraint.FLOOR, Constraint.LIMIT,
                Constraint.COOLDOWN, Constraint.CHURN)  # fmt: skip
    for where, rule in _broken(snapshot, decision, rules, guard_state, silent):
        members = where if rule in (Constraint.LIMIT, Constraint.CAPACITY, Constraint.CHURN) else (where,)
        named = [why for key in members for why in entries[key].guarded if why.gave_way is rule]
        started = [key for key in members if entries[key].previous == NOTHING != entries[key].allocation]
        if rule is Constraint.CHURN and started and not guard_state.started_at and not named:
            # The first job of a slot that starts may take more, and then nobody else starts anything.
            assert not any(_starts_of(entries[key]) for key in members if key != started[0])
        elif rule is Constraint.FLOOR and where in silent:
            assert entries[where].allocation == entries[where].previous
        elif rule is Constraint.CAPACITY:  # never exceeded: what floors lack waits
            assert any(why.gave_way is Constraint.FLOOR for key in members for why in entries[key].guarded)
        else:
            assert named, (rule, where)
            assert all(hardness.index(why.constraint) < hardness.index(rule) for why in named)
    for before, after in zip(proposed.jobs, decision.jobs, strict=True):
        assert before.allocation == after.allocation or after.guarded
        limit = [max(*pair) for pair in zip(before.allocation, before.previous, strict=True)]
        assert all(count <= most for count, most in zip(after.allocation, limit, strict=True))
    assert guard(proposed, snapshot, rules, guard_state, kept_sizes=silent) == decision


def _starts_of(entry: JobDecision) -> int:
    before, after = entry.previous, entry.allocation
    return max(after.workers - before.workers, 0) + max(after.ps - before.ps, 0)


@given(snapshots, _RULES)
def test_what_a_policy_packed_stays_valid_and_without_limits_unchanged(snapshot: Snapshot, rules: GuardRules) -> None:
    proposed = ask(Drf(), snapshot)
    check_decision(guard(proposed, snapshot, rules, GuardState()), snapshot)
    assert guard(proposed, snapshot, GuardRules(), GuardState()) == proposed


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


@pytest.mark.parametrize(
    ("jobs", "nodes", "words"),
    [
        (1, 1, ""),
        (40, 24, ""),
        (401, 24, "401 jobs; its weights are for 1 to 40"),
        (400, 241, "241 nodes; its weights are for 3 to 24"),
        (400, 2, "200 jobs per node; its weights are for 0.0416667 to 13.3333"),
    ],
)
def test_far_out_of_the_range_of_training_the_fallback_decides(jobs, nodes, words) -> None:
    snapshot = a_snapshot([a_job(number) for number in range(1, jobs + 1)], cluster(nodes, cpu=9, gpu=9))
    training = {INPUT_RANGES: training_ranges([(40, 24), (40, 3)])}
    assert out_of_range(snapshot, {}) == ""
    assert out_of_range(snapshot, training) == words
    deciders = Deciders(
        Scripted(Drf().decide), Fifo(), LoadBalance(), out_of_range=lambda seen: out_of_range(seen, training)
    )
    decision = decide(snapshot, deciders, 7)
    assert (decision.policy, decision.fallback_cause) == ("fifo" if words else "drf", "")
    assert decision.out_of_range == (f"policy scripted was not asked: there are {words}" if words else "")


@pytest.mark.parametrize(
    ("jobs", "nodes", "words"),
    [
        (1, 1, ""),
        (160, 1, ""),
        (4000, 2000, ""),
        (1, 20_000, ""),
        (4001, 500, "4001 jobs; its weights are for 1 to 400"),
    ],
)
def test_the_policy_that_comes_with_dl2d_decides_on_sites_of_all_usual_sizes(jobs, nodes, words) -> None:
    snapshot = a_snapshot([a_job(number) for number in range(1, jobs + 1)], cluster(nodes, cpu=9, gpu=9))
    assert out_of_range(snapshot, read_checkpoint(DEFAULT_CHECKPOINT, policy="dl2").training) == words


def test_a_policy_that_returns_late_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it kept the caller from noticing in time, as one does that does not release Python's global lock."""
    snapshot = a_snapshot([a_job(1)], BIG)
    clock = iter([0.0, 5.5])
    monkeypatch.setattr(policy_call, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    decision = decide(snapshot, Deciders(Scripted(Drf().decide), Fifo(), LoadBalance(), call_policy=Deadline(5.0)), 7)
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
        deciders = Deciders(Scripted(hangs), Fifo(), LoadBalance(), call_policy=call)
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


@pytest.mark.parametrize(
    ("given", "statistic", "cause"),
    [
        ({}, "", "policy scripted failed: ZeroDivisionError: .*"),
        ({"set_aside": SetAside("dl2", "1", "is slow")}, "", "policy dl2 is set aside: it is slow"),
        ({}, "999 nodes", "policy scripted was not asked: there are 999 nodes"),
        (
            {"canary": ()},
            "",
            "policy scripted failed: PolicyError: policy scripted decides on the canary's jobs only.*",
        ),
    ],
    ids=["policy failed", "set aside", "out of range", "canary"],
)
def test_when_the_fallback_fails_nothing_is_decided(given: dict[str, Any], statistic: str, cause: str) -> None:
    snapshot = a_snapshot([a_job(1)], BIG)
    deciders = Deciders(Scripted(fails), Scripted(fails), LoadBalance(), out_of_range=lambda _: statistic)
    with pytest.raises(PolicyError, match=f"^{cause}; the fallback scripted failed: ZeroDivisionError: "):
        decide(snapshot, deciders, 7, **given)


def test_the_generator_depends_on_seed_and_slot_alone() -> None:
    snapshot = a_snapshot([a_job(1)], BIG)
    drawn: list[float] = []

    def draws(seen: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        drawn.append(rng.random())
        return Drf().decide(seen, packing, rng)

    for seed, slot in ((7, 1), (7, 1), (7, 2), (8, 1)):
        deciders = Deciders(Scripted(draws), Fifo(), LoadBalance())
        decide(structs.replace(snapshot, slot=slot), deciders, seed)
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_failures_are_counted_in_a_row_and_among_the_last_decisions() -> None:
    snapshot = a_snapshot([a_job(1)], BIG)
    failed, good = choose(snapshot, fails), a_decision(snapshot, (1, 1))
    policy, failures = Scripted(fails), PolicyFailures()
    for number in range(30):
        failures = failures.after(policy, failed if number % 2 else good)
    assert (failures.consecutive, sum(failures.recent), len(failures.recent)) == (1, 10, 20)
    assert failures.cause == "policy scripted failed: ZeroDivisionError: division by zero"
    failures = failures.after(policy, replace(good, jobs=()))
    assert failures.consecutive == 1  # a decision on no job says nothing
    policy.version = "2"
    assert failures.after(policy, failed).recent == (True,)
