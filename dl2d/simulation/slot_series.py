"""The books of a simulation: who held how much in which slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

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


class Books:
    """Counts sizes, changes of size and used resources, slot by slot.

    ``keep`` asks for ``series``; without it the memory taken does not grow with the number of slots.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._slots: list[int] = []
        self._waiting: list[int] = []
        self._running: list[int] = []
        self._workers: list[int] = []
        self._ps: list[int] = []
        self._used: list[Resources] = []
        self._capacity: list[Resources] = []
        self._allocations: list[dict[str, Allocation]] = []
        #: Last size of each job that has started and not ended, and how often it was changed.
        self._sizes: dict[str, Allocation] = {}
        self._resizes: dict[str, int] = {}
        #: Thousandths x slots, by resource: what was held, and what there was up to the last slot entered.
        self._held: dict[str, int] = defaultdict(int)
        self._there: dict[str, int] = defaultdict(int)
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
            before = self._sizes.get(job, NOTHING if has == NOTHING else None)
            if before is None:
                self._sizes[job] = has
            elif before != has:
                self._sizes[job] = has
                self._resizes[job] = self._resizes.get(job, 0) + 1
        if self._keep:
            self._slots.append(slot)
            self._waiting.append(len(held) - len(training))
            self._running.append(len(training))
            self._workers.append(sum(has.workers for has in held.values()))
            self._ps.append(sum(has.ps for has in held.values()))
            self._used.append(used)
            self._capacity.append(capacity)
            self._allocations.append({job: has for job, has in held.items() if has != NOTHING})

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
        if not self._keep:
            return None
        names = sorted({name for capacity in self._capacity for name, _ in capacity.thousandths})
        return SlotSeries(
            slots=tuple(self._slots),
            waiting=tuple(self._waiting),
            running=tuple(self._running),
            workers=tuple(self._workers),
            ps=tuple(self._ps),
            utilisation={
                name: tuple(
                    held.get(name) / capacity.get(name) if capacity.get(name) else 0.0
                    for held, capacity in zip(self._used, self._capacity, strict=True)
                )
                for name in names
            },
            allocations=tuple(self._allocations),
        )

    def _count_until(self, slot: int) -> None:
        """Count what there was since the last slot entered, up to the beginning of ``slot``."""
        if self._last is None:
            return
        since, capacity = self._last
        for name, amount in capacity.thousandths:
            self._there[name] += amount * (slot - since)
        self._last = (slot, capacity)
