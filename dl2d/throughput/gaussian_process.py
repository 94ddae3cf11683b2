"""Gaussian process regression of training speed: one posterior over all kinds of jobs and all sizes.

Model. The logarithm of the speed y, in samples/s, of a job of kind k with w workers and p parameter servers is a sum
of independent parts, with s = (w, p):

    log y_k(s) = c + t(s) + g(s) + h_k(s) + r_k(s) + noise

    c       mean of log y - t over all kinds that were measured
    t(s)    prior trend: a quarter of a doubling for each doubling of w and of p; for all-reduce, half for each of w
    g(s)    shared by all kinds of one group (architecture, consistency): Matern-3/2, length 2, variance 0.5
    h_k(s)  of kind k alone: Matern-3/2, length 1.5, variance 0.12, plus a constant of variance 9, the kind's level
    r_k(s)  of kind k at this one size, independent from size to size: standard deviation 0.1
    noise   of a mean of m measurements: standard deviation 0.05 / sqrt(m), but at least 0.01

Lengths are in doublings: inputs of both kernels are (log2 w, log2 p, log2 w/p), for all-reduce log2 w alone.

Inference. The covariance of all measurements is block-diagonal but for g, which has U distinct sizes (at most 64). Let
K = L L' be the covariance of g there and g = L z with z ~ N(0, I). Kind k was measured at n sizes X_k (at most 40);
S_k, of shape (n, U), picks them out of the U, H_k is the covariance of h_k at them, N_k = diag(noise variances), and
y_k = log y - t - c. Then

    A_k = (H_k + 0.1^2 I + N_k)^-1                                     (n, n)
    P   = I + L' (sum_k S_k' A_k S_k) L                                (U, U), precision of z given all measurements
    m   = P^-1 L' sum_k S_k' A_k y_k                                   (U,), mean of z

and of log y_k at other sizes X, with W = L^-1 K(U, X) and G = A_k H_k(X_k, X):

    mean     = c + t(X) + W' m + G' (y_k - S_k L m)
    variance = 0.5 - colsum(W * W) + 9.12 - colsum(G * H_k(X_k, X)) + colsum(V * V) + 0.1^2
               where V = R (W - L' S_k' G) and R' R = P^-1

Cost: K n^3 + U^3 for K kinds, in place of (K n)^3; n (n + U) for each size that is predicted.

Sources: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006: section 2.2 (prediction), 4.2
(Matern-3/2), 5.4.2 (leave-one-out residuals). Kinds with a shared part: Hensman, Lawrence and Rattray, "Hierarchical
Bayesian modelling of gene expression time series across irregularly sampled replicates and clusters", 2013. Speeds with
a bonus for uncertainty: Srinivas et al., "Gaussian process optimization in the bandit setting", ICML 2010.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Architecture, Consistency, JobRequest
from dl2d.core.measured_speeds import SpeedPoint, TrainingKind
from dl2d.throughput.observations import Points, as_points, sizes_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Weight of the standard deviation in predicted speeds while speeds are being learned.
OPTIMISM: Final = 0.5

# The prior (see above). Lengths in doublings, variances and deviations of natural logarithms.
_SHARED_LENGTH: Final = 2.0
_SHARED_VARIANCE: Final = 0.5
_OWN_LENGTH: Final = 1.5
_OWN_VARIANCE: Final = 0.12
_LEVEL_VARIANCE: Final = 9.0
_ROUGHNESS: Final = 0.1
_TREND: Final = 0.25
_NOISE: Final = 0.05
_MIN_NOISE: Final = 0.01

# Limits on the size of matrices.
#: Sizes of one kind that are conditioned on together; where more were measured, some are selected.
_MAX_SIZES: Final = 40
#: Sizes at which the shared part is inferred; where kinds have more, close ones are merged.
_MAX_SHARED_SIZES: Final = 64
#: Counts of one role that are predicted: all of them up to 40; where there are more, all up to 24 and 16 in geometric
#: progression, with linear interpolation in log2 between them.
_MAX_COUNTS: Final = 40
_DENSE_COUNTS: Final = 24
#: Added to the diagonal of the shared covariance for its Cholesky factorisation.
_JITTER: Final = 1e-9

# Measurements that may be of jobs which are not what their users declare.
#: Fewer jobs than this may all be wrong.
_TRUSTED_JOBS: Final = 3
#: Standard deviations between a measurement and its prediction from other sizes, of which there are so many at least,
#: from which on the measurement of few jobs is taken for an outlier.
_OUTLIER: Final = 4.0
_MIN_OTHERS: Final = 4


class Group(NamedTuple):
    """Kinds with a shared part."""

    architecture: Architecture
    consistency: Consistency

    @property
    def has_ps(self) -> bool:
        """Whether its jobs have parameter servers."""
        return self.architecture is Architecture.PS

    @classmethod
    def of(cls, kind: TrainingKind) -> Group:
        """Group of a kind."""
        return cls(kind.architecture, kind.consistency)


class Bounds(NamedTuple):
    """Largest counts of a job."""

    workers: int
    ps: int


@dataclass(frozen=True, slots=True, eq=False)
class _Data:
    """Measurements of one kind at n sizes."""

    #: Workers and PSs, shape (n, 2); inputs of the kernels, shape (n, 3) or (n, 1); prior trend, shape (n,).
    sizes: Ints
    inputs: Floats
    trend: Floats
    #: Logarithm of samples/s less the trend, and variance of its noise, shape (n,).
    residuals: Floats
    noise: Floats
    #: Whether so few jobs were measured that all of them may be wrong, shape (n,).
    doubtful: Bools

    @classmethod
    def of(cls, points: Points, group: Group) -> _Data:
        """Of the points with a speed."""
        workers, ps, speed = points["workers"], points["ps"], points["speed"]
        points = points[(workers > 0) & ((ps > 0) | (not group.has_ps)) & (speed > 0) & (speed < np.inf)]
        sizes, jobs = sizes_of(points), points["jobs"]
        inputs, trend = _inputs(sizes, group)
        variances = np.maximum(_NOISE**2 / np.maximum(points["measurements"], 1.0), _MIN_NOISE**2)
        residuals = np.log(points["speed"]) - trend
        return cls(sizes, inputs, trend, residuals, variances, (jobs > 0) & (jobs < _TRUSTED_JOBS))

    def take(self, which: Ints | Bools) -> _Data:
        """Those at some places."""
        return _Data(
            self.sizes[which], self.inputs[which], self.trend[which], self.residuals[which], self.noise[which],
            self.doubtful[which],
        )  # fmt: skip

    def inside(self, bounds: Bounds, group: Group) -> tuple[Ints, Ints]:
        """Places of those within bounds, and their places among all sizes from (1, 1) on, workers last."""
        workers, ps = self.sizes.T
        (which,) = np.nonzero((workers <= bounds.workers) & ((ps <= bounds.ps) | (not group.has_ps)))
        row = ps[which] - 1 if group.has_ps else 0
        return which, row * bounds.workers + workers[which] - 1


@dataclass(frozen=True, slots=True, eq=False)
class Conditioned:
    """What depends on the measurements of one kind alone, or of one job as a kind of its own."""

    #: Those that are conditioned on together, at n sizes, and A_k, shape (n, n).
    joint: _Data
    precision: Floats
    #: Those that change the prediction at their own size only; None where there are none.
    separate: _Data | None = None

    @classmethod
    def of(cls, joint: _Data, separate: _Data | None = None) -> Conditioned:
        """With A_k."""
        covariance = _own_covariance(joint.inputs, joint.inputs)
        return cls(joint, _precision(covariance, joint.noise), separate)

    @property
    def parts(self) -> tuple[_Data, ...]:
        """All measurements."""
        return (self.joint,) if self.separate is None else (self.joint, self.separate)


class _Member(NamedTuple):
    """A kind in its group."""

    kind: Conditioned
    #: S_k as places among the U sizes of the shared part, shape (n,).
    shared: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """Posterior of the shared part g = L z of a group, at U sizes."""

    #: Inputs of the U sizes, shape (U, 3) or (U, 1).
    inputs: Floats
    #: L^-1, shape (U, U); m, (U,); R, (U, U).
    inverse: Floats
    mean: Floats
    root: Floats
    #: L m, the posterior mean of g, shape (U,); and R L', (U, U).
    mean_at_sizes: Floats
    root_at_sizes: Floats

    @classmethod
    def of(cls, inputs: Floats, members: Iterable[_Member], centre: float) -> _Shared:
        """Condition on the measurements of all kinds of a group."""
        count = len(inputs)
        factor = np.linalg.cholesky(_shared_covariance(inputs, inputs) + _JITTER * np.eye(count))
        information, weighted = np.zeros((count, count)), np.zeros(count)
        for kind, shared in members:
            pick = (shared[:, None] == np.arange(count)).astype(np.float64)  # S_k
            picked = pick.T @ kind.precision
            information += picked @ pick
            weighted += picked @ (kind.joint.residuals - centre)
        root = np.linalg.inv(np.linalg.cholesky(np.eye(count) + factor.T @ information @ factor))
        mean = root.T @ (root @ (factor.T @ weighted))
        return cls(inputs, np.linalg.inv(factor), mean, root, factor @ mean, root @ factor.T)


@dataclass(frozen=True, slots=True, eq=False)
class _Targets:
    """N sizes whose speed is predicted."""

    #: Inputs, shape (N, 3) or (N, 1), and prior trend, (N,).
    inputs: Floats
    trend: Floats
    #: W and R W, shape (U, N); None where no kind of the group was measured.
    weights: Floats | None = None
    spread: Floats | None = None


class GaussianProcess:
    """Predicted training speeds of all kinds of jobs, with uncertainty, from measured ones.

    A kind that was never measured is predicted from the shared part alone, at the mean level of all others; where
    nothing was measured at all that is 1 sample/s at (1, 1).

    A run that failed (speed 0) says nothing about its neighbours: in the DL2 authors' measurements those are as fast as
    others. Its own size is predicted to have speed 0.

    Exact with up to 40 sizes a kind and 64 in all. Of more sizes of a kind, 40 are conditioned on together, the fastest
    20 and others that are far apart, and the rest change the prediction at their own size only. Of more in all, close
    sizes share one value of g.

    Parameters
    ----------
    observations
        Points by kind; a kind that is left out was never measured.
    before
        Another model: what it worked out of kinds whose points are the same is taken over.
    """

    def __init__(self, observations: Mapping[TrainingKind, Points], *, before: GaussianProcess | None = None) -> None:
        self._observations = dict(observations)
        groups: dict[Group, dict[TrainingKind, Conditioned]] = {}
        for name, points in sorted(observations.items()):
            kind = before.conditioned_on(name, points) if before is not None else None
            kind = kind or _conditioned(points, Group.of(name))
            if kind is not None:
                groups.setdefault(Group.of(name), {})[name] = kind
        levels = [kind.joint.residuals.mean() for kinds in groups.values() for kind in kinds.values()]
        self._centre = float(np.mean(levels)) if levels else 0.0
        self._members: dict[TrainingKind, _Member] = {}
        self._shared: dict[Group, _Shared] = {}
        for group, kinds in groups.items():
            inputs, places = _shared_sizes([kind.joint.sizes for kind in kinds.values()], group)
            members = dict(zip(kinds, map(_Member, kinds.values(), places), strict=True))
            self._members |= members
            self._shared[group] = _Shared.of(inputs, members.values(), self._centre)
        # Many jobs ask for the same prediction.
        self._targets: dict[tuple[Group, Bounds], _Targets] = {}
        self._predicted: dict[tuple[TrainingKind, Bounds, tuple[SpeedPoint, ...]], tuple[Floats, Floats]] = {}
        self._speeds: dict[tuple[TrainingKind, Bounds, tuple[SpeedPoint, ...], float], Floats] = {}

    @property
    def kinds(self) -> tuple[TrainingKind, ...]:
        """Kinds that were measured."""
        return tuple(self._members)

    def conditioned_on(self, name: TrainingKind, points: Points) -> Conditioned | None:
        """A kind, if it was conditioned on these points."""
        member = self._members.get(name)
        if member is None or self._observations[name].tobytes() != points.tobytes():
            return None
        return member.kind

    def speeds(self, request: JobRequest, optimism: float = 0.0, own: tuple[SpeedPoint, ...] = ()) -> Floats:
        """Upper confidence bound of samples/s: ``exp(mean + optimism * sqrt(variance - its least over all sizes))``.

        The least variance is subtracted because what is unknown of all sizes alike is no reason to prefer one.

        Parameters
        ----------
        own
            As for ``predict``.

        Returns
        -------
        Shape (max_ps + 1, max_workers + 1), zeros where a needed count is 0 or a run failed. Jobs that are alike get
        one and the same array; it is not to be written to.
        """
        asked = (TrainingKind.of(request), Bounds(request.max_workers, request.max_ps), own, optimism)
        if asked not in self._speeds:
            mean, deviation = self.predict(request, own)
            if optimism:
                variance, trains = deviation**2, np.isfinite(mean)
                least = variance.min(where=trains, initial=np.inf)
                mean = mean + optimism * np.sqrt(np.where(trains, np.maximum(variance - least, 0.0), 0.0))
            speeds: Floats = np.exp(mean)
            speeds.flags.writeable = False
            self._speeds[asked] = speeds
        return self._speeds[asked]

    def predict(self, request: JobRequest, own: tuple[SpeedPoint, ...] = ()) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of samples/s; not to be written to.

        Parameters
        ----------
        own
            Measurements of this one job, if its speeds are not those of its kind: then it is predicted as a kind of its
            own, of which these are all measurements. Sizes with speed 0 are predicted to fail in any case.

        Returns
        -------
        Two arrays of shape (max_ps + 1, max_workers + 1); -inf and 0 where nothing is trained (see ``speeds``).
        """
        asked = (TrainingKind.of(request), Bounds(request.max_workers, request.max_ps), own)
        if asked not in self._predicted:
            self._predicted[asked] = self._predict(*asked)
        return self._predicted[asked]

    def _predict(self, name: TrainingKind, bounds: Bounds, own: tuple[SpeedPoint, ...]) -> tuple[Floats, Floats]:
        group = Group.of(name)
        shape = (bounds.ps + 1, bounds.workers + 1)
        mean, deviation = np.full(shape, -np.inf), np.zeros(shape)
        if bounds.workers < 1 or (group.has_ps and bounds.ps < 1):
            return mean, deviation
        points = as_points(own)
        member = self._job(_Data.of(points, group), group) or self._members.get(name)
        found, variance = self._on_grid(group, member, bounds)
        variance += _ROUGHNESS**2
        if member is not None:
            _update_joint(member.kind.joint, bounds, group, found, variance)
            if member.kind.separate is not None:
                _update_separate(member.kind.separate, bounds, group, found, variance)
        first = int(group.has_ps)
        mean[first:, 1:] = found.reshape(-1, bounds.workers)
        deviation[first:, 1:] = np.sqrt(variance).reshape(-1, bounds.workers)
        for measured in (self._observations.get(name, points), points):
            for workers, ps in sizes_of(measured[measured["speed"] == 0.0]).tolist():
                if workers <= bounds.workers and ps <= bounds.ps:
                    where = (ps if group.has_ps else slice(None), workers)
                    mean[where], deviation[where] = -np.inf, 0.0
        return mean, deviation

    def _job(self, data: _Data, group: Group) -> _Member | None:
        """A job as a kind of its own, if it was measured; the shared part is not inferred anew."""
        shared = self._shared.get(group)
        if shared is None or not len(data.sizes):
            return None
        return _Member(Conditioned.of(data), _nearest(data.inputs, shared.inputs))

    def _on_grid(self, group: Group, member: _Member | None, bounds: Bounds) -> tuple[Floats, Floats]:
        """Mean and variance but for roughness at all sizes within bounds, from (1, 1) on, workers last."""
        workers, ps = _counts(bounds.workers), _counts(bounds.ps) if group.has_ps else np.ones(1, dtype=np.int64)
        if (group, bounds) not in self._targets:
            sizes = np.stack(np.meshgrid(workers, ps), axis=-1).reshape(-1, 2)
            self._targets[group, bounds] = self._targets_at(sizes, group)
        mean, variance = self._at(group, member, self._targets[group, bounds])
        if len(workers) == bounds.workers and (not group.has_ps or len(ps) == bounds.ps):
            return mean, variance
        mean, deviation = (_interpolated(each, workers, ps, bounds, group) for each in (mean, np.sqrt(variance)))
        variance = deviation**2
        for data in () if member is None else member.kind.parts:
            which, where = data.inside(bounds, group)
            mean[where], variance[where] = self._at(group, member, self._targets_at(data.sizes[which], group))
        return mean, variance

    def _targets_at(self, sizes: Ints, group: Group) -> _Targets:
        shared, (inputs, trend) = self._shared.get(group), _inputs(sizes, group)
        if shared is None:
            return _Targets(inputs, trend)
        weights = shared.inverse @ _shared_covariance(shared.inputs, inputs)
        return _Targets(inputs, trend, weights, shared.root @ weights)

    def _at(self, group: Group, member: _Member | None, targets: _Targets) -> tuple[Floats, Floats]:
        """Mean and variance but for roughness, as the module's docstring has them; both shape (N,)."""
        mean = self._centre + targets.trend
        variance = np.full(len(mean), _SHARED_VARIANCE + _OWN_VARIANCE + _LEVEL_VARIANCE)
        shared, weights, spread = self._shared.get(group), targets.weights, targets.spread
        if shared is None or weights is None or spread is None:
            return mean, variance
        mean += shared.mean @ weights
        variance -= np.einsum("ij,ij->j", weights, weights)
        if member is not None:
            kind, places = member
            across = _own_covariance(kind.joint.inputs, targets.inputs)
            gain = kind.precision @ across
            mean += (kind.joint.residuals - self._centre - shared.mean_at_sizes[places]) @ gain
            variance -= np.einsum("ij,ij->j", gain, across)
            spread = spread - shared.root_at_sizes[:, places] @ gain
        variance += np.einsum("ij,ij->j", spread, spread)
        return mean, np.maximum(variance, 0.0)


