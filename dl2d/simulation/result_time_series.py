"""Time series of a simulation, slot by slot: jobs waiting and running, their sizes, and utilisation of resources."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dl2d.core.cluster import Node, NodeState
from dl2d.core.jobs import NOTHING, Allocation
from dl2d.core.resources import Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSeries:
    """What the slots looked like, for plots: one entry per slot in every tuple. Slots without any job are left out."""

    #: Numbers of the slots, ascending.
    slots: tuple[int, ...] = ()
    #: Jobs that were admitted and did not train, and jobs that trained.
    waiting: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    #: Workers and parameter servers of all jobs together.
    workers: tuple[int, ...] = ()
    ps: tuple[int, ...] = ()
    #: By resource, which fraction of what the nodes that were up had was held.
    utilisation: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    #: What each job with tasks held, by id.
    allocations: tuple[Mapping[str, Allocation], ...] = ()


class _Slot(NamedTuple):
    """A slot of a series that is kept."""

    number: int
    running: int
    used: Resources
    capacity: Resources
    held: Mapping[str, Allocation]


class SlotRecorder:
    """Counts sizes, changes of size and used resources, slot by slot.

    ``keep`` asks for ``series``; without it the memory taken does not grow with the number of slots.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._slots: list[_Slot] | None = [] if keep else None
        #: Last size of each job that has started and not ended, and how often it was changed.
        self._sizes: dict[str, Allocation] = {}
        self._resizes = Counter[str]()
        #: Thousandths x slots, by resource: what was held, and what there was up to the last slot entered.
        self._held = Counter[str]()
        self._there = Counter[str]()
        self._last: tuple[int, Resources] | None = None

    def enter(
        self, slot: int, nodes: Sequence[Node], held: Mapping[str, Allocation], training: Collection[str]
    ) -> None:
        """Enter a slot: the nodes as they stand, what each present job holds, and which jobs train."""
        up = [node for node in nodes if node.state is not NodeState.DOWN]
        used = Resources.total(node.used for node in up)
        capacity = Resources.total(node.capacity for node in up)
        self._count_until(slot)
        self._last = (slot, capacity)
        for name, amount in used.thousandths:
            self._held[name] += amount
        for job, has in held.items():
            before = self._sizes.get(job)
            if before is None and has == NOTHING:
                continue
            self._resizes[job] += before is not None and before != has
            self._sizes[job] = has
        if self._slots is not None:
            self._slots.append(_Slot(slot, len(training), used, capacity, held))

    def forget(self, job: str) -> int:
        """Drop a job that has ended; returns in how many slots its size was changed, its first start aside."""
        self._sizes.pop(job, None)
        return self._resizes.pop(job, 0)

    def utilisation(self, end: int) -> dict[str, float]:
        """By resource, held amount x time over the amount x time there was, from the first slot to before ``end``.

        In slots without a job, which are not entered, the cluster is as it was in the entered slot before them.
        """
        self._count_until(end)
        return {name: self._held[name] / amount for name, amount in sorted(self._there.items()) if amount}

    @property
    def series(self) -> SlotSeries | None:
        """All slots, if they are kept."""
        slots = self._slots
        if slots is None:
            return None
        names = sorted({name for slot in slots for name, _ in slot.capacity.thousandths})
        return SlotSeries(
            slots=tuple(slot.number for slot in slots),
            waiting=tuple(len(slot.held) - slot.running for slot in slots),
            running=tuple(slot.running for slot in slots),
            workers=tuple(sum(has.workers for has in slot.held.values()) for slot in slots),
            ps=tuple(sum(has.ps for has in slot.held.values()) for slot in slots),
            utilisation={
                name: tuple(slot.used.get(name) / (slot.capacity.get(name) or math.inf) for slot in slots)
                for name in names
            },
            allocations=tuple({job: has for job, has in slot.held.items() if has != NOTHING} for slot in slots),
        )

    def _count_until(self, slot: int) -> None:
        """Count what there was since the last slot entered, up to the beginning of ``slot``."""
        if self._last is None:
            return
        since, capacity = self._last
        for name, amount in capacity.thousandths:
            self._there[name] += amount * (slot - since)
        self._last = (slot, capacity)
