"""Predicted speed of each job at each size, from measurements of the checkpoint, of the cluster and of the job itself.

Steps: measurements are brought together (``observations``), the throughput model is conditioned on them, jobs whose
speeds are not those of their kind are relabelled, some optimism is added for exploration, and where the placement lays
jobs on few nodes, sizes that fit on them are predicted to be faster (``locality``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import JobRequest
from dl2d.core.measured_speeds import SpeedPoint, TrainingKind
from dl2d.policies.dl2.checkpoint_contents import Parameters
from dl2d.policies.dl2.exploration import job_optimism
from dl2d.policies.dl2.locality import Locality, largest_requests, min_worker_seconds
from dl2d.policies.dl2.scoring import Floats
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.kind_relabelling import Relabelling
from dl2d.throughput.observations import (
    Points,
    by_kind,
    calibration,
    informative,
    merged_kinds,
    scaled,
    speeds_at,
    without_drift,
)


class KnownSpeeds:
    """Speeds that were measured when the checkpoint was trained, and what they alone predict."""

    def __init__(self, parameters: Parameters) -> None:
        self.points = by_kind(parameters.known)
        self.min_worker_seconds = {speeds.kind: min_worker_seconds(speeds.points) for speeds in parameters.known}

    def predicted(self, request: JobRequest) -> Floats:
        """Samples/s, shape (max_ps + 1, max_workers + 1)."""
        return self._model.speeds(request)

    @cached_property
    def _model(self) -> GaussianProcess:
        return GaussianProcess(self.points)


class Basis(NamedTuple):
    """What the predicted speeds of a job depend on; jobs for which it is equal have equal speeds."""

    #: The job's own request, or with the model type whose speeds it showed.
    request: JobRequest
    #: Measurements of the job itself that hold for no other, see ``Relabelled``.
    own: tuple[SpeedPoint, ...]
    #: Standard deviations that are added.
    optimism: float


class Predictions:
    """Predicted speeds of the jobs of a snapshot.

    Parameters
    ----------
    gathers
        The placement lays each job on as few nodes as hold it.
    before
        Throughput model of the decision before: of kinds for which nothing new was measured it is taken over.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        known: KnownSpeeds,
        parameters: Parameters,
        *,
        gathers: bool,
        before: GaussianProcess | None = None,
    ) -> None:
        self._locality = Locality(snapshot, known.min_worker_seconds, known.predicted) if gathers else None
        if self._locality is not None:
            snapshot = self._locality.apart()
        #: Throughput model that the predictions come from.
        self.model = GaussianProcess(observations(snapshot, known), previous=before)
        relabelling = Relabelling(snapshot, self.model)
        #: Of each job, in the order of the snapshot.
        self.bases = [
            Basis(*relabelling.of(job), optimism)
            for job, optimism in zip(snapshot.jobs, job_optimism(snapshot, relabelling, parameters), strict=True)
        ]

    def speeds(self, basis: Basis) -> Floats:
        """Samples/s, shape (max_ps + 1, max_workers + 1)."""
        speeds = self.model.speeds(basis.request, basis.optimism, basis.own)
        return speeds if self._locality is None else self._locality.together(basis.request, speeds)


def observations(snapshot: Snapshot, known: KnownSpeeds) -> dict[TrainingKind, Points]:
    """Measurements of each kind: the checkpoint's, calibrated for this cluster, and informative ones made on it."""
    requests = largest_requests(snapshot)
    of_group = {kind[1:]: request for kind, request in requests.items()}
    points = dict(known.points)
    measured = {kind: without_drift(some) for kind, some in by_kind(snapshot.speeds).items()}
    for kind in measured.keys() & points.keys():
        # A kind without a job at present is judged by the bounds of another of its architecture.
        request = requests.get(kind) or of_group.get(kind[1:])
        if request is None:
            continue
        expected = speeds_at(known.predicted(replace(request, model=kind.model)), measured[kind])
        factor = calibration(measured[kind], expected, points[kind])
        points[kind] = scaled(points[kind], factor)
        if kind in requests or factor != 1.0:
            measured[kind] = informative(measured[kind], factor * expected)
    return merged_kinds(points, measured)
