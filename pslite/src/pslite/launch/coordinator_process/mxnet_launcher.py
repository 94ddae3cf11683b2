"""Jobs started by MXNet's own launcher: its environment (DMLC_*) translated to that of dl2-run (DL2_*).

The launcher's scheduler becomes the coordinator, its servers and workers become servers and workers.  It distributes no
secret, so DL2_TOKEN must be set for all of its processes besides.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Mapping

from pslite.errors import UsageError
from pslite.job.job_status import Reply, Status
from pslite.launch.environment_parsing import need
from pslite.net.authentication import parse_token
from pslite.net.tcp_sockets import listen

_ROLES = {"scheduler": "coordinator", "server": "server", "worker": "worker"}


class OpenMembership:
    """Membership source that waits for a number of workers and servers, then admits every task that joins."""

    def __init__(self, workers: int, servers: int) -> None:
        self._counts = {"worker": workers, "ps": servers}
        self._complete = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> OpenMembership:
        """Return the source for the numbers that the launcher has set."""
        return cls(_number(environ, "DMLC_NUM_WORKER", 4096), _number(environ, "DMLC_NUM_SERVER", 4096))

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:
        """Nothing to do: the launcher starts the tasks."""

    def exchange(self, status: Status, *, urgent: bool) -> Reply | None:  # noqa: ARG002
        """Ask for every task that has joined once there are enough; from the first plan on for every one that joins."""
        there = [m for m in status.members if m.state != "left"]
        if not self._complete:
            self._complete = all(sum(m.role == role for m in there) >= count for role, count in self._counts.items())
        if not self._complete:
            return None
        return Reply(members=None if status.plan else frozenset(m.task for m in there))

    def close(self, status: Status) -> None:
        """Nothing to do."""


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether MXNet's launcher has started this process, and DL2_ROLE does not override it."""
    return bool(environ.get("DMLC_ROLE")) and not environ.get("DL2_ROLE")


def task_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the DL2_* variables that correspond to DMLC_*; none if the launcher has not started this process.

    Raises
    ------
    UsageError
        a variable is absent or malformed.
    AuthenticationError
        the token is malformed.

    """
    if not is_launched(environ):
        return {}
    role = _ROLES.get(environ["DMLC_ROLE"])
    if role is None:
        raise UsageError(f"DMLC_ROLE is {environ['DMLC_ROLE']!r}: it must be scheduler, server or worker")
    if not environ.get("DL2_TOKEN"):
        raise UsageError(
            "DMLC_ROLE is set, but DL2_TOKEN is not, with which the processes of a job authenticate each other: set "
            "it to the same 64 hexadecimal digits in all of them (openssl rand -hex 32)"
        )
    parse_token(environ["DL2_TOKEN"])
    return {
        "DL2_ROLE": role,
        "DL2_TASK": f"{environ['DMLC_ROLE']}-{uuid.uuid4().hex[:12]}",
        "DL2_COORDINATOR": f"{need(environ, 'DMLC_PS_ROOT_URI')}:{_number(environ, 'DMLC_PS_ROOT_PORT', 65535)}",
        **({"DL2_HOST": environ["DMLC_NODE_HOST"]} if environ.get("DMLC_NODE_HOST") else {}),
    }


def launched_listener(environ: Mapping[str, str]) -> socket.socket:
    """Listen at the address of the launcher's scheduler."""
    return listen(need(environ, "DMLC_PS_ROOT_URI"), _number(environ, "DMLC_PS_ROOT_PORT", 65535))


def _number(environ: Mapping[str, str], name: str, most: int) -> int:
    text = need(environ, name)
    if not text.isdigit() or not 0 < int(text) <= most:
        raise UsageError(f"{name} is {text!r}: it must be a number from 1 to {most}")
    return int(text)