def _conditioned(points: Points, group: Group) -> Conditioned | None:
    """A kind by its points; None where none of them has a speed."""
    data = _Data.of(points, group)
    if not len(data.sizes):
        return None
    joint, separate = _selected(data)
    return Conditioned.of(_without_outliers(joint), separate)


def _selected(data: _Data) -> tuple[_Data, _Data | None]:
    """What is conditioned on together, and the rest: the fastest half of the limit, then again and again the farthest.

    That is the size whose distance to the nearest selected one is largest, of equals the first.
    """
    if len(data.sizes) <= _MAX_SIZES:
        return data, None
    fastest = np.argsort(-(data.residuals + data.trend), kind="stable")[: _MAX_SIZES // 2]
    joint = np.zeros(len(data.sizes), dtype=np.bool_)
    joint[fastest] = True
    apart = _distances(data.inputs[fastest], data.inputs).min(axis=0)
    for _ in range(_MAX_SIZES - len(fastest)):
        farthest = int(apart.argmax())
        joint[farthest] = True
        apart = np.minimum(apart, np.linalg.norm(data.inputs - data.inputs[farthest], axis=1))
    return data.take(joint), data.take(~joint)


def _without_outliers(data: _Data) -> _Data:
    """Raise the noise of measurements of few jobs that are far from what all other sizes predict.

    To the noise variance the square of the leave-one-out residual is added (Rasmussen and Williams, equations 5.10 to
    5.12): the jobs may not be what their users declare.
    """
    if len(data.residuals) < _MIN_OTHERS or not data.doubtful.any():
        return data
    covariance = _shared_covariance(data.inputs, data.inputs) + _own_covariance(data.inputs, data.inputs)
    precision = _precision(covariance, data.noise)
    weighted, diagonal = precision @ (data.residuals - data.residuals.mean()), np.diagonal(precision)
    outlier = data.doubtful & (np.abs(weighted) > _OUTLIER * np.sqrt(diagonal))
    return replace(data, noise=np.where(outlier, data.noise + (weighted / diagonal) ** 2, data.noise))


def _update_joint(data: _Data, bounds: Bounds, group: Group, mean: Floats, variance: Floats) -> None:
    """Condition the roughness of sizes that were measured on their measurement, in place."""
    which, where = data.inside(bounds, group)
    noise = data.noise[which]
    gain = _ROUGHNESS**2 / (_ROUGHNESS**2 + noise)
    mean[where] += gain * ((data.residuals + data.trend)[which] - mean[where])
    variance[where] = (1.0 - gain) ** 2 * (variance[where] - _ROUGHNESS**2) + gain * noise


def _update_separate(data: _Data, bounds: Bounds, group: Group, mean: Floats, variance: Floats) -> None:
    """Condition single sizes on their own measurement, in place; the noise of outliers is raised."""
    which, where = data.inside(bounds, group)
    noise, prior = data.noise[which], variance[where]
    residual = (data.residuals + data.trend)[which] - mean[where]
    outlier = data.doubtful[which] & (residual**2 > _OUTLIER**2 * (prior + noise))
    gain = prior / (prior + noise + np.where(outlier, residual**2, 0.0))
    mean[where] += gain * residual
    variance[where] = prior * (1.0 - gain)


def _shared_sizes(sizes: Sequence[Ints], group: Group) -> tuple[Floats, list[Ints]]:
    """The U sizes of the shared part: distinct sizes of all kinds, or where these are too many, cells that they lie in.

    Cells of a lattice in log2 are as wide as 1/16 of a doubling, or twice, four times ... that, until they are few
    enough.

    Returns
    -------
    Their inputs, shape (U, 3) or (U, 1), and which of them each size of each kind is, shape (n,).
    """
    logs, cells = np.log2(np.maximum(np.concatenate(sizes), 1)), 16.0
    distinct, places = np.unique(logs, axis=0, return_inverse=True)
    while len(distinct) > _MAX_SHARED_SIZES:
        distinct, places = np.unique(np.round(logs * cells) / cells, axis=0, return_inverse=True)
        cells /= 2.0
    ends = np.cumsum([len(some) for some in sizes])[:-1]
    return _inputs_of(distinct, group), np.split(places.reshape(-1), ends)


def _inputs(sizes: Ints, group: Group) -> tuple[Floats, Floats]:
    """Inputs, shape (n, 3) or (n, 1), and prior trend of log samples/s, (n,), of sizes, shape (n, 2)."""
    logs = np.log2(np.maximum(sizes, 1))
    doublings = logs.sum(axis=1) if group.has_ps else 2.0 * logs[:, 0]
    return _inputs_of(logs, group), _TREND * float(np.log(2.0)) * doublings


def _inputs_of(logs: Floats, group: Group) -> Floats:
    workers, ps = logs.T
    return np.stack([workers, ps, workers - ps] if group.has_ps else [workers], axis=1)


def _nearest(inputs: Floats, others: Floats) -> Ints:
    places: Ints = _distances(inputs, others).argmin(axis=1)
    return places


def _distances(one: Floats, other: Floats) -> Floats:
    """Euclidean distances of inputs; shape (one, other)."""
    squares = np.zeros((len(one), len(other)))
    for column, others in zip(one.T, other.T, strict=True):
        squares += (column[:, None] - others) ** 2
    return np.sqrt(squares)


def _matern(distances: Floats, length: float, variance: float) -> Floats:
    scaled = distances * (np.sqrt(3.0) / length)
    covariances: Floats = variance * (1.0 + scaled) * np.exp(-scaled)
    return covariances


def _shared_covariance(one: Floats, other: Floats) -> Floats:
    return _matern(_distances(one, other), _SHARED_LENGTH, _SHARED_VARIANCE)


def _own_covariance(one: Floats, other: Floats) -> Floats:
    """Of a kind's own part, its level included."""
    return _LEVEL_VARIANCE + _matern(_distances(one, other), _OWN_LENGTH, _OWN_VARIANCE)


def _precision(covariance: Floats, noise: Floats) -> Floats:
    """Inverse of the covariance of measurements: roughness and noise are added to that of the function."""
    return np.asarray(np.linalg.inv(covariance + np.diag(_ROUGHNESS**2 + noise)), dtype=np.float64)


def _counts(most: int) -> Ints:
    """Counts of one role that are predicted, ascending."""
    if most <= _MAX_COUNTS:
        return np.arange(1, most + 1)
    sparse = np.round(np.geomspace(_DENSE_COUNTS, most, _MAX_COUNTS - _DENSE_COUNTS + 1)).astype(np.int64)
    return np.unique(np.concatenate([np.arange(1, _DENSE_COUNTS), sparse]))


def _interpolated(values: Floats, workers: Ints, ps: Ints, bounds: Bounds, group: Group) -> Floats:
    """Values at all counts within bounds, bilinear in log2 of the counts; workers last."""
    wanted = np.log2(np.arange(1, bounds.workers + 1))
    rows = np.stack([np.interp(wanted, np.log2(workers), row) for row in values.reshape(len(ps), len(workers))])
    if group.has_ps:
        wanted = np.log2(np.arange(1, bounds.ps + 1))
        rows = np.stack([np.interp(wanted, np.log2(ps), column) for column in rows.T], axis=1)
    return rows.reshape(-1)
