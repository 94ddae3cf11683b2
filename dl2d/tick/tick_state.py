"""State that one tick hands to the next. A daemon begins with the guard's state alone, and asks the policy at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from dl2d.core.cluster import ClaimedNodes, TaskState
from dl2d.core.decision import Decision
from dl2d.core.guard_state import GuardState
from dl2d.core.jobs import JobKey
from dl2d.core.policy import Policy
from dl2d.tick.missing_tasks import Missing
from dl2d.tick.needlessly_waiting_jobs import NeedlessWait

#: Failures are counted among this many last decisions, whether consecutive or not.
RECENT_DECISIONS: Final = 20


@dataclass(frozen=True, slots=True)
class PolicyFailures:
    """Decisions of one policy version that failed, so that the fallback decided."""

    version: str = ""
    #: Consecutive ones up to the last decision.
    consecutive: int = 0
    #: Why the last one failed.
    cause: str = ""
    #: Of the last ``RECENT_DECISIONS``, whether each failed, oldest first.
    recent: tuple[bool, ...] = ()

    def after(self, policy: Policy, decision: Decision) -> PolicyFailures:
        """The failures after one more decision.

        A decision without jobs, or one for which the policy was not asked, changes nothing.
        """
        if not decision.jobs or decision.out_of_range:
            return self
        cause, same = decision.fallback_cause, self.version == policy.version
        recent = ((*self.recent, bool(cause)) if same else (bool(cause),))[-RECENT_DECISIONS:]
        if not cause:
            return PolicyFailures(policy.version, recent=recent)
        return PolicyFailures(policy.version, (self.consecutive if same else 0) + 1, cause, recent)


@dataclass(frozen=True, slots=True)
class SetAside:
    """A policy version that is not asked any more; the fallback decides until another version is configured."""

    policy: str
    version: str
    #: Why, in words that follow the policy's name.
    reason: str

    def is_for(self, policy: Policy) -> bool:
        """Whether ``policy`` is the one that was set aside, in the same version."""
        return (self.policy, self.version) == (policy.name, policy.version)


class ClaimKey(NamedTuple):
    """A waiting claim. Pending tasks of a job array share one handle: when one of them starts, the number changes."""

    handle: str
    #: Number of claims that wait under the handle.
    waiting: int


class GivenUpClaim(NamedTuple):
    """A claim for which no nodes are vacated for a while, since its job did not start although it had room."""

    user: str
    #: Its number of nodes, its demand, and which nodes it may use.
    shape: tuple[object, ...]
    #: When it was given up, seconds on a monotonic clock.
    at: float
    #: Whether it was given up after some of its planned nodes were vacated. It is met again as soon as all nodes that
    #: it needs can be vacated.
    partial: bool = False


@dataclass(frozen=True, slots=True)
class ClaimHistory:
    """What ticks remember of claims. Times are seconds on a monotonic clock."""

    #: Handles and nodes of the claims in the last tick, and at the last decision.
    nodes: frozenset[tuple[str, str]] = frozenset()
    decided: frozenset[tuple[str, str]] = frozenset()
    #: Since when the room of a claim has been free.
    free_since: Mapping[ClaimKey, float] = field(default_factory=dict)
    #: Since when planned nodes have been vacated for a claim that cannot be met yet.
    vacated_since: Mapping[ClaimKey, float] = field(default_factory=dict)
    given_up: tuple[GivenUpClaim, ...] = ()

    def is_undecided(self, claims: Iterable[ClaimedNodes]) -> bool:
        """Whether tasks have to leave a node for a claim that was not there at the last decision."""
        return any(claim.leaving and not nodes_of_claims((claim,)) <= self.decided for claim in claims)

    def after_decision(self) -> ClaimHistory:
        """The history after the claims of the last tick were decided on."""
        return replace(self, decided=self.nodes)


def nodes_of_claims(claims: Iterable[ClaimedNodes]) -> frozenset[tuple[str, str]]:
    """The handle and each node of each claim."""
    return frozenset((claim.handle, node) for claim in claims for node in claim.nodes)


@dataclass(frozen=True, slots=True)
class SlotDecision:
    """What was decided in a slot."""

    #: The policy's decision before the guard; in mode observe the same as ``in_force``.
    proposed: Decision
    #: In modes live and canary the decision after the guard; in observe and shadow what the scheduler in charge gave.
    in_force: Decision
    #: In mode shadow the policy's decision after the guard, else None.
    shadow: Decision | None = None
    #: In mode canary the jobs on which the policy decides, the fallback on the others; None where there is no group.
    group: frozenset[JobKey] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TickState:
    """What one tick hands to the next.

    ``ended_until``, ``decided_at`` and the times in ``memory`` are seconds since 1970. The others are seconds on a
    monotonic clock (``Context.timer``).
    """

    #: Number of the last slot that was decided.
    slot: int = 0
    #: Static jobs that ended before this time are in the store; None where dl2d has not observed the cluster yet.
    ended_until: float | None = None
    #: The last job whose anchor was tried when time ran out before all were tried; None where all were.
    last_anchor_tried: JobKey | None = None
    #: Decision of slot ``slot``; None before the first slot.
    slot_decision: SlotDecision | None = None
    #: When that decision was made.
    decided_at: float = float("-inf")
    #: Digest of the situation that the decision was made for (see ``decide.situation_digest``).
    situation: str = ""
    #: What the guard remembers; it is in the store as well, and a daemon begins with it.
    memory: GuardState = field(default_factory=GuardState)
    #: What is remembered of jobs of others that wait for room.
    claim_history: ClaimHistory = field(default_factory=ClaimHistory)
    #: Tasks and anchors that the resource manager does not list.
    missing: Missing = field(default_factory=Missing)
    #: State of each task, and since when ticks have found it in that state, by tag.
    state_since: Mapping[str, tuple[TaskState, float]] = field(default_factory=dict)
    #: Since when each job's coordinator has called without a gap; without silent ones.
    calling_since: Mapping[JobKey, float] = field(default_factory=dict)
    #: Jobs that wait although they fit into free resources.
    needless_wait: NeedlessWait = field(default_factory=NeedlessWait)
    #: The policy version that is set aside, or None.
    set_aside: SetAside | None = None
    policy_failures: PolicyFailures = PolicyFailures()

    def decision_for(self, situation: str, at: float, slot_seconds: float) -> SlotDecision | None:
        """The last slot's decision, or None where it is older than a slot or was made for another situation.

        A decision from the future, which means that the clock was set back, does not hold either: it would stay in
        force until the clock has caught up.
        """
        in_slot = 0 <= at - self.decided_at < slot_seconds
        return self.slot_decision if in_slot and situation == self.situation else None
