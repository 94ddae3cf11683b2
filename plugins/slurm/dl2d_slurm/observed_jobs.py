"""Jobs of users who know nothing of dl2d: which of them train, as a site's rules say, and what squeue tells of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Final

from dl2d.core.input_validation import Text
from dl2d.core.resource_manager import StaticJob
from dl2d.core.resources import Resources
from dl2d.core.training_job_detection_rules import SIZE, StaticJobRule, Words
from dl2d_slurm.command_output_values import hosts, limit_seconds, owner_of, present

#: What is asked of squeue beside the rest where there are rules.
WATCH_FIELDS: Final = (
    *("StartTime", "TimeLimit", "NumNodes", "NumTasks", "tres-per-task", "tres-per-job"),
    *("Partition", "UserID", "GroupID", "Account", "QOS"),
)
#: ``SlurmStaticJobRule.size`` of a rule that counts tasks.
TASKS: Final = "tasks"


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
