"""A batch job for slurmrestd or pyslurm: fields of ``job_desc_msg`` for options of sbatch, script and environment.

Names and forms are those of slurmrestd. The job is the same as sbatch would submit. If that is impossible it is
refused, and the message names the backend and the option or variable that it cannot be given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dl2d.core.errors import Rejected
from dl2d_slurm.commands.commands import UMASK, VARIABLE_NAME, privileged_users
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.commands.values_in_command_output import hosts
from dl2d_slurm.submission.sbatch_backend import JobControl
from dl2d_slurm.submission.sbatch_options import time_limit_minutes

_NUMBER = re.compile(r"-?[0-9]{1,20}")
_MEBIBYTES = re.compile(r"([0-9]{1,15})M")
_NODE_LIST = re.compile(r"[A-Za-z0-9_.,\[\]-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: Maximum of a 32-bit number in Slurm; larger ones stand for "none" and "infinite".
_MAX_NUMBER = 0xFFFFFFF0
#: Maximum of ``--nice``, both ways.
_MAX_NICE = 2**31 - 3


def _text(value: str) -> str:
    if not value:
        raise ValueError("it has no value")
    return value


def _whole(value: str, least: int = 0, most: int = _MAX_NUMBER) -> int:
    if not _NUMBER.fullmatch(value) or not least <= int(value) <= most:
        raise ValueError(f"expected a whole number from {least} to {most}, got {value!r}")
    return int(value)


def _positive(value: str) -> int:
    return _whole(value, 1)


def _id(value: str) -> str:
    return str(_whole(value))


def _nice(value: str) -> int:
    return _whole(value, -_MAX_NICE, _MAX_NICE)


def _number(value: int | None) -> dict[str, object]:
    return {"set": True, "number": value} if value is not None else {"set": True, "infinite": True}


def _memory(value: str) -> dict[str, object]:
    match = _MEBIBYTES.fullmatch(value)
    if match is None:
        raise ValueError(f"expected MiB such as 100M, got {value!r}")
    return _number(_positive(match[1]))


def _minutes(value: str) -> dict[str, object]:
    minutes = time_limit_minutes(value)
    return _number(minutes if minutes is None else _positive(str(minutes)))


def _gres(value: str) -> str:
    return ",".join(f"gres/{each}" for each in _text(value).split(","))


def _nodes(value: str) -> Sequence[str]:
    # sbatch takes what has a slash in it for a file.
    nodes = hosts(value) if _NODE_LIST.fullmatch(value) else ()
    if not nodes:
        raise ValueError(f"expected a node list such as n[1-4],gpu7, got {value!r}")
    return nodes


def _no_requeue(value: str) -> bool:
    if value:
        raise ValueError("it takes no value")
    return False


#: By option of sbatch: the field of the job, and the function that converts the option's value. Options without a field
#: concern sbatch alone.
_FIELDS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "--account": ("account", _text),
    "--chdir": ("current_working_directory", _text),
    "--comment": ("comment", _text),
    "--constraint": ("constraints", _text),
    "--cpus-per-task": ("cpus_per_task", _positive),
    "--exclude": ("excluded_nodes", _nodes),
    "--export": ("", str),
    "--gid": ("group_id", _id),
    "--gres": ("tres_per_node", _gres),
    "--job-name": ("name", _text),
    "--licenses": ("licenses", _text),
    "--mem": ("memory_per_node", _memory),
    "--nice": ("nice", _nice),
    "--no-requeue": ("requeue", _no_requeue),
    "--nodelist": ("required_nodes", _nodes),
    "--nodes": ("nodes", _text),
    "--ntasks": ("tasks", _positive),
    "--output": ("standard_output", _text),
    "--parsable": ("", str),
    "--partition": ("partition", _text),
    "--propagate": ("", str),
    "--qos": ("qos", _text),
    "--reservation": ("reservation", _text),
    "--time": ("time_limit", _minutes),
    "--time-min": ("time_minimum", _minutes),
    "--uid": ("user_id", _id),
    "--wckey": ("wckey", _text),
}


@dataclass(eq=False)
class JobFieldsControl(JobControl):
    """Base of the backends that submit a job as its fields, as root or SlurmUser."""

    rate: RpcRate
    #: Where it submits: address of slurmrestd, or Python that has pyslurm.
    place: str
    #: Seconds after which a call counts as unanswered, with all that it waits for.
    time_limit: float
    #: Environment of jobs.
    environment: Mapping[str, str]
    #: Seconds on a monotonic clock.
    timer: Callable[[], float]

    def privileged(self) -> Collection[int]:
        """See ``JobControl``: root and SlurmUser."""
        return privileged_users(self.commands)


def job_fields(options: Sequence[str], backend: str) -> dict[str, object]:
    """Fields of a job for options of sbatch.

    Raises
    ------
    Rejected
        An option has no field, or its value cannot be sent unchanged; names the option.
    """
    fields: dict[str, object] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in _FIELDS:
            raise Rejected(
                f"{name} cannot be used with the backend {backend}, which knows only {', '.join(sorted(_FIELDS))}"
            )
        field, made_of = _FIELDS[name]
        _check_text(name, value, _CONTROL, backend)
        if field:
            try:
                fields[field] = made_of(value)
            except ValueError as error:
                raise Rejected(f"{name} cannot be used with the backend {backend}: {error}") from None
    return fields


def job_description(
    options: Sequence[str], script: str, environment: Mapping[str, str], *, backend: str
) -> dict[str, object]:
    """A job with its script and environment; it has the file mode mask of sbatch as ``Commands`` runs it.

    Raises
    ------
    Rejected
        As ``job_fields``, and for a script or a variable that cannot be sent unchanged.
    """
    _check_text("the script", script, re.compile("\0"), backend)
    for name, value in environment.items():
        if not VARIABLE_NAME.fullmatch(name):
            raise Rejected(
                f"the variable {name!r} cannot be used with the backend {backend}, where names have letters, digits "
                "and _ only: unset it, or use backend: command"
            )
        _check_text(f"the variable {name}", value, _CONTROL, backend)
    fields = job_fields(options, backend)
    # Set by sbatch, too: the first tells slurmd the mask, the second tells the job its --cpus-per-task.
    variables = {**environment, "SLURM_UMASK": f"{UMASK:04o}"}
    if "cpus_per_task" in fields:
        variables["SLURM_CPUS_PER_TASK"] = str(fields["cpus_per_task"])
    return {
        **fields,
        "environment": [f"{name}={value}" for name, value in variables.items()],
        "script": script,
    }


def _check_text(name: str, text: str, forbidden: re.Pattern[str], backend: str) -> None:
    """Raise ``Rejected`` where JSON, or the C strings that are made of it, cannot hold a text."""
    if match := forbidden.search(text):
        raise Rejected(f"{name} cannot be used with the backend {backend}: it holds the control character {match[0]!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Rejected(
            f"{name} cannot be used with the backend {backend}: it is not UTF-8 (character {error.start}); "
            "use backend: command"
        ) from None
