"""Decision of a policy: an allocation for each job, with reasons."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from dl2d.core.jobs import NOTHING, Allocation, JobKey, Role
from dl2d.core.resources import Shortfall


class Constraint(enum.StrEnum):
    """The constraint that kept a job from a larger allocation."""

    #: It has all it asked for.
    SATISFIED = "satisfied"
    #: The cluster's total has too little left of a resource.
    CAPACITY = "capacity"
    #: There is enough in total but no single node has room for the next task.
    FRAGMENTED = "fragmented"
    #: A task asks for more than the largest node has at all.
    INFEASIBLE = "infeasible"
    #: Jobs before it in the queue are served first.
    QUEUE = "queue"
    #: A limit of the site: per user, per job, or per partition.
    LIMIT = "limit"
    #: It was resized a short while ago.
    COOLDOWN = "cooldown"
    #: This interval's number of starts is used up.
    CHURN = "churn"
    #: It keeps its floor although the policy would give less.
    FLOOR = "floor"
    #: Its coordinator has not called for a while, so it stays as it is.
    SILENT = "silent"
    #: The policy failed and the fallback decided.
    FALLBACK = "fallback"
    #: dl2d decided nothing: it is what the scheduler in charge gave.
    OBSERVED = "observed"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an allocation is what it is: the binding constraint, with amounts, and a sentence for people."""

    constraint: Constraint
    text: str
    shortfalls: tuple[Shortfall, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """An allocation that was considered, and its score in the policy's own measure (see ``Decision.measure``)."""

    allocation: Allocation
    score: float


@dataclass(frozen=True, slots=True)
class JobDecision:
    """The decision for one job."""

    job: JobKey
    allocation: Allocation
    reason: Reason
    previous: Allocation = NOTHING
    alternatives: tuple[Alternative, ...] = ()
    #: What the guard changed, and why; in order.
    guarded: tuple[Reason, ...] = ()

    def changed_by(self, allocation: Allocation, reason: Reason) -> JobDecision:
        """This decision after the guard put another allocation in its place."""
        return replace(self, allocation=allocation, guarded=(*self.guarded, reason))


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's answer to a snapshot. ``jobs`` are in the snapshot's order."""

    policy: str
    policy_version: str
    jobs: tuple[JobDecision, ...]
    #: What the alternatives' scores measure, e.g. ``dominant share``; empty where there are none.
    measure: str = ""
    #: The single steps in the order in which they were taken: (job, bundles or tasks added).
    actions: tuple[tuple[JobKey, Allocation], ...] = field(default=())
    #: Where the policy would have the tasks of its jobs, those that run already included. Placing tries these nodes
    #: first, and waits for them where tasks are about to leave. Empty for a policy that leaves this to the placement,
    #: and without those of a job for which it does.
    nodes: tuple[tuple[JobKey, Role, str], ...] = field(default=())

    def allocations(self) -> dict[JobKey, Allocation]:
        """Allocation by job."""
        return {decided.job: decided.allocation for decided in self.jobs}
