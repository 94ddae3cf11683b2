"""Modes of the daemon: how far dl2d is in charge of a cluster."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
