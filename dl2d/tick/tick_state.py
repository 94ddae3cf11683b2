"""State that one tick hands to the next, and that is not in the store.

A daemon begins without it, except for ``slot`` and ``ReconcileHistory.ended_until``, which it reads from the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dl2d.core.decision import Decision
from dl2d.core.jobs import JobKey
from dl2d.tick.idle_coordinators import IdleHistory
from dl2d.tick.observation.task_time_in_state import StateSince
from dl2d.tick.policy_check.policy_failures import PolicyFailures, SetAside
from dl2d.tick.policy_check.waiting_jobs_that_fit import NeedlessWait
from dl2d.tick.reconciliation.queued_tasks import QueueHistory
from dl2d.tick.reconciliation.unlisted_tasks_and_silent_coordinators import Unlisted
from dl2d.tick.vacating.claim_history import ClaimHistory
from dl2d.tick.vacating.make_room_in_limits import LimitHistory

_NO_DECISION = Decision("", "", ())


@dataclass(frozen=True, slots=True)
class SlotDecision:
    """What was decided in a slot; empty before the first one."""

    #: The decision before the guard: the policy's, the fallback's where that decided, or that of both (canary). In mode
    #: observe the same as ``in_force``.
    proposed: Decision = _NO_DECISION
    #: In modes live and canary the decision after the guard; in observe and shadow what the scheduler in charge gave.
    in_force: Decision = _NO_DECISION
    #: In mode shadow the decision ``proposed`` after the guard, else None.
    shadow: Decision | None = None
    #: In mode canary the jobs on which the policy decides, the fallback on the others; None where there is no group.
    canary_jobs: frozenset[JobKey] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileHistory:
    """What reconciling remembers. ``ended_until`` is in seconds since 1970, the others on a monotonic clock."""

    #: Static jobs that ended before this time are in the store; None where dl2d has not observed the cluster yet.
    ended_until: float | None = None
    #: The last job whose anchor was tried when time ran out before all were tried; None where all were.
    last_anchor_tried: JobKey | None = None
    #: Tasks and anchors that the resource manager does not list.
    unlisted: Unlisted = field(default_factory=Unlisted)
    #: Tags of the anchors that count as gone and of which accounting could not say yet how they ended, with the time
    #: when it was asked last.
    unaccounted: Mapping[str, float] = field(default_factory=dict)
    #: State of each task, and since when ticks have found it in that state, by tag.
    state_since: Mapping[str, StateSince] = field(default_factory=dict)
    #: Since when each job's coordinator has called without a gap; without silent ones.
    calling_since: Mapping[JobKey, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TickState:
    """What one tick hands to the next.

    ``decided_at`` is in seconds since 1970; the others are seconds on a monotonic clock (``Context.timer``).
    """

    #: Number of the last slot that was decided.
    slot: int = 0
    #: What is remembered of the listings before.
    reconcile_history: ReconcileHistory = field(default_factory=ReconcileHistory)
    #: Decision of slot ``slot``.
    slot_decision: SlotDecision = field(default_factory=SlotDecision)
    #: When that decision was made.
    decided_at: float = float("-inf")
    #: Digest of the situation that the decision was made for (see ``decide.situation_digest``).
    situation: str = ""
    #: Jobs that the decision gave nothing although there was room for them (``jobs_with_room``): room for these is no
    #: reason to decide again.
    with_room: frozenset[JobKey] = frozenset()
    #: What is remembered of jobs of others that wait for room on nodes, and in limits.
    claim_history: ClaimHistory = field(default_factory=ClaimHistory)
    limit_history: LimitHistory = field(default_factory=LimitHistory)
    #: What is remembered of elastic jobs that lack tasks of their minimum sizes while jobs of others wait.
    queue_history: QueueHistory = field(default_factory=QueueHistory)
    #: What is remembered of jobs whose coordinators run without tasks.
    idle_history: IdleHistory = field(default_factory=IdleHistory)
    #: Jobs that wait although they fit into free resources.
    needless_wait: NeedlessWait = field(default_factory=NeedlessWait)
    #: The policy version that is set aside, or None.
    set_aside: SetAside | None = None
    policy_failures: PolicyFailures = field(default_factory=PolicyFailures)
