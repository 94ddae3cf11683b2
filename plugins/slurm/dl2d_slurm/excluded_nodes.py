"""Which nodes jobs exclude (``--exclude``), for which the listing has no field: asked of squeue when it may be new."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from dl2d_slurm.commands import Commands
from dl2d_slurm.queue_listing import excluded_option, new_word, parse_excluded


class Phase(NamedTuple):
    """Time in which the answer on a job holds: as long as it runs.

    Users may change the nodes of jobs that wait; a requeued job has a new submit time. While a job waits the answer is
    used, too, though it may be out of date.
    """

    submitted: int
    waits: bool


class ExcludedNodes:
    """Excluded nodes of jobs, by the ids by which their users know them. Thread-safe."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        #: One dictionary for good: jobs are submitted and authenticated beside a listing.
        self._known: dict[str, tuple[Phase, str]] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._known

    def of(self, job: str) -> str:
        """The nodes that a job excludes, as a node list; empty if there are none, or they are not known."""
        known = self._known.get(job)
        return "" if known is None else known[1]

    def ask(self, jobs: Mapping[str, Phase]) -> None:
        """Ask squeue once for each phase of a job. Of one that is gone it stays unknown.

        Raises
        ------
        ResourceManagerError
            squeue does not answer. What was known before holds until it does.
        """
        new = sorted(job for job, phase in jobs.items() if self._known.get(job, (None, ""))[0] != phase)
        if not new:
            return
        word = new_word()
        answer = self._commands.run("squeue", "--noheader", "--all", f"--jobs={','.join(new)}", excluded_option(word))
        if answer.status == 0:
            found = parse_excluded(answer.stdout, word)
            self._known |= {job: (jobs[job], found.get(job) or found.get(job.partition("_")[0], "")) for job in new}

    def forget_all_but(self, jobs: Collection[str]) -> None:
        """Forget what is known of jobs that are not listed any more."""
        for gone in [job for job in list(self._known) if job not in jobs]:
            self._known.pop(gone, None)
