"""Batch script of the Slurm job in which this process runs, and whether it asks for dl2d."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

from pslite.errors import UsageError

_DIRECTIVE = re.compile(r"#DL2(\s.*)?")
#: name of slurmd's copy of a batch script, which the shell of the job gets as its argument
_COPY = "slurm_script"
#: beginning of the variables that Slurm sets for dl2d's options of sbatch
_OPTION = "SLURM_SPANK_DL2_"
#: variables that Slurm sets for options of sbatch by which pyxis runs the batch script in a container, and pyxis' own
_CONTAINER = re.compile(
    r"(?:SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container|PYXIS_CONTAINER)_(image|name)", re.IGNORECASE
)
_NO_SCRIPT = "Job script not specified"


def submission_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the options of dl2d that were given to sbatch (`--dl2-...`), by the keys of `#DL2` lines."""
    return {name.removeprefix(_OPTION).lower(): value for name, value in environ.items() if name.startswith(_OPTION)}


def refuse_container(environ: Mapping[str, str]) -> None:
    """Refuse a batch job that pyxis runs in a container, where its tasks would not be.

    Raises
    ------
    UsageError
        it is one.

    """
    for name, value in environ.items():
        found = _CONTAINER.fullmatch(name)
        if found is not None and value:
            option = name if name.startswith("PYXIS_") else f"--container-{found[1]} of sbatch"
            raise UsageError(
                f"{option} cannot be used with an elastic job: tasks would run outside of the container; start it in "
                "the command of dl2-run"
            )


def asks_for_daemon(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs in a batch job that has options of dl2d, or `#DL2` lines in its script.

    Raises
    ------
    UsageError
        it runs in a batch job without such options, and the script cannot be read.

    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return False
    if submission_options(environ):
        return True
    script = _of_parents()
    if script is None:
        script = _of_slurm(job, batch=environ.get("ENVIRONMENT") == "BATCH")
    return any(_DIRECTIVE.fullmatch(line.strip()) for line in script.splitlines())


def _of_parents() -> str | None:
    """Return the script that a parent of this process executes; None if that is not known."""
    try:
        for parent in psutil.Process().parents():
            for word in parent.cmdline():
                if Path(word).name == _COPY:
                    return Path(word).read_text(encoding="utf-8", errors="replace")
    except (psutil.Error, OSError):
        pass
    return None


def _of_slurm(job: str, *, batch: bool) -> str:
    """Return the script as Slurm has it; "" for a job without one. `batch`: the job is known to have one."""
    command = ["scontrol", "write", "batch_script", job, "-"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if done.stdout:
            return done.stdout.decode(errors="replace")
        reason = done.stderr.decode(errors="replace").strip()
    if not batch or _NO_SCRIPT in reason:
        return ""
    raise UsageError(
        f"the script of batch job {job} cannot be read, so it is not known whether it has #DL2 lines ({reason}): "
        "`dl2-run --standalone` trains without dl2d, inside this job alone"
    )
