"""Which nodes jobs exclude (``--exclude``), for which the listing has no field: asked of squeue when it may be new."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from dl2d_slurm.commands.commands import Commands
from dl2d_slurm.commands.squeue_and_sinfo_records import ALL_LOCAL, SEPARATOR, new_terminator, records
from dl2d_slurm.commands.values_in_command_output import value_or_empty

_EXCLUDED_FIELDS = ("JobID", "Excluded")


class AnswerValidity(NamedTuple):
    """Key of a cached answer: asked again after a requeue and when the job starts.

    Users may change the nodes of jobs that wait, so an answer that is used while a job waits may be out of date.
    """

    submitted: int
    waits: bool


class ExcludedNodes:
    """Excluded nodes of jobs, by the ids by which their users know them. Thread-safe."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        #: Never replaced, since other threads update it.
        self._known: dict[str, tuple[AnswerValidity, str]] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._known

    def of(self, job: str) -> str:
        """The nodes that a job excludes, as a node list; empty if there are none, or they are not known."""
        known = self._known.get(job)
        return "" if known is None else known[1]

    def ask(self, jobs: Mapping[str, AnswerValidity]) -> None:
        """Ask squeue for the nodes of jobs whose cached answers are not valid. For a job that is gone it stays unknown.

        Raises
        ------
        ResourceManagerError
            squeue does not answer. What was known before holds until it does.
        """
        new = sorted(job for job, validity in jobs.items() if self._known.get(job, (None, ""))[0] != validity)
        if not new:
            return
        terminator = new_terminator()
        answer = self._commands.run("squeue", *ALL_LOCAL, f"--jobs={','.join(new)}", excluded_option(terminator))
        if answer.status == 0:
            found = parse_excluded(answer.stdout, terminator)
            self._known |= {job: (jobs[job], found.get(job) or found.get(job.partition("_")[0], "")) for job in new}

    def forget_all_but(self, jobs: Collection[str]) -> None:
        """Forget what is known of jobs that are not listed any more."""
        for gone in [job for job in list(self._known) if job not in jobs]:
            self._known.pop(gone, None)


def excluded_option(terminator: str) -> str:
    """The option that asks for each job's excluded nodes, for which ``--Format`` has no field."""
    return f"--format=%i{SEPARATOR}{terminator}-%x{SEPARATOR}{terminator}"


def parse_excluded(text: str, terminator: str) -> dict[str, str]:
    """Excluded nodes of each job in squeue's answer to ``excluded_option``."""
    # Tasks of an array that wait share a record: ``12_[3-9]``.
    return {
        record["JobID"].partition("_[")[0]: value_or_empty(record["Excluded"])
        for record in records(text, _EXCLUDED_FIELDS, terminator)
        if not isinstance(record, str)
    }
