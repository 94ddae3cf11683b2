"""Hadoop's own ``yarn`` command, for what the REST interfaces cannot do: remove a chosen container of a service."""

from __future__ import annotations

import os
import signal
import subprocess

from dl2d.core.errors import Rejected, Unavailable, printable_line

_TIMEOUT_SECONDS = 60.0
#: Time from a failure of the ``yarn`` command to the next attempt: for the same service, and for any, seconds.
COMMAND_RETRY_SECONDS, ANY_COMMAND_RETRY_SECONDS = 600.0, 60.0
#: Size of the end of its error output that errors quote, in bytes.
_MAX_SAID = 500


def decommission(
    command: str, service: str, instance: str, *, user: str = "", do_as: str = "", seconds: float = _TIMEOUT_SECONDS
) -> None:
    """Remove the container of an instance such as ``worker-1``; YARN does not use its number again.

    The command acts as ``user``, or as this user for ``do_as``. "" is the account of the daemon, with its tickets.
    After ``seconds`` it is killed with all processes of its group; it may have been carried out all the same.

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
        process = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise Unavailable(f"{service}: cannot remove {instance}: {command} could not be run", said=str(error)) from None
    with process:
        try:
            _, output = process.communicate(timeout=seconds)  # until all its processes have closed the error output
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)  # it has not been waited for, so the group is still its own
            raise Unavailable(
                f"{service}: {instance} was perhaps not removed: {command} did not end in {seconds:g} s",
                said=_end_of(error.stderr),
            ) from None
    if status := process.returncode:
        raise Rejected(
            f"{service}: {instance} is not removed: {command} ended with status {status}", said=_end_of(output)
        )


def _end_of(output: bytes | None) -> str:
    return printable_line((output or b"")[-_MAX_SAID:].decode(errors="replace"))
