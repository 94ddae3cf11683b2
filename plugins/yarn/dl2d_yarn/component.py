"""Containers of one role of a job: which YARN has, which have reported, and which have no task. No I/O."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from dl2d.core.resource_manager import ContainerReport
from dl2d.core.resources import NO_RESOURCES, Resources

#: Number of former processes of each position whose reports are refused.
_FORMER_PROCESSES: Final = 8
#: Time that YARN has to end a container that it was asked to remove, seconds: it is asked again after that.
REMOVAL_SECONDS: Final = 60.0
_NUMBERS: Final = re.compile(r"[0-9]+")


@dataclass(slots=True)
class Idle:
    """A container without a task: its node, and when it was seen so first and last."""

    node: str
    since: float
    reported: float


@dataclass(slots=True)
class Component:
    """Containers of one role of a job."""

    #: Number of positions that there should be; containers at lower ones may be given tasks.
    wanted: int = 0
    #: Positions that YARN was asked to give up, which it does not use again.
    decommissioned: set[int] = field(default_factory=set)
    #: Number that YARN has confirmed; None where this is not known: after a restart of the daemon, while a request is
    #: under way, and after one that failed.
    confirmed_size: int | None = None
    #: Newest container that reported from each position, its process, and those that were there before.
    newest: dict[int, str] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    former: dict[int, deque[str]] = field(default_factory=dict)
    #: Containers that YARN was asked to remove, and since when it may have.
    removed: dict[str, float] = field(default_factory=dict)
    #: Containers that YARN lists and that have not reported to this daemon, by position: an earlier one may have given
    #: them tasks.
    silent: dict[int, str] = field(default_factory=dict)
    #: Whether a container has reported from a position that YARN should not have.
    surprising: bool = False
    #: Containers without a task, by position.
    idle: dict[int, Idle] = field(default_factory=dict)
    #: Resources of each container, as far as a task was submitted since the daemon's start.
    demand: Resources = NO_RESOURCES

    @property
    def size(self) -> int:
        """Number of containers that there should be."""
        return self.wanted - sum(position < self.wanted for position in self.decommissioned)

    def is_usable(self, position: int) -> bool:
        """Whether a container at this position may be given tasks."""
        return position < self.wanted and position not in self.decommissioned

    def usable_idle(self, since: float) -> list[Idle]:
        """Containers that have reported no task since then, seconds, and may be given one."""
        return [idle for place, idle in self.idle.items() if place < self.wanted and idle.reported >= since]

    def is_former(self, report: ContainerReport) -> bool:
        """Whether another container or process has reported from the position since: the report has come late."""
        older = start_order(report.container) < start_order(self.newest.get(report.instance, ""))
        return older or report.incarnation in self.former.get(report.instance, ())

    def heard(self, report: ContainerReport, now: float) -> None:
        """Note that a container has reported at this time, in seconds on a monotonic clock."""
        process = self.processes.get(report.instance, report.incarnation)
        if process != report.incarnation:
            self.former.setdefault(report.instance, deque(maxlen=_FORMER_PROCESSES)).append(process)
        self.newest[report.instance], self.processes[report.instance] = report.container, report.incarnation
        if start_order(self.silent.get(report.instance, "")) <= start_order(report.container):
            self.silent.pop(report.instance, None)
        beyond = self.confirmed_size is not None and report.instance >= self.confirmed_size + len(self.decommissioned)
        stays = now - self.removed.get(report.container, -math.inf) >= REMOVAL_SECONDS
        self.surprising = self.surprising or (beyond and stays)

    def begin_change(self, now: float) -> None:
        """Note that YARN is about to be asked for ``size``: until it has agreed, its number is not known."""
        self.removed |= {name: now for place, name in self.newest.items() if place >= self.wanted}
        self.confirmed_size = None


def start_order(container: str) -> tuple[int, ...]:
    """Sort key of containers of one application, larger for one that started later.

    Its parts are epoch, timestamp, application, attempt and number.
    """
    numbers = tuple(int(number) for number in _NUMBERS.findall(container))
    # Only ids of a ResourceManager that was restarted have an epoch: container_e17_...
    return numbers if container.startswith("container_e") or not numbers else (0, *numbers)
