"""Modes of the daemon: how far dl2d is in charge of a cluster; and canaries, trials of a policy on some of the jobs."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from dl2d.core.jobs import Job, JobKey
from dl2d.core.measured_speeds_and_losses import TrainingKind


class Mode(enum.StrEnum):
    """``observe``: record what the scheduler in charge does. ``shadow``: decide as well, and compare. ``canary``: act,
    with the policy for some jobs and the fallback for the others, and compare. ``live``: act.
    """

    OBSERVE = "observe"
    SHADOW = "shadow"
    CANARY = "canary"
    LIVE = "live"

    @property
    def acts(self) -> bool:
        """Whether decisions are carried out; otherwise another scheduler is in charge and dl2d records what it does."""
        return self in (Mode.CANARY, Mode.LIVE)


@dataclass(frozen=True, slots=True)
class ModeChange:
    """A change of the daemon's mode."""

    #: Seconds since 1970.
    at: float
    #: None for the first mode of a store.
    before: Mode | None
    after: Mode
    #: The daemon's process, and how it came about: ``start`` or ``reload``.
    by: str
    reason: str


class CanaryState(enum.StrEnum):
    """State of a canary."""

    #: The policy decides on the jobs of its group, the fallback on the others.
    RUNNING = "running"
    #: The policy decides on all jobs.
    PROMOTED = "promoted"
    #: The fallback decides on all jobs.
    WITHDRAWN = "withdrawn"
    #: It ended without a result: the mode, the policy's version, the fallback or the group was changed.
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A policy version in mode canary: which jobs it decides on, and how it came out.

    Its group are the jobs of one partition or account, or else a share of all jobs.
    """

    #: Counts up from 1; 0 for one that is not in the store yet.
    number: int = 0
    policy: str
    version: str
    fallback: str
    #: Fraction of all jobs; 0 where a partition or account is given.
    share: float = 0.0
    partition: str = ""
    account: str = ""
    #: Seconds since 1970.
    began_at: float
    ended_at: float | None = None
    state: CanaryState = CanaryState.RUNNING
    #: Why it ended, in words.
    reason: str = ""

    @property
    def group(self) -> str:
        """The jobs of its group, in words."""
        if self.partition:
            return f"jobs in partition {self.partition}"
        return f"jobs of account {self.account}" if self.account else f"{100 * self.share:g} % of the jobs"

    def includes(self, job: Job) -> bool:
        """Whether a job belongs to its group. Depends on nothing but the job's key and owner."""
        if self.partition:
            return self.partition in job.owner.partition.split(",")
        if self.account:
            return job.owner.account == self.account
        return fraction(job.key) < self.share

    def continues(self, other: Canary) -> bool:
        """Whether both are trials of the same policy version in the same way."""
        return self._subject() == other._subject()

    def _subject(self) -> tuple[object, ...]:
        return self.policy, self.version, self.fallback, self.share, self.partition, self.account


def fraction(key: JobKey) -> float:
    """A number from 0 up to 1 by the SHA-256 of a job's key: evenly distributed, the same for ever.

    A group with a larger share therefore has all jobs of one with a smaller share.
    """
    return int.from_bytes(hashlib.sha256(key.slug.encode()).digest()[:8]) / 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryJob:
    """A job that was submitted during a canary, as far as it is compared."""

    #: Whether it is in the group on which the policy decides.
    in_group: bool
    #: Jobs of one kind, with work in the same unit.
    kind: tuple[TrainingKind, str]
    #: Samples, or steps where its user declared no samples.
    work: float
    #: Seconds since 1970.
    submitted: float
    ended_at: float | None
    finished: bool
