"""Settings of the Slurm resource manager: ``resource_manager.slurm`` in the config file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

from dl2d.core.input_validation import Items, ManagerSettings, Number, Text, Whole, bad
from dl2d_slurm.observed_jobs import SlurmStaticJobRule
from dl2d_slurm.sharing_with_waiting_jobs import SharingRule
from dl2d_slurm.submission_backends import Backend

_PARTITION = r"[A-Za-z0-9_][A-Za-z0-9_.-]*(,[A-Za-z0-9_][A-Za-z0-9_.-]*)*"
_TIME = r"(?i:UNLIMITED)|[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}"
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*)"
_OPTION = re.compile(r"--[a-z][a-z-]*(=.*)?")
#: Options of sbatch that are dl2d's own business.
_RESERVED = frozenset(
    {
        *("account", "array", "chdir", "comment", "cpus-per-task", "export", "gid", "gres", "job-name", "mem"),
        *("no-requeue", "nodelist", "nodes", "ntasks", "output", "parsable", "partition", "propagate", "qos"),
        *("requeue", "test-only", "uid", "wait", "wrap"),
    }
)


def _text(given: object) -> object:
    # YAML reads 60 and 12:30:00 as numbers; the latter is lost, the former is meant.
    return str(given) if isinstance(given, int) and not isinstance(given, bool) else given


def _options(options: tuple[str, ...]) -> tuple[str, ...]:
    for option in options:
        if not _OPTION.fullmatch(option):
            raise bad("", f"expected an option such as --reservation=ml, got {option!r}")
        if option[2:].partition("=")[0] in _RESERVED:
            raise bad("", f"{option!r} is set by dl2d itself")
    return options


def _secure(address: str) -> str:
    if not address.startswith(("unix:", "https:")):
        raise bad("", "http:// would show the daemon's token and users' scripts to the network; use https:// or unix:/")
    try:
        urlsplit(address).port  # noqa: B018
    except ValueError as error:
        raise bad("", f"{address!r} is no URL: {error}") from None
    return address


AbsolutePath = Annotated[str, Text(4096, r"/[^\x00]*", "an absolute path")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings(ManagerSettings):
    """Checked settings of the Slurm resource manager."""

    #: Name of the cluster, the first part of its jobs' keys; "" asks Slurm for its ClusterName.
    cluster: Annotated[str, Text(64, "[A-Za-z0-9_-]+", "up to 64 letters, digits, _ or -")] = ""
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
    #: After this many seconds a command of Slurm counts as unanswered.
    command_timeout_seconds: Annotated[float, Number(600, least=1)] = 30.0
    #: A listing younger than this is given out again, unless a task was started or stopped, or a job registered,
    #: since; 0 never.
    poll_floor_seconds: Annotated[float, Number(3600)] = 0.0
    #: Most tasks that are submitted in a second, on average; a burst of one second's worth is allowed.
    submit_rate_per_second: Annotated[float, Number(1000, least=0.1)] = 20.0
    #: Most RPCs to slurmctld in a minute; cancelling is counted and never waits.
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
    #: Which jobs of users who know nothing of dl2d train, and what: the first rule that takes a job counts.
    watch: Annotated[tuple[SlurmStaticJobRule, ...], Items(10_000, least=0)] = ()

    section: ClassVar[str] = "resource_manager.slurm"
