"""``dl2d run``: the daemon in the foreground, as a service manager wants it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import structlog

from dl2d.cli.logging import configure_logging
from dl2d.cli.shared_options import ConfigOption, option
from dl2d.config.settings import DEFAULT_PATH, Settings, load_settings
from dl2d.core.errors import ConfigError
from dl2d.daemon.key_and_address_files import exposed_folder
from dl2d.daemon.loop import Daemon, check_restart_only, process_name
from dl2d.daemon.policy_versions.learner_supervisor import learner_command
from dl2d.daemon.standby import wait_for_lease
from dl2d.daemon.systemd import ServiceManager
from dl2d.store import schema_version
from dl2d.store.sql_store import SqlStore
from dl2d.tick.policy_check.policy_call import freeze_startup_objects

log = structlog.get_logger()
_ADVICE = "chown it to the daemon's account, or set state_dir to another folder"


def run(
    config: ConfigOption = DEFAULT_PATH,
    standby: Annotated[
        bool, option("If another daemon holds the store, wait and take over when it ends.", "--standby")
    ] = False,
) -> None:
    """Run the daemon until SIGTERM; SIGHUP reads the configuration again."""
    settings = load_settings(config)
    configure_logging(settings.log)
    _make_folder(settings.state_dir)
    # An empty database is set up; one with an older schema is an admin's to upgrade, when no other daemon uses it.
    if schema_version.current(settings.store_url) is None:
        schema_version.upgrade(settings.store_url)
    store = SqlStore(settings.store_url, progress_seconds=settings.store.progress_seconds)
    if standby:
        if not _waited(settings, store):
            store.close()
            return
        settings = _read_again(config, settings)
    with Daemon(
        settings,
        store,
        reread=lambda: load_settings(config),
        reloaded=lambda taken: configure_logging(taken.log),
        learner=learner_command(str(config.absolute())),
    ) as daemon:
        freeze_startup_objects()
        daemon.run()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o750)
    except OSError as error:
        raise ConfigError(
            f"state_dir: uid {os.getuid()} cannot create {error.filename or folder} ({error.strerror}): create it and "
            f"{_ADVICE}"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"state_dir: uid {os.getuid()} cannot write to {folder}: {_ADVICE}")
    if problem := exposed_folder(folder):
        raise ConfigError(f"state_dir: {problem}")


def _read_again(config: Path, settings: Settings) -> Settings:
    """The settings of the file after the wait for the lease, which may take days; those before if it is in error."""
    try:
        now = load_settings(config)
        check_restart_only(settings, now)
    except ConfigError as error:
        log.error("the configuration was not read again", error=str(error))
        return settings
    configure_logging(now.log)
    return now


def _waited(settings: Settings, store: SqlStore) -> bool:
    """Wait for the lease; false if the process was told to end before it came.

    SIGHUP changes nothing: the configuration is read again when the lease has come.
    """
    stop = threading.Event()
    handled = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    handled[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: None)
    service = ServiceManager()
    try:
        return wait_for_lease(store, process_name(), settings.schedule.poll_seconds, service, stop)
    finally:
        for number, before in handled.items():
            signal.signal(number, before)
        if stop.is_set():
            service.stopping()
