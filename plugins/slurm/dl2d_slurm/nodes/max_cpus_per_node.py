"""``MaxCPUsPerNode`` of partitions: how many CPUs of a node the jobs of a partition may have together.

Each such partition has a resource of its own, of which its nodes have so many, and of which jobs and tasks of the
partition demand and hold as many as they do of CPUs. Jobs that may run in several partitions are not counted before
they run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from dl2d.core.cluster import Node
from dl2d.core.resource_manager import RmJob
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_slurm.jobs.allocation_beyond_demand import AllocationRules
from dl2d_slurm.jobs.squeue_jobs import HeldInPartition
from dl2d_slurm.submission.partitions import Partition

_NOT_IN_NAME = re.compile(r"[^a-z0-9_.-]")


class MaxCpusPerNode:
    """Counts the CPUs of those partitions that limit them, by slurm.conf and what jobs hold."""

    def __init__(
        self, rules: AllocationRules, partitions: Mapping[str, Partition], held: Mapping[str, HeldInPartition]
    ) -> None:
        self._limits = {name: most for name, most in rules.max_cpus_per_node.items() if name in partitions}
        self._partitions = partitions
        self._held = {handle: each for handle, each in held.items() if each.partition in self._limits}

    def resource_of(self, partition: str) -> str:
        """Name of a partition's resource; "" where it has no limit."""
        return f"cpu-in-{_NOT_IN_NAME.sub('-', partition.lower())[:56]}" if partition in self._limits else ""

    def of(self, partition: str, cpus: float) -> Resources:
        """So many CPUs as an amount of a partition's resource; nothing where it has no limit."""
        name = self.resource_of(partition)
        return Resources.of({name: cpus}) if name else NO_RESOURCES

    def nodes(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """The nodes with these resources."""
        capacity: defaultdict[str, list[Resources]] = defaultdict(list)
        used: defaultdict[str, list[Resources]] = defaultdict(list)
        for name, most in self._limits.items():
            for node in self._partitions[name].nodes:
                capacity[node].append(self.of(name, most))
        for each in self._held.values():
            for node in each.nodes:
                used[node].append(self.of(each.partition, each.cpus))
        return tuple(
            replace(
                node,
                capacity=node.capacity + (limits := Resources.total(capacity[node.name])),
                used=node.used + Resources.total(used[node.name]).minimum(limits),
            )
            if node.name in capacity
            else node
            for node in nodes
        )

    def jobs(self, jobs: Iterable[RmJob]) -> tuple[RmJob, ...]:
        """The jobs, of which tasks hold these resources."""
        return tuple(
            replace(job, held=job.held + self.of(self._held[job.handle].partition, job.held.get("cpu")))
            if job.handle in self._held and job.held.thousandths
            else job
            for job in jobs
        )
