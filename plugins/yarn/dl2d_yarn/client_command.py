"""Hadoop's own ``yarn`` command, for what the REST interfaces cannot do: remove a chosen container of a service."""

from __future__ import annotations

import os
import subprocess
from typing import Final

from dl2d.core.errors import Rejected, Unavailable

_SECONDS: Final = 60.0


def decommission(command: str, service: str, instance: str, *, user: str = "", do_as: str = "") -> None:
    """Remove the container of an instance such as ``worker-1``, whose number is not used again.

    The command acts as ``user``, or as this user for ``do_as``. "" is the account of the daemon, with its tickets.

    Raises
    ------
    Unavailable
        The command cannot be run, or does not end in time.
    Rejected
        It failed.
    """
    acting = {"HADOOP_USER_NAME": user, "HADOOP_PROXY_USER": do_as}
    environment = {**os.environ, **{name: value for name, value in acting.items() if value}}
    arguments = [command, "app", "-decommission", service, "-instances", instance]
    try:
        done = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{service}: {instance} is not removed", said=str(error)) from None
    if done.returncode:
        raise Rejected(f"{service}: {instance} is not removed", said=done.stderr[-500:])
