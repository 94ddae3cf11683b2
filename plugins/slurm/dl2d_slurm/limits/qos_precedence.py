"""Precedence of QOS: whether limits of a job's own or of its partition's apply, and factors of associations' limits.

The QOS of the partition comes first, except where the job's own has the flag ``OverPartQOS``. The first of them with a
``LimitFactor`` multiplies the limits on resources (``GrpTRES``) of the job's associations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import structlog

from dl2d.core.backoff_after_failed_starts import doubled
from dl2d.core.errors import ResourceManagerError
from dl2d_slurm.commands.commands import Commands
from dl2d_slurm.commands.squeue_and_sinfo_records import SHOW_PARTITIONS
from dl2d_slurm.submission.sbatch_options import AnchorOptions

log = structlog.get_logger(__name__)

#: ``scontrol show assoc_mgr`` does not print flags and factors; slurmdbd has them. Each line is
#: ``name|flag,flag|factor``.
_SHOW_QOS = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=name,flags,limitfactor")
#: Seconds between two questions to slurmdbd, doubled with each failure in a row after the first, up to the maximum.
_ASK_SECONDS = 600.0
_MAX_ASK_SECONDS = 3600.0
#: How long a listing waits for an answer.
_ANSWER_SECONDS = 10.0
#: A partition, and its QOS.
_PARTITION = re.compile(r"^PartitionName=(\S+) .*? QoS=(\S+)", re.MULTILINE)
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class QosPrecedence:
    """Flags, factors and QOS of partitions, from which the precedence follows."""

    #: Names of the QOS that come before that of the partition.
    first: frozenset[str] = frozenset()
    factors: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    #: The QOS of each partition that has one.
    of_partitions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def own_is_first(self, options: AnchorOptions) -> bool:
        """Whether the QOS of a job with these options comes before that of its partition."""
        return options.qos in self.first

    def factor(self, options: AnchorOptions) -> float:
        """By what the limits on resources of the associations of a job with these options are multiplied."""
        if not self.factors:
            return 1.0
        names = [self.of_partitions.get(partition, "") for partition in options.partition.split(",")]
        names.insert(0 if self.own_is_first(options) else len(names), options.qos)
        return next((self.factors[name] for name in names if name in self.factors), 1.0)


class KnownQosPrecedence:
    """The precedence as Slurm told it last."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._known = QosPrecedence()
        self._asked = -math.inf
        self._failures = 0

    def at(self, now: float, *, for_limits: bool) -> QosPrecedence:
        """The precedence; ``for_limits``: whether any QOS has limits.

        Raises
        ------
        ResourceManagerError
            slurmctld did not tell the QOS of partitions.
        """
        if not 0 <= now - self._asked < doubled(_ASK_SECONDS, self._failures, _MAX_ASK_SECONDS):
            self._asked = now
            self._ask_of_all()
        if not (for_limits or self._known.factors):
            return self._known
        text = self._commands.ask(*SHOW_PARTITIONS, seconds=_ANSWER_SECONDS)
        of_partitions = {name: qos for name, qos in _PARTITION.findall(text) if qos != "N/A"}
        return replace(self._known, of_partitions=of_partitions)

    def _ask_of_all(self) -> None:
        """Ask slurmdbd for flags and factors, which stay as they were if it does not answer."""
        try:
            answer = self._commands.ask(*_SHOW_QOS, seconds=_ANSWER_SECONDS)
        except ResourceManagerError as error:
            self._failures += 1
            log.warning("cannot read OverPartQOS and LimitFactor of QOS; the last ones stay in use", error=str(error))
            return
        records = [parts for line in answer.splitlines() if len(parts := line.split("|")) == 3]
        first = frozenset(name for name, flags, _ in records if "OverPartQOS" in flags.split(","))
        factors = {name: float(text) for name, _, text in records if _NUMBER.fullmatch(text) and float(text) > 0}
        self._known, self._failures = QosPrecedence(first, factors), 0
