"""Static jobs: training jobs that are not dl2d's, recognised by the site's rules (setting ``watch``), from squeue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dl2d.core.resource_manager import StaticJob
from dl2d.core.resources import Resources
from dl2d_slurm.commands.values_in_command_output import hosts, limit_seconds, owner_of, value_or_empty
from dl2d_slurm.settings import TASKS, SlurmStaticJobRule

#: What is asked of squeue beside the rest where there are rules.
WATCH_FIELDS = (
    *("StartTime", "TimeLimit", "NumNodes", "NumTasks", "tres-per-task", "tres-per-job"),
    *("Partition", "UserID", "GroupID", "Account", "QOS"),
)


def static_job(
    record: Mapping[str, str], held: Resources, rules: Sequence[SlurmStaticJobRule], started: int
) -> StaticJob | None:
    """The static job of a record of squeue, by the first rule that matches it; None where none does.

    Parameters
    ----------
    record
        Has ``WATCH_FIELDS`` too.
    held
        All that the job holds, or asks for where it waits.
    started
        Seconds since 1970; 0 for a job that has not run.
    """
    partition, comment = record["Partition"], value_or_empty(record["Comment"])
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
