"""End of a job before its last version: it has failed, or was cancelled; its user and its members are told."""

from __future__ import annotations

from typing import Literal

from pslite.coordinator.coordinator_context import Job
from pslite.net.messages import JobEnded


def fail(job: Job, reason: str) -> None:
    """End a job as failed."""
    end(job, "failed", reason)


def end(job: Job, state: Literal["failed", "cancelled"], reason: str) -> None:
    """End a job before it has reached its last version."""
    job.state.state, job.state.reason = state, reason
    job.say(f"job {state}: {reason}")
    job.tell(job.state.members, JobEnded(reason=reason))
