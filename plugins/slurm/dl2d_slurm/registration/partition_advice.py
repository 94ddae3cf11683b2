"""Advice on partitions in which Slurm gives whole nodes to a task or to a user."""

from __future__ import annotations

import time
from collections.abc import Mapping
from re import Pattern

from dl2d.core.error_wording import some_of
from dl2d.core.errors import ResourceManagerError
from dl2d_slurm.commands.commands import Commands, command_environment
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.registration.authentication import EXCLUSIVE_PARTITION, EXCLUSIVE_USER_PARTITION
from dl2d_slurm.settings import SlurmSettings


def partition_advice(settings: SlurmSettings, environ: Mapping[str, str]) -> str:
    """What ``dl2d check`` says of such partitions; "" if there is none, or Slurm does not answer.

    ``environ`` has PATH and, perhaps, SLURM_CONF.
    """
    environment = command_environment(settings.slurm_conf, environ)
    rate = RpcRate(settings.rpcs_per_minute, time.monotonic)
    commands = Commands(environment, settings.command_timeout_seconds, rate)
    try:
        answer = commands.run("scontrol", "--all", "--local", "--oneliner", "show", "partition")
    except ResourceManagerError:
        return ""
    if answer.status != 0:
        return ""
    chosen = [name for name in settings.partition.split(",") if name]

    def found(pattern: Pattern[str]) -> list[str]:
        return [name for name in pattern.findall(answer.stdout) if not chosen or name in chosen]

    advice = []
    if whole := found(EXCLUSIVE_PARTITION):
        advice.append(
            f"OverSubscribe=EXCLUSIVE in {some_of(whole)}: Slurm gives each task a node of its own there, and dl2d "
            "decides by demands; have workers and parameter servers demand whole nodes, or other jobs may wait for ever"
        )
    if of_users := found(EXCLUSIVE_USER_PARTITION):
        advice.append(
            f"ExclusiveUser=YES in {some_of(of_users)}: elastic jobs make no room there for those of other users, "
            "which may wait for ever; leave these out of resource_manager.slurm.partition, or set ExclusiveUser=NO"
        )
    return "; ".join(advice)
