"""Jobs of users who know nothing of dl2d: which of them train, as a site's rules say, and what squeue tells of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Final

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from dl2d.core.input_validation import Text
from dl2d.core.resource_manager import StaticJob
from dl2d.core.resources import Resources
from dl2d.core.static_job_rule import SIZE, StaticJobRule, Words
from dl2d_slurm.output_fields import owner_of, present, time_span

#: What is asked of squeue beside the rest where there are rules.
WATCH_FIELDS: Final = (
    *("StartTime", "TimeLimit", "NumNodes", "NumTasks", "tres-per-task", "tres-per-job"),
    *("Partition", "UserID", "GroupID", "Account", "QOS"),
)
#: ``SlurmStaticJobRule.size`` of a rule that counts tasks.
TASKS: Final = "tasks"
_LIMIT: Final = re.compile(r"(?:(\d{1,6})-)?(\d{1,4})(?::(\d{1,2}))?(?::(\d{1,2}))?")
#: Slurm shows a job without a limit, in a partition without one, as one of a year.
_YEAR: Final = 365 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStaticJobRule(StaticJobRule):
    """Slurm jobs that count as training one type of model."""

    partition: Words
    #: Pattern as in a shell; ``*`` matches any.
    comment: Words = "*"
    #: What counts as a worker: a task, or a unit of a resource (``gpu``).
    size: Annotated[str, Text(64, SIZE, "tasks or a resource such as gpu")] = TASKS

    def matches(self, partition: str, name: str, comment: str) -> bool:
        """Whether a job is one of these; a job that waits may name several partitions."""
        named = self.partition in partition.split(",")
        return named and fnmatchcase(name, self.name) and fnmatchcase(comment, self.comment)


def static_job(
    record: Mapping[str, str], held: Resources, rules: Sequence[SlurmStaticJobRule], started: int
) -> StaticJob | None:
    """What a record of squeue tells, by the first rule that matches the job; None where none does.

    Parameters
    ----------
    record
        Has ``WATCH_FIELDS`` too.
    held
        All that the job holds, or asks for where it waits.
    started
        Seconds since 1970; 0 for a job that has not run.
    """
    partition, comment = record["Partition"], present(record["Comment"])
    rule = next((each for each in rules if each.matches(partition, record["Name"], comment)), None)
    tasks = int(record["NumTasks"]) if record["NumTasks"].isdecimal() else 0
    if rule is None or not tasks:
        return None
    owner = owner_of(record)
    if owner is None:
        return None
    # squeue does not say how many of a job's tasks are on which of its nodes.
    return rule.static_job(
        record["Name"], owner, tasks if rule.size == TASKS else int(held.get(rule.size)), held,
        hosts(record["NodeList"]) if started else (), limit=limit_seconds(record["TimeLimit"]), started=float(started),
    )  # fmt: skip


def limit_seconds(text: str) -> float | None:
    """A time limit as squeue shows it: ``30:00``, ``2:00:00``, ``1-12:00:00``; None for none."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        return None
    total = float(time_span(*match.groups()))
    return total if 0 < total < _YEAR else None


@lru_cache(16_384)
def hosts(text: str) -> tuple[str, ...]:
    """Names in a node list: ``n[1-2,07],gpu1`` is gpu1, n1, n2 and n07. What is no such list is one name."""
    try:
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return (text,)
