"""What ``dl2d check`` advises on Slurm's configuration: priorities, and partitions that give nodes to a user."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from dl2d.core.error_wording import some_of
from dl2d.core.errors import ResourceManagerError
from dl2d.core.resource_manager import Yields
from dl2d_slurm.commands.command_records import SHOW_PARTITIONS
from dl2d_slurm.commands.commands import Commands, command_environment, configured
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.munge_authentication import EXCLUSIVE_USER_PARTITION
from dl2d_slurm.settings import SlurmSettings

_PRIORITY_BASIC: Final = "priority/basic"


def priorities_advice(settings: SlurmSettings, environ: Mapping[str, str]) -> str:
    """What is advised where priorities say only who came first; "" for nothing, or if Slurm does not say.

    ``environ`` has PATH and, perhaps, SLURM_CONF.
    """
    if all(rule.yields is not Yields.HIGHER_PRIORITY for rule in settings.sharing):
        return ""
    try:
        kind = configured(_commands(settings, environ), "PriorityType")
    except ResourceManagerError:
        return ""
    if kind != _PRIORITY_BASIC:
        return ""
    return (
        f"PriorityType is {kind}: priorities only tell who came first, so with yield: higher-priority elastic jobs "
        "make no room for jobs that were submitted after them; use yield: always in resource_manager.slurm.sharing"
    )


def partition_advice(settings: SlurmSettings, environ: Mapping[str, str]) -> str:
    """What is advised on partitions in which Slurm gives each node to one user; as above."""
    try:
        answer = _commands(settings, environ).run(*SHOW_PARTITIONS)
    except ResourceManagerError:
        return ""
    if answer.status != 0:
        return ""
    chosen = [name for name in settings.partition.split(",") if name]
    found = [name for name in EXCLUSIVE_USER_PARTITION.findall(answer.stdout) if not chosen or name in chosen]
    if not found:
        return ""
    return (
        f"ExclusiveUser=YES in {some_of(found)}: elastic jobs make no room there for those of other users, "
        "which may wait for ever; leave these out of resource_manager.slurm.partition, or set ExclusiveUser=NO"
    )


def _commands(settings: SlurmSettings, environ: Mapping[str, str]) -> Commands:
    environment = command_environment(settings.slurm_conf, environ)
    return Commands(environment, settings.command_timeout_seconds, RpcRate(settings.rpcs_per_minute, time.monotonic))
