"""When nodes come and go: failures and repairs, and changes of capacity that the workload says."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dl2d.core.cluster import Node
from dl2d.simulation.seeded_random import SeededRandom
from dl2d.simulation.speeds.realism_options import Realism
from dl2d.simulation.workload.workload_file import CapacityChange

_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A node that goes away or comes back; ``at`` is in seconds of virtual time."""

    at: float
    node: str
    up: bool
    #: Why it went.
    reason: str = ""


class Outages:
    """The events of a cluster's nodes, in order of time.

    Each node fails after exponential times of its own, and is repaired after a fixed one. A node is up when it neither
    failed nor was taken away; events tell only what changes that.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        realism: Realism,
        draws: SeededRandom,
        changes: Sequence[CapacityChange] = (),
        slot_seconds: float = 1.0,
    ) -> None:
        self._draws = draws
        self._mtbf = realism.node_mtbf_hours * _HOUR
        self._repair = realism.node_repair_hours * _HOUR
        #: Reasons for which each node is away now.
        self._away: dict[str, set[str]] = {node.name: set() for node in nodes}
        self._coming: list[tuple[float, int, str, bool, str]] = []
        self._number = itertools.count()
        self._failures = dict.fromkeys(self._away, 0)
        for change in changes:
            members = [node.name for node in nodes if node.name.rpartition("-")[0] == change.name]
            for place, name in enumerate(members):
                self._add(change.slot * slot_seconds, name, "taken away", up=place < change.up)
        if self._mtbf:
            for node in nodes:
                self._fail_next(node.name, 0.0)

    def until(self, end: float, *, inclusive: bool = False) -> Iterator[NodeEvent]:
        """Events before ``end`` (or at it) that were not told yet."""
        while self._coming and (self._coming[0][0] < end or (inclusive and self._coming[0][0] == end)):
            at, _, name, up, reason = heapq.heappop(self._coming)
            away = self._away[name]
            before = bool(away)
            (away.discard if up else away.add)(reason)
            if reason == "failed":
                if up:
                    self._fail_next(name, at)
                else:
                    self._add(at + self._repair, name, reason, up=True)
            if before != bool(away):
                yield NodeEvent(at, name, up, "" if up else reason)

    def _fail_next(self, name: str, since: float) -> None:
        self._failures[name] += 1
        after = self._draws.exponential(self._mtbf, "failure", self._failures[name], name)
        self._add(since + after, name, "failed", up=False)

    def _add(self, at: float, name: str, reason: str, *, up: bool) -> None:
        heapq.heappush(self._coming, (at, next(self._number), name, up, reason))
