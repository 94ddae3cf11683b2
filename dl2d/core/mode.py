"""How far dl2d is in charge of a cluster, and which stages a tick has for that."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Mode(enum.StrEnum):
    """``observe``: record what the scheduler in charge does. ``shadow``: decide as well, and compare. ``live``: act."""

    OBSERVE = "observe"
    SHADOW = "shadow"
    LIVE = "live"


@dataclass(frozen=True, slots=True)
class Stages:
    """What a tick does beyond looking and recording."""

    #: Jobs that the scheduler in charge runs at fixed sizes are followed from their first day on, and recorded.
    watch: bool
    #: The policy is asked.
    decide: bool
    #: What was decided is carried out, and what reconciliation finds wrong in the resource manager is mended.
    act: bool


STAGES: Mapping[Mode, Stages] = MappingProxyType(
    {
        Mode.OBSERVE: Stages(watch=True, decide=False, act=False),
        Mode.SHADOW: Stages(watch=True, decide=True, act=False),
        Mode.LIVE: Stages(watch=False, decide=True, act=True),
    }
)


@dataclass(frozen=True, slots=True)
class ModeChange:
    """The daemon came into another mode."""

    #: Seconds since 1970.
    at: float
    #: None for the first mode of a store.
    before: Mode | None
    after: Mode
    #: The daemon's process, and how it came about: ``start`` or ``reload``.
    by: str
    reason: str
