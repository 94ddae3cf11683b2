"""Who may speak to the daemon and to a job: secrets derived from one key, so that none is kept in the database."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from dl2d.core.errors import ConfigError
from dl2d.core.jobs import JobKey

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Credentials:
    """Derives every secret from the daemon's key with HMAC-SHA256; a restart derives the same ones again."""

    key: bytes = field(repr=False)

    def for_job(self, job: JobKey) -> str:
        """Bearer credential with which a job's coordinator speaks to the job API."""
        return self._derive("coordinator", job.slug)

    def token(self, job: JobKey) -> str:
        """Token that the members of a job show one another."""
        return self._derive("members", job.slug)

    def for_submission(self) -> str:
        """Bearer credential with which the command line submits and cancels jobs."""
        return self._derive("submission", "")

    def is_job(self, job: JobKey, shown: str) -> bool:
        """Whether ``shown`` is the job's credential, in constant time."""
        return hmac.compare_digest(self.for_job(job).encode(), shown.encode())

    def may_submit(self, shown: str) -> bool:
        """Whether ``shown`` is the submission credential, in constant time."""
        return hmac.compare_digest(self.for_submission().encode(), shown.encode())

    def _derive(self, purpose: str, subject: str) -> str:
        return hmac.new(self.key, f"dl2d/{purpose}/{subject}".encode(), hashlib.sha256).hexdigest()


def load_credentials(path: Path, *, create: bool) -> Credentials:
    """Read the daemon's key file, or make it.

    Raises
    ------
    ConfigError
        The file is missing (and not to be made), unreadable, of a wrong length, or others may read it.
    """
    try:
        if create:
            _create(path)
        mode = path.stat().st_mode & 0o777
        key = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: the daemon makes it when it first runs (dl2d run)") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: only the account that runs the daemon may read it") from error
    if mode & 0o077:
        raise ConfigError(f"{path} has mode {mode:04o}: nobody else may read it; run chmod 600 and restart")
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{path} holds {len(key)} bytes instead of {_KEY_BYTES}; remove it to have it made anew")
    return Credentials(key)


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
