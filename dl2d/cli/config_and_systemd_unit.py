"""``dl2d config`` and ``dl2d unit``: the files with which an installation begins."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from dl2d.cli.shared_options import option
from dl2d.config.settings import DEFAULT_PATH, load_settings, shipped
from pslite.launch.daemon_connection.daemon_address_file import default_file


def config() -> None:
    """Print the sample configuration, in which every key is explained and has its default."""
    typer.echo(shipped("etc/dl2d.yaml").read_text(encoding="utf-8"), nl=False)


def unit(
    config: Annotated[Path, option("Configuration file of the service.", "--config", "-c")] = DEFAULT_PATH,
    local_jobs: Annotated[
        bool,
        option("Print the drop-in that gives the local manager's jobs GPUs and homes.", "--local-jobs"),
    ] = False,
) -> None:
    """Print the systemd unit with this installation's path: `dl2d unit > /etc/systemd/system/dl2d.service`."""
    if local_jobs:
        typer.echo(shipped("systemd/local-jobs.conf").read_text(encoding="utf-8"), nl=False)
        return
    program = Path(sys.argv[0]).resolve()
    configured = load_settings(config).api.address_file if config.exists() else None
    folder = (configured or default_file()).parent
    values = {
        "ExecStart": f"{program} run --config {config.absolute()}",
        "ExecStartPre": f'-+/bin/sh -c "umask 022; mkdir -p {folder}"',
        "ReadWritePaths": f"-{folder}",
    }
    text = shipped("systemd/dl2d.service").read_text(encoding="utf-8")
    pattern = rf"(?m)^({'|'.join(values)})=.*$"
    typer.echo(re.sub(pattern, lambda match: f"{match[1]}={values[match[1]]}", text), nl=False)
