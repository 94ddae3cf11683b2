"""Context of a tick: resource manager, store, policies, limits and timeouts. It does not change from tick to tick."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from dl2d.core.daemon_mode import Mode
from dl2d.core.decision import Decision
from dl2d.core.job_request import RequestRules
from dl2d.core.placement import Placement
from dl2d.core.policy import Evidence, Policy
from dl2d.core.resource_manager import ResourceManager
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.core.store import TickStore
from dl2d.tick.policy_call import at_once
from dl2d.tick.task_specs import Launcher


@dataclass(frozen=True, slots=True)
class Deciders:
    """The policy, the fallback that decides when it fails, and the placement with which both pack tasks."""

    policy: Policy
    fallback: Policy
    placement: Placement
    #: Seconds that the policy may take before the fallback decides instead.
    timeout: float = 5.0
    #: How the policy is called: directly, or with a ``Deadline`` for one that may never return.
    call: Callable[[Callable[[], Decision]], Decision] = at_once

    @property
    def needs(self) -> frozenset[Evidence]:
        """Measurements that the snapshot must hold for either of them."""
        return self.policy.needs | self.fallback.needs


@dataclass(frozen=True, slots=True)
class GuardRules:
    """The site's limits on what a policy may do; the defaults limit nothing."""

    #: Maximum that the jobs of one user may hold together; a resource not named is not limited.
    per_user: Resources = NO_RESOURCES
    #: Seconds after a job's last resize before it may grow or shrink again.
    cooldown_up: float = 0.0
    cooldown_down: float = 0.0
    #: Maximum number of tasks that one interval may add to the cluster; 0 for no limit.
    churn: int = 0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long to wait, in seconds, before something is done about a task or a job."""

    #: A task that was asked for but that the manager does not list was never started.
    unseen: float = 15.0
    #: A task that the manager does not start in this time is given up.
    start: float = 600.0
    #: A draining task that has not ended in this time is stopped through the manager.
    drain: float = 60.0
    #: The anchor and tasks of an ended job may take this long to end by themselves.
    end: float = 10.0
    #: A coordinator that has not called for this long is not expected to carry out a resize.
    silent: float = 60.0
    #: A job ends after this many attempts in a row whose tasks ended before they joined.
    start_failures: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a tick works with."""

    cluster: str
    manager: ResourceManager
    store: TickStore
    deciders: Deciders
    launcher: Launcher
    rules: GuardRules
    timeouts: Timeouts
    #: Maximum age of a decision, in seconds.
    slot_seconds: float
    seed: int
    starts_anchors: bool
    mode: Mode = Mode.LIVE
    #: Name and version of the resource manager, which decides where dl2d does not.
    scheduler: str = ""
    #: What the site allows jobs; bounds of those that declare none.
    limits: RequestRules = field(default_factory=RequestRules)
    #: Seconds that jobs may wait although they fit into free resources, before the fallback replaces the policy.
    idle_seconds: float = math.inf
    #: Seconds between asking a process to end and killing it.
    grace: float
    #: Seconds on a monotonic clock, to measure durations.
    timer: Callable[[], float]
