"""``dl2d run``: the daemon in the foreground, as a service manager wants it."""

from __future__ import annotations

from dl2d.cli.logging import configure_logging
from dl2d.cli.options import ConfigOption
from dl2d.config.settings import DEFAULT_PATH, load_settings
from dl2d.daemon.loop import Daemon
from dl2d.daemon.models.learner_process import learner_command
from dl2d.store import schema
from dl2d.store.sql_store import SqlStore
from dl2d.tick.policy_call import freeze_startup_objects


def run(
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Run the daemon until SIGTERM; SIGHUP reads the configuration again."""
    settings = load_settings(config)
    configure_logging(settings.log)
    settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
    # An empty database is set up; one with an older schema is an admin's to upgrade, when no other daemon uses it.
    if schema.current(settings.store_url) is None:
        schema.upgrade(settings.store_url)
    store = SqlStore(settings.store_url, progress_seconds=settings.store.progress_seconds)
    with Daemon(
        settings,
        store,
        reread=lambda: load_settings(config),
        reloaded=lambda taken: configure_logging(taken.log),
        learner=learner_command(str(config.absolute())),
    ) as daemon:
        freeze_startup_objects()
        daemon.run()
