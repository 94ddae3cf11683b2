"""Waiting jobs that get all memory of their nodes: with ``--mem=0``, or without ``--mem`` where no default is set.

squeue shows for such a job the memory of one node that it may get. Its ``MinMemory`` is 0; that of a job that asks for
this amount is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import structlog

from dl2d.core.errors import ResourceManagerError
from dl2d.core.resources import Resources
from dl2d_slurm.commands.command_records import query_jobs
from dl2d_slurm.commands.commands import Commands, failure
from dl2d_slurm.jobs.waiting_jobs_and_sharing_rules import WaitingJob

log = structlog.get_logger(__name__)

_FIELDS = ("JobID", "MinMemory")


class JobsWithAllMemory:
    """Asks squeue once for each job whose memory equals that of a node, where nodes differ in memory."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        #: By handle and demand, which changes when the job's memory is changed.
        self._known: dict[tuple[str, Resources], bool] = {}

    def among(self, waiting: Iterable[WaitingJob], capacities: Collection[Resources]) -> frozenset[str]:
        """Handles (``Claim.handle``) of these jobs. A job that squeue does not show is asked about again next time."""
        sizes = {capacity.get("memory") for capacity in capacities}
        unclear = {
            (job.claim.handle, job.claim.demand)
            for job in (waiting if len(sizes) > 1 else ())
            if job.claim.demand.get("memory") / max(job.claim.nodes, 1) in sizes
        }
        self._known = {key: found for key, found in self._known.items() if key in unclear}
        if new := unclear - self._known.keys():
            try:
                minima = self._minima(sorted({handle for handle, _ in new}))
            except ResourceManagerError as error:
                log.warning("which waiting jobs get all memory of their nodes is not known", error=str(error))
            else:
                self._known |= {key: minima[key[0]] == "0" for key in new if key[0] in minima}
        return frozenset(handle for (handle, _), found in self._known.items() if found)

    def _minima(self, handles: Collection[str]) -> dict[str, str]:
        answer, found = query_jobs(self._commands, _FIELDS, handles)
        if answer.status != 0:
            raise failure("squeue failed", answer)
        # A value of 0 may be shown with or without a unit.
        return {record["JobID"]: record["MinMemory"].rstrip("KMGT") for record in found}
