"""Gaussian process regression of training speed: one posterior over all kinds of jobs and all sizes.

Model. The logarithm of the speed y, in samples/s, of a job of kind k with w workers and p parameter servers is a sum
of independent components, with s = (w, p):

    log y_k(s) = c + t(s) + g(s) + h_k(s) + r_k(s) + noise

    c       mean level of the kinds that were measured (of all groups), with the weights b_k below; the level of a kind
            is the mean of log y - t over its sizes X_k
    t(s)    prior trend: a quarter of a doubling for each doubling of w and of p; for all-reduce, half for each of w
    g(s)    shared by all kinds of one group (architecture, consistency): Matern-3/2, length 2, variance 0.5
    h_k(s)  of kind k alone: Matern-3/2, length 1.5, variance 0.12, plus a constant of variance 9, the kind's level
    r_k(s)  of kind k at this one size, independent from size to size (the nugget): standard deviation 0.1
    noise   of a mean of several measurements: standard deviation 0.05 (``_MEASUREMENT_DEVIATION``) / sqrt(their
            number), at least 0.01 (``_MIN_DEVIATION``)

The prior (kernels, trend and their constants) is in ``dl2d.throughput.gaussian_process_prior``.

Inference. The covariance of all measurements is block-diagonal, except for that of g. The measured sizes of a group are
U distinct ones, X_U (at most ``_MAX_SHARED_SIZES``). Let E be the covariance of g, with E(X_U, X_U) = L L', and g = L z
at X_U with z ~ N(0, I). Kind k was measured at n sizes X_k (at most ``_MAX_JOINT_SIZES``); S_k, (n, U), selects them
from X_U, H_k is the covariance of h_k (at X_k where no sizes are given), D_k = diag(noise variances), and
y_k = log y - t - c. M' is the transpose of M. Then

    A_k = (H_k + 0.1^2 I + D_k)^-1                                     (n, n)
    P   = I + L' (sum_k b_k S_k' A_k S_k) L                            (U, U), precision of z given all measurements
    m   = P^-1 L' sum_k b_k S_k' A_k y_k                               (U,), mean of z

(0.1^2 is ``NUGGET_VARIANCE``; ``_JITTER`` is added to the diagonal of E(X_U, X_U), so that it can be factorised)
where b_k is 1, or less for a kind whose speeds are implausible (``_weights``). For
f = c + t + g + h_k at N sizes X, with W = L^-1 E(X_U, X) and G = A_k H_k(X_k, X):

    mean_f     = c + t(X) + W' m + G' (y_k - S_k L m)                                                           (N,)
    variance_f = 0.5 - colsum(W * W) + 9.12 - colsum(G * H_k(X_k, X)) + colsum(V * V)                           (N,)
                 where V = R (W - L' S_k' G) and R' R = P^-1; 0.5 and 9.12 = 0.12 + 9 are the prior variances of g and
                 h_k, whose sum is ``PRIOR_VARIANCE``

The predicted logarithm of speed is f + r_k:

- At a size that was not measured, r_k has its prior: the mean is mean_f, the variance is variance_f + 0.1^2.
- At a measured size, r_k is then conditioned on the measurement log y there, whose noise has variance v
  (``_update_joint``). Given f, its mean is q (log y - f) and its variance q v, with q = 0.1^2 / (0.1^2 + v), so that

      mean = mean_f + q (log y - mean_f)                  variance = (1 - q)^2 variance_f + q v

- Where a kind was measured at more than ``_MAX_JOINT_SIZES`` sizes, f is not conditioned on the measurements beyond
  these. Each of them changes the prediction at its own size only (``_update_separate``): f + r_k, with its variance
  u = variance_f + 0.1^2, is conditioned on it, with q = u / (u + v):

      mean = mean_f + q (log y - mean_f)                  variance = (1 - q) u

If each kind has at most ``_MAX_JOINT_SIZES`` sizes and each group ``_MAX_SHARED_SIZES``, and all b_k are 1, this is the
posterior of equations 2.25 and 2.26 of Rasmussen and Williams, given c and the noise variances (higher for outliers:
``with_noise_of_outliers``), with the inverse of the covariance of all measurements written by the matrix inversion
lemma (A.9). Cost: M n^3 + U^3 for M kinds, instead of (M n)^3; n (n + U) for each size that is predicted.

Sources: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006: section 2.2 (prediction), 4.2
(Matern-3/2). Kinds with a shared component: Hensman, Lawrence and Rattray, "Hierarchical Bayesian modelling of gene
expression time series across irregularly sampled replicates and clusters", 2013. Speeds with a bonus for uncertainty:
Srinivas et al., "Gaussian process optimization in the bandit setting", ICML 2010.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dl2d.core.array_types import Bools, Floats, Ints
from dl2d.core.jobs import JobRequest
from dl2d.core.measured_speeds_and_losses import SpeedPoint, TrainingKind
from dl2d.throughput.gaussian_process_prior import (
    NUGGET_VARIANCE,
    PRIOR_VARIANCE,
    Group,
    distances,
    inputs_and_trend,
    kernel_inputs,
    kind_covariance,
    precision,
    shared_covariance,
)
from dl2d.throughput.training_data import (
    Points,
    are_few,
    as_points,
    noise_of_outliers,
    sizes_of,
    with_noise_of_outliers,
)

#: Standard deviation of the logarithm of one measured speed, and the least one of a mean of several.
_MEASUREMENT_DEVIATION = 0.05
_MIN_DEVIATION = 0.01

# Limits on the size of matrices.
#: Sizes of one kind that are conditioned on together; where more were measured, some are selected.
_MAX_JOINT_SIZES = 40
#: Sizes at which the shared component is inferred; where kinds have more, close ones are merged.
_MAX_SHARED_SIZES = 64
#: Maximum number of counts of one role that are predicted.
_MAX_PREDICTED_COUNTS = 40
#: If a role has more counts, all counts up to this one are predicted, and others in geometric progression, up to
#: ``_MAX_PREDICTED_COUNTS`` in all; speeds at the counts between are interpolated linearly in log2.
_DENSE_COUNTS = 24
# One user's jobs may report any speeds, and must not change the sizes of jobs of all other kinds. Speeds of kinds that
# train do not reach these limits.
#: Root mean square of a kind's deviations from the trend, in logarithms and without its level, up to which it counts
#: fully in what all kinds share. The prior expects 0.8 = sqrt(0.5 + 0.12 + 0.01), the variances of g, of h_k without
#: the level and of r_k; no kind of dl2's checkpoint exceeds that.
_PLAUSIBLE_DEVIATION = 2.0
#: The same for a kind's level, less the median over all kinds: three standard deviations of its prior.
_PLAUSIBLE_LEVEL = 9.0
#: Limits of that median: 1 to 100,000 samples/s at (1, 1). Without them, kinds with implausible speeds would make the
#: others implausible wherever they are the majority.
_PLAUSIBLE_MEDIAN = (0.0, math.log(1e5))
#: Added to the diagonal of the shared covariance for its Cholesky factorisation.
_JITTER = 1e-9


class _Bounds(NamedTuple):
    """Largest counts of a job."""

    workers: int
    ps: int


class _Measurements(NamedTuple):
    """Measured speeds of one kind, or of one job, at n sizes."""

    #: Workers and PSs, shape (n, 2).
    sizes: Ints
    #: Inputs of the kernels, shape (n, 3) or (n, 1).
    inputs: Floats
    #: Prior trend of the logarithm of samples/s, shape (n,).
    trend: Floats
    #: Logarithm of samples/s less the trend, shape (n,).
    detrended: Floats
    #: Variance of the noise of ``detrended``, shape (n,).
    noise_variance: Floats
    #: Whether only one or two jobs were measured, which may be mislabelled (``are_few``), shape (n,).
    few_jobs: Bools

    @classmethod
    def of(cls, points: Points, group: Group) -> _Measurements:
        """Convert those points that have a speed."""
        workers, ps, speed = points["workers"], points["ps"], points["speed"]
        points = points[(workers > 0) & ((ps > 0) | (not group.has_ps)) & (speed > 0) & (speed < np.inf)]
        sizes, jobs = sizes_of(points), points["jobs"]
        inputs, trend = inputs_and_trend(sizes, group)
        variance = np.maximum(_MEASUREMENT_DEVIATION**2 / np.maximum(points["measurements"], 1.0), _MIN_DEVIATION**2)
        detrended = np.log(points["speed"]) - trend
        return cls(sizes, inputs, trend, detrended, variance, are_few(jobs))

    def take(self, selection: Bools) -> _Measurements:
        """Return the selected measurements."""
        return _Measurements._make(values[selection] for values in self)

    def within(self, bounds: _Bounds, group: Group) -> tuple[Ints, Ints]:
        """Indices of the sizes within bounds, and their indices among all sizes, flattened; both of shape (i,).

        All sizes are a grid with a row for each count of PSs from 1 on (one row for all-reduce jobs) and a column for
        each count of workers from 1 on; flattened, the index of a size is (ps - 1) * max_workers + (workers - 1).
        """
        workers, ps = self.sizes.T
        (indices,) = np.nonzero((workers <= bounds.workers) & ((ps <= bounds.ps) | (not group.has_ps)))
        row = ps[indices] - 1 if group.has_ps else 0
        return indices, row * bounds.workers + workers[indices] - 1


@dataclass(frozen=True, slots=True, eq=False)
class ConditionedKind:
    """Terms of the posterior that depend on the measurements of one kind (or of one job treated as a kind) alone."""

    #: Measurements that are conditioned on together, at n sizes.
    joint: _Measurements
    #: A_k of the module's docstring, shape (n, n).
    precision: Floats
    #: Measurements that change the prediction at their own size only; None where there are none.
    separate: _Measurements | None = None

    @classmethod
    def of(cls, joint: _Measurements, separate: _Measurements | None = None) -> ConditionedKind:
        """Compute A_k."""
        return cls(joint, precision(kind_covariance(joint.inputs, joint.inputs), joint.noise_variance), separate)

    @property
    def measurements(self) -> tuple[_Measurements, ...]:
        """All measurements."""
        return (self.joint,) if self.separate is None else (self.joint, self.separate)


class _GroupMember(NamedTuple):
    """A kind and its sizes among those of its group."""

    conditioned: ConditionedKind
    #: S_k, as the index of each of its n sizes among the U of the group, shape (n,).
    shared_sizes: Ints
    #: b_k.
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _SharedPosterior:
    """Posterior of the shared component g = L z of a group, at U sizes; symbols are those of the module's docstring."""

    #: Inputs of the U sizes, shape (U, 3) or (U, 1).
    inputs: Floats
    #: L^-1, shape (U, U).
    inverse_factor: Floats
    #: m, the posterior mean of z, shape (U,).
    z_mean: Floats
    #: R, a root of the posterior covariance of z: z_root' z_root is P^-1; shape (U, U).
    z_root: Floats
    #: L m, the posterior mean of g, shape (U,).
    g_mean: Floats
    #: R L', a root of the posterior covariance of g, shape (U, U).
    g_root: Floats

    @classmethod
    def of(cls, inputs: Floats, members: Iterable[_GroupMember], mean_level: float) -> _SharedPosterior:
        """Condition on the measurements of all kinds of a group; ``mean_level`` is c."""
        count = len(inputs)
        factor = np.linalg.cholesky(shared_covariance(inputs, inputs) + _JITTER * np.eye(count))
        information, weighted_detrended = np.zeros((count, count)), np.zeros(count)
        for kind, shared_sizes, weight in members:
            selection = (shared_sizes[:, None] == np.arange(count)).astype(np.float64)  # S_k
            selected_precision = weight * (selection.T @ kind.precision)
            information += selected_precision @ selection
            weighted_detrended += selected_precision @ (kind.joint.detrended - mean_level)
        z_root = np.linalg.inv(np.linalg.cholesky(np.eye(count) + factor.T @ information @ factor))
        z_mean = z_root.T @ (z_root @ (factor.T @ weighted_detrended))
        return cls(inputs, np.linalg.inv(factor), z_mean, z_root, factor @ z_mean, z_root @ factor.T)


