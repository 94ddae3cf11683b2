"""CPUs, and memory for each of them, that Slurm will allocate to a job that waits: squeue shows what it asks for.

Slurm allocates whole cores, as it does for tasks (``allocation_rules``), and more of them for a job that uses one
thread of each or has one task on each, for one that asks for CPUs with each GPU, and for one that asks for a minimum on
each node. Tried with Slurm 22.05 and 26.05: tests/slurm/test_real_slurm.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from dl2d.core.resources import Resources
from dl2d_slurm.commands.command_output_values import count, parse_gres
from dl2d_slurm.jobs.allocation_rules import MOST, AllocationRules, CpuUnit

#: Fields of squeue that are read here.
CPU_FIELDS: Final = ("NumTasks", "cpus-per-task", "mincpus", "threads", "NTPerCore", "cpus-per-tres", "MinMemory")


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

    @classmethod
    def of(cls, record: Mapping[str, str]) -> RequestedCpus:
        """What a record of squeue shows."""
        tasks, of_task, of_node, threads, on_core = (count(record[field]) or 0 for field in CPU_FIELDS[:5])
        of_gpu = parse_gres(record["cpus-per-tres"]).get("gpu", 0)
        memory = record["MinMemory"]
        bytes_ = count(memory if memory[-1:].isalpha() else f"{memory}M") or 0
        return cls(max(tasks, 1), max(of_task, 1), of_node, of_gpu, threads, on_core, bytes_ / 1024**2)

    def given(
        self, demand: Resources, nodes: int, unit: CpuUnit, rules: AllocationRules, default_memory: float
    ) -> Resources:
        """What the job gets on so many nodes, the same on each, whose ``demand`` squeue shows.

        ``default_memory`` is that for each CPU. A job with as many CPUs as nodes does not show whether the memory that
        it asks for is for each CPU: it is, if it is this.
        """
        cpus, memory = demand.get("cpu"), demand.get("memory")
        of_node = max(math.ceil(cpus / nodes), self.of_node)
        tasks = max(math.ceil(self.tasks / nodes), math.ceil(of_node / self.of_task))
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
        return demand.maximum(Resources.of(cpu=min(given * nodes, MOST), memory=min(memory, MOST)))
