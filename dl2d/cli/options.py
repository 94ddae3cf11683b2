"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dl2d.config.settings import DEFAULT_PATH, Settings, load_settings

ConfigOption = Annotated[
    Path,
    typer.Option("--config", "-c", help="Configuration file.", envvar="DL2D_CONFIG", show_default=str(DEFAULT_PATH)),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def settings_from(config: Path) -> Settings:
    """Settings of a configuration file; raises ``ConfigError``."""
    return load_settings(config)


def default_config() -> Path:
    """Where the configuration lies unless a command is told otherwise."""
    return Path(os.environ.get("DL2D_CONFIG", DEFAULT_PATH))
