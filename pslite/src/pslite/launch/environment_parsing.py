"""What a task learns from its environment."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from pslite.errors import UsageError
from pslite.job.job_status import Role
from pslite.net.authentication import Identity, parse_token
from pslite.net.tcp_sockets import split_address
from pslite.net.tls import VARIABLE, Encryption

PROGRESS_VARIABLE = "DL2_PROGRESS_DEADLINE"
DURABILITY_VARIABLE = "DL2_DURABILITY"
_TASK = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True)
class TaskEnvironment:
    """A worker's or a server's place in its job."""

    identity: Identity
    coordinator: str


def role_of(environ: Mapping[str, str]) -> Literal["worker", "ps", "coordinator", "container", "standalone"]:
    """Return the role that the environment gives this process.

    Raises
    ------
    UsageError
        DL2_ROLE is none of coordinator, worker, server, ps, container.

    """
    text = environ.get("DL2_ROLE", "")
    match text:
        case "":
            return "coordinator" if environ.get("DL2_DAEMON") else "standalone"
        case "coordinator" | "worker" | "container" | "ps":
            return text
        case "server":
            return "ps"
    raise UsageError(f"DL2_ROLE is {text!r}: it must be coordinator, worker, server or container")


def architecture_of(environ: Mapping[str, str]) -> Literal["ps", "allreduce"]:
    """Return what DL2_ARCHITECTURE says: parameter servers unless it is set.

    Raises `UsageError` if it is neither ps nor allreduce.
    """
    return cast("Literal['ps', 'allreduce']", _one_of(environ, "DL2_ARCHITECTURE", ("ps", "allreduce")) or "ps")


def durability_of(environ: Mapping[str, str]) -> Literal["", "none", "durable"]:
    """Return what DL2_DURABILITY says, for scripts that do not say it; "" if it is not set.

    Raises `UsageError` if it is neither none nor durable.
    """
    return cast("Literal['', 'none', 'durable']", _one_of(environ, DURABILITY_VARIABLE, ("none", "durable")))


def watch_seconds(environ: Mapping[str, str]) -> float:
    """Return the least time between two looks at what a task uses, DL2_WATCH_SECONDS; 0 for none.

    Raises `UsageError` if it is no such number.
    """
    return _seconds("DL2_WATCH_SECONDS", environ.get("DL2_WATCH_SECONDS") or "5")


def progress_deadline(environ: Mapping[str, str]) -> float:
    """Return the least time, in seconds, for which a job may make no progress, DL2_PROGRESS_DEADLINE; 0: for ever.

    Raises `UsageError` if it is no such number.
    """
    return _seconds(PROGRESS_VARIABLE, environ.get(PROGRESS_VARIABLE) or "1800")


def _seconds(name: str, text: str) -> float:
    """Return a number of seconds from its text.  Raises UsageError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{name} is {text!r}: it must be a number of seconds, 0 or more")
    return seconds


def encryption_of(environ: Mapping[str, str]) -> Literal["", "none", "control", "all"]:
    """Return what DL2_ENCRYPT says; "" if it is not set. Raises `UsageError` if it is none of none, control, all."""
    return cast("Literal['', 'none', 'control', 'all']", _one_of(environ, VARIABLE, get_args(Encryption)))


def balance_of(environ: Mapping[str, str]) -> Literal["speed", "even"]:
    """Return what DL2_BALANCE says: by speed unless it is set. Raises `UsageError` if it is neither speed nor even."""
    return cast("Literal['speed', 'even']", _one_of(environ, "DL2_BALANCE", ("speed", "even")) or "speed")


def _one_of(environ: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Return what a variable says, one of some words; "" if it is not set. Raises UsageError."""
    text = environ.get(name, "")
    if text and text not in choices:
        *others, last = choices
        raise UsageError(f"{name} is {text!r}: it must be {', '.join(others)} or {last}")
    return text


def need(environ: Mapping[str, str], name: str) -> str:
    """Return a variable that must be set. Raises `UsageError` if it is not."""
    value = environ.get(name, "")
    if not value:
        raise UsageError(f"{name} is not set: this process was not started as a task of a job")
    return value


def task_environment(environ: Mapping[str, str], role: Role) -> TaskEnvironment:
    """Read DL2_TASK, DL2_COORDINATOR, DL2_TOKEN and DL2_ENCRYPT; the incarnation is new for each process.

    Raises
    ------
    UsageError
        one is missing or malformed.
    AuthenticationError
        the token is malformed.

    """
    task = need(environ, "DL2_TASK")
    if not _TASK.fullmatch(task):
        raise UsageError(f"DL2_TASK is {task!r}: it may have letters, digits, '.', '_' and '-' only")
    coordinator = need(environ, "DL2_COORDINATOR")
    try:
        split_address(coordinator)
    except ValueError as error:
        raise UsageError(f"DL2_COORDINATOR: {error}") from None
    token = parse_token(need(environ, "DL2_TOKEN"))
    return TaskEnvironment(Identity(role, task, uuid.uuid4().hex, token, encryption_of(environ)), coordinator)
