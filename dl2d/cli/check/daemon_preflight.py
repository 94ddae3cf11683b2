"""Whether `dl2d run` could start: its folder, its address, its resource manager. Reads, and changes nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dl2d.config.settings import Settings
from dl2d.core.errors import Dl2dError, counted
from dl2d.daemon.api.tls_certificate import certificate_problem, read_certificate
from dl2d.daemon.key_and_address_files import exposed_folder
from dl2d.daemon.tick_settings_from_configuration import manager_settings
from dl2d.plugins import load_manager


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    item: str
    good: bool
    text: str
    #: Nothing is wrong for the daemon, but jobs on some machines would not reach it.
    warning: bool = False


AS_ACCOUNT = "run this command as the daemon's account"
#: Free space below which a daemon soon cannot record, in bytes.
_MIN_FREE_BYTES = 256 << 20


def folder_problem(folder: Path) -> str:
    """What is wrong with the state folder, as the account that asks sees it; empty for nothing."""
    place = folder
    try:
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            return f"{place} is not a folder; set another state_dir"
        if not os.access(place, os.W_OK | os.X_OK):
            what = "" if place == folder else f", so it cannot create {folder}"
            return f"uid {os.getuid()} cannot write to {place}{what}: {AS_ACCOUNT}"
        if place == folder and (problem := exposed_folder(place)):
            return problem
        space = os.statvfs(place)
    except OSError as error:
        return f"cannot read {folder}: {error.strerror}: {AS_ACCOUNT}"
    free = space.f_bavail * space.f_frsize
    if free < _MIN_FREE_BYTES:
        return f"{place} has {free >> 20} MiB of free space, less than {_MIN_FREE_BYTES >> 20}; free some space"
    return ""


def unusable_certificate(settings: Settings) -> str:
    """Why the job API cannot be served with its certificate and key, or why jobs refuse it; empty if neither."""
    try:
        if settings.api.certificate is not None:
            read_certificate(settings.api.certificate, settings.api.certificate_key)
    except Dl2dError as error:
        return str(error)
    return certificate_problem(settings.api)


def address_problem(settings: Settings) -> str:
    """Why the job API's address cannot be bound; empty if it can."""
    host, port = settings.api.host, settings.api.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return f"api.host={host} api.port={port}: {error.strerror}"
    return ""


def manager_answers(settings: Settings) -> Iterator[Finding]:
    """Whether Slurm answers, and what it says."""
    item = "slurm"
    try:
        with closing(load_manager(settings.resource_manager.name, manager_settings(settings), time.time)) as manager:
            capabilities, listing = manager.capabilities(), manager.listing()
    except Dl2dError as error:
        yield Finding(item, False, str(error))
        return
    nodes = counted(len(listing.nodes), "node")
    text = f"{capabilities.name} {capabilities.version}, cluster {capabilities.cluster}, {nodes}"
    yield Finding(item, True, text)
    memory = capabilities.defaults.get("memory")
    largest = max((node.capacity.get("memory") for node in listing.nodes), default=memory)
    if memory > largest:
        text = (
            f"{memory:.0f} MiB is more than any node has ({largest:.0f} MiB at most), so jobs whose tasks demand no "
            "memory are refused; lower it"
        )
        yield Finding("resource_manager.slurm.default_memory_mib", True, text, warning=True)
    if not capabilities.other_users:
        text = (
            f"uid {os.geteuid()} has no permission to submit jobs of other users, so only its own jobs get tasks: run "
            "the daemon as root, or as SlurmUser with resource_manager.slurm.slurmrestd or pyslurm_python"
        )
        yield Finding("slurm users", True, text, warning=True)