@dataclass(frozen=True, slots=True, eq=False)
class _SizesToPredict:
    """N sizes whose speed is predicted, with the terms that are the same for all kinds of a group."""

    #: Inputs, shape (N, 3) or (N, 1).
    inputs: Floats
    #: Prior trend, shape (N,).
    trend: Floats
    #: W, the covariance of z and of g at the N sizes, shape (U, N); None where no kind of the group was measured.
    z_covariance: Floats | None = None
    #: R W, shape (U, N); None where no kind of the group was measured.
    rooted_covariance: Floats | None = None


class GaussianProcess:
    """Predicted training speeds of all kinds of jobs, with uncertainty, from measured ones.

    A kind that was never measured is predicted from the shared component alone, at the mean level c of the others;
    where nothing was measured at all, the speed at (1, 1) is predicted to be 1 sample/s.

    A run that failed (speed 0) does not change the predictions for neighbouring sizes: in the DL2 authors' measurements
    those are as fast as others. Its own size is predicted to have speed 0.

    All measurements of a kind are conditioned on together at up to 40 (``_MAX_JOINT_SIZES``) sizes. Of more, 40 are:
    the fastest 20 and others that are far apart; the remaining ones change the prediction at their own size only. Of
    more than 64 (``_MAX_SHARED_SIZES``) sizes of a group, close ones share one value of g.

    Parameters
    ----------
    observations
        Points by kind; a kind that is left out was never measured.
    previous
        Another model: its computations for kinds whose points are the same are reused.
    """

    def __init__(self, observations: Mapping[TrainingKind, Points], *, previous: GaussianProcess | None = None) -> None:
        self._observations = dict(observations)
        groups: dict[Group, dict[TrainingKind, ConditionedKind]] = {}
        for kind, points in sorted(observations.items()):
            conditioned = previous.conditioned_on(kind, points) if previous is not None else None
            conditioned = conditioned or _conditioned(points, Group.of(kind))
            if conditioned is not None:
                groups.setdefault(Group.of(kind), {})[kind] = conditioned
        all_kinds = {kind: conditioned for kinds in groups.values() for kind, conditioned in kinds.items()}
        weights = _weights(all_kinds)
        levels = [conditioned.joint.detrended.mean() for conditioned in all_kinds.values()]
        #: c of the module's docstring.
        self._mean_level = float(np.average(levels, weights=list(weights.values()))) if levels else 0.0
        self._members: dict[TrainingKind, _GroupMember] = {}
        self._shared: dict[Group, _SharedPosterior] = {}
        for group, kinds in groups.items():
            inputs, shared_sizes = _shared_sizes([conditioned.joint.sizes for conditioned in kinds.values()], group)
            members = {
                kind: _GroupMember(conditioned, sizes, weights[kind])
                for (kind, conditioned), sizes in zip(kinds.items(), shared_sizes, strict=True)
            }
            self._members |= members
            self._shared[group] = _SharedPosterior.of(inputs, members.values(), self._mean_level)
        # Caches, since many jobs need the same prediction.
        self._sizes_to_predict: dict[tuple[Group, _Bounds], _SizesToPredict] = {}
        self._log_speeds: dict[tuple[TrainingKind, _Bounds, tuple[SpeedPoint, ...]], tuple[Floats, Floats]] = {}
        self._speeds: dict[tuple[TrainingKind, _Bounds, tuple[SpeedPoint, ...], float], Floats] = {}

    @property
    def kinds(self) -> tuple[TrainingKind, ...]:
        """Kinds that were measured."""
        return tuple(self._members)

    def conditioned_on(self, kind: TrainingKind, points: Points) -> ConditionedKind | None:
        """Return the computations for a kind; None if this model was not conditioned on exactly these points of it."""
        member = self._members.get(kind)
        if member is None or self._observations[kind].tobytes() != points.tobytes():
            return None
        return member.conditioned

    def predict_speeds(
        self, request: JobRequest, optimism: float = 0.0, own_measurements: tuple[SpeedPoint, ...] = ()
    ) -> Floats:
        """Upper confidence bound of samples/s: ``exp(mean + optimism * sqrt(variance - its least over all sizes))``.

        The least variance is subtracted because uncertainty that all sizes have alike is no reason to prefer one.

        Parameters
        ----------
        optimism
            Standard deviations that are added to the mean.
        own_measurements
            See ``predict_log_speeds``.

        Returns
        -------
        Shape (max_ps + 1, max_workers + 1), with equal rows for all-reduce jobs; zeros where a count that the job needs
        is 0, or a run failed. Equal jobs share one read-only array.
        """
        key = (TrainingKind.of(request), _Bounds(request.max_workers, request.max_ps), own_measurements, optimism)
        if key not in self._speeds:
            mean, deviation = self.predict_log_speeds(request, own_measurements)
            if optimism:
                variance, trains = deviation**2, np.isfinite(mean)
                least = variance.min(where=trains, initial=np.inf)
                mean = mean + optimism * np.sqrt(np.where(trains, np.maximum(variance - least, 0.0), 0.0))
            speeds: Floats = np.exp(mean)
            speeds.flags.writeable = False
            self._speeds[key] = speeds
        return self._speeds[key]

    def predict_log_speeds(
        self, request: JobRequest, own_measurements: tuple[SpeedPoint, ...] = ()
    ) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of samples/s; callers must not write to them.

        Parameters
        ----------
        own_measurements
            Sizes at which this job failed (speed 0): they are predicted to fail. Also all its other measurements, if
            its speeds are not those of its kind: then it is predicted from them instead of its kind's. The latter are
            ignored if no kind of its group was measured, since there is no posterior that they could be added to.

        Returns
        -------
        Two arrays of shape (max_ps + 1, max_workers + 1), with equal rows for all-reduce jobs; -inf and 0 where a count
        that the job needs is 0, or a run failed.
        """
        key = (TrainingKind.of(request), _Bounds(request.max_workers, request.max_ps), own_measurements)
        if key not in self._log_speeds:
            self._log_speeds[key] = self._predict(*key)
        return self._log_speeds[key]

    def _predict(
        self, kind: TrainingKind, bounds: _Bounds, own_measurements: tuple[SpeedPoint, ...]
    ) -> tuple[Floats, Floats]:
        group = Group.of(kind)
        shape = (bounds.ps + 1, bounds.workers + 1)
        mean, deviation = np.full(shape, -np.inf), np.zeros(shape)
        if bounds.workers < 1 or (group.has_ps and bounds.ps < 1):
            return mean, deviation
        own_points = as_points(own_measurements)
        member = self._job_as_member(_Measurements.of(own_points, group), group) or self._members.get(kind)
        flat_mean, flat_variance = self._at_all_sizes(group, member, bounds)
        flat_variance += NUGGET_VARIANCE
        if member is not None:
            _update_joint(member.conditioned.joint, bounds, group, flat_mean, flat_variance)
            if member.conditioned.separate is not None:
                _update_separate(member.conditioned.separate, bounds, group, flat_mean, flat_variance)
        first_row = int(group.has_ps)
        mean[first_row:, 1:] = flat_mean.reshape(-1, bounds.workers)
        deviation[first_row:, 1:] = np.sqrt(flat_variance).reshape(-1, bounds.workers)
        of_kind = [self._observations[kind]] if kind in self._observations else []
        for points in (*of_kind, own_points):
            for workers, ps in sizes_of(points[points["speed"] == 0.0]).tolist():
                if workers <= bounds.workers and ps <= bounds.ps:
                    failed = (ps if group.has_ps else slice(None), workers)
                    mean[failed], deviation[failed] = -np.inf, 0.0
        return mean, deviation

    def _job_as_member(self, measurements: _Measurements, group: Group) -> _GroupMember | None:
        """Treat a job as a kind of its own; the shared component stays as inferred from the measured kinds.

        None where the job was not measured, or no kind of its group was.
        """
        shared = self._shared.get(group)
        if shared is None or not len(measurements.sizes):
            return None
        nearest: Ints = distances(measurements.inputs, shared.inputs).argmin(axis=1)
        return _GroupMember(ConditionedKind.of(measurements), nearest)

    def _at_all_sizes(self, group: Group, member: _GroupMember | None, bounds: _Bounds) -> tuple[Floats, Floats]:
        """``mean_f`` and ``variance_f`` of the module's docstring at all sizes within bounds.

        Both are flattened as in ``_Measurements.within``.
        """
        workers, ps = _counts(bounds.workers), _counts(bounds.ps) if group.has_ps else np.ones(1, dtype=np.int64)
        if (group, bounds) not in self._sizes_to_predict:
            sizes = np.stack(np.meshgrid(workers, ps), axis=-1).reshape(-1, 2)
            self._sizes_to_predict[group, bounds] = self._with_shared_terms(sizes, group)
        mean, variance = self._at(group, member, self._sizes_to_predict[group, bounds])
        if len(workers) == bounds.workers and (not group.has_ps or len(ps) == bounds.ps):
            return mean, variance
        mean, deviation = (_interpolated(values, workers, ps, bounds, group) for values in (mean, np.sqrt(variance)))
        variance = deviation**2
        for measurements in () if member is None else member.conditioned.measurements:
            indices, targets = measurements.within(bounds, group)
            sizes_to_predict = self._with_shared_terms(measurements.sizes[indices], group)
            mean[targets], variance[targets] = self._at(group, member, sizes_to_predict)
        return mean, variance

    def _with_shared_terms(self, sizes: Ints, group: Group) -> _SizesToPredict:
        """Compute the terms of sizes, shape (N, 2), that are the same for all kinds of a group."""
        shared, (inputs, trend) = self._shared.get(group), inputs_and_trend(sizes, group)
        if shared is None:
            return _SizesToPredict(inputs, trend)
        z_covariance = shared.inverse_factor @ shared_covariance(shared.inputs, inputs)
        return _SizesToPredict(inputs, trend, z_covariance, shared.z_root @ z_covariance)

    def _at(self, group: Group, member: _GroupMember | None, sizes: _SizesToPredict) -> tuple[Floats, Floats]:
        """``mean_f`` and ``variance_f`` of the module's docstring; both of shape (N,)."""
        mean = self._mean_level + sizes.trend
        variance = np.full(len(mean), PRIOR_VARIANCE)
        shared, z_covariance, rooted = self._shared.get(group), sizes.z_covariance, sizes.rooted_covariance
        if shared is None or z_covariance is None or rooted is None:
            return mean, variance
        mean += shared.z_mean @ z_covariance
        variance -= np.einsum("ij,ij->j", z_covariance, z_covariance)
        if member is not None:
            kind, shared_sizes = member.conditioned, member.shared_sizes
            covariance = kind_covariance(kind.joint.inputs, sizes.inputs)
            gain = kind.precision @ covariance
            mean += (kind.joint.detrended - self._mean_level - shared.g_mean[shared_sizes]) @ gain
            variance -= np.einsum("ij,ij->j", gain, covariance)
            rooted = rooted - shared.g_root[:, shared_sizes] @ gain  # V
        variance += np.einsum("ij,ij->j", rooted, rooted)
        return mean, np.maximum(variance, 0.0)


