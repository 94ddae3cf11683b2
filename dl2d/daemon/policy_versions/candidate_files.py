"""Candidates: checkpoints with the result of their trial, as files between the learner process and the daemon.

The learner does not write to the store: it runs at the lowest priority and would hold the database's lock for as long
as that lasts. The daemon reads its candidate and registers it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dl2d.atomic_file import write_atomically
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.errors import CheckpointError, LiveVersionChanged, RegistryError
from dl2d.core.json_codec import decode, encode
from dl2d.core.policy_registry import SITE_SCHEDULER, Trial, Version, VersionState
from dl2d.daemon.policy_versions.active_version import read_version, roll_back
from dl2d.policies.common.checkpoint import DIGITS, writing

if TYPE_CHECKING:
    from dl2d.store.tables.policy_versions import SqlRegistry

#: Beside the checkpoint.
_FILE = "candidate.json"
_MAX_BYTES = 1 << 24
_BY = "gate"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version, whose checkpoint is in its folder, and its trial against the active one."""

    version: Version
    trial: Trial
    #: Trial of the fallback against what the live version did; None where there was none.
    review: Trial | None = None


def write_candidate(candidate: Candidate) -> Path:
    """Write a candidate into its version's folder, which is returned. Raises ``CheckpointError``."""
    folder = Path(candidate.version.folder)
    with writing(folder):
        write_atomically(folder / _FILE, encode(candidate))
    return folder


def read_candidate(folder: Path) -> Candidate:
    """Inverse of ``write_candidate``.

    Raises
    ------
    CheckpointError
        There is none, or what is there is no candidate, or not the one that lies there.
    """
    try:
        with (folder / _FILE).open("rb") as file:
            data = file.read(_MAX_BYTES)
        candidate = decode(data, Candidate)
    except OSError as error:
        raise CheckpointError(f"{folder / _FILE}: cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{folder / _FILE}: does not describe a candidate: {error}") from error
    if Path(candidate.version.folder) != folder or candidate.trial.candidate != candidate.version.digest:
        raise CheckpointError(f"{folder / _FILE}: belongs to another policy version")
    read_version(candidate.version)
    return candidate


def enter(candidate: Candidate, registry: SqlRegistry, mode: Mode, *, at: float) -> Trial:
    """Register a candidate, keep its trial, and have it go live if it passed; returns the trial as it is kept.

    It does not go live where another version did since it was compared with the live one, nor in a ``mode`` that acts
    where it was compared with the site's scheduler, as is done in the other modes.
    """
    version, trial = registry.add_version(candidate.version), candidate.trial
    live = registry.live(version.policy)
    if trial.passed and trial.current == SITE_SCHEDULER:
        if mode.acts:
            compared = f"compared with the site's scheduler, but the mode is {mode} by now"
            trial = replace(trial, passed=False, reason=f"{compared}; {trial.reason}")
    elif trial.passed and live is not None and trial.current != live.digest:
        trial = replace(trial, passed=False, reason=f"another version went live meanwhile; {trial.reason}")
    registry.add_trial(trial)
    if version.state is not VersionState.LIVE:
        state = VersionState.LIVE if trial.passed else VersionState.REJECTED
        unchanged = ("" if live is None else live.digest,) if trial.passed else None
        registry.change(version.policy, version.digest, state, at=at, by=_BY, reason=trial.reason, live=unchanged)
    return trial


def withdraw_if_worse(review: Trial, registry: SqlRegistry, *, at: float) -> str:
    """Record a review of the live version, and roll it back if the fallback would surely have been better.

    Returns what was done, in words; empty if nothing was, as when the version is not live any more. A version that
    replaced none stays live, and a remark on it says why.
    """
    registry.add_trial(review)
    live = registry.live(review.policy)
    if not review.passed or live is None or live.digest != review.current:
        return ""
    version = live.digest[:DIGITS]
    try:
        earlier = roll_back(registry, review.policy, at=at, by=_BY, reason=review.reason, live=live.digest)
    except LiveVersionChanged:
        return ""
    except RegistryError as error:
        registry.remark(review.policy, live.digest, at=at, by=_BY, text=f"{review.reason}; it stays live: {error}")
        return f"version {version} stays live, because none can replace it ({error}): {review.reason}"
    return f"version {version} withdrawn, {earlier.digest[:DIGITS]} is live again: {review.reason}"
