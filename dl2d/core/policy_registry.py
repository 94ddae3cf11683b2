"""Registry of learned policies: versions, the live one, changes of state, trials and runs of the learner."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: What trials name in place of a version's digest where a candidate was compared with the site's own scheduler.
SITE_SCHEDULER = "site-scheduler"


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
    #: Number of the draw of the speeds; 0: the expected speeds, and in trials of earlier releases.
    draw: int = 0


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
