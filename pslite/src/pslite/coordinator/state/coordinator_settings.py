"""Settings of a coordinator: heartbeat, lease, how long it waits for members, and how it shares out work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pslite.coordinator.stall_detector import ProgressRule
from pslite.job.load_balancing import Rule


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Times, in seconds, and how state moves and work is shared out."""

    heartbeat: float = 1.0
    #: a member that is silent for so long is dead
    lease: float = 10.0
    #: how long a plan's members may take to get ready
    prepare: float = 30.0
    #: how long announced members are waited for at the start, once one worker and one server are there
    grace: float = 3.0
    #: how long announced members are waited for before a resize, once one is there: merges what comes together
    settle: float = 0.3
    #: how long a lost member's dl2-run may take to say how it ended; a tenth of it where there is none
    verdict: float = 2.0
    #: the longest time between two looks at what is due
    look: float = 0.1
    #: how long the first worker and server may take to come; None: as long as the resource manager needs
    start: float | None = None
    #: how long a resource manager may take to start another process where a role has nobody left
    vacancy: float = 600.0
    #: how long a job may make no progress
    progress: ProgressRule = field(default_factory=ProgressRule)
    #: "speed": slow members get less work; "even": all get the same
    balance: Literal["speed", "even"] = "speed"
    rule: Rule = field(default_factory=Rule)
