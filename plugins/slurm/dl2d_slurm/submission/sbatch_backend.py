"""Submitting and cancelling jobs by Slurm's commands."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dl2d.core.errors import Rejected
from dl2d_slurm.commands.commands import Answer, Commands

#: What ``sbatch --parsable`` prints.
_JOB_ID = re.compile(r"^([0-9]+)(?:;\S*)?$", re.MULTILINE)


@dataclass(eq=False)
class JobControl:
    """Submits and cancels jobs: here by one sbatch and one scancel, in subclasses otherwise. Thread-safe.

    An answer that is not good has Slurm's own words, mostly the same in all backends. All methods raise ``Unavailable``
    where there is no answer.
    """

    #: Run sbatch, scancel and scontrol.
    commands: Commands

    def check(self) -> None:
        """Check that the backend can be used; commands are checked when they are run."""

    def privileged(self) -> Collection[int]:
        """Ids of the users who may submit jobs of other users: sbatch takes ``--uid`` of nobody but root."""
        return (0,)

    def submit(self, options: Sequence[str], script: str, more: Mapping[str, str] | None = None) -> Answer:
        """Submit a batch job with options of sbatch and more variables for its environment.

        Raises ``Rejected`` for what the backend cannot pass on unchanged, by its name.
        """
        for what, text in [(option.partition("=")[0], option) for option in options] + [("the script", script)]:
            _check_bytes(what, text)
        answer = self.commands.run("sbatch", *_with_plain_output(options), stdin=script, more=more)
        submitted = _JOB_ID.search(answer.stdout)
        return answer if submitted is None else replace(answer, job_id=submitted[1])

    def cancel(self, jobs: Sequence[str], *, state: str = "", signal: str = "") -> Answer:
        """Cancel jobs, or only send a signal to their batch scripts; only those in a state where one is given."""
        only = (f"--state={state}",) if state else ()
        sent = (f"--signal={signal}", "--batch") if signal else ()
        return self.commands.run("scancel", *only, *sent, *jobs)

    def close(self) -> None:
        """Close connections."""


def _with_plain_output(options: Sequence[str]) -> list[str]:
    """The options, with the path of the output as sbatch has to be given it for the file to have this name.

    sbatch takes a % in a path for a pattern, also where it has put a relative path behind the folder. It takes a
    backslash for an end of patterns, and drops it.
    """
    folder = next((option.partition("=")[2] for option in options if option.startswith("--chdir=")), "")
    if "\\" in folder:
        raise Rejected(
            f"tasks cannot write their output to {folder}: sbatch does not take a backslash in a folder's name"
        )
    if "%" not in folder:
        return list(options)
    name = f"--output={folder}/".replace("%", "%%")
    return [option.replace("--output=", name, 1) if option.startswith("--output=") else option for option in options]


def _check_bytes(what: str, text: str) -> None:
    """Raise ``Rejected`` where no program can be given a text."""
    try:
        held = "a zero byte" if b"\0" in os.fsencode(text) else ""
    except UnicodeEncodeError as error:
        held = f"an unpaired surrogate, which is no valid character: {text[error.start]!r}"
    if held:
        raise Rejected(f"{what} cannot be passed to sbatch: it holds {held}")
