"""Jobs of users who know nothing of dl2d: which of them train, as a site's rules say, and what squeue tells of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Final

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from dl2d.core.input_validation import NAME, Number, Record, Text, Whole
from dl2d.core.resource_manager import StaticJob
from dl2d.core.resources import Resources
from dl2d_slurm.output_fields import owner_of, present

#: What is asked of squeue beside the rest where there are rules.
WATCH_FIELDS: Final = (
    *("StartTime", "TimeLimit", "NumNodes", "NumTasks", "tres-per-task", "tres-per-job"),
    *("Partition", "UserID", "GroupID", "Account", "QOS"),
)
_RESOURCE: Final = r"[a-z][a-z0-9_.:/-]{0,63}"
#: ``WatchRule.size`` of a rule that counts tasks.
TASKS: Final = "tasks"
_LIMIT: Final = re.compile(r"(?:(\d{1,6})-)?(\d{1,4})(?::(\d{1,2}))?(?::(\d{1,2}))?")
#: Slurm shows a job without a limit, in a partition without one, as one of a year.
_YEAR: Final = 365 * 86_400.0
_HOUR: Final = 3600.0
_MAX_TASKS: Final = 10_000
_MAX_HOURS: Final = 8760.0

Words = Annotated[str, Text(200, expected="some text (quote it in YAML)")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRule(Record):
    """Jobs that count as training one type of model."""

    partition: Words
    #: Patterns as in a shell (``bert-*``); ``*`` takes any.
    name: Words = "*"
    comment: Words = "*"
    #: Type of the model, as in ``jobs.models``.
    model: Annotated[str, Text(128, NAME, "a type of model such as bert")]
    #: What counts as a worker: a task, or a unit of a resource (``gpu``).
    size: Annotated[str, Text(64, _RESOURCE, "tasks or a resource such as gpu")] = TASKS
    #: So many of them are parameter servers; 0: the workers exchange gradients among themselves.
    ps: Annotated[int, Whole(0, _MAX_TASKS)] = 0
    #: Fewest workers and parameter servers together.
    least: Annotated[int, Whole(1, _MAX_TASKS)] = 2
    #: Length of a job that has no time limit, in hours.
    hours: Annotated[float, Number(_MAX_HOURS, least=0.01)] = 24.0

    ignored_keys: ClassVar[frozenset[str]] = frozenset()

    def takes(self, partition: str, name: str, comment: str) -> bool:
        """Whether a job is one of these; a job that waits may name several partitions."""
        named = self.partition in partition.split(",")
        return named and fnmatchcase(name, self.name) and fnmatchcase(comment, self.comment)


def static_job(
    record: Mapping[str, str], held: Resources, rules: Sequence[WatchRule], started: int
) -> StaticJob | None:
    """What a record of squeue tells, by the first rule that takes the job; None where none does.

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
    rule = next((each for each in rules if each.takes(partition, record["Name"], comment)), None)
    tasks = int(record["NumTasks"]) if record["NumTasks"].isdecimal() else 0
    if rule is None or not tasks:
        return None
    count = tasks if rule.size == TASKS else int(held.get(rule.size))
    if count < max(rule.least, rule.ps + 1) or count > _MAX_TASKS:
        return None
    owner = owner_of(record)
    if owner is None:
        return None
    return StaticJob(
        name=_plain(record["Name"]) or rule.model,
        model=rule.model,
        owner=owner,
        workers=count - rule.ps,
        ps=rule.ps,
        task=Resources.of({name: amount / count for name, amount in held.as_dict().items()}),
        nodes=spread(hosts(record["NodeList"]), count) if started else (),
        limit=limit_seconds(record["TimeLimit"]) or rule.hours * _HOUR,
        started=float(started),
    )


def limit_seconds(text: str) -> float | None:
    """A time limit as squeue shows it: ``30:00``, ``2:00:00``, ``1-12:00:00``; None for none."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        return None
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers] if len(numbers) == 2 else [0, numbers[0], 0]
    numbers += [0] * (3 - len(numbers))
    hours, minutes, seconds = numbers
    total = 86_400.0 * int(days or 0) + 3600.0 * hours + 60.0 * minutes + seconds
    return total if 0 < total < _YEAR else None


def hosts(text: str) -> tuple[str, ...]:
    """Names in a node list: ``n[1-2,07],gpu1`` is gpu1, n1, n2 and n07. What is no such list is one name."""
    try:
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException:
        return (text,)


def spread(nodes: Sequence[str], count: int) -> tuple[str, ...]:
    """Which node each of ``count`` tasks is on, if they are spread evenly and in order.

    squeue does not say how many of a job's tasks are on which of its nodes.
    """
    return tuple(nodes[number * len(nodes) // count] for number in range(count)) if nodes else ()


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)[:128].strip()
