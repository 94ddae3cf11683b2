"""Partitions in which Slurm gives each job nodes of its own, by OverSubscribe=EXCLUSIVE or select/linear."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final

import structlog

from dl2d.core.errors import ResourceManagerError
from dl2d_slurm.commands.command_output_values import EXCLUSIVE_PARTITION, LINEAR
from dl2d_slurm.commands.command_records import SHOW_PARTITIONS
from dl2d_slurm.commands.commands import Commands, configured, failure

log = structlog.get_logger(__name__)

#: How often they are asked for, and how long after Slurm did not answer.
_SECONDS: Final = 600.0
_RETRY_SECONDS: Final = 60.0
#: Those of select/linear in which jobs do not share nodes.
_NOT_SHARED: Final = re.compile(r"^PartitionName=(\S+) .*\bOverSubscribe=(?:NO|EXCLUSIVE)\b", re.MULTILINE)


class WholeNodePartitions:
    """The partitions that give whole nodes: asked for at times, and only once a job has whole nodes."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._known: frozenset[str] = frozenset()
        self._asked = -math.inf

    def at(self, now: float, *, ask: bool) -> frozenset[str]:
        """Their names as they are known at ``now``, seconds since 1970; asked for again, if ``ask`` says so."""
        if not ask or 0 <= now - self._asked < _SECONDS:
            return self._known
        try:
            partitions = self._commands.run(*SHOW_PARTITIONS)
            if partitions.status != 0:
                raise failure("scontrol show partition failed", partitions)
            whole = _NOT_SHARED if configured(self._commands, "SelectType") == LINEAR else EXCLUSIVE_PARTITION
        except ResourceManagerError as error:
            log.warning("which partitions give whole nodes stays as it was known", error=str(error))
            self._asked = now - _SECONDS + _RETRY_SECONDS
        else:
            self._known, self._asked = frozenset(whole.findall(partitions.stdout)), now
        return self._known


def give_whole_nodes(names: str, known: Iterable[str]) -> bool:
    """Whether all partitions of a comma-separated list are among those that are known to give whole nodes."""
    return frozenset(names.split(",")).issubset(known)
