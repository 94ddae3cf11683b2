"""Decision of a policy: an allocation for each job, with reasons."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple

from dl2d.core.cluster import Claimant
from dl2d.core.jobs import NOTHING, Allocation, JobKey, Role
from dl2d.core.resources import Shortfall

#: Seconds after a slot within which the site's scheduler starts what there is room for: Slurm's ``sched_interval``.
SOON_SECONDS = 60


class Constraint(enum.StrEnum):
    """The constraint that kept a job from a larger allocation."""

    #: The job has all it asked for.
    SATISFIED = "satisfied"
    #: The cluster's total has too little left of a resource.
    CAPACITY = "capacity"
    #: There is enough in total but no single node has room for the next task.
    FRAGMENTED = "fragmented"
    #: A task asks for more than the largest node has at all.
    INFEASIBLE = "infeasible"
    #: Jobs before it in the queue are served first.
    QUEUE = "queue"
    #: A job that was submitted earlier has waited for too long, and starts first.
    HELD_BACK = "held-back"
    #: A limit of the site: per user, per account, or per partition.
    LIMIT = "limit"
    #: Nodes are vacated for a job of the resource manager that waits for them.
    CLAIM = "claim"
    #: The job was resized a short while ago.
    COOLDOWN = "cooldown"
    #: The slot's number of starts is used up.
    CHURN = "churn"
    #: An attempt to start tasks of the job failed, and the next one has to wait.
    BACKOFF = "backoff"
    #: The job keeps its floor although the policy would give less.
    FLOOR = "floor"
    #: The job's coordinator has not called for a while, so its allocation stays as it is.
    SILENT = "silent"
    #: The policy failed and the fallback decided.
    FALLBACK = "fallback"
    #: The input is far out of the range of the policy's training, and the fallback decided.
    OUT_OF_RANGE = "out-of-range"
    #: dl2d decided nothing: the allocation is what the scheduler in charge gave.
    OBSERVED = "observed"


#: Constraints that say that a job gets less because nodes have no room for its tasks.
FOR_WANT_OF_ROOM = frozenset(
    {Constraint.CAPACITY, Constraint.FRAGMENTED, Constraint.INFEASIBLE, Constraint.QUEUE, Constraint.CLAIM}
)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an allocation is what it is: the binding constraint, with amounts, and a sentence for people."""

    constraint: Constraint
    text: str
    shortfalls: tuple[Shortfall, ...] = ()
    #: The softer rule of the guard that does not hold because of this one; None where all rules hold.
    gave_way: Constraint | None = None
    #: Waiting jobs that the text names, if the constraint is ``CLAIM``; empty in slots of earlier versions.
    claimants: tuple[Claimant, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """An allocation that was considered, and its score in the policy's own measure (see ``Decision.measure``)."""

    allocation: Allocation
    score: float


class Decider(NamedTuple):
    """Name and version of a policy."""

    name: str
    version: str


#: Policy name of a decision in mode canary, which is put together from those of the policy and of the fallback.
CANARY = "canary"


@dataclass(frozen=True, slots=True)
class JobDecision:
    """The decision for one job."""

    job: JobKey
    allocation: Allocation
    reason: Reason
    #: Allocation that the job had when it was decided.
    previous: Allocation = NOTHING
    #: Other allocations that the policy considered.
    alternatives: tuple[Alternative, ...] = ()
    #: Why the allocation is not the policy's: the rules of the guard that changed it, in the order in which they were
    #: applied; or the failure because of which the fallback decided; and the claims of other jobs that left the policy
    #: less room. (Stored slots hold this name.)
    guarded: tuple[Reason, ...] = ()
    #: In mode canary the policy that decided on the job; None where that is the decision's.
    by: Decider | None = None

    @property
    def binding_reason(self) -> Reason:
        """Why the allocation is what it is: the last change that the guard made, or the policy's reason."""
        return self.guarded[-1] if self.guarded else self.reason

    def changed_by(self, allocation: Allocation, reason: Reason) -> JobDecision:
        """A copy with another allocation, and the reason for it appended to ``guarded``."""
        return replace(self, allocation=allocation, guarded=(*self.guarded, reason))


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's answer to a snapshot. ``jobs`` are in the snapshot's order."""

    policy: str
    policy_version: str
    jobs: tuple[JobDecision, ...]
    #: What the alternatives' scores measure, e.g. ``dominant share``; empty where there are none.
    measure: str = ""
    #: The increments from which the policy put the allocations together, in the order in which it gave them: the job,
    #: and the tasks that it got.
    actions: tuple[tuple[JobKey, Allocation], ...] = ()
    #: Nodes on which the policy wants the tasks of its jobs, one entry for each task, running ones included. The stage
    #: place tries these nodes first, and waits for them if tasks are about to leave them. Jobs without an entry are
    #: placed by the site's placement alone.
    nodes: tuple[tuple[JobKey, Role, str], ...] = ()

    @property
    def fallback_cause(self) -> str:
        """Why the fallback decided after the policy failed or was set aside; empty if it did not, or without jobs."""
        return self._first_reason(Constraint.FALLBACK)

    @property
    def out_of_range(self) -> str:
        """Why the fallback decided since the input is out of the range of the policy's training; empty if it is not."""
        return self._first_reason(Constraint.OUT_OF_RANGE)

    def _first_reason(self, constraint: Constraint) -> str:
        guarded = (reason for entry in self.jobs[:1] for reason in entry.guarded)
        return next((reason.text for reason in guarded if reason.constraint is constraint), "")

    def allocations(self) -> dict[JobKey, Allocation]:
        """Allocation by job."""
        return {decided.job: decided.allocation for decided in self.jobs}
