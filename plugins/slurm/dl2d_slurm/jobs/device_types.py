"""Types of the devices that tasks hold which asked for none, on nodes with several types (``gpu:a100:4,gpu:v100:4``).

squeue shows what a job asked for, and of types what the site accounts for; ``scontrol -d show job`` what it holds.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import structlog
from msgspec.structs import replace

from dl2d.core.errors import ResourceManagerError
from dl2d.core.resource_manager import RmIdentity, RmJob, RmJobState
from dl2d.core.resources import Resources
from dl2d_slurm.commands.commands import Commands
from dl2d_slurm.commands.values_in_command_output import parse_gres
from dl2d_slurm.jobs.waiting_jobs import WaitingJob

log = structlog.get_logger(__name__)

#: The answer has a page for each job of the cluster.
_ASK_SECONDS = 60.0
_JOB = re.compile(r"^JobId=([0-9]+) ", re.MULTILINE)
_HELD = re.compile(r"\bJOB_GRES=(\S+)")


class DeviceTypes:
    """Asks scontrol, at most once a minute, while a job waits for a type and those of new tasks are not known."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._known: dict[RmIdentity, Resources] = {}
        self._asked = -math.inf

    def with_types(
        self, jobs: Iterable[RmJob], waiting: Iterable[WaitingJob], capacities: Mapping[str, Resources], now: float
    ) -> tuple[RmJob, ...]:
        """The jobs; of tasks, what they hold has the types of devices. ``capacities`` are those of nodes."""
        jobs = tuple(jobs)
        unclear = {job.identity: job for job in jobs if _is_unclear(job, capacities)}
        self._known = {key: types for key, types in self._known.items() if key in unclear}
        wanted = any(":" in name for job in waiting for name in job.claim.demand.as_dict()) if unclear else False
        if wanted and unclear.keys() - self._known.keys() and not 0 <= now - self._asked < _ASK_SECONDS:
            self._asked = now
            try:
                held = self._ask()
            except ResourceManagerError as error:
                log.warning("cannot read the types of the tasks' GPUs; the last ones stay in use", error=str(error))
            else:
                self._known = {
                    key: _types(job, held[job.handle], capacities[job.node])
                    for key, job in unclear.items()
                    if job.handle in held
                }
        if not self._known:
            return jobs
        return tuple(
            replace(job, held=job.held.maximum(self._known[job.identity])) if job.identity in self._known else job
            for job in jobs
        )

    def _ask(self) -> Mapping[str, list[str]]:
        """What jobs hold, by handle."""
        _, *parts = _JOB.split(self._commands.ask("scontrol", "-d", "--oneliner", "show", "job"))
        found = defaultdict[str, list[str]](list)
        for handle, text in zip(parts[::2], parts[1::2], strict=True):
            found[handle] += _HELD.findall(text)
        return found


def _types(job: RmJob, held: Sequence[str], capacity: Resources) -> Resources:
    """The types of the devices that a task holds; any, where a user has written something like it into a job's name."""
    kinds = _kinds_of_types(capacity)
    if len(held) == 1:
        shown = {name.lower(): amount for name, amount in parse_gres(held[0]).items()}
        amounts = {name: shown.get(name, 0.0) for _, names in kinds for name in names}
    else:
        amounts = {name: job.held.get(kind) for kind, names in kinds for name in names}
    return Resources.of({name: min(amount, capacity.get(name)) for name, amount in amounts.items()})


def _is_unclear(job: RmJob, capacities: Mapping[str, Resources]) -> bool:
    """Whether it is a task that holds devices of a kind of which its node has several types, and not all are known."""
    return (
        bool(job.tag)
        and job.state is RmJobState.RUNNING
        and job.node in capacities
        and any(
            job.held.get(kind) > sum(map(job.held.get, types)) for kind, types in _kinds_of_types(capacities[job.node])
        )
    )


@lru_cache(1024)
def _kinds_of_types(capacity: Resources) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Kinds of devices of which a node has several types, and these."""
    types: dict[str, tuple[str, ...]] = {}
    for name in capacity.as_dict():
        kind, typed, _ = name.partition(":")
        if typed:
            types[kind] = (*types.get(kind, ()), name)
    return tuple((kind, names) for kind, names in types.items() if len(names) > 1)
