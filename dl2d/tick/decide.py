"""Decide: asks the policy for an allocation, and the fallback where the policy fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import structlog

from dl2d.core.cluster import Snapshot
from dl2d.core.daemon_mode import Mode
from dl2d.core.decision import Constraint, Decision, Reason
from dl2d.core.errors import PolicyError
from dl2d.core.json_codec import digest
from dl2d.core.packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.tick import guard
from dl2d.tick.context import Deciders
from dl2d.tick.idle_cluster import IdleWaiting
from dl2d.tick.policy_call import gc_paused
from dl2d.tick.reconcile import Reconciled
from dl2d.tick.state import SetAside

log = structlog.get_logger()


@gc_paused()
def decide(
    snapshot: Snapshot,
    deciders: Deciders,
    seed: int,
    timer: Callable[[], float],
    *,
    set_aside: SetAside | None = None,
) -> Decision:
    """The policy's decision for a snapshot, checked; or the fallback's, with the cause among every job's reasons.

    The fallback decides where the policy fails, takes longer than ``deciders.timeout``, or is ``set_aside``. ``timer``
    gives seconds on a monotonic clock.

    Raises
    ------
    PolicyError
        The fallback failed as well.
    """
    if set_aside is not None:
        decision = _ask(deciders.fallback, snapshot, deciders.placement, seed)
        return _by_fallback(decision, f"policy {set_aside.policy} is set aside: it {set_aside.reason}")
    begin = timer()
    try:
        decision = deciders.call(lambda: _ask(deciders.policy, snapshot, deciders.placement, seed))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in: whatever it raises, the cluster goes on
        problem = f"{type(error).__name__}: {error}"
    else:
        took = timer() - begin
        if took <= deciders.timeout:
            return decision
        problem = f"it took {took:.1f} s, more than {deciders.timeout:g} s"
    log.error("policy failed", policy=deciders.policy.name, problem=problem, fallback=deciders.fallback.name)
    try:
        decision = _ask(deciders.fallback, snapshot, deciders.placement, seed)
    except Exception as error:
        raise PolicyError(
            f"policy {deciders.policy.name} failed ({problem}) and the fallback {deciders.fallback.name} too: {error}"
        ) from error
    return _by_fallback(decision, f"policy {deciders.policy.name} failed: {problem}")


def _ask(policy: Policy, snapshot: Snapshot, placement: Placement, seed: int) -> Decision:
    packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, placement)
    decision = policy.decide(snapshot, packing, np.random.default_rng([seed, snapshot.slot]))
    guard.check(decision, snapshot)
    # What a job has is a fact and not the policy's to say: later stages rely on it.
    held = snapshot.held()
    return replace(decision, jobs=tuple(replace(entry, previous=held[entry.job]) for entry in decision.jobs))


def _by_fallback(decision: Decision, why: str) -> Decision:
    reason = Reason(Constraint.FALLBACK, why)
    return replace(decision, jobs=tuple(entry.changed_by(entry.allocation, reason) for entry in decision.jobs))


def situation_of(mode: Mode, reconciled: Reconciled, set_aside: SetAside | None) -> str:
    """Digest of what a decision is made for: where it changes, a new decision is due before the slot is over."""
    snapshot = reconciled.snapshot
    nodes = [(node.name, node.capacity, node.state) for node in snapshot.nodes]
    static = {job.key for job in snapshot.jobs if job.static}
    fixed = [(task.job, task.id) for task in snapshot.tasks if task.job in static]
    jobs = [job.key for job in snapshot.jobs]
    return digest(mode, jobs, nodes, sorted(reconciled.failures.items()), sorted(reconciled.silent), fixed, set_aside)


def set_aside_if_idle(deciders: Deciders, idle: IdleWaiting, limit: float) -> SetAside | None:
    """The policy, to be set aside, where jobs have waited for ``limit`` seconds although they fit; else None."""
    policy = deciders.policy
    if not idle.jobs or idle.seconds < limit or policy is deciders.fallback:
        return None
    text = f"left {len(idle.jobs)} jobs waiting for {idle.seconds:.0f} s although they fit into free resources"
    return SetAside(policy.name, policy.version, text)
