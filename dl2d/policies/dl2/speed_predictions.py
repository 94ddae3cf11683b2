"""Predicted speed of each job at each size, from measurements of the checkpoint, of the cluster and of the job itself.

Measurements are merged (``merged_measurements``), the throughput model is conditioned on them, jobs whose speeds are
not those of their kind are relabelled, and optimism is added: one job of each kind at a time gets more of it, so that
it runs at sizes with uncertain speed (exploration). If the placement places each job on as few nodes as possible, sizes
that fit on few nodes are predicted to be faster (``node_locality``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from dl2d.core.array_types import Floats
from dl2d.core.cluster import Snapshot
from dl2d.core.jobs import Job, JobKey, JobRequest
from dl2d.core.measured_speeds_and_losses import SpeedPoint, TrainingKind
from dl2d.policies.dl2.checkpoint_contents import Parameters
from dl2d.policies.dl2.node_locality import Locality, largest_requests, min_worker_seconds
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.gaussian_process_prior import Group
from dl2d.throughput.mislabelled_jobs import Relabelling
from dl2d.throughput.remaining_time import samples_left
from dl2d.throughput.training_data import (
    Points,
    by_kind,
    calibration,
    informative,
    merged_kinds,
    scaled,
    speeds_at,
    without_drift,
)

#: Optimism of an exploring job, as a multiple of that of other jobs.
EXPLORATION_FACTOR = 2.0
#: Least number of confirmed jobs of a kind for one of them to explore: at least two others run at sizes that were
#: measured before, so that a change of all speeds is noticed.
_MIN_JOBS = 3


def job_optimism(snapshot: Snapshot, relabelling: Relabelling, parameters: Parameters) -> list[float]:
    """Compute the standard deviations to add to the predicted speeds of each job, in the order of the snapshot."""
    checkpoint_kinds = {speeds.kind for speeds in parameters.measured_speeds}
    exploring = exploring_jobs(snapshot, relabelling) if parameters.optimism_of_unknown > 0 else frozenset()
    return [
        (
            parameters.optimism
            if TrainingKind.of(relabelling.of(job).request) in checkpoint_kinds
            else parameters.optimism_of_unknown
        )
        * (EXPLORATION_FACTOR if job.key in exploring else 1.0)
        for job in snapshot.jobs
    ]


def exploring_jobs(snapshot: Snapshot, relabelling: Relabelling) -> frozenset[JobKey]:
    """Select, of each kind with at least three (``_MIN_JOBS``) confirmed jobs, the one with the most samples left.

    A job is confirmed if it was measured and its speeds are those of the kind that its user declares. Its measurements
    count for all jobs of the kind, so it is enough that one of them runs at sizes that may turn out to be slow.
    """
    measured = {
        speeds.job for speeds in snapshot.job_speeds if any(point.samples_per_second > 0 for point in speeds.points)
    }
    confirmed: dict[TrainingKind, list[Job]] = {}
    for job in snapshot.jobs:
        if job.key not in measured:
            continue
        relabelled = relabelling.of(job)
        if relabelled.of_known_kind and relabelled.request.model == job.request.model:
            confirmed.setdefault(TrainingKind.of(job.request), []).append(job)
    return frozenset(max(jobs, key=samples_left).key for jobs in confirmed.values() if len(jobs) >= _MIN_JOBS)


class CheckpointSpeeds:
    """Speeds that were measured when the checkpoint was trained, and the predictions from these alone."""

    def __init__(self, parameters: Parameters) -> None:
        #: Measured speeds of each kind.
        self.points = by_kind(parameters.measured_speeds)
        #: Least worker-seconds per sample of each kind.
        self.min_worker_seconds = {
            speeds.kind: min_worker_seconds(speeds.points) for speeds in parameters.measured_speeds
        }

    def predicted(self, request: JobRequest) -> Floats:
        """Predicted samples/s, shape (max_ps + 1, max_workers + 1)."""
        return self._model.predict_speeds(request)

    @cached_property
    def _model(self) -> GaussianProcess:
        return GaussianProcess(self.points)


class PredictionInputs(NamedTuple):
    """Inputs of the prediction of a job's speeds; jobs with equal inputs have equal speeds."""

    #: See ``PredictedAs``.
    request: JobRequest
    #: See ``PredictedAs``.
    own_measurements: tuple[SpeedPoint, ...]
    #: Standard deviations that are added.
    optimism: float


class Predictions:
    """Predicted speeds of the jobs of a snapshot.

    Parameters
    ----------
    gathers
        Whether the placement places each job on as few nodes as possible.
    previous
        Throughput model of the previous decision: its computations are reused for kinds without new measurements.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        checkpoint_speeds: CheckpointSpeeds,
        parameters: Parameters,
        *,
        gathers: bool,
        previous: GaussianProcess | None = None,
    ) -> None:
        self._locality = None
        if gathers:
            self._locality = Locality(snapshot, checkpoint_speeds.min_worker_seconds, checkpoint_speeds.predicted)
            snapshot = self._locality.to_different_nodes()
        #: Throughput model that the predictions come from.
        self.model = GaussianProcess(merged_measurements(snapshot, checkpoint_speeds), previous=previous)
        relabelling = Relabelling(snapshot, self.model)
        relabelled = [relabelling.of(job) for job in snapshot.jobs]
        optimism = job_optimism(snapshot, relabelling, parameters)
        #: Inputs of each job, in the order of the snapshot.
        self.inputs = [
            PredictionInputs(job.request, job.own_measurements, deviations)
            for job, deviations in zip(relabelled, optimism, strict=True)
        ]

    def speeds(self, inputs: PredictionInputs) -> Floats:
        """Predicted samples/s, shape (max_ps + 1, max_workers + 1)."""
        speeds = self.model.predict_speeds(inputs.request, inputs.optimism, inputs.own_measurements)
        return speeds if self._locality is None else self._locality.to_few_nodes(inputs.request, speeds)


def merged_measurements(snapshot: Snapshot, checkpoint_speeds: CheckpointSpeeds) -> dict[TrainingKind, Points]:
    """Merge the checkpoint's measurements, calibrated for this cluster, with informative ones made on the cluster.

    The steps are those of ``dl2d.throughput.training_data``; the checkpoint's points are the reference.
    """
    requests = largest_requests(snapshot)
    requests_of_groups = {Group.of(kind): request for kind, request in requests.items()}
    reference = dict(checkpoint_speeds.points)
    site = {kind: without_drift(points) for kind, points in by_kind(snapshot.speeds).items()}
    for kind in site.keys() & reference.keys():
        # The predictions need bounds: if no job of this kind is present, those of another kind of its group.
        request = requests.get(kind) or requests_of_groups.get(Group.of(kind))
        if request is None:
            continue
        predicted = speeds_at(checkpoint_speeds.predicted(replace(request, model=kind.model)), site[kind])
        factor = calibration(site[kind], predicted, reference[kind])
        reference[kind] = scaled(reference[kind], factor)
        # Uninformative points are left out so that noise in new measurements does not change decisions. A kind without
        # a job gets no new ones, so all its points stay, unless the factor explains them.
        if kind in requests or factor != 1.0:
            site[kind] = informative(site[kind], factor * predicted)
    return merged_kinds(reference, site)