def _conditioned(points: Points, group: Group) -> ConditionedKind | None:
    """Condition a kind on its points; None where none of them has a speed."""
    measurements = _Measurements.of(points, group)
    if not len(measurements.sizes):
        return None
    joint, separate = _split(measurements)
    variance = with_noise_of_outliers(joint.noise_variance, joint.inputs, joint.detrended, joint.few_jobs)
    return ConditionedKind.of(joint._replace(noise_variance=variance), separate)


def _weights(kinds: Mapping[TrainingKind, ConditionedKind]) -> dict[TrainingKind, float]:
    """Weight of each kind in what all kinds share: 1, or less where its speeds are implausible.

    It falls with the fourth power of the deviations, so that larger ones change less.
    """
    if not kinds:
        return {}
    levels, deviations = np.array(
        [(kind.joint.detrended.mean(), kind.joint.detrended.std()) for kind in kinds.values()]
    ).T
    median = np.clip(np.median(levels), *_PLAUSIBLE_MEDIAN)
    excess = np.maximum(deviations / _PLAUSIBLE_DEVIATION, np.abs(levels - median) / _PLAUSIBLE_LEVEL)
    return dict(zip(kinds, (np.maximum(excess, 1.0) ** -4).tolist(), strict=True))


def _split(measurements: _Measurements) -> tuple[_Measurements, _Measurements | None]:
    """Split into at most ``_MAX_JOINT_SIZES`` measurements that are conditioned on together, and the remaining ones.

    Half of the former are the fastest sizes. The other half are selected one by one: each time the size whose distance
    to the nearest selected one is largest, of equals the first.
    """
    if len(measurements.sizes) <= _MAX_JOINT_SIZES:
        return measurements, None
    fastest = np.argsort(-(measurements.detrended + measurements.trend), kind="stable")[: _MAX_JOINT_SIZES // 2]
    joint = np.zeros(len(measurements.sizes), dtype=np.bool_)
    joint[fastest] = True
    inputs = measurements.inputs
    to_nearest = distances(inputs[fastest], inputs).min(axis=0)
    for _ in range(_MAX_JOINT_SIZES - len(fastest)):
        farthest = int(to_nearest.argmax())
        joint[farthest] = True
        to_nearest = np.minimum(to_nearest, np.linalg.norm(inputs - inputs[farthest], axis=1))
    return measurements.take(joint), measurements.take(~joint)


def _update_joint(measurements: _Measurements, bounds: _Bounds, group: Group, mean: Floats, variance: Floats) -> None:
    """Condition the nugget of each measured size on its measurement, in place.

    Parameters
    ----------
    mean, variance
        Of the logarithm of speed at all sizes within bounds, with the nugget's prior variance in the latter; flattened
        as in ``_Measurements.within``.
    """
    indices, targets = measurements.within(bounds, group)
    noise_variance = measurements.noise_variance[indices]
    gain = NUGGET_VARIANCE / (NUGGET_VARIANCE + noise_variance)
    mean[targets] += gain * ((measurements.detrended + measurements.trend)[indices] - mean[targets])
    variance[targets] = (1.0 - gain) ** 2 * (variance[targets] - NUGGET_VARIANCE) + gain * noise_variance


def _update_separate(
    measurements: _Measurements, bounds: _Bounds, group: Group, mean: Floats, variance: Floats
) -> None:
    """Condition each measured size on its own measurement alone, in place, with more noise for outliers.

    Parameters
    ----------
    mean, variance
        See ``_update_joint``.
    """
    indices, targets = measurements.within(bounds, group)
    prior = variance[targets]
    residual = (measurements.detrended + measurements.trend)[indices] - mean[targets]
    expected = prior + measurements.noise_variance[indices]
    gain = prior / (expected + noise_of_outliers(residual, expected, measurements.few_jobs[indices]))
    mean[targets] += gain * residual
    variance[targets] = prior * (1.0 - gain)


def _shared_sizes(sizes_of_kinds: Sequence[Ints], group: Group) -> tuple[Floats, list[Ints]]:
    """Select the U sizes at which the shared component is inferred.

    They are the distinct sizes of all kinds. If these are too many, each size is rounded to a lattice in log2 whose
    spacing is 1/16 of a doubling, or twice, four times ... that, until few enough are left.

    Parameters
    ----------
    sizes_of_kinds
        Workers and PSs of each kind, shape (n, 2).

    Returns
    -------
    Inputs of the U sizes, shape (U, 3) or (U, 1), and for each kind the index among them of each of its sizes, shape
    (n,).
    """
    log_counts, cells_per_doubling = np.log2(np.maximum(np.concatenate(sizes_of_kinds), 1)), 16.0
    distinct, indices = np.unique(log_counts, axis=0, return_inverse=True)
    while len(distinct) > _MAX_SHARED_SIZES:
        rounded = np.round(log_counts * cells_per_doubling) / cells_per_doubling
        distinct, indices = np.unique(rounded, axis=0, return_inverse=True)
        cells_per_doubling /= 2.0
    ends = np.cumsum([len(sizes) for sizes in sizes_of_kinds])[:-1]
    return kernel_inputs(distinct, group), np.split(indices.reshape(-1), ends)


def _counts(max_count: int) -> Ints:
    """Counts of one role, from 1 to ``max_count``, that are predicted without interpolation; ascending."""
    if max_count <= _MAX_PREDICTED_COUNTS:
        return np.arange(1, max_count + 1)
    sparse = np.round(np.geomspace(_DENSE_COUNTS, max_count, _MAX_PREDICTED_COUNTS - _DENSE_COUNTS + 1)).astype(
        np.int64
    )
    return np.unique(np.concatenate([np.arange(1, _DENSE_COUNTS), sparse]))


def _interpolated(values: Floats, workers: Ints, ps: Ints, bounds: _Bounds, group: Group) -> Floats:
    """Interpolate values to all sizes within bounds, bilinearly in log2 of the counts.

    Parameters
    ----------
    values
        Values at the sizes of ``ps`` (rows) and ``workers`` (columns), flattened.

    Returns
    -------
    Values at all sizes, flattened as in ``_Measurements.within``.
    """
    log_counts = np.log2(np.arange(1, bounds.workers + 1))
    rows = np.stack([np.interp(log_counts, np.log2(workers), row) for row in values.reshape(len(ps), len(workers))])
    if group.has_ps:
        log_counts = np.log2(np.arange(1, bounds.ps + 1))
        rows = np.stack([np.interp(log_counts, np.log2(ps), column) for column in rows.T], axis=1)
    return rows.reshape(-1)
