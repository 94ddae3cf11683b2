"""Decide: asks the policy for the jobs' allocations, and the fallback if the policy fails."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import numpy as np
import structlog

from dl2d.core.cluster import Snapshot
from dl2d.core.daemon_mode_and_canary import Canary, Mode
from dl2d.core.decision import Constraint, Decision, Reason
from dl2d.core.errors import PolicyError
from dl2d.core.jobs import JobKey
from dl2d.core.json_codec import digest
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.tick.decision.canary_decision import decide_in_groups
from dl2d.tick.decision.long_waiting_jobs import with_held_back, without_held_back
from dl2d.tick.policy_check.decision_check import check_decision
from dl2d.tick.policy_check.policy_call import gc_paused
from dl2d.tick.policy_check.policy_failures import SetAside
from dl2d.tick.policy_check.waiting_jobs_that_fit import jobs_with_room
from dl2d.tick.reconcile import Reconciled
from dl2d.tick.tick_context import Deciders
from dl2d.tick.tick_state import SlotDecision, TickState

log = structlog.get_logger()


@gc_paused()
def decide(
    snapshot: Snapshot,
    deciders: Deciders,
    seed: int,
    *,
    set_aside: SetAside | None = None,
    canary: Collection[JobKey] | None = None,
) -> Decision:
    """The policy's decision for a snapshot, checked; or the fallback's, with the cause in every job's ``guarded``.

    Jobs that are held back (``Snapshot.held_back``) get nothing; neither of the two decides on them.

    With ``canary``, the policy decides on these jobs only, and the fallback on the others
    (``dl2d.tick.decision.canary_decision``).

    The fallback decides on all jobs if the policy fails, exceeds the time limit of ``deciders.call_policy``, or is
    ``set_aside``, and if the snapshot is out of the range of its training.

    Raises
    ------
    PolicyError
        The fallback was asked and failed.
    """
    decision = _decide(without_held_back(snapshot), deciders, seed, set_aside, canary)
    return with_held_back(decision, snapshot)


def _decide(
    snapshot: Snapshot, deciders: Deciders, seed: int, set_aside: SetAside | None, canary: Collection[JobKey] | None
) -> Decision:
    def ask_policy(snapshot: Snapshot) -> Decision:
        return deciders.call_policy(lambda: _ask(deciders.policy, snapshot, deciders.placement, seed))

    def ask_fallback(snapshot: Snapshot, cause: str) -> Decision:
        try:
            return _ask(deciders.fallback, snapshot, deciders.placement, seed)
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}"
            raise PolicyError(f"{cause}; the fallback {deciders.fallback.name} failed: {problem}") from error

    def decide_by_fallback(cause: str, constraint: Constraint = Constraint.FALLBACK) -> Decision:
        decision, reason = ask_fallback(snapshot, cause), Reason(constraint, cause)
        return replace(decision, jobs=tuple(entry.changed_by(entry.allocation, reason) for entry in decision.jobs))

    name = deciders.policy.name
    if set_aside is not None:
        return decide_by_fallback(f"policy {set_aside.policy} is set aside: it {set_aside.reason}")
    if statistic := deciders.out_of_range(snapshot):
        return decide_by_fallback(f"policy {name} was not asked: there are {statistic}", Constraint.OUT_OF_RANGE)
    try:
        if canary is None:
            return ask_policy(snapshot)
        ask_on_others = partial(ask_fallback, cause=f"policy {name} decides on the canary's jobs only")
        return decide_in_groups(snapshot, canary, ask_policy, ask_on_others, deciders.placement)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in may raise anything, and the tick must go on
        problem = f"{type(error).__name__}: {error}"
    log.error("policy failed", policy=name, problem=problem, fallback=deciders.fallback.name)
    return decide_by_fallback(f"policy {name} failed: {problem}")


def _ask(policy: Policy, snapshot: Snapshot, placement: Placement, seed: int) -> Decision:
    packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, placement, snapshot.node_sets, snapshot.limits)
    decision = policy.decide(snapshot, packing, np.random.default_rng([seed, snapshot.slot]))
    check_decision(decision, snapshot)
    # Later stages rely on ``previous``, so it is not taken from the policy.
    held = snapshot.held()
    return replace(decision, jobs=tuple(replace(entry, previous=held[entry.job]) for entry in decision.jobs))


def decision_in_force(state: TickState, situation: str, at: float, slot_seconds: float) -> SlotDecision | None:
    """The last slot's decision, or None where it is older than a slot or was made for another situation.

    A decision from the future, which means that the clock was set back, does not hold either: it would stay in force
    until the clock has caught up.
    """
    in_slot = 0 <= at - state.decided_at < slot_seconds
    return state.slot_decision if in_slot and situation == state.situation else None


def room_appeared(state: TickState, snapshot: Snapshot, placement: Placement) -> bool:
    """Whether a job that the last slot's decision gives nothing fits into free resources, and did not fit then."""
    return not jobs_with_room(snapshot, state.slot_decision.in_force, placement) <= state.with_room


def situation_digest(mode: Mode, canary: Canary | None, reconciled: Reconciled, set_aside: SetAside | None) -> str:
    """Digest of the situation that a decision is made for; when it changes, a decision is due before the slot ends.

    It has the mode, the number of the canary, the jobs, the capacity and state of the nodes, failed attempts to start
    tasks, silent coordinators, jobs whose next start has to wait, the tasks of static jobs, the policy that is set
    aside, the nodes that elastic jobs may use, and the limits that were learned from refusals.

    The limits that the resource manager lists (``RmListing.growth_limits``) are not in it, since they come and go
    with tasks that start and with jobs of others. Growth keeps to those of the time of the decision until the slot
    ends.
    """
    number = 0 if canary is None else canary.number
    snapshot = reconciled.snapshot
    jobs = [job.key for job in snapshot.jobs]
    nodes = [(node.name, node.capacity, node.state) for node in snapshot.nodes]
    failures, kept_sizes = sorted(reconciled.guard_state.start_failures.items()), sorted(reconciled.kept_sizes)
    backing_off = sorted(reconciled.backing_off)
    static = {job.key for job in snapshot.jobs if job.static}
    static_tasks = [(task.job, task.id) for task in snapshot.tasks if task.job in static]
    # ``hash`` differs from process to process, but the state with the digest is not kept beyond the process.
    # Node sets of static jobs alone are left out: their reasons change with each pass of the scheduler in charge.
    may_use = [
        (each.jobs, each.reason, hash(each.nodes)) for each in snapshot.node_sets if not static.issuperset(each.jobs)
    ]
    learned_limits = sorted(limit.reason for limit in reconciled.growth_limits)
    return digest(
        mode, number, jobs, nodes, failures, kept_sizes, backing_off, static_tasks, set_aside, may_use, learned_limits
    )
