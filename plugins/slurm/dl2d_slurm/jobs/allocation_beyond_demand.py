"""What Slurm gives a job beyond its demand, by slurm.conf: whole nodes, whole cores, default memory, CPUs for memory.

The same answers of ``scontrol`` also say how the backfill scheduler plans, and which jobs preempt which.

Tried with Slurm 22.05, 24.11 and 26.05: tests/slurm/test_real_slurm.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import structlog

from dl2d.core.errors import ResourceManagerError
from dl2d.core.resources import Resources
from dl2d_slurm.commands.commands import Commands
from dl2d_slurm.commands.squeue_and_sinfo_records import SHOW_CONFIG, SHOW_NODES, SHOW_PARTITIONS, shown_fields
from dl2d_slurm.commands.values_in_command_output import EXCLUSIVE_PARTITION, LINEAR, count
from dl2d_slurm.jobs.which_jobs_may_preempt import Preemption

log = structlog.get_logger(__name__)

#: How often slurm.conf is asked for, and how long after Slurm did not answer.
_SECONDS = 600.0
_RETRY_SECONDS = 60.0
#: Partitions of select/linear in which jobs do not share nodes.
_NOT_SHARED = re.compile(r"^PartitionName=(\S+) .*\bOverSubscribe=(?:NO|EXCLUSIVE)\b", re.MULTILINE)
#: The first release of which it is known that it gives all CPUs that memory needs (``GivenToTask``).
_ALL_CPUS_FOR_MEMORY = (24, 11)
#: Maximum amount: ``Resources`` knows none larger.
MOST = 1e12
_VERSION = re.compile(r"([0-9]{2})\.([0-9]{2})\b")
_SETTING = re.compile(r"^(\w+) *= *(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """Default memory of the jobs of a partition, and how much they may have for each CPU; in MiB, 0 for not set."""

    per_node: int = 0
    per_cpu: int = 0
    per_gpu: int = 0
    most_per_cpu: int = 0


class CpuUnit(NamedTuple):
    """How many CPUs of a node are given to jobs together."""

    #: Those of a core.
    core: int = 1
    #: Those that are given to one job as a whole: of a core, or of a socket.
    whole: int = 1

    def given(self, cpus: float, threads: int = 0, least_cores: int = 0) -> tuple[int, int]:
        """CPUs that a job gets that asks for so many, and for how many of them default memory is counted.

        Parameters
        ----------
        threads
            How many CPUs of each core it uses at most (``--threads-per-core``, ``--hint=nomultithread``); 0 for all.
        least_cores
            How many cores it gets in any case.
        """
        cores = max(self.cores(cpus, threads), least_cores)
        all_cpus = -(-cores * self.core // self.whole) * self.whole
        return all_cpus, all_cpus * self._used(threads) // self.core

    def cores(self, cpus: float, threads: int) -> int:
        """Number of cores on which a job has so many CPUs; ``threads`` as above."""
        return math.ceil(cpus / self._used(threads))

    def _used(self, threads: int) -> int:
        return min(threads or self.core, self.core)


@dataclass(frozen=True, slots=True)
class GivenToTask:
    """What each task of a job gets: the least by the partitions in one of which it will run (``RmListing.given``)."""

    partitions: Collection[MemoryRule]
    cpu_unit: CpuUnit
    #: A further resource, of which it gets as many as CPUs: that of its partition (``max_cpus_per_node``).
    counted_as_cpus: str = ""
    #: ``CpuUnit.given``, of an option for all task jobs.
    threads: int = 0
    #: Whether memory is a resource of which nodes run out.
    memory_counts: bool = True
    #: Whether memory for each CPU is counted for the CPUs that were asked for (``CR_CPU``), not for those that are
    #: given.
    memory_of_asked_cpus: bool = False
    #: Whether ``MaxMemPerCPU`` gives as many CPUs as a task's memory needs, and tasks with GPUs as well. In Slurm 22.05
    #: it gives these none, and others a multiple of the CPUs that they asked for.
    all_cpus_for_memory: bool = False

    def __call__(self, demand: Resources) -> Resources:
        """What a task with a demand gets of CPUs and memory."""
        return reduce(Resources.minimum, (self._in_partition(rule, demand) for rule in self.partitions))

    def _in_partition(self, rule: MemoryRule, demand: Resources) -> Resources:
        asked, gpus, memory = max(math.ceil(demand.get("cpu")), 1), demand.get("gpu"), demand.get("memory")
        per_cpu = 0 if memory or rule.per_node else rule.per_cpu
        cpus, memory = asked, memory or rule.per_node
        if rule.most_per_cpu and per_cpu > rule.most_per_cpu:
            times = math.ceil(per_cpu / rule.most_per_cpu)
            cpus, per_cpu = asked * times, math.ceil(per_cpu / times)
        elif rule.most_per_cpu and memory and self.all_cpus_for_memory:
            cpus = max(asked, math.ceil(memory / rule.most_per_cpu))
        elif rule.most_per_cpu and memory and not gpus:
            cpus = asked * max(math.ceil(memory / rule.most_per_cpu) // asked, 1)
        given, with_memory = self.cpu_unit.given(cpus, self.threads)
        if rule.per_gpu and gpus and not demand.get("memory"):
            memory = rule.per_gpu * gpus
        elif per_cpu:
            memory = per_cpu * (cpus if self.memory_of_asked_cpus else with_memory)
        amounts = {"cpu": min(given, MOST), "memory": min(memory, MOST) if self.memory_counts else 0}
        return Resources.of({**amounts, self.counted_as_cpus: amounts["cpu"]} if self.counted_as_cpus else amounts)


@dataclass(frozen=True, slots=True)
class AllocationRules:
    """What slurm.conf says of what jobs are given."""

    #: Partitions that give each job nodes of its own.
    whole_nodes: frozenset[str] = frozenset()
    memory: Mapping[str, MemoryRule] = field(default_factory=dict)
    #: How many CPUs of a node the jobs of a partition may have together; those that have no such limit are absent.
    max_cpus_per_node: Mapping[str, int] = field(default_factory=dict)
    #: By node.
    cpu_units: Mapping[str, CpuUnit] = field(default_factory=dict)
    memory_counts: bool = True
    memory_of_asked_cpus: bool = False
    all_cpus_for_memory: bool = False
    #: To how many seconds the backfill scheduler rounds the times for which it plans (``bf_resolution``).
    backfill_seconds: int = 60
    preemption: Preemption = field(default_factory=Preemption)

    @classmethod
    def of(cls, config: str, partitions: str, nodes: str) -> AllocationRules:
        """The rules by the answers of ``scontrol show`` for configuration, partitions and nodes."""
        settings = dict(_SETTING.findall(config))
        # JobDefaults has two settings in one value.
        settings |= _pairs(settings.get("JobDefaults", ""))
        kinds = settings.get("SelectTypeParameters", "").upper().split(",")
        whole = _NOT_SHARED if settings.get("SelectType") == LINEAR else EXCLUSIVE_PARTITION
        memory: dict[str, MemoryRule] = {}
        max_cpus: dict[str, int] = {}
        records = [fields for fields in map(shown_fields, partitions.splitlines()) if "PartitionName" in fields]
        for record in records:
            name, values = record["PartitionName"], {**record, **_pairs(record.get("JobDefaults", ""))}
            memory[name] = _memory_rule(values, settings)
            if (most := values.get("MaxCPUsPerNode", "")).isdecimal() and len(most) < 10:
                max_cpus[name] = int(most)
        units = {}
        for line in nodes.splitlines():
            values = shown_fields(line)
            cpus, sockets = _amount(values, "CPUTot"), _amount(values, "Sockets")
            core = _part(cpus, sockets * _amount(values, "CoresPerSocket"))
            units[values.get("NodeName", "")] = CpuUnit(core, _part(cpus, sockets) if "SOCKET" in kinds[0] else core)
        return cls(
            frozenset(whole.findall(partitions)), memory, max_cpus, units,
            memory_counts="MEMORY" in kinds[0], memory_of_asked_cpus=kinds[0].startswith("CR_CPU"),
            all_cpus_for_memory=_release(settings.get("SLURM_VERSION", "")) >= _ALL_CPUS_FOR_MEMORY,
            backfill_seconds=_amount(_pairs(settings.get("SchedulerParameters", "")), "bf_resolution") or 60,
            preemption=Preemption.of(settings, records),
        )  # fmt: skip

    def gives_whole_nodes(self, partitions: str) -> bool:
        """Whether all partitions of a comma-separated list are known to give each job nodes of its own."""
        return self.whole_nodes.issuperset(partitions.split(","))

    def unit(self, node: str) -> CpuUnit:
        """How many CPUs of a node are given together."""
        return self.cpu_units.get(node, CpuUnit())

    def default_memory_of_cpu(self, partitions: str) -> int:
        """The largest ``DefMemPerCPU`` of the partitions of a comma-separated list."""
        return max(self.memory.get(name, MemoryRule()).per_cpu for name in partitions.split(","))

    def given(
        self,
        partitions: str,
        nodes: Iterable[str],
        default_memory: int,
        threads: int = 0,
        counted_as_cpus: str = "",
    ) -> GivenToTask | None:
        """What the tasks of a job get that run in one of these partitions, on one of these nodes; None if unknown.

        The least of what the partitions and the nodes give: tasks of which more is assumed would not start where they
        fit. ``default_memory``: with how much memory those tasks are submitted that demand none, 0 for not any.
        ``threads``: how many CPUs of each core they use at most, 0 for all. ``counted_as_cpus``: see ``GivenToTask``.
        """
        rules = {self.memory.get(name) for name in partitions.split(",")}
        units = {self.unit(node) for node in nodes}
        known = [
            MemoryRule(per_node=default_memory, most_per_cpu=rule.most_per_cpu) if default_memory else rule
            for rule in rules
            if rule
        ]
        if not known or len(known) < len(rules) or not units:
            return None
        return GivenToTask(
            known, min(units), counted_as_cpus, threads, self.memory_counts, self.memory_of_asked_cpus,
            self.all_cpus_for_memory,
        )  # fmt: skip


def _part(cpus: int, parts: int) -> int:
    return max(cpus // parts, 1) if parts else 1


def _memory_rule(partition: Mapping[str, str], cluster: Mapping[str, str]) -> MemoryRule:
    """The memory of a partition's jobs; what it does not set itself is that of the cluster."""

    def of_either(*names: str) -> Mapping[str, str]:
        return partition if any(_amount(partition, name) for name in names) else cluster

    defaults, limits = of_either("DefMemPerNode", "DefMemPerCPU"), of_either("MaxMemPerNode", "MaxMemPerCPU")
    return MemoryRule(
        per_node=_amount(defaults, "DefMemPerNode"),
        per_cpu=_amount(defaults, "DefMemPerCPU"),
        per_gpu=_amount(of_either("DefMemPerGPU"), "DefMemPerGPU"),
        most_per_cpu=_amount(limits, "MaxMemPerCPU"),
    )


