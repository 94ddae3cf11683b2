"""True speeds of the jobs of a workload, which some policies are told in place of measured ones."""

from __future__ import annotations

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.jobs import Architecture, Job
from dl2d.simulation.speeds.speed_models import MAX_TASKS, Table
from dl2d.simulation.workload.format import Workload


class TrueSpeeds:
    """Implements ``dl2d.core.measured_speeds.KnownSpeeds``."""

    def __init__(self, workload: Workload) -> None:
        self._speeds = workload.speeds
        #: By job, for a user may say that it is of another type.
        self._models = {job.id: job.model for job in workload.jobs}
        self._grids: dict[tuple[str, int, int], Floats] = {}

    def grid(self, job: Job) -> Floats:
        """See ``KnownSpeeds.grid``; jobs of one model with equal bounds are given the same array."""
        request = job.request
        max_ps = request.max_ps if request.architecture is Architecture.PS else 0
        name = self._models.get(job.key.id, request.model)
        asked = (name, request.max_workers, max_ps)
        if asked not in self._grids:
            grid = self._speeds[name].grid(request.max_workers, max_ps)
            grid.flags.writeable = False
            self._grids[asked] = grid
        return self._grids[asked]

    def beyond(self, job: Job) -> Floats:
        """Like ``grid``, with one worker and one PS more than the job may have.

        Where a table has every size that the job may have, it is not extrapolated: what it does not have is 0.
        """
        request = job.request
        model = self._speeds[self._models.get(job.key.id, request.model)]
        workers = min(request.max_workers + 1, MAX_TASKS)
        ps = min(request.max_ps + 1, MAX_TASKS) if request.architecture is Architecture.PS else 0
        if not isinstance(model, Table) or not model.fills(request.max_workers, request.max_ps):
            return model.grid(workers, ps)
        speeds = np.zeros((ps + 1, workers + 1))
        for at_ps, at_workers, speed in model.points:
            if at_ps <= ps and at_workers <= workers:
                speeds[at_ps, at_workers] = speed
        return speeds
