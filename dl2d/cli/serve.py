"""``dl2d run``: the daemon in the foreground, as a service manager wants it."""

from __future__ import annotations

from typing import Annotated

import typer

from dl2d.cli.logging import configure_logging
from dl2d.cli.options import ConfigOption
from dl2d.config.settings import DEFAULT_PATH, load_settings
from dl2d.daemon.loop import Daemon
from dl2d.store import schema
from dl2d.store.sql import SqlStore


def run(
    config: ConfigOption = DEFAULT_PATH,
    upgrade: Annotated[
        bool, typer.Option("--upgrade/--no-upgrade", help="Bring the database's schema up to date first.")
    ] = True,
) -> None:
    """Run the daemon until SIGTERM; SIGHUP reads the configuration again."""
    settings = load_settings(config)
    configure_logging(settings.log)
    settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
    if upgrade:
        schema.upgrade(settings.store_url)
    store = SqlStore(settings.store_url, progress_seconds=settings.store.progress_seconds)
    with Daemon(
        settings,
        store,
        reread=lambda: load_settings(config),
        reloaded=lambda taken: configure_logging(taken.log),
    ) as daemon:
        daemon.run()
