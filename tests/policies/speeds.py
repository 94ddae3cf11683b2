"""Speeds that policies are told, or that were measured, for tests."""

from __future__ import annotations

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Allocation, Job
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.simulation.speeds.speed_models import SpeedModel


class Told:
    """Speeds by model: rows are PS counts from 1, columns workers from 1; 0 beyond them."""

    def __init__(self, **tables: list[list[float]]) -> None:
        self._tables = tables
        self._grids: dict[tuple[str, int, int], NDArray[np.float64]] = {}

    def grid(self, job: Job) -> NDArray[np.float64]:
        request = job.request
        asked = (request.model, request.max_workers, request.max_ps)
        if asked not in self._grids:
            speeds = np.zeros((request.max_ps + 1, request.max_workers + 1))
            for ps, row in enumerate(self._tables[request.model][: request.max_ps], start=1):
                speeds[ps, 1 : len(row) + 1] = row[: request.max_workers]
            self._grids[asked] = speeds
        return self._grids[asked]


class Truth:
    """Speeds of all jobs by one model."""

    def __init__(self, model: SpeedModel) -> None:
        self._model = model
        self._grids: dict[tuple[int, int], NDArray[np.float64]] = {}

    def grid(self, job: Job) -> NDArray[np.float64]:
        asked = (job.request.max_workers, job.request.max_ps)
        return self._grids.setdefault(asked, self._model.grid(*asked))


def measured(snapshot: Snapshot, model: SpeedModel, sizes) -> Snapshot:
    """The snapshot after the kind of its first job was measured at some sizes."""
    points = [SpeedPoint(Allocation(w, p), model.samples_per_second(w, p), 1) for w, p in sorted(set(sizes))]
    return structs.replace(snapshot, speeds=(MeasuredSpeeds(TrainingKind.of(snapshot.jobs[0].request), tuple(points)),))
