"""Context of a tick: resource manager, store, policies, limits and timeouts.

The daemon replaces it when its settings, the policy's version or the canary change, and never within a tick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dl2d.core.cluster import Snapshot
from dl2d.core.daemon_mode_and_canary import Canary, Mode
from dl2d.core.decision import Decision
from dl2d.core.job_request_parser import RequestRules
from dl2d.core.jobs import JobKey
from dl2d.core.placement import Placement
from dl2d.core.policy import Evidence, Policy
from dl2d.core.resource_manager import RmIdentity, RmJob, StartAllowance, TickManager
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.core.store import TickStore
from dl2d.tick.policy_check.policy_call import call_directly
from dl2d.tick.policy_check.policy_failures import SetAside
from dl2d.tick.task_command_and_environment import TaskSpecs
from dl2d.tick.task_submitter import TaskSubmitter


@dataclass(frozen=True, slots=True)
class Deciders:
    """The policy, the fallback that decides when it fails, and the placement with which both pack tasks."""

    policy: Policy
    fallback: Policy
    placement: Placement
    #: Calls the policy: without a time limit, or with that of a ``Deadline``.
    call_policy: Callable[[Callable[[], Decision]], Decision] = call_directly
    #: Why a snapshot is out of the range of the policy's training; empty if it is not.
    out_of_range: Callable[[Snapshot], str] = lambda snapshot: ""  # noqa: ARG005

    @property
    def needs(self) -> frozenset[Evidence]:
        """Measurements that the policy or the fallback needs in a snapshot."""
        return self.policy.needs | self.fallback.needs


@dataclass(frozen=True, slots=True)
class GuardRules:
    """The site's limits on what a policy may do; the defaults limit nothing."""

    #: Maximum that the jobs of one user may hold together; a resource that is not named has no limit.
    per_user: Resources = NO_RESOURCES
    #: The same for the jobs of one account, and for those of one partition or queue.
    per_account: Resources = NO_RESOURCES
    per_partition: Resources = NO_RESOURCES
    #: Seconds after a job's last resize before it may grow again.
    cooldown_up: float = 0.0
    #: Seconds after a job's last resize before it may shrink again.
    cooldown_down: float = 0.0
    #: Maximum number of tasks that are started within any ``slot_seconds``; 0 for no limit.
    churn: int = 0
    #: Seconds that a job waits before later ones are held back until it has started; 0: they never are.
    hold_back_after: float = 0.0
    #: Seconds after the first failed attempt to start a job's tasks before the next one; doubled with each further one.
    backoff: float = 10.0

    @property
    def need_resizes(self) -> bool:
        """Whether a rule depends on when jobs were resized."""
        return bool(self.cooldown_up or self.cooldown_down or self.churn)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """When a tick gives up waiting for a task or a job. The names are those of the configuration (``jobs.*``)."""

    #: A task or anchor has ended, or was never started, when so many complete listings in a row, over so many seconds,
    #: lack it.
    unseen_listings: int = 3
    unseen_seconds: float = 30.0
    #: How long a task may wait for resources in the resource manager before it is withdrawn; and how long one that runs
    #: may take until its coordinator hears of it.
    start_seconds: float = 600.0
    #: How long a job lacks tasks of its minimum size, while others wait for the same nodes, before these are queued.
    queue_seconds: float = 180.0
    #: How long a draining task may run before it is stopped through the resource manager.
    drain_seconds: float = 60.0
    #: How long drained tasks, and the anchor and tasks of an ended job, may take to exit by themselves.
    end_seconds: float = 10.0
    #: How long a coordinator may not call before it counts as silent and its job is not resized.
    silent_seconds: float = 60.0
    #: Maximum number of consecutive attempts to start a job's tasks that may fail before the job is ended.
    start_failures: int = 3


class LastHeartbeat(NamedTuple):
    """The last heartbeat of a job that was answered; by default, that none is known."""

    #: Since when its heartbeats have been answered without a gap of ``Timeouts.silent_seconds``, and when this one was,
    #: by ``Context.timer``.
    since: float | None = None
    at: float = 0.0
    #: Ids of the tasks whose dl2-run had reached the coordinator and that had not joined yet; None if it did not say.
    connected_tasks: Collection[str] | None = None
    #: Whether the job's training was done, so that its tasks end.
    training_done: bool = False
    #: Whether it was the first after a gap: it may have been sent before the gap.
    after_gap: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a tick works with."""

    #: Name of the cluster, the first part of every job's key.
    cluster: str
    manager: TickManager
    store: TickStore
    deciders: Deciders
    task_specs: TaskSpecs
    guard_rules: GuardRules
    timeouts: Timeouts
    #: Maximum age of a decision, in seconds.
    slot_seconds: float
    #: Seed of the random numbers that the policy draws.
    seed: int
    #: Whether dl2d starts the jobs' anchors; otherwise users submit them to the resource manager.
    starts_anchors: bool
    mode: Mode = Mode.LIVE
    #: In mode canary, while it runs: the policy decides on the jobs of its group, the fallback on the others.
    canary: Canary | None = None
    #: The policy, where it was withdrawn in mode canary or its live version cannot be read: the fallback decides on all
    #: jobs.
    withdrawn: SetAside | None = None
    #: Name and version of the resource manager, which decides where dl2d does not.
    scheduler: str = ""
    #: What jobs may request; also the bounds of jobs that declare none.
    request_rules: RequestRules = field(default_factory=RequestRules)
    #: Seconds that jobs may wait although they fit into free resources before the policy is set aside.
    idle_seconds: float = math.inf
    #: Seconds between asking a process to end and killing it.
    grace_seconds: float
    #: Whether tasks run as the user who owns their job, not as the daemon's user (``Capabilities.other_users``).
    tasks_as_owner: bool = True
    #: Where the output of a task is (``Capabilities.output``).
    output: str = ""
    #: Whether tasks can wait in the resource manager's queue (``Capabilities.queues_tasks``).
    queues_tasks: bool = False
    #: Called in each tick that may act, right after the lease was checked: until the next tick the resource manager's
    #: plug-in may change services (``ContainerManager.allow_changes``).
    allow_changes: Callable[[], None] = lambda: None
    #: The last known states of the jobs with these handles (``AccountingManager.final_states``).
    final_states: Callable[[Collection[str]], Sequence[RmJob]] = lambda handles: ()  # noqa: ARG005
    #: See ``RequeuingManager.requeue``; None where anchors hold no room, or cannot be put back into the queue.
    requeue: Callable[[RmIdentity, float], None] | None = None
    #: The last heartbeat of a job.
    last_heartbeat: Callable[[JobKey], LastHeartbeat] = lambda job: LastHeartbeat()  # noqa: ARG005
    #: How many tasks may be submitted now (``RateLimitedManager.start_allowance``); None: any number.
    start_allowance: Callable[[], StartAllowance] | None = None
    #: Submits the tasks of a plan; None: one after the other.
    submitter: TaskSubmitter | None = None
    #: Seconds after which a tick submits no further batch of tasks and leaves the others to the next tick.
    submit_seconds: float = math.inf
    #: Seconds on a monotonic clock; measures how long a tick takes, and how long something is not listed.
    timer: Callable[[], float]