def _release(version: str) -> tuple[int, int]:
    """Year and month of a version such as 22.05.8; zeros for what is none."""
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2])) if match is not None else (0, 0)


def _pairs(text: str) -> dict[str, str]:
    return {name: value for name, equals, value in (each.partition("=") for each in text.split(",")) if equals}


def _amount(values: Mapping[str, str], name: str) -> int:
    """A number; 0 for ``UNLIMITED``, and where there is none."""
    return count(values.get(name, "")) or 0


class KnownAllocationRules:
    """The rules, which are asked for every ten minutes while any job runs."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._known = AllocationRules()
        self._asked = -math.inf

    def at(self, now: float, *, ask: bool) -> AllocationRules:
        """The rules as they are known at ``now``, seconds since 1970; asked for again, if ``ask`` says so."""
        if not ask or 0 <= now - self._asked < _SECONDS:
            return self._known
        try:
            config, partitions, nodes = (
                self._commands.ask(*query) for query in (SHOW_CONFIG, SHOW_PARTITIONS, SHOW_NODES)
            )
        except ResourceManagerError as error:
            log.warning("cannot read what tasks get beyond their demands; the last answer is used", error=str(error))
            self._asked = now - _SECONDS + _RETRY_SECONDS
        else:
            self._known, self._asked = AllocationRules.of(config, partitions, nodes), now
        return self._known
