"""Munge credentials, by which the daemon verifies which user sent a request."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from pslite.errors import UsageError


def registration_payload(job: str) -> str:
    """Return the payload of a credential that registers a Slurm job."""
    return f"dl2d:{job}"


def munge_credential(payload: str, environ: Mapping[str, str]) -> str:
    """Return a credential with a payload, which everybody may read; each can be used once.

    Raises
    ------
    UsageError
        munge is not installed, or failed.

    """
    command = ["munge", "-s", payload]
    if environ.get("MUNGE_SOCKET"):
        command += ["-S", environ["MUNGE_SOCKET"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except FileNotFoundError:
        raise UsageError("munge is not installed on this node: the daemon cannot verify which user asks") from None
    except subprocess.TimeoutExpired:
        raise UsageError("munge did not answer within 30 s") from None
    except subprocess.CalledProcessError as error:
        raise UsageError(f"munge failed: {error.stderr.strip()}") from None
    return done.stdout.strip()
