"""Containers of one role of a job: which YARN has, which have reported, and which have no task. No I/O."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from dl2d.core.jobs import JobKey
from dl2d.core.resource_manager import ContainerReport
from dl2d.core.resources import NO_RESOURCES, Resources

#: Number of former processes of each position whose reports are refused.
_FORMER_PROCESSES = 8
#: Time that YARN has to end a container that it was asked to remove, seconds: it is asked again after that.
REMOVAL_SECONDS = 60.0
#: Time without a task after which a container is decommissioned, if one with a higher number is busy, seconds.
IDLE_SECONDS = 30.0
_NUMBERS = re.compile(r"[0-9]+")


@dataclass(slots=True)
class IdlePeriod:
    """Time that a container has had no task: its node, and the times of its first and last report without one."""

    node: str
    since: float
    last_report: float


class IdleContainer(NamedTuple):
    """A container without a task."""

    job: JobKey
    node: str
    demand: Resources


@dataclass(slots=True)
class Component:
    """Containers of one role of a job."""

    #: Number of positions that YARN should have, decommissioned ones included; only containers at these get tasks.
    positions: int = 0
    #: Positions that YARN was asked to decommission; it does not use them again.
    decommissioned: set[int] = field(default_factory=set)
    #: Number of containers that YARN has confirmed; None while it is unknown: after a restart of the daemon, during a
    #: request to change it, and after a request that failed.
    confirmed_size: int | None = None
    #: By position: newest container that has reported, its process, and the processes before it.
    newest_containers: dict[int, str] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    former_processes: dict[int, deque[str]] = field(default_factory=dict)
    #: Containers that YARN was asked to remove, with the time from which ``REMOVAL_SECONDS`` count.
    removal_times: dict[str, float] = field(default_factory=dict)
    #: By position: containers that YARN lists and that have not reported to this daemon; they may run tasks that an
    #: earlier daemon assigned.
    unreported: dict[int, str] = field(default_factory=dict)
    #: Whether a container has reported from a position that YARN should not have.
    has_unexpected: bool = False
    #: Containers without a task, by position.
    idle: dict[int, IdlePeriod] = field(default_factory=dict)
    #: Resources of each container, as far as a task was submitted since the daemon's start.
    demand: Resources = NO_RESOURCES

    @property
    def size(self) -> int:
        """Number of containers that there should be."""
        return self.positions - sum(position < self.positions for position in self.decommissioned)

    def is_usable(self, position: int) -> bool:
        """Whether a container at this position may be given tasks."""
        return position < self.positions and position not in self.decommissioned

    def is_beyond(self, position: int) -> bool:
        """Whether YARN has confirmed that it has no container at this position."""
        return self.confirmed_size is not None and position >= self.confirmed_size + len(self.decommissioned)

    def usable_idle(self, since: float) -> list[IdlePeriod]:
        """Containers without a task that may get one and have reported since that time, in seconds."""
        return [idle for position, idle in self.idle.items() if self.is_usable(position) and idle.last_report >= since]

    def is_superseded(self, report: ContainerReport) -> bool:
        """Whether a newer container or process than that of the report has reported from its position."""
        older = start_order(report.container) < start_order(self.newest_containers.get(report.position, ""))
        return older or report.incarnation in self.former_processes.get(report.position, ())

    def record_report(self, report: ContainerReport, now: float) -> None:
        """Record the container and process of a report; ``now`` is in seconds on a monotonic clock."""
        process = self.processes.get(report.position, report.incarnation)
        if process != report.incarnation:
            self.former_processes.setdefault(report.position, deque(maxlen=_FORMER_PROCESSES)).append(process)
        self.newest_containers[report.position], self.processes[report.position] = report.container, report.incarnation
        if start_order(self.unreported.get(report.position, "")) <= start_order(report.container):
            self.unreported.pop(report.position, None)
        beyond = self.is_beyond(report.position)
        stays = now - self.removal_times.get(report.container, -math.inf) >= REMOVAL_SECONDS
        self.has_unexpected = self.has_unexpected or (beyond and stays)

    def begin_change(self, now: float) -> None:
        """Prepare a request for ``size``, which is to remove the containers of higher positions.

        ``confirmed_size`` is unknown until YARN answers it.
        """
        self.removal_times |= {
            container: now for position, container in self.newest_containers.items() if position >= self.positions
        }
        self.confirmed_size = None


def start_order(container: str) -> tuple[int, ...]:
    """Sort key of containers of one application, larger for one that started later.

    Its parts are epoch, timestamp, application, attempt and number.
    """
    numbers = tuple(int(number) for number in _NUMBERS.findall(container))
    # Only ids of a ResourceManager that was restarted have an epoch: container_e17_...
    return numbers if container.startswith("container_e") or not numbers else (0, *numbers)
