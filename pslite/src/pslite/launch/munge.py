"""Credentials of munge, by which the daemon verifies which user a job of Slurm belongs to."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from pslite.errors import UsageError


def munge_credential(job: str, environ: Mapping[str, str]) -> str:
    """Return a credential for registering a Slurm job; each can be used once.

    Raises
    ------
    UsageError
        munge is not installed, or failed.

    """
    command = ["munge", "-s", f"dl2d:{job}"]
    if environ.get("MUNGE_SOCKET"):
        command += ["-S", environ["MUNGE_SOCKET"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except FileNotFoundError:
        raise UsageError("munge is not installed on this node: the scheduler cannot verify who owns this job") from None
    except subprocess.TimeoutExpired:
        raise UsageError("munge did not answer within 30 s") from None
    except subprocess.CalledProcessError as error:
        raise UsageError(f"munge failed: {error.stderr.strip()}") from None
    return done.stdout.strip()
