"""What ``dl2d check`` advises on limits that Slurm enforces: those of nodes and minutes, and of few running jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dl2d.core.errors import some_of
from dl2d_slurm.commands.commands import Commands
from dl2d_slurm.commands.squeue_and_sinfo_records import SHOW_CONFIG
from dl2d_slurm.limits.association_limits import ASK_LIMITS, enforces_limits
from dl2d_slurm.settings import SlurmSettings

#: Limits that are set and that dl2d does not ask for: of nodes, and of minutes.
_NOT_ASKED_FOR = re.compile(
    r"(?<=[\s{])(?:(?P<of_nodes>GrpTRES|MaxTRESP[UA])=(?:[^\s}]*,)?node=\d"
    r"|(?P<of_minutes>GrpTRESMins|GrpTRESRunMins)=(?:[^\s}]*,)?[^\s,=}]+=\d|(?P<of_time>GrpWall)=\d)"
)
#: Limits on the number of running jobs, in which coordinators and tasks count.
_OF_JOBS = re.compile(r"(?<=[\s{])(GrpJobs|MaxJobs(?:P[UA])?)=(\d+)")
#: Up to which number they are named: so many coordinators may well run at once, and leave nothing to tasks.
_FEW_JOBS = 16
#: Whose record a line is: a QOS, or an account with or without a user.
_RECORD = re.compile(r"(?:QOS=([^\s(]+)|ClusterName=\S* Account=(\S+) UserName=([^\s(]*))")


def on_limits(_: SlurmSettings, commands: Commands) -> str:
    """What is advised on limits that Slurm enforces; "" for nothing. Raises ``ResourceManagerError``."""
    limits = commands.ask(*ASK_LIMITS)
    found, few = list(dict.fromkeys(_not_asked_for(limits))), list(dict.fromkeys(_of_few_jobs(limits)))
    if not found + few or not enforces_limits(commands.run(*SHOW_CONFIG).stdout):
        return ""
    of_nodes = (
        f"Slurm limits the number of nodes or the minutes ({some_of(found)}): dl2d does not read these limits, so "
        "elastic jobs grow until one of their tasks waits for one; limit cpu or gres/gpu (GrpTRES) instead, if that is "
        "not wanted"
    )
    of_jobs = (
        f"Slurm limits the number of running jobs ({some_of(few)}): coordinators and tasks of elastic jobs count, "
        "so as many coordinators leave nothing to tasks; limit coordinators by a partition of their own instead "
        "(docs/slurm.md, many elastic jobs at once)"
    )
    return "; ".join(text for text, of in ((of_nodes, found), (of_jobs, few)) if of)


def _records(text: str) -> Iterator[tuple[str, str]]:
    """Whose record each line is, and the line."""
    for line in text.split("\n"):
        if (record := _RECORD.match(line)) is None:
            continue
        qos, account, user = record.groups()
        yield (f"QOS {qos}" if qos else f"user {user} in account {account}" if user else f"account {account}"), line


def _of_few_jobs(text: str) -> Iterator[str]:
    for whose, line in _records(text):
        for name, number in _OF_JOBS.findall(line):
            if int(number) <= _FEW_JOBS:
                yield f"{name}={number} of {whose}"


def _not_asked_for(text: str) -> Iterator[str]:
    for whose, line in _records(text):
        for match in _NOT_ASKED_FOR.finditer(line):
            name = f"{match['of_nodes']}=node" if match["of_nodes"] else match["of_minutes"] or match["of_time"]
            yield f"{name} of {whose}"
