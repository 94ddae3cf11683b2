"""Whether jobs on the cluster's nodes find and reach the daemon: its URL, the address file, and a probe job."""

from __future__ import annotations

import os
import stat
import sysconfig
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from dl2d.cli.check.daemon_preflight import Finding
from dl2d.config.settings import Settings
from dl2d.core.errors import Dl2dError
from dl2d.core.resource_manager import ProbeManager
from dl2d.daemon.tick_settings_from_configuration import manager_settings
from dl2d.plugins import load_manager
from pslite.errors import UsageError
from pslite.launch.daemon_connection.daemon_address_file import default_file, distrust_of_others, read_address
from pslite.launch.daemon_connection.daemon_http import is_loopback

_PROBE_SECONDS = 120.0
_FILE = "api.address_file"


def jobs_find_daemon(settings: Settings, *, runs: bool) -> Iterator[Finding]:
    """Whether jobs that users submit find the daemon; ``runs``: whether it does."""
    api = settings.api
    url = api.url(api.host, api.port) if api.port or api.advertise else ""
    host = urlsplit(url).hostname or ""
    if url and is_loopback(host):
        text = (
            f"jobs on other machines cannot reach {url}: set api.host to 0.0.0.0, api.advertise to "
            f"https://HOST:{api.port}, where HOST is the name by which nodes know this machine, and api.certificate to "
            "a certificate for HOST"
        )
        yield Finding("api.advertise" if api.advertise else "api.host", True, text, warning=True)
    elif url.startswith("http:"):
        text = f"jobs on other machines register over https only, and jobs get {url}: set api.certificate"
        yield Finding("api.certificate", True, text, warning=True)
    path = api.address_file or default_file()
    try:
        address = read_address(path)
    except FileNotFoundError:
        yield _no_file(path, runs=runs)
    except (UsageError, OSError) as error:
        yield Finding(_FILE, False, str(error))
    else:
        if hidden := _hidden(path.resolve()):
            yield Finding(_FILE, False, f"make {hidden} readable for all users: jobs find the daemon by {path}")
        elif problem := distrust_of_others(path):
            text = f"jobs of other users do not use {path}: {problem}"
            yield Finding(_FILE, True, text, warning=True)
        elif url and address.url != url:
            text = f"{path} says {address.url}, the configuration {url}: restart the daemon"
            yield Finding(_FILE, True, text, warning=True)
        else:
            yield Finding(_FILE, True, f"{path}: {address.url}")


def _no_file(path: Path, *, runs: bool) -> Finding:
    if runs:
        text = (
            f"{path} does not exist although the daemon runs, so jobs do not find the daemon: its log says why; "
            "`dl2d unit` prints a unit that lets it write there"
        )
        return Finding(_FILE, True, text, warning=True)
    folder = next(place for place in path.absolute().parents if place.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"{path} cannot be written by uid {os.getuid()}: set api.address_file to a file that nodes share"
        return Finding(_FILE, False, text)
    return Finding(_FILE, True, f"{path} does not exist yet; the daemon writes it when it starts")


def _hidden(path: Path) -> str:
    """The file or the folder above it that keeps others from reading the file; empty if nothing does."""
    if not path.stat().st_mode & stat.S_IROTH:
        return str(path)
    return next((str(folder) for folder in path.parents if not folder.stat().st_mode & stat.S_IXOTH), "")


def probe_findings(settings: Settings, user: str) -> Iterator[Finding]:
    """The steps of a job from a node to the daemon, of a job that is submitted for it."""
    name = settings.resource_manager.name
    runner = Path(sysconfig.get_path("scripts")) / "dl2-run"
    try:
        with closing(load_manager(name, manager_settings(settings), time.time)) as manager:
            if not isinstance(manager, ProbeManager):
                yield Finding("probe", False, f"the resource manager {name} has no probe; only slurm has one")
                return
            steps = manager.probe(str(runner), user, _PROBE_SECONDS)
    except Dl2dError as error:
        yield Finding("probe job", False, str(error))
        return
    for step in steps:
        yield Finding(f"probe: {step.item}", step.good, step.text)
