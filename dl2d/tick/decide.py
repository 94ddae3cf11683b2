"""Ask the policy, and the fallback where the policy fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import structlog

from dl2d.core.cluster import Snapshot
from dl2d.core.codec import digest
from dl2d.core.decision import Constraint, Decision, Reason
from dl2d.core.errors import PolicyError
from dl2d.core.packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.policy import Evidence, Policy
from dl2d.tick import guard
from dl2d.tick.policy_call import at_once, gc_paused

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Deciders:
    """The policy in charge, what decides in its place when it fails, and the placement both pack with."""

    policy: Policy
    fallback: Policy
    placement: Placement
    #: Seconds that the policy may take before the fallback's answer is used instead.
    patience: float = 5.0
    #: How the policy is called: at once, or with a deadline for one that may never come back.
    call: Callable[[Callable[[], Decision]], Decision] = at_once

    @property
    def needs(self) -> frozenset[Evidence]:
        """What the snapshot has to hold for either of them."""
        return self.policy.needs | self.fallback.needs


@dataclass(frozen=True, slots=True)
class SetAside:
    """A policy that is not asked any more, as long as it is this version of it."""

    policy: str
    version: str
    #: Why, in words that follow the policy's name.
    reason: str

    def names(self, policy: Policy) -> bool:
        """Whether it is this one."""
        return (self.policy, self.version) == (policy.name, policy.version)


@gc_paused()
def decide(
    snapshot: Snapshot,
    deciders: Deciders,
    seed: int,
    timer: Callable[[], float],
    *,
    set_aside: SetAside | None = None,
) -> Decision:
    """The policy's decision for a snapshot, checked; or the fallback's, which then says why in every job's reasons.

    The fallback decides where the policy fails, and where it is ``set_aside``. ``timer`` gives seconds on a monotonic
    clock.

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
        if took <= deciders.patience:
            return decision
        problem = f"it took {took:.1f} s, more than {deciders.patience:g} s"
    log.error("policy failed", policy=deciders.policy.name, problem=problem, fallback=deciders.fallback.name)
    try:
        decision = _ask(deciders.fallback, snapshot, deciders.placement, seed)
    except Exception as error:
        raise PolicyError(
            f"policy {deciders.policy.name} failed ({problem}) and the fallback {deciders.fallback.name} too: {error}"
        ) from error
    return _by_fallback(decision, f"policy {deciders.policy.name} failed: {problem}")


def _by_fallback(decision: Decision, why: str) -> Decision:
    reason = Reason(Constraint.FALLBACK, why)
    return replace(decision, jobs=tuple(entry.changed_by(entry.allocation, reason) for entry in decision.jobs))


class Signed(Protocol):
    """Whatever signs a decision."""

    @property
    def name(self) -> str:
        """Of a policy, or what stands in its place."""
        ...

    @property
    def version(self) -> str:
        """Which one."""
        ...


def inputs_hash(snapshot: Snapshot, policy: Signed, placement: Placement, seed: int) -> str:
    """SHA-256 over everything that the decision depends on."""
    return digest(snapshot, [policy.name, policy.version, placement.name, seed])


def _ask(policy: Policy, snapshot: Snapshot, placement: Placement, seed: int) -> Decision:
    packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, placement)
    decision = policy.decide(snapshot, packing, np.random.default_rng([seed, snapshot.slot]))
    guard.check(decision, snapshot)
    # What a job has is a fact and not the policy's to say: later stages rely on it.
    held = snapshot.held()
    return replace(decision, jobs=tuple(replace(entry, previous=held[entry.job]) for entry in decision.jobs))
