"""Partitions: in which of them tasks run, and with which time limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


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
    """Partitions of the task jobs of an anchor, as a comma-separated list.

    The anchor's partitions that are also in the setting; if there are none, all of the setting; if that is empty, the
    anchor's.
    """
    named = setting.split(",")
    return ",".join(name for name in anchor.split(",") if name in named) or setting or anchor


def partitions_of(names: str, node: str, partitions: Mapping[str, Partition]) -> Sequence[str]:
    """Those partitions of a comma-separated list that have a node; all of the list if none is known to have it."""
    listed = [name for name in names.split(",") if name]
    having = [name for name in listed if name in partitions and node in partitions[name].nodes]
    return having or listed


def largest_limit(names: Iterable[str], partitions: Mapping[str, Partition]) -> float:
    """The largest time limit of those of the named partitions that are known, in seconds; infinite for none."""
    limits = [partitions[name].max_seconds for name in names if name in partitions]
    return max((math.inf if limit is None else limit for limit in limits), default=math.inf)


def partitions_that_allow(
    minutes: int | None, names: Sequence[str], partitions: Mapping[str, Partition]
) -> Sequence[str]:
    """Those of the named partitions whose limit allows a job of so many minutes, None for one without a limit; all if
    none does.

    With ``EnforcePartLimits=ALL`` Slurm refuses a job if any of its partitions has a smaller limit.
    """
    seconds = math.inf if minutes is None else 60.0 * minutes
    return [name for name in names if largest_limit([name], partitions) >= seconds] or names


def task_time_limit(
    anchor_ends: float, now: float, most: float, names: Iterable[str], partitions: Mapping[str, Partition]
) -> str:
    """``--time`` of a task job, in minutes, as Slurm counts it: what is left of its anchor's, rounded up.

    So a task does not end before its anchor, unless it may not have more than ``most`` seconds, or all of its
    partitions ``names`` have a smaller limit. ``anchor_ends`` is infinite for an anchor without a time limit.
    """
    maximum = min(largest_limit(names, partitions), most)
    # Slurm takes whole minutes: a maximum is rounded down.
    limits = ((max(anchor_ends - now, 0.0), math.ceil), (maximum, math.floor))
    minutes = [rounded(seconds / 60) for seconds, rounded in limits if not math.isinf(seconds)]
    return str(max(1, min(minutes))) if minutes else "UNLIMITED"
