"""What ``dl2d check`` advises where Slurm enforces limits that dl2d does not ask for: those of nodes and of minutes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Final

from dl2d.core.error_wording import some_of
from dl2d.core.errors import ResourceManagerError
from dl2d_slurm.commands.commands import Commands, command_environment
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.limits.association_limits import ASK_LIMITS, enforces_limits
from dl2d_slurm.settings import SlurmSettings

#: Limits that are set and that dl2d does not ask for: of nodes, and of minutes.
_NOT_ASKED_FOR: Final = re.compile(
    r"(?<=[\s{])(?:(?P<of_nodes>GrpTRES|MaxTRESP[UA])=(?:[^\s}]*,)?node=\d"
    r"|(?P<of_minutes>GrpTRESMins|GrpTRESRunMins)=(?:[^\s}]*,)?[^\s,=}]+=\d|(?P<of_time>GrpWall)=\d)"
)
#: Whose record a line is: a QOS, or an account with or without a user.
_RECORD: Final = re.compile(r"(?:QOS=([^\s(]+)|ClusterName=\S* Account=(\S+) UserName=([^\s(]*))")


def limits_advice(settings: SlurmSettings, environ: Mapping[str, str]) -> str:
    """What is advised where Slurm enforces limits that dl2d does not ask for; "" for nothing, or if Slurm does not say.

    ``environ`` has PATH and, perhaps, SLURM_CONF.
    """
    environment = command_environment(settings.slurm_conf, environ)
    rate = RpcRate(settings.rpcs_per_minute, time.monotonic)
    commands = Commands(environment, settings.command_timeout_seconds, rate)
    try:
        answer = commands.run(*ASK_LIMITS)
        found = list(dict.fromkeys(_not_asked_for(answer.stdout)))
        if answer.status != 0 or not found or not enforces_limits(commands.run("scontrol", "show", "config").stdout):
            return ""
    except ResourceManagerError:
        return ""
    return (
        f"Slurm limits the number of nodes or the minutes ({some_of(found)}): dl2d does not read these limits, so "
        "elastic jobs grow until one of their tasks waits for one; limit cpu or gres/gpu (GrpTRES) instead, if that is "
        "not wanted"
    )


def _not_asked_for(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        if (record := _RECORD.match(line)) is None:
            continue
        qos, account, user = record.groups()
        whose = f"QOS {qos}" if qos else f"user {user} in account {account}" if user else f"account {account}"
        for match in _NOT_ASKED_FOR.finditer(line):
            name = f"{match['of_nodes']}=node" if match["of_nodes"] else match["of_minutes"] or match["of_time"]
            yield f"{name} of {whose}"
