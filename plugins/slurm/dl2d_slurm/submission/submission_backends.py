"""How jobs are submitted and cancelled: which backend does it, and the one by Slurm's commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import structlog

from dl2d.core.errors import ConfigError, Rejected
from dl2d_slurm.commands.commands import Answer, Commands
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.settings import Backend, SlurmSettings
from dl2d_slurm.submission.slurmrestd import RestControl
from dl2d_slurm.submission.slurmrestd_job_fields import job_fields

log = structlog.get_logger(__name__)

#: sbatch commands that run at once, so that a slow controller is asked at the full rate.
PARALLEL_SUBMITS = 8


def chosen_backend(backend: Backend, slurmrestd: str, uid: int) -> tuple[Backend, str]:
    """The backend that a daemon of this user id uses, and why.

    ``slurmrestd`` is the address of that; empty if the site gives none.
    """
    if backend is not Backend.AUTO:
        return backend, "as configured"
    if uid == 0:
        return Backend.COMMAND, "the daemon is root, so sbatch submits for all users"
    if not slurmrestd:
        return Backend.COMMAND, "slurmrestd has no address; the daemon is not root and serves its own user's jobs only"
    return (
        Backend.REST,
        "the daemon is not root; slurmrestd submits for all users if the daemon's user is SlurmUser",
    )


def job_control(
    settings: SlurmSettings,
    commands: Commands,
    rate: RpcRate,
    *,
    environment: Mapping[str, str],
    uid: int,
    timer: Callable[[], float],
) -> JobControl:
    """The backend of a daemon with these settings and user id. ``environment`` is that of jobs.

    Raises
    ------
    ConfigError
        The backend lacks a setting, or cannot pass on an option of ``sbatch_options``.
    """
    backend, why = chosen_backend(settings.backend, settings.slurmrestd, uid)
    log.info("backend of Slurm", backend=backend, why=why)
    if backend is Backend.COMMAND:
        return CommandControl(commands)
    if not settings.slurmrestd:
        raise ConfigError("resource_manager.slurm.slurmrestd: backend: rest needs the address of slurmrestd")
    try:
        job_fields(settings.sbatch_options)
    except Rejected as error:
        raise ConfigError(f"resource_manager.slurm.sbatch_options: {error}") from None
    return RestControl(
        settings.slurmrestd, commands, rate,
        time_limit=settings.command_timeout_seconds, environment=environment, timer=timer,
    )  # fmt: skip


class JobControl(Protocol):
    """Submits and cancels jobs. An answer that is not good has Slurm's own words, which are the same in all backends.

    All methods raise ``Unavailable`` where there is no answer.
    """

    def check(self) -> None:
        """Check that the backend can be used."""

    def privileged(self) -> Collection[int]:
        """Ids of the users who may submit jobs of other users."""

    def submit(self, options: Sequence[str], script: str, more: Mapping[str, str] | None = None) -> Answer:
        """Submit a batch job with options of sbatch and more variables for its environment.

        Raises ``Rejected`` for what the backend cannot pass on unchanged, by its name.
        """

    def cancel(self, jobs: Sequence[str], *, state: str = "", signal: str = "") -> Answer:
        """Cancel jobs, or only send a signal to their batch scripts; only those in a state where one is given."""

    def close(self) -> None:
        """Close connections."""


class CommandControl:
    """``JobControl`` by sbatch and scancel."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    def check(self) -> None:
        """See ``JobControl``; commands are checked when they are run."""

    def privileged(self) -> Collection[int]:
        """See ``JobControl``. sbatch takes ``--uid`` of nobody but root."""
        return (0,)

    def submit(self, options: Sequence[str], script: str, more: Mapping[str, str] | None = None) -> Answer:
        """See ``JobControl``. One sbatch."""
        for what, text in [(option.partition("=")[0], option) for option in options] + [("the script", script)]:
            _check_bytes(what, text)
        return self._commands.run("sbatch", *options, stdin=script, more=more)

    def cancel(self, jobs: Sequence[str], *, state: str = "", signal: str = "") -> Answer:
        """See ``JobControl``. One scancel."""
        only = (f"--state={state}",) if state else ()
        sent = (f"--signal={signal}", "--batch") if signal else ()
        return self._commands.run("scancel", *only, *sent, *jobs)

    def close(self) -> None:
        """See ``JobControl``; nothing to close."""


def _check_bytes(what: str, text: str) -> None:
    """Raise ``Rejected`` where no program can be given a text."""
    try:
        held = "a zero byte" if b"\0" in os.fsencode(text) else ""
    except UnicodeEncodeError as error:
        held = f"an unpaired surrogate, which is no valid character: {text[error.start]!r}"
    if held:
        raise Rejected(f"{what} cannot be passed to sbatch: it holds {held}")
