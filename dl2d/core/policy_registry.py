"""Registry of learned policies: versions, the live one, changes of state, trials and runs of the learner."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

#: What trials name in place of a version's digest where a candidate was compared with the site's own scheduler.
SITE_SCHEDULER: Final = "site-scheduler"


class VersionState(enum.StrEnum):
    """State of a version. At most one of a policy is ``live``: the one that decides."""

    CANDIDATE = "candidate"
    LIVE = "live"
    RETIRED = "retired"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A checkpoint of a policy, kept for good."""

    policy: str
    #: SHA-256 of what decides (``dl2d.policies.common.checkpoint.Checkpoint.digest``); unique for its policy.
    digest: str
    #: Folder of the checkpoint, an absolute path.
    folder: str
    #: Where it came from, as a text for people.
    origin: str
    #: When it was registered, seconds since 1970.
    at: float
    #: Digest of the version that its training began with; empty for none that is known.
    parent: str = ""
    #: Jobs that came between these times, seconds since 1970, were learned from, so many; None for none of this site.
    data_from: float | None = None
    data_to: float | None = None
    jobs: int = 0
    #: Plain JSON values: how well it did in training.
    metrics: Mapping[str, Any] = field(default_factory=dict)
    state: VersionState = VersionState.CANDIDATE


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChange:
    """A change of a version's state, or a remark on it: then both states are the same."""

    at: float
    policy: str
    digest: str
    before: VersionState
    after: VersionState
    #: Who or what did it: a user, ``gate``, ``daemon``.
    by: str
    reason: str
    #: Digest of the version that was live until then, where this one went live; empty for none.
    replaced: str = ""
    #: Whether it went live because the one after it was taken back.
    rollback: bool = False


@dataclass(frozen=True, slots=True)
class TrialCase:
    """One workload on which two versions were compared: mean completion times in slots."""

    name: str
    candidate: float
    current: float
    #: The recorded day that it was made from (YYYY-MM-DD, UTC); empty in trials of earlier releases.
    day: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of comparing a candidate with the live version."""

    at: float
    policy: str
    #: Digests; ``current`` may be of a version that is not in the registry, or ``SITE_SCHEDULER``.
    candidate: str
    current: str
    #: Recorded days (YYYY-MM-DD, UTC) that neither was trained on.
    days: tuple[str, ...]
    cases: tuple[TrialCase, ...]
    #: The candidate's mean completion time by the current one's, less 1, with its 95 % interval; None if unknown.
    change: float | None
    low: float | None
    high: float | None
    passed: bool
    #: Why it passed or failed.
    reason: str


class RunState(enum.StrEnum):
    """State of a run of the learner."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    #: Ended by the daemon: it took too long, or the daemon itself ended.
    STOPPED = "stopped"
    #: The daemon crashed while it ran.
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRun:
    """A learner that the daemon started."""

    number: int
    policy: str
    started_at: float
    ended_at: float | None = None
    state: RunState = RunState.RUNNING
    #: Its last output, or why it was ended.
    note: str = ""


class Registry(Protocol):
    """Contract of the registry. Every method may raise ``StoreUnavailable``; then nothing was written."""

    def add_version(self, version: Version) -> Version:
        """Add a candidate, whatever its state says; one whose digest is known is returned as it is."""
        ...

    def versions(self, policy: str | None = None) -> tuple[Version, ...]:
        """All versions, of one policy or all, newest first."""
        ...

    def live(self, policy: str) -> Version | None:
        """The version that decides."""
        ...

    def change(
        self,
        policy: str,
        digest: str,
        state: VersionState,
        *,
        at: float,
        by: str,
        reason: str,
        live: Collection[str] | None = None,
    ) -> Version:
        """Change a version's state. Where it goes live, the one that was is retired in the same transaction.

        Raises ``RegistryError`` if there is no such version, or if it is live and is to be something else: another one
        has to go live in its place. ``live``: digests, of which one must be that of the live version (``""`` if none
        is live); raises ``LiveVersionChanged`` otherwise.
        """
        ...

    def earlier(self, policy: str) -> tuple[Version, ...]:
        """The versions to which the live one can be rolled back, nearest first.

        They are those that the live version replaced when it was promoted, that this one had replaced, and so on. A
        rollback takes back the promotion of the version that was live, so that rollbacks never go in a circle. Rejected
        versions are left out.
        """
        ...

    def roll_back(self, policy: str, *, at: float, by: str, reason: str, to: str = "", live: str = "") -> Version:
        """Make an earlier version live: the nearest of ``earlier``, or the one with digest ``to``.

        Raises ``RegistryError`` where there is none. Raises ``LiveVersionChanged`` if ``live`` is given and is not the
        digest of the live version.
        """
        ...

    def remark(self, policy: str, digest: str, *, at: float, by: str, text: str) -> None:
        """Add a remark to a version's changes; its state stays. Does nothing where there is no such version."""
        ...

    def changes(self, policy: str | None = None, *, limit: int = 100) -> tuple[VersionChange, ...]:
        """Changes of state, newest first."""
        ...

    def add_trial(self, trial: Trial) -> None:
        """Add a trial."""
        ...

    def trials(self, policy: str | None = None, *, limit: int = 100) -> tuple[Trial, ...]:
        """Trials, newest first."""
        ...

    def begin_run(self, policy: str, at: float) -> LearningRun:
        """Add a run of the learner. Earlier ones that have not ended count as lost: only one runs at a time."""
        ...

    def end_run(self, number: int, state: RunState, note: str, at: float) -> None:
        """Record how a run ended; one that has ended is not changed."""
        ...

    def runs(self, *, limit: int = 100) -> tuple[LearningRun, ...]:
        """Runs of the learner, newest first."""
        ...
