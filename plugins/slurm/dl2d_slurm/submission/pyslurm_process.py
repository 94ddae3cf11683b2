"""A program that submits batch jobs through pyslurm, which loads Slurm's library into it.

The daemon starts it as a process of its own, with a Python (3.9 or later) that has pyslurm: a fault of the library ends
this process and not the daemon. The file is run by its path and imports nothing of dl2d.

It reads requests from the socket whose number is its argument and answers each with a line of JSON. The first line,
unasked, has the release of Slurm for which pyslurm was built, ``{"release": "26.05"}``, or ``{"error": ...}``. A
request is a line ``{"number": 3, "job": ...}``, where the job is as slurmrestd takes it. The answer has the same number
and ``"job_id": 7``, ``"error": ...`` in Slurm's words, or ``"refused": ...`` for what pyslurm does not take.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import sys
from typing import Any

#: pyslurm's names of what slurmrestd names otherwise.
_NAMES = {
    "current_working_directory": "working_directory",
    "partition": "partitions",
    "requeue": "is_requeueable",
    "reservation": "reservations",
    "tasks": "ntasks",
    "time_minimum": "time_limit_min",
    "tres_per_node": "gres_per_node",
}


def main() -> None:
    """Answer requests until the daemon closes its end of the socket."""
    with socket.socket(fileno=int(sys.argv[1])) as daemon, daemon.makefile("rwb") as lines:

        def answer(said: dict[str, object]) -> None:
            lines.write(json.dumps(said).encode() + b"\n")
            lines.flush()

        try:
            pyslurm = importlib.import_module("pyslurm")
            major, minor, *_ = pyslurm.slurm_api_version()
            answer({"release": f"{major}.{minor:02}"})
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the installation is the daemon's to tell
            answer({"error": f"{type(error).__name__}: {error}"})
            return
        for line in lines:
            request = json.loads(line)
            answer({"number": request["number"], **_submitted(pyslurm, request["job"])})


def _submitted(pyslurm: Any, job: dict[str, Any]) -> dict[str, object]:
    try:
        attributes = {_NAMES.get(name, name): _attribute_value(name, value) for name, value in job.items()}
        # Without types pyslurm asks for all profiles of accounting, and an empty list counts as none given; this is an
        # empty sequence that is true.
        description = pyslurm.JobSubmitDescription(profile_types=iter(()), **attributes)
        return {"job_id": description.submit()}
    except pyslurm.RPCError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - pyslurm raises many kinds of errors for values that it does not take
        return {"refused": f"{type(error).__name__}: {error}"}


def _attribute_value(name: str, value: Any) -> object:
    """A field of slurmrestd as the value of pyslurm's attribute."""
    if name == "environment":
        return dict(variable.split("=", 1) for variable in value)
    if name in ("memory_per_node", "time_limit", "time_minimum"):
        return "UNLIMITED" if value.get("infinite") else value["number"]
    if name in ("partition", "reservation"):
        return value.split(",")
    if name == "tres_per_node":
        return value.replace("gres/", "")
    return value


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the daemon has ended
        main()
