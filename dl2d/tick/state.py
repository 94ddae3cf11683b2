"""State that one tick hands to the next. A daemon that starts with an empty state only decides a little earlier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dl2d.core.decision import Decision
from dl2d.core.jobs import JobKey
from dl2d.core.policy import Policy
from dl2d.tick.guard import ResizeHistory
from dl2d.tick.idle_cluster import IdleWaiting


class StartFailures(NamedTuple):
    """Attempts in a row in which tasks of a job ended before they joined, and how the last one ended."""

    attempts: int = 0
    last: str = ""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A policy version that is not asked any more; the fallback decides until another version is in charge."""

    policy: str
    version: str
    #: Why, in words that follow the policy's name.
    reason: str

    def names(self, policy: Policy) -> bool:
        """Whether it is this policy and version."""
        return (self.policy, self.version) == (policy.name, policy.version)


@dataclass(frozen=True, slots=True)
class Ruling:
    """The decision of a slot: as the policy proposed it, as it is in force, and as dl2d would have carried it out."""

    proposed: Decision
    decision: Decision
    #: After the guard, where another scheduler is in charge; else None.
    shadow: Decision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TickState:
    """What one tick hands to the next."""

    #: Number of the last slot that was decided.
    slot: int = 0
    #: The ruling in force, when it was made, and a digest of the situation for which it was made.
    ruling: Ruling | None = None
    decided_at: float = float("-inf")
    situation: str = ""
    resizes: ResizeHistory = field(default_factory=ResizeHistory)
    failures: Mapping[JobKey, StartFailures] = field(default_factory=dict)
    #: When each handle was last asked to stop.
    stopping: Mapping[str, float] = field(default_factory=dict)
    #: Since when each job's coordinator has called without a gap.
    heard: Mapping[JobKey, float] = field(default_factory=dict)
    idle: IdleWaiting = field(default_factory=IdleWaiting)
    set_aside: SetAside | None = None

    def ruling_for(self, situation: str, at: float, slot_seconds: float) -> Ruling | None:
        """The ruling in force; None where it is too old or made for another situation.

        A clock that was set back ends it too, so that it does not stand for hours.
        """
        return self.ruling if situation == self.situation and 0 <= at - self.decided_at < slot_seconds else None
