"""dl2d's SPANK plug-in and job_submit.lua for tests, built against this machine's headers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "plugins" / "slurm" / "spank"
_HEADER = Path("/usr/include/slurm/spank.h")


def why_not() -> str:
    """Reason for which the plug-in cannot be built here, or "" if it can."""
    missing = [] if shutil.which("gcc") else ["gcc"]
    missing += [] if _HEADER.exists() else ["libslurm-dev"]
    return f"not installed: {', '.join(missing)}" if missing else ""


def why_no_lua() -> str:
    """Reason for which slurmctld cannot run job_submit.lua here, or "" if it can."""
    found = [*Path("/usr/lib").glob("*/slurm*/job_submit_lua.so"), *Path("/usr/lib64").glob("slurm*/job_submit_lua.so")]
    if not found:
        return "not installed: Slurm's plug-in job_submit/lua"
    linked = subprocess.run(["ldd", found[0]], capture_output=True, text=True, timeout=30, check=False).stdout
    return "not installed: the Lua library of job_submit/lua" if "not found" in linked else ""


def build(target: Path, *more: str) -> None:
    """Compile the plug-in with all warnings as errors, and ``more`` arguments of gcc before its source."""
    flags = ("-fPIC", "-O2", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["gcc", *(more or ("-shared",)), *flags, "-o", target, SOURCE / "dl2d.c"], check=True, timeout=60)
