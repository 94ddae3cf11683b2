"""Speeds that the throughput model predicts for the next slot, in which a resize costs a fraction of the time."""

from __future__ import annotations

from dl2d.core.array_types import Floats
from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import NOTHING, Allocation, Job
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.mislabelled_jobs import Relabelling
from dl2d.throughput.training_data import by_kind, without_drift

#: Standard deviations that are added to predicted speeds by default, so that sizes which may be faster are tried.
DEFAULT_OPTIMISM = 0.5
#: Least fraction of a slot that is left after a resize.
_MIN_LEFT = 0.01


class PredictedSpeeds:
    """Predicted speeds of the jobs of a snapshot, as ``dl2d.core.measured_speeds_and_losses.KnownSpeeds``.

    Parameters
    ----------
    optimism
        Standard deviations that are added to the mean.
    lost
        Fraction of a slot that a resize costs.
    """

    def __init__(self, snapshot: Snapshot, *, optimism: float, lost: float) -> None:
        measured = by_kind(snapshot.speeds)
        self._model = GaussianProcess({kind: without_drift(points) for kind, points in measured.items()})
        self._relabelling = Relabelling(snapshot, self._model)
        self._held = snapshot.held()
        self._optimism = optimism
        self._lost = lost
        #: Speeds of the next slot by id of the predicted array and present size, so that equal jobs share one array.
        #: Ids are unique, since the model keeps its arrays.
        self._grids: dict[tuple[int, Allocation], Floats] = {}

    def grid(self, job: Job) -> Floats:
        """See ``KnownSpeeds.grid``."""
        relabelled, held = self._relabelling.of(job), self._held[job.key]
        speeds = self._model.predict_speeds(relabelled.request, self._optimism, relabelled.own_measurements)
        if (id(speeds), held) not in self._grids:
            self._grids[id(speeds), held] = speeds_in_next_slot(speeds, held, self._lost)
        return self._grids[id(speeds), held]


def can_keep(speeds: Floats, held: Allocation) -> bool:
    """Whether a job has a size, and it is within the bounds of ``speeds[ps, workers]``."""
    return held != NOTHING and held.ps < speeds.shape[0] and held.workers < speeds.shape[1]


def speeds_in_next_slot(speeds: Floats, held: Allocation, lost: float) -> Floats:
    """Mean samples/s over a slot at whose beginning a job is resized, or keeps its size.

    With these, a size is changed only where that pays within a slot.

    Parameters
    ----------
    speeds
        Samples/s, ``speeds[ps, workers]``; returned as they are if there is no size to keep (``can_keep``).
    held
        Present size of the job.
    lost
        Fraction of the slot that a resize costs. It may include costs that are not modelled, such as slower
        communication after tasks have moved to other nodes.
    """
    if not lost or not can_keep(speeds, held):
        return speeds
    slowed: Floats = speeds * max(1.0 - lost, _MIN_LEFT)
    slowed[held.ps, held.workers] = speeds[held.ps, held.workers]
    return slowed
