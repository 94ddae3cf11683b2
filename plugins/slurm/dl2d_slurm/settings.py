"""Settings of the Slurm resource manager: ``resource_manager.slurm`` in the config file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

from dl2d.core.input_validation import (
    AbsolutePath,
    ClusterName,
    Items,
    ManagerSettings,
    Number,
    Record,
    Text,
    Whole,
    bad,
)
from dl2d.core.resource_manager import Yields
from dl2d.core.training_job_detection_rules import SIZE, StaticJobRule, Words
from dl2d_slurm.commands.values_in_command_output import TIME_SPAN

_PARTITION = r"[A-Za-z0-9_][A-Za-z0-9_.-]*(,[A-Za-z0-9_][A-Za-z0-9_.-]*)*"
_TIME = rf"(?i:UNLIMITED)|{TIME_SPAN.pattern}"
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*)"
_OPTION = re.compile(r"--[a-z][a-z-]*(=.*)?")
#: Options that ``sbatch_options`` may not contain, nor their beginnings, which sbatch takes for them.
_RESERVED = frozenset(
    {
        *("account", "array", "chdir", "comment", "cpus-per-task", "export", "gid", "gres", "job-name", "mem"),
        *("no-requeue", "nodelist", "nodes", "ntasks", "output", "parsable", "partition", "propagate", "qos"),
        *("requeue", "test-only", "uid", "wait", "wrap", "clusters"),
        # With these sbatch prints no job id.
        *("help", "quiet", "usage", "version"),
    }
)


def _text(given: object) -> object:
    # YAML reads 60 and 12:30:00 as numbers; the latter is lost, the former is meant.
    return str(given) if isinstance(given, int) and not isinstance(given, bool) else given


def _options(options: tuple[str, ...]) -> tuple[str, ...]:
    for option in options:
        if not _OPTION.fullmatch(option):
            raise bad("", f"expected an option such as --reservation=ml, got {option!r}")
        name = option[2:].partition("=")[0]
        if any(reserved.startswith(name) for reserved in _RESERVED):
            raise bad("", f"{option!r} cannot be given in sbatch_options")
    return options


def _secure(address: str) -> str:
    if not address.startswith(("unix:", "https:")):
        raise bad("", "http:// would show the daemon's token and users' scripts to the network; use https:// or unix:/")
    try:
        urlsplit(address).port  # noqa: B018
    except ValueError as error:
        raise bad("", f"{address!r} is no URL: {error}") from None
    return address


class Backend(StrEnum):
    """What submits and cancels jobs. All else is asked by commands: listing 1,000 jobs is fastest by squeue."""

    COMMAND = "command"
    REST = "rest"
    PYSLURM = "pyslurm"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingRule(Record):
    """How elastic jobs of a partition share its nodes with other jobs."""

    #: Pattern of the partition's name, as in a shell (in ``watch`` rules it is an exact name).
    partition: Words = "*"
    #: To which waiting jobs elastic jobs give up tasks above their minimum sizes.
    yields: Yields = Yields.ALWAYS
    #: Maximum part of the partition's resources that its elastic jobs may hold together.
    max_share: Annotated[float, Number(1.0, above=0.0)] = 1.0
    #: Number of nodes that are kept empty for other jobs, as far as elastic jobs can be reduced for it.
    min_free: Annotated[int, Whole(0, 10_000)] = 0

    file_keys: ClassVar[Mapping[str, str]] = {"yields": "yield"}
    ignored_keys: ClassVar[frozenset[str]] = frozenset()


#: ``SlurmStaticJobRule.size`` of a rule that counts tasks.
TASKS = "tasks"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStaticJobRule(StaticJobRule):
    """Slurm jobs that count as training one type of model."""

    #: Exact name; a job that waits may name several partitions.
    partition: Words
    #: Pattern as in a shell; ``*`` matches any.
    comment: Words = "*"
    #: What counts as a worker: a task, or a unit of a resource (``gpu``).
    size: Annotated[str, Text(64, SIZE, "tasks or a resource such as gpu")] = TASKS

    def matches(self, partition: str, name: str, comment: str) -> bool:
        """Whether a job is one of these."""
        named = self.partition in partition.split(",")
        return named and fnmatchcase(name, self.name) and fnmatchcase(comment, self.comment)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings(ManagerSettings):
    """Checked settings of the Slurm resource manager."""

    #: Name of the cluster, the first part of its jobs' keys; "" asks Slurm for its ClusterName.
    cluster: ClusterName = ""
    #: Partitions whose nodes dl2d sees and in which tasks run, each in that of its anchor if this is one of them; ""
    #: for all nodes, and for each task the partition of its anchor.
    partition: Annotated[
        str, Text(4096, _PARTITION, "a partition's name or a comma list of them"), BeforeValidator(_text)
    ] = ""
    #: Path of slurm.conf; "" leaves it to $SLURM_CONF and Slurm's own default.
    slurm_conf: AbsolutePath = ""
    #: Socket of the munged that proofs are checked with; "" for munge's own default.
    munge_socket: AbsolutePath = ""
    #: What submits and cancels jobs.
    backend: Backend = Backend.AUTO
    #: Address of slurmrestd, ``unix:`` and the path of its socket or an https URL; "" for none.
    slurmrestd: Annotated[
        str,
        Text(
            4096,
            rf"unix:/[^\x00]*|(?i:http)://.*|https://{_HOST}(?::[0-9]+)?",
            "unix:/path/of/socket or https://host:port",
        ),
        AfterValidator(_secure),
    ] = ""
    #: Python that has pyslurm; "" for the daemon's own where ``backend`` is pyslurm.
    pyslurm_python: AbsolutePath = ""
    #: After this many seconds a command, or a call of slurmrestd or pyslurm, counts as unanswered, unless a shorter
    #: time is set where it is called.
    command_timeout_seconds: Annotated[float, Number(600, least=1)] = 30.0
    #: A listing younger than this is given out again, unless a task was started or stopped, or a job registered,
    #: since; 0 never.
    poll_floor_seconds: Annotated[float, Number(3600)] = 0.0
    #: Most tasks that are submitted in a second, on average; a burst of one second's worth is allowed.
    submit_rate_per_second: Annotated[float, Number(1000, least=0.1)] = 20.0
    #: Most RPCs to slurmctld in a minute; those that cancel jobs do not count toward it and never wait.
    rpcs_per_minute: Annotated[int, Whole(100, 1_000_000)] = 1800
    #: Longest time limit of task jobs in sbatch's form (``2-00:00:00``), which get what is left of their anchor's;
    #: "" for no other than the partition's.
    time_limit: Annotated[
        str,
        Text(100, _TIME, "a time as sbatch knows it, e.g. 2-00:00:00 or UNLIMITED (quote it in YAML)"),
        BeforeValidator(_text),
    ] = ""
    #: Memory in MiB of a task that demands none; 0 leaves it to the partition's default, which may be a whole node.
    default_memory_mib: Annotated[int, Whole(0, 2**40)] = 0
    #: More options for sbatch, such as ``--reservation=ml``.
    sbatch_options: Annotated[tuple[str, ...], Items(1000, least=0), AfterValidator(_options)] = ()
    #: How elastic jobs of a partition share its nodes with other jobs: the first rule that matches it counts.
    sharing: Annotated[tuple[SharingRule, ...], Items(1000, least=0)] = ()
    #: Which jobs are static jobs, and of which model: the first rule that matches a job counts.
    watch: Annotated[tuple[SlurmStaticJobRule, ...], Items(10_000, least=0)] = ()

    section: ClassVar[str] = "resource_manager.slurm"
