"""A task as a batch job: the options of sbatch and the script."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping

from dl2d.core.errors import NodeRefused, Rejected
from dl2d.core.resource_manager import TaskSpec
from dl2d.core.resources import Resources, too_small_everywhere
from dl2d_slurm.commands.commands import VARIABLE_NAME
from dl2d_slurm.settings import SlurmSettings
from dl2d_slurm.submission.sbatch_options import NO_OPTIONS, AnchorOptions

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_RETURN = "_dl2_return"
#: What sbatch says where a job may not run on the node that was named.
NODE_REFUSED = re.compile(
    r"requested node configuration is not available|required node not available|requested nodes are busy",
    re.IGNORECASE,
)
#: Set by slurmd or the shell for the node and the room that the task really has; the anchor's values would be wrong.
NODE_VARIABLES = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
        *("ENVIRONMENT", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_"),
        # Shells refuse to have these set.
        *("UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "OPTIND"),
    }
)


def check_fits(task: TaskSpec, capacities: Mapping[str, Resources]) -> None:
    """Refuse a demand that can never be met, by the capacities of nodes: Slurm would queue some of these for ever.

    Raises
    ------
    NodeRefused
        The node that is named is too small. One that is not among these is Slurm's to refuse.
    Rejected
        No node is named, and all are too small.
    """
    what = f"{task.name} of job {task.job.id}"
    if task.node:
        if task.node in capacities and (short := task.demand.lacking(capacities[task.node])):
            raise NodeRefused(f"{what} does not fit on {task.node} ({short})")
    elif (found := too_small_everywhere(task.demand, capacities)) is not None:
        nearest, short = found
        raise Rejected(f"{what} fits on no node that dl2d uses: even {nearest} has too little {short}")


def basic_arguments(folder: str, owner: tuple[int, int] | None) -> Iterator[str]:
    """Options of sbatch for any job of the daemon; ``owner`` has user and group id, if it becomes another user."""
    yield "--parsable"
    if owner is not None:
        # Without a group of its own a job started by root has root's.
        yield from (f"--uid={owner[0]}", f"--gid={owner[1]}")
    yield f"--chdir={folder}"
    # The command's own environment is small and known; any other choice loads the user's login scripts.
    yield from ("--export=ALL", "--propagate=NONE", "--no-requeue", "--nodes=1", "--ntasks=1")


def sbatch_arguments(
    task: TaskSpec,
    settings: SlurmSettings,
    spelling: Mapping[str, str],
    *,
    as_owner: bool,
    partition: str = "",
    time_limit: str = "",
    time_min: str = "",
    anchor: AnchorOptions = NO_OPTIONS,
) -> list[str]:
    """Options of sbatch. Values that users chose are always behind a ``=``, so none can become an option.

    Parameters
    ----------
    spelling
        Slurm's own spelling of generic resources, by dl2d's lower-case names.
    as_owner
        Whether to become the owner (root may); otherwise the job belongs to whoever runs the daemon.
    partition, time_limit, time_min
        Where the task is to run, for how long, and to how much backfill may shorten that (see ``task_time_limits``);
        empty for what the settings and the owner have, and for no shortening.
    anchor
        What its user gave to sbatch for its anchor.

    Raises
    ------
    Rejected
        The demand cannot be told to Slurm, or a value holds a zero byte, or a list of nodes a slash.
    """
    owner = task.owner
    name = _job_name(task)
    chosen = [
        *basic_arguments(task.launch.cwd, (owner.uid, owner.gid) if as_owner else None),
        *_amounts(task.demand, settings, spelling),
        f"--comment={task.tag}",
        f"--job-name={name}",
        # Relative to --chdir.
        f"--output={name}.out",
    ]
    for option, value in (
        ("--nodelist", task.node),
        ("--partition", partition or settings.partition or owner.partition),
        ("--account", owner.account),
        ("--qos", owner.qos),
        ("--time", time_limit or settings.time_limit),
        # Not beside a --time or --time-min of the administrator's, than which it may be longer.
        ("--time-min", "" if any(word.startswith("--ti") for word in settings.sbatch_options) else time_min),
    ):
        if value:
            chosen.append(f"{option}={value}")
    # Of an option that is given twice, the last counts.
    words = [*chosen, *anchor.for_tasks(), *settings.sbatch_options]
    for word in words:
        option, _, value = word.partition("=")
        if "\0" in word:
            raise Rejected(f"{option} holds a zero byte")
        # Only the administrator may name a file, which sbatch reads as the daemon's user.
        if option in ("--nodelist", "--exclude") and "/" in value and word not in settings.sbatch_options:
            raise Rejected(f"{word}: sbatch would take a list of nodes with a slash in it for the name of a file")
    return words


def _amounts(demand: Resources, settings: SlurmSettings, spelling: Mapping[str, str]) -> Iterable[str]:
    amounts = demand.as_dict()
    yield f"--cpus-per-task={max(1, math.ceil(amounts.pop('cpu', 1)))}"
    memory = math.ceil(amounts.pop("memory", settings.default_memory_mib))
    if memory:
        yield f"--mem={memory}M"
    gres = []
    for name, amount in amounts.items():
        if amount != int(amount):
            raise Rejected(f"{name}={amount:g}: Slurm gives generic resources in whole numbers only")
        typed = sum(other for key, other in amounts.items() if key.startswith(f"{name}:"))
        # gpu and gpu:a100 name the same devices: what is asked for by type is not asked for again.
        if amount > typed:
            gres.append(f"{spelling.get(name, name)}:{int(amount - typed)}")
    if gres:
        yield f"--gres={','.join(gres)}"


def batch_script(task: TaskSpec) -> str:
    """The batch script: the environment, then the command in place of the shell, so that signals reach it.

    Names that no shell can set and those of ``NODE_VARIABLES`` and Slurm's own are left out. The script first moves its
    output, which Slurm has opened, to ``worker-3.out`` in the job's folder ``dl2-<id>``: Slurm itself does not create
    folders, and goes on writing to the same file.

    Raises
    ------
    Rejected
        There is no command, or it or the environment holds a zero byte.
    """
    launch = task.launch
    if not launch.argv:
        raise Rejected("the task has no command")
    if any("\0" in text for pair in launch.env for text in pair) or any("\0" in word for word in launch.argv):
        raise Rejected("the task's command or environment holds a zero byte")
    # sbatch stops looking for #SBATCH lines at the first command: none of the user's text comes before it.
    folder, output = _UNSAFE.sub("_", f"dl2-{task.job.id}"), f"{_job_name(task)}.out"
    moved = f"{folder}/{_UNSAFE.sub('_', task.name)}.out"
    # Before the user's PATH is set.
    move = f"[ -f {output} ] && mkdir -p {folder} && mv -f {output} {moved}"
    lines = ["#!/bin/sh", ":", move, rf"{_RETURN}=$(printf '\r')"]
    for name, value in launch.env:
        if VARIABLE_NAME.fullmatch(name) and name not in NODE_VARIABLES and not name.startswith(("SLURM", _RETURN)):
            lines.append(f"export {name}={_quoted(value)}")
    # A task that is asked to end, or whose job is cancelled, is COMPLETED in Slurm's accounting, not FAILED.
    lines.append("export DL2_STOPPED_STATUS=0")
    lines.append("exec " + " ".join(_quoted(word) for word in launch.argv))
    return "\n".join(lines) + "\n"


def _job_name(task: TaskSpec) -> str:
    return _UNSAFE.sub("_", f"dl2-{task.job.id}-{task.name}")


def _quoted(text: str) -> str:
    # sbatch refuses scripts with carriage returns in them.
    return shlex.quote(text).replace("\r", f"'\"${_RETURN}\"'")
