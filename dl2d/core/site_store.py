"""Contract of a site's store: with registry of policies, changes of mode, canaries, and deletion of old rows."""

from __future__ import annotations

from typing import Protocol

from dl2d.core.canary import Canary, CanaryJob
from dl2d.core.daemon_mode import Mode, ModeChange
from dl2d.core.policy_registry import Registry
from dl2d.core.store import Keep, Store


class SiteStore(Store, Protocol):
    """The store of a site, with its registry of policies."""

    @property
    def registry(self) -> Registry:
        """The registry in the same database."""
        ...

    def enter_mode(self, mode: Mode, *, at: float, by: str, reason: str) -> ModeChange | None:
        """Record the daemon's mode; returns the change, None where it was in this mode before."""
        ...

    def mode_changes(self, *, limit: int = 100) -> tuple[ModeChange, ...]:
        """Changes of mode, newest first."""
        ...

    def keep_canary(self, canary: Canary) -> Canary:
        """Add a canary that has no number yet, or replace the record of one that was running; returns it as kept."""
        ...

    def canaries(self, *, limit: int = 100) -> tuple[Canary, ...]:
        """Canaries, newest first."""
        ...

    def canary_jobs(self, canary: Canary) -> tuple[CanaryJob, ...]:
        """Jobs that were submitted after a canary began and assigned in it, in no particular order."""
        ...

    def prune(self, keep: Keep, now: float) -> int:
        """Delete some rows that are too old, or give back some space; returns 0 if there is nothing left to do."""
        ...

    def size(self) -> int:
        """Bytes that the store takes on disk."""
        ...
