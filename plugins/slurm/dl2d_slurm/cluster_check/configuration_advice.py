"""What ``dl2d check`` finds in the settings and in Slurm's configuration: priorities, partitions, munge's socket."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import NamedTuple

from dl2d.core.errors import ResourceManagerError, Unavailable, did_you_mean, some_of
from dl2d.core.resource_manager import Yields
from dl2d_slurm.cluster_check.unsupported_limits import on_limits
from dl2d_slurm.commands.commands import Commands, command_environment, configured, failure
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.commands.squeue_and_sinfo_records import SHOW_PARTITIONS, shown_fields
from dl2d_slurm.jobs.waiting_jobs import sharing_rule
from dl2d_slurm.munge_authentication import EXCLUSIVE_USER_PARTITION
from dl2d_slurm.settings import SlurmSettings

#: Beginning of what sbatch says where slurmctld refuses a job that is only tested.
_BY_SLURMCTLD = "allocation failure"
_PRIORITY_BASIC = "priority/basic"
#: Modes of preemption that suspend jobs and resume them later.
_SUSPENDING = frozenset({"SUSPEND", "GANG"})


_NOT_IN_TIME = "tasks that do not start within jobs.start_seconds are withdrawn, so none may ever start"
#: Options that sbatch takes and that do not suit tasks: why, and whether no job can train with them.
_UNSUITABLE: Mapping[str, tuple[str, bool]] = {
    "--hold": ("no task starts before somebody releases it", True),
    "--begin": (_NOT_IN_TIME, True),
    "--dependency": (_NOT_IN_TIME, True),
    "--deadline": ("Slurm ends or removes tasks at that time, whatever is left of their jobs", False),
    "--exclusive": (
        (
            "each task gets a whole node, but dl2d counts only what it asked for; use OverSubscribe=EXCLUSIVE in the "
            "partition instead"
        ),
        False,
    ),
    "--container": ("dl2-run starts inside the container, which may lack dl2d's file and munge", False),
    "--priority": (
        "tasks come before all jobs of others, or behind all of them, whatever the site's priorities say",
        False,
    ),
}


class Advice(NamedTuple):
    """What is wrong with a setting or with Slurm's configuration, and what to do."""

    item: str
    text: str
    #: The daemon, or some of its jobs, cannot work with it.
    wrong: bool = False


def munge_socket_problem(settings: SlurmSettings) -> str:
    """Why ``munge_socket`` cannot be used; "" if it can, or is not set."""
    path = settings.munge_socket
    if not path:
        return ""
    try:
        why = "" if stat.S_ISSOCK(os.stat(path).st_mode) else "it is not a socket"  # noqa: PTH116
    except OSError as error:
        why = error.strerror or str(error)
    return f"{path}: {why}; start munged with this socket, or correct the path" if why else ""


def configuration_advice(settings: SlurmSettings, environ: Mapping[str, str]) -> Iterator[Advice]:
    """What is advised on Slurm's configuration and limits; nothing on what Slurm does not tell.

    ``environ`` has PATH and, perhaps, SLURM_CONF.
    """
    environment = command_environment(settings.slurm_conf, environ)
    rate = RpcRate(settings.rpcs_per_minute, time.monotonic)
    commands = Commands(environment, settings.command_timeout_seconds, rate)
    for item, find in (
        ("slurm priorities", _on_priorities),
        ("slurm requeue", _on_requeue),
        ("slurm limits", on_limits),
    ):
        with suppress(ResourceManagerError):
            if text := find(settings, commands):
                yield Advice(item, text)
    for advice in (_on_partitions, _on_options):
        with suppress(ResourceManagerError):
            yield from advice(settings, commands)


def _on_priorities(settings: SlurmSettings, commands: Commands) -> str:
    """What is advised where priorities say only who came first."""
    if all(rule.yields is not Yields.HIGHER_PRIORITY for rule in settings.sharing):
        return ""
    kind = configured(commands, "PriorityType")
    if kind != _PRIORITY_BASIC:
        return ""
    return (
        f"PriorityType is {kind}: priorities only tell who came first, so with yield: higher-priority elastic jobs "
        "make no room for jobs that were submitted after them; use yield: always in resource_manager.slurm.sharing"
    )


def _on_requeue(_: SlurmSettings, commands: Commands) -> str:
    """What is advised if Slurm requeues only jobs whose users ask for it."""
    if configured(commands, "JobRequeue") != "0":
        return ""
    return (
        "JobRequeue is 0: a job whose coordinator is preempted or loses its node does not start again, and idle "
        "coordinators cannot make room for others, except of jobs submitted with --requeue; set JobRequeue=1"
    )


