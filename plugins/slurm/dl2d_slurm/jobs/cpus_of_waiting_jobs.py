"""Nodes, CPUs and memory that Slurm will allocate to a job that waits: squeue shows what it asks for.

Slurm allocates whole cores, as it does for tasks (``allocation_beyond_demand``), and more of them for a job that uses
one thread of each or has one task on each, for one that asks for CPUs with each GPU, and for one that asks for a
minimum on each node. Each task of the job runs on one node. Tried with Slurm 22.05 and 26.05:
tests/slurm/test_real_slurm.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from dl2d.core.resources import Resources
from dl2d_slurm.commands.values_in_command_output import count, node_count, parse_gres
from dl2d_slurm.jobs.allocation_beyond_demand import MOST, AllocationRules, CpuUnit

#: Fields of squeue that are read here.
CPU_FIELDS = ("NumTasks", "cpus-per-task", "mincpus", "threads", "NTPerCore", "cpus-per-tres", "MinMemory")
_CPUS = re.compile(r"(?:^|,)cpu=([0-9]{1,9})(?:,|$)")


class RequestedCpus(NamedTuple):
    """What a job asks for in CPUs, beside their number. 0 for what it says nothing of."""

    tasks: int = 1
    of_task: int = 1
    #: Minimum on each node.
    of_node: int = 0
    of_gpu: int = 0
    #: How many CPUs of a core it uses at most, and how many of its tasks run on one.
    threads: int = 0
    tasks_on_core: int = 0
    #: Minimum memory in MiB, on each node or for each CPU.
    memory: float = 0
    #: Number of nodes that it asks for, 1 if it asks for none, and the minimum that it gets.
    asked_nodes: int = 1
    nodes: int = 1

    @classmethod
    def of(cls, record: Mapping[str, str]) -> RequestedCpus:
        """What a record of squeue shows.

        ``node=`` of ``tres-alloc`` is the number of nodes that the job asks for; ``--ntasks-per-node`` does not count
        in it. ``NumNodes`` is the same until Slurm has tried to start the job. Then it is the number that Slurm would
        give it, which is the maximum if it asks for a range, ``-N 2-4``.
        """
        tasks, of_task, of_node, threads, on_core = (count(record[field]) or 0 for field in CPU_FIELDS[:5])
        of_gpu = parse_gres(record["cpus-per-tres"]).get("gpu", 0)
        memory = record["MinMemory"]
        bytes_ = count(memory if memory[-1:].isalpha() else f"{memory}M") or 0
        asked_nodes, cpus = max(node_count(record["tres-alloc"]), 1), _CPUS.search(record["tres-alloc"])
        by_cpus = math.ceil(int(cpus[1]) / max(of_node, 1)) if cpus else 1
        estimate = count(record["NumNodes"].partition("-")[0]) or 1
        nodes = max(asked_nodes, min(estimate, max(tasks, 1), by_cpus))
        return cls(
            max(tasks, 1), max(of_task, 1), of_node, of_gpu, threads, on_core, bytes_ / 1024**2, asked_nodes, nodes
        )

    def nodes_that_hold(self, demand: Resources, nodes: int, capacities: Collection[Resources]) -> int:
        """On how many of such nodes, at least ``nodes``, the job can have as many tasks on each."""
        most = {name: max(capacity.get(name) for capacity in capacities) for name in ("cpu", "gpu")}
        of_node = most["cpu"] // self.of_task if self._has_cpus_by_task(demand.get("cpu")) else 0
        by_tasks = math.ceil(self.tasks / of_node) if of_node else 1
        return max(nodes, by_tasks, *(math.ceil(demand.get(name) / amount) for name, amount in most.items() if amount))

    def larger_spreads(self, demand: Resources, nodes: int) -> list[int]:
        """Numbers of nodes above ``nodes`` on which the job may start as well, with as many tasks on each.

        None for a job that asks for a number of nodes, for a minimum on each or for GPUs. One that asks for one node
        (``-N 1``) cannot be told from one that asks for none.
        """
        if (
            self.asked_nodes > 1
            or self.of_node > self.of_task
            or demand.get("gpu")
            or not self._has_cpus_by_task(demand.get("cpu"))
        ):
            return []
        return sorted({count for count in (nodes + 1, nodes + 2, 2 * nodes, 4 * nodes) if count <= self.tasks})

    def _has_cpus_by_task(self, cpus: float) -> bool:
        return self.tasks * self.of_task == cpus

    def given(
        self,
        demand: Resources,
        nodes: int,
        unit: CpuUnit,
        rules: AllocationRules,
        default_memory: float,
        *,
        whole_tasks: bool = True,
    ) -> Resources:
        """What the job gets on so many nodes, the same on each, whose ``demand`` squeue shows.

        ``default_memory`` is that for each CPU. A job with as many CPUs as nodes does not show whether the memory that
        it asks for is for each CPU: it is, if it is this. ``whole_tasks``: each node has room for as many tasks as the
        others; that may be more than the job gets in all.
        """
        cpus, memory = demand.get("cpu"), demand.get("memory")
        tasks = math.ceil(self.tasks / nodes)
        by_task = whole_tasks and self._has_cpus_by_task(cpus)
        of_node = max(tasks * self.of_task if by_task else math.ceil(cpus / nodes), self.of_node)
        tasks = max(tasks, math.ceil(of_node / self.of_task))
        cores = 0
        if self.tasks_on_core == 1:
            cores = tasks * unit.cores(self.of_task, self.threads)
        elif self.tasks_on_core:
            cores = math.ceil(tasks / self.tasks_on_core)
        of_gpus = math.ceil(demand.get("gpu") / nodes) * self.of_gpu
        given, with_memory = unit.given(max(of_node, of_gpus), self.threads, cores)
        by_cpu = memory and self.memory * cpus == memory and (cpus != nodes or self.memory == default_memory)
        if by_cpu and not rules.memory_of_asked_cpus:
            memory = self.memory * with_memory * nodes
        elif not by_cpu and memory:
            memory = max(memory, self.memory * nodes)
        return demand.maximum(Resources.of(cpu=min(given * nodes, MOST), memory=min(memory, MOST)))
