"""Failures of the policy: decisions that failed, and when it is set aside, so that the fallback decides."""

from __future__ import annotations

from dataclasses import dataclass

from dl2d.core.decision import Decision
from dl2d.core.errors import counted
from dl2d.core.policy import Policy
from dl2d.tick.policy_check.waiting_jobs_that_fit import NeedlessWait

#: Failures are counted among this many last decisions, whether consecutive or not.
RECENT_DECISIONS = 20


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


def set_aside_after_wait(policy: Policy, wait: NeedlessWait, max_seconds: float) -> SetAside | None:
    """The policy, to be set aside since jobs have waited for ``max_seconds`` although they fit; else None."""
    if not wait.jobs or wait.seconds < max_seconds:
        return None
    reason = (
        f"left {counted(len(wait.jobs), 'job')} waiting for {wait.seconds:.0f} s although they fit into free resources"
    )
    return SetAside(policy.name, policy.version, reason)
