"""Partitions: in which of them tasks run, and with which time limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: How long a task may wait for the backfill scheduler, which runs every 30 seconds unless it has much to do.
_START_SECONDS = 60.0
#: A larger ``bf_resolution`` counts as 300 s; otherwise tasks would end too early. Together with ``_START_SECONDS`` and
#: the rounding to minutes it is ``observe.SAME_END_SECONDS`` of the tick, within which a task ends with its anchor.
_MAX_BACKFILL_SECONDS = 300


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


def task_time_limits(
    anchor_ends: float,
    now: float,
    most: float,
    names: Iterable[str],
    partitions: Mapping[str, Partition],
    backfill_seconds: int = 60,
) -> tuple[str, str]:
    """``--time`` and ``--time-min`` of a task job in minutes; the latter is "" if the task needs none.

    ``--time`` is what is left of the anchor's. For a job that waits for the anchor's room, Slurm plans the nodes from
    the anchor's end on, rounded down to ``backfill_seconds`` (``bf_resolution``), and backfills no task on these nodes
    that would end after this time. With ``--time-min``, to which backfill may shorten a task, it ends before that if it
    has waited no longer than ``_START_SECONDS``. This is at least half of what is left. Neither is less than a minute.

    No task has more than ``most`` seconds, or more than all of its partitions ``names`` allow. ``anchor_ends`` is
    infinite for an anchor without a time limit.
    """
    longest = min(largest_limit(names, partitions), most, anchor_ends - now)
    if math.isinf(longest):
        return "UNLIMITED", ""
    minutes = _whole_minutes(longest)
    if math.isinf(anchor_ends):
        return str(minutes), ""
    step = max(min(backfill_seconds, _MAX_BACKFILL_SECONDS), 1)
    shortest = _whole_minutes(max(anchor_ends // step * step - now - _START_SECONDS, (anchor_ends - now) / 2))
    return str(minutes), str(shortest) if shortest < minutes else ""


def _whole_minutes(seconds: float) -> int:
    """The time in whole minutes, as Slurm takes it: rounded down, at least one."""
    return max(1, math.floor(seconds / 60))
