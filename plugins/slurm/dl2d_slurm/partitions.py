"""Partitions: in which of them tasks run, with which time limit, and which give their jobs nodes of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dl2d_slurm.command_output_values import exclusive_kind
from dl2d_slurm.commands import Commands

#: Partitions whose jobs all get nodes of their own, and those that give each node to the jobs of one user. The second
#: forms are those of Slurm 26.05.
_EXCLUSIVE_PARTITION = re.compile(
    r"^PartitionName=(\S+) .*\b(?:OverSubscribe=EXCLUSIVE|Exclusive=(?:NODE|TOPO))\b", re.MULTILINE
)
_EXCLUSIVE_USER_PARTITION = re.compile(r"^PartitionName=(\S+) .*\b(?:ExclusiveUser=YES|Exclusive=USER)\b", re.MULTILINE)
_LINEAR = re.compile(r"^SelectType\s*=\s*select/linear", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition as sinfo shows it."""

    name: str
    nodes: frozenset[str]
    #: Maximum time limit of its jobs in seconds; None if they may have any.
    max_seconds: float | None = None
    #: Its state if it starts no jobs, such as ``inact``; empty if it does.
    down: str = ""


def task_partitions(anchor: str, setting: str) -> str:
    """Partitions of the task jobs of an anchor, as a comma-separated list, by its own and those of the settings.

    They are those of the anchor that the settings name; where these name none of them, all that they name; and where
    they name none at all, the anchor's.
    """
    named = setting.split(",")
    return ",".join(name for name in anchor.split(",") if name in named) or setting or anchor


def partitions_of(names: str, node: str, partitions: Mapping[str, Partition]) -> Sequence[str]:
    """Those partitions of a comma-separated list that have a node; all of the list if none is known to have it."""
    listed = [name for name in names.split(",") if name]
    having = [name for name in listed if name in partitions and node in partitions[name].nodes]
    return having or listed


def task_minutes(
    anchor_ends: float, now: float, most: float | None, names: Iterable[str], partitions: Mapping[str, Partition]
) -> int:
    """Time limit of a task job in minutes, as Slurm counts it: what is left of its anchor's, rounded up.

    So a task does not end before its anchor, unless the settings (``most``, seconds) or all of its partitions ``names``
    have a smaller limit.
    """
    limits = [partitions[name].max_seconds for name in names if name in partitions]
    partition_limit = max((math.inf if limit is None else limit for limit in limits), default=math.inf)
    maximum = min(partition_limit, math.inf if most is None else most)
    wanted = math.ceil(max(anchor_ends - now, 0.0) / 60)
    # Slurm takes whole minutes: a maximum is rounded down.
    return max(1, wanted if math.isinf(maximum) else min(wanted, int(maximum // 60)))


def is_exclusive(commands: Commands, record: Mapping[str, str]) -> bool:
    """Whether a job's user asked for nodes that other jobs, or those of other users, do not share: two more queries if
    it has such nodes.

    All jobs of an exclusive partition have, and all jobs with ``SelectType=select/linear``.
    """
    kind = exclusive_kind(record)
    if not kind:
        return False
    partitions = commands.run("scontrol", "--all", "--oneliner", "show", "partition")
    config = commands.run("scontrol", "show", "config")
    if partitions.status != 0 or config.status != 0:
        return False
    exclusive = set(_EXCLUSIVE_PARTITION.findall(partitions.stdout))
    if kind in ("USER", "MCS"):
        exclusive.update(_EXCLUSIVE_USER_PARTITION.findall(partitions.stdout))
    return exclusive.isdisjoint(record["Partition"].split(",")) and _LINEAR.search(config.stdout) is None
