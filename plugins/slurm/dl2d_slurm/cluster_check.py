"""Check of ``dl2d check`` on a Slurm cluster: whether elastic jobs yield as its priorities ask for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from dl2d.core.errors import ResourceManagerError
from dl2d.core.resource_manager import Yields
from dl2d_slurm.commands import Commands, command_environment, configured
from dl2d_slurm.rpc_rate import RpcRate
from dl2d_slurm.settings import SlurmSettings

_WITHOUT_PRIORITIES: Final = "priority/basic"


def priorities_advice(settings: SlurmSettings, environ: Mapping[str, str]) -> str:
    """What to change where priorities say only who came first; "" for nothing, or if Slurm does not say.

    ``environ`` has PATH and, perhaps, SLURM_CONF.
    """
    if all(rule.yields is not Yields.HIGHER_PRIORITY for rule in settings.sharing):
        return ""
    environment = command_environment(settings.slurm_conf, environ)
    rate = RpcRate(settings.rpcs_per_minute, time.monotonic)
    try:
        kind = configured(Commands(environment, settings.command_timeout_seconds, rate), "PriorityType")
    except ResourceManagerError:
        return ""
    if kind != _WITHOUT_PRIORITIES:
        return ""
    return (
        f"PriorityType is {kind}: priorities only tell who came first, so with yield: higher-priority elastic jobs "
        "make no room for jobs that were submitted after them; use yield: always in resource_manager.slurm.sharing"
    )
