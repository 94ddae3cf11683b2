"""Files of the daemon: its key, from which every credential is derived, and the address by which jobs find it."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import msgspec

from dl2d.atomic_file import write_atomically
from dl2d.core.credentials_from_daemon_key import Credentials
from dl2d.core.errors import ConfigError
from pslite.launch.daemon_connection.daemon_address_file import DaemonAddress

_KEY_BYTES = 32
#: What to do once the file is removed, and its price.
_RESTART = "restart: the daemon creates a new one, and jobs that run now cannot report any more"


def load_credentials(path: Path, *, create: bool) -> Credentials:
    """Read the daemon's key file, or make it.

    Raises
    ------
    ConfigError
        The file is missing (and not to be made), unreadable, of a wrong length, not the daemon's own, or others may
        read it.
    """
    try:
        if create:
            _create(path)
        status = path.stat()
        mode = status.st_mode & 0o777
        key = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: the daemon makes it when it first runs (dl2d run); wait if it just began"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; only the daemon's account may read it") from error
    if mode & 0o077:
        raise ConfigError(f"{path} has mode {mode:04o}: only its owner may read it; run chmod 600 and restart")
    if create and status.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to uid {status.st_uid}, which knows the key: it must belong to the daemon's account, uid "
            f"{os.geteuid()}; chown it if you trust that user, or remove it and {_RESTART}"
        )
    if len(key) != _KEY_BYTES:
        raise ConfigError(
            f"{path} holds {len(key)} bytes instead of {_KEY_BYTES}; restore it from a backup, or remove it and "
            f"{_RESTART}"
        )
    return Credentials(key)


def exposed_folder(folder: Path) -> str:
    """Why every user could replace the key in this folder by another one; empty if they cannot."""
    mode = folder.stat().st_mode
    if not mode & stat.S_IWOTH:
        return ""
    return (
        f"{folder} is writable for all users (mode {stat.S_IMODE(mode):04o}), who could replace the daemon's key "
        "and database; run chmod o-w"
    )


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(fresh, path)  # atomic, and never over a key that is there
        except FileExistsError:
            pass
    finally:
        fresh.unlink(missing_ok=True)


def write_address(path: Path, address: DaemonAddress) -> None:
    """Replace the address file, which everybody may read: see ``pslite.launch.daemon_connection.daemon_address_file``.

    Raises ``OSError``.
    """
    path = path.resolve()  # a link stays one
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)  # whatever the daemon's file mask is
    write_atomically(path, msgspec.json.format(msgspec.json.encode(address), indent=2) + b"\n", mode=0o644)