def _on_partitions(settings: SlurmSettings, commands: Commands) -> Iterator[Advice]:
    """What is wrong with partitions: names in the settings, and what dl2d does not know of."""
    text = commands.ask(*SHOW_PARTITIONS)
    found = [shown_fields(line) for line in text.split("\n") if line.startswith("PartitionName=")]
    partitions = {fields["PartitionName"]: fields for fields in found}
    if not partitions:
        return
    chosen = [name for name in settings.partition.split(",") if name]
    yield from _advice_on_names(settings, chosen, list(partitions))
    used = {name: fields for name, fields in partitions.items() if not chosen or name in chosen}
    yield from _advice_on_min_free(settings, used)
    if names := [name for name in EXCLUSIVE_USER_PARTITION.findall(text) if name in used]:
        yield Advice(
            "slurm partitions",
            f"ExclusiveUser=YES in {some_of(names)}: elastic jobs make no room there for those of other users, "
            "which may wait for ever; leave these partitions out of resource_manager.slurm.partition, or set "
            "ExclusiveUser=NO",
        )
    suspending = [
        name for name in used if not _SUSPENDING.isdisjoint(used[name].get("PreemptMode", "").upper().split(","))
    ]
    if suspending:
        yield Advice(
            "slurm partitions",
            f"PreemptMode has SUSPEND or GANG in {some_of(suspending)}: suspended tasks stand still, and a job without "
            "checkpoints may lose its work; let jobs write checkpoints, or set PreemptMode=OFF for these partitions",
        )


def unsuitable_options_advice(settings: SlurmSettings) -> Iterator[Advice]:
    """Options of ``sbatch_options`` that sbatch takes and that do not suit tasks; sbatch takes beginnings of names."""
    for option in settings.sbatch_options:
        name = option.partition("=")[0]
        for unsuitable, (why, wrong) in _UNSUITABLE.items():
            if unsuitable.startswith(name):
                yield Advice(
                    "resource_manager.slurm.sbatch_options",
                    f"leave out {option}, which holds for each task: {why}",
                    wrong,
                )
                break


def _on_options(settings: SlurmSettings, commands: Commands) -> Iterator[Advice]:
    """What Slurm says of a job with ``sbatch_options``; nothing if it accepts that, or refuses one without them, too.

    Words that sbatch itself does not take are wrong. What slurmctld refuses may depend on who submits the job.
    """
    if not settings.sbatch_options:
        return
    job = ["--wrap=true", "--output=/dev/null", f"--mem={settings.default_memory_mib or 1}M"]
    job += [f"--partition={settings.partition}"] if settings.partition else []
    answer = commands.run("sbatch", "--test-only", *job, *settings.sbatch_options)
    if answer.status == 0 or commands.run("sbatch", *job, "--test-only").status != 0:
        return
    error = failure("sbatch --test-only with these options", answer)
    key, wrong = "resource_manager.slurm.sbatch_options", _BY_SLURMCTLD not in error.said
    if isinstance(error, Unavailable):
        return
    what = "no task can be submitted" if wrong else "tasks of jobs may be refused in the same way"
    yield Advice(key, f"{error}; {what}: correct {' '.join(settings.sbatch_options)}", wrong=wrong)


def _advice_on_names(settings: SlurmSettings, chosen: Iterable[str], existing: Sequence[str]) -> Iterator[Advice]:
    """Names of partitions in the settings that Slurm does not have."""
    known = some_of(existing)
    for name in chosen:
        if name not in existing:
            text = f"Slurm has no partition {name}{did_you_mean(name, existing)}; name one of {known}"
            yield Advice("resource_manager.slurm.partition", text, wrong=True)
    for number, rule in enumerate(settings.sharing):
        if not any(fnmatchcase(name, rule.partition) for name in existing):
            key = f"resource_manager.slurm.sharing[{number}].partition"
            text = f"no partition matches {rule.partition!r}, so the rule has no effect; Slurm has {known}"
            yield Advice(key, text)


def _advice_on_min_free(settings: SlurmSettings, used: Mapping[str, Mapping[str, str]]) -> Iterator[Advice]:
    """Rules that keep more nodes free than a partition has."""
    for number, rule in enumerate(settings.sharing):
        sizes = {name: int(total) for name in used if (total := used[name].get("TotalNodes", "")).isdecimal()}
        small = [
            f"{name} ({size})"
            for name, size in sizes.items()
            if 0 < size < rule.min_free and sharing_rule(name, settings.sharing) is rule
        ]
        if small:
            yield Advice(
                f"resource_manager.slurm.sharing[{number}].min_free",
                f"{rule.min_free} is more than the number of nodes of {some_of(small)}, so elastic jobs get no more "
                "than their minimum sizes there; lower it",
            )
