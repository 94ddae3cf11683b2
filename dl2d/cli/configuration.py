"""``dl2d config``: the documented sample to start from."""

from __future__ import annotations

import typer

from dl2d.config.files import shipped


def config() -> None:
    """Print the sample configuration, in which every key is explained and has its default."""
    typer.echo(shipped("etc/dl2d.yaml").read_text(encoding="utf-8"), nl=False)
