"""Which backend of a daemon submits and cancels jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from dl2d.core.errors import ConfigError, Rejected
from dl2d_slurm.commands.commands import Commands
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.settings import Backend, SlurmSettings
from dl2d_slurm.submission.job_fields_for_rest_and_pyslurm import job_fields
from dl2d_slurm.submission.pyslurm_backend import PyslurmControl
from dl2d_slurm.submission.sbatch_backend import JobControl
from dl2d_slurm.submission.slurmrestd_backend import RestControl

log = structlog.get_logger(__name__)

#: Submissions that run at once, so that a slow controller is asked at the full rate.
PARALLEL_SUBMITS = 8


def chosen_backend(settings: SlurmSettings, uid: int) -> tuple[Backend, str]:
    """The backend that a daemon of this user id uses, and why."""
    if settings.backend is not Backend.AUTO:
        return settings.backend, "as configured"
    if uid == 0:
        return Backend.COMMAND, "the daemon is root, so sbatch submits for all users"
    if settings.slurmrestd:
        return (
            Backend.REST,
            "the daemon is not root; slurmrestd submits for all users if the daemon's user is SlurmUser",
        )
    if settings.pyslurm_python:
        return (
            Backend.PYSLURM,
            "the daemon is not root; pyslurm submits for all users if the daemon's user is SlurmUser",
        )
    return (
        Backend.COMMAND,
        "neither slurmrestd nor pyslurm_python is set; the daemon is not root and serves its own user's jobs only",
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
    backend, why = chosen_backend(settings, uid)
    log.info("backend of Slurm", backend=backend, why=why)
    if backend is Backend.COMMAND:
        return JobControl(commands)
    try:
        job_fields(settings.sbatch_options, backend)
    except Rejected as error:
        raise ConfigError(f"resource_manager.slurm.sbatch_options: {error}") from None
    kind: type[PyslurmControl | RestControl] = PyslurmControl
    place = settings.pyslurm_python
    if backend is Backend.REST:
        kind, place = RestControl, settings.slurmrestd
        if not place:
            raise ConfigError("resource_manager.slurm.slurmrestd: backend: rest needs the address of slurmrestd")
    return kind(commands, rate, place, settings.command_timeout_seconds, environment, timer)
