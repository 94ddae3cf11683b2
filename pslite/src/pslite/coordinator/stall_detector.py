"""Stall detector: since when a job has made no progress, and how long it may make none, learned from its own steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pslite.net.messages import Stacks

#: how long a slow step counts, in seconds
_MEMORY_SECONDS = 86400.0


@dataclass(frozen=True)
class ProgressRule:
    """How long a job may make no progress: `seconds`, or `factor` times its slowest step of the last day if longer.

    Its first step may take twice `seconds`.  With 0 seconds there is no deadline.
    """

    seconds: float = 1800.0
    factor: float = 10.0

    @property
    def first(self) -> float:
        """How long the first step may take."""
        return 2 * self.seconds


@dataclass(eq=False)
class ProgressWatch:
    """When a job last made progress, and what its members answered when they were asked why it makes none."""

    #: time of the last progress, monotonic, in seconds
    since: float = 0.0
    #: the version then, and numbers that count as progress when they change
    version: int = -1
    other: tuple[int, ...] = ()
    #: whether a step has ended since the last `rest`
    stepped: bool = False
    #: when steps of the last day ended and how long they took, without those before a slower one
    slowest: deque[tuple[float, float]] = field(default_factory=deque)
    #: when members were asked what they do, monotonic; 0: they were not asked
    asked: float = 0.0
    #: their answers, by task
    answers: dict[str, Stacks] = field(default_factory=dict)

    def note(self, now: float, version: int, other: tuple[int, ...]) -> None:
        """Record how far the job is."""
        if (version, other) == (self.version, self.other):
            return
        if other == self.other and version > self.version >= 0:
            seconds = (now - self.since) / (version - self.version)
            while self.slowest and self.slowest[-1][1] <= seconds:
                self.slowest.pop()
            self.slowest.append((now, seconds))
            while now - self.slowest[0][0] > _MEMORY_SECONDS:
                self.slowest.popleft()
            self.stepped = True
        self.version, self.other, self.since, self.asked = version, other, now, 0.0

    def rest(self, now: float) -> None:
        """Begin anew: the job is not expected to make progress, or this coordinator was stopped."""
        self.version, self.since, self.asked, self.stepped = -1, now, 0.0, False

    def longest(self, rule: ProgressRule) -> float:
        """Return the longest deadline that is likely to apply before the next plan, in seconds; 0: none."""
        return max(rule.first, self.deadline(rule))

    def deadline(self, rule: ProgressRule) -> float:
        """Return how long the job may make no progress, in seconds; 0: no deadline."""
        if not rule.seconds:
            return 0.0
        learned = rule.factor * self.slowest[0][1] if self.slowest else 0.0
        return max(rule.seconds if self.stepped else rule.first, learned)
