"""Prior of the throughput model: trend and covariance of the logarithm of speed over sizes.

The covariance functions are of the Matern class with smoothness 3/2 (Rasmussen and Williams, "Gaussian Processes for
Machine Learning", 2006, equation 4.17):

    k(x, z) = variance * (1 + d) * exp(-d)    with d = sqrt(3) * |x - z| / length

Inputs x of a size are (log2 w, log2 p, log2 w/p), where it has w workers and p parameter servers; for all-reduce jobs
log2 w alone. So lengths are in doublings. Variances are of natural logarithms of speed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dl2d.core.array_types import Floats, Ints
from dl2d.core.jobs import Architecture, Consistency
from dl2d.core.measured_speeds_and_losses import TrainingKind

#: Length and variance of the component that all kinds of a group share.
_SHARED_LENGTH = 2.0
_SHARED_VARIANCE = 0.5
#: Length and variance of the component of one kind, and variance of its level, a constant.
_KIND_LENGTH = 1.5
_KIND_VARIANCE = 0.12
_LEVEL_VARIANCE = 9.0
#: Variance of the component that is independent from size to size (in geostatistics, the nugget).
NUGGET_VARIANCE = 0.1**2
#: Variance of the logarithm of speed at any size before anything is measured, without the nugget.
PRIOR_VARIANCE = _SHARED_VARIANCE + _KIND_VARIANCE + _LEVEL_VARIANCE
#: Prior increase of the logarithm of speed, in doublings, for each doubling of one role's count.
_TREND = 0.25


class Group(NamedTuple):
    """Kinds that share a component of the model: those with equal architecture and consistency."""

    architecture: Architecture
    consistency: Consistency

    @property
    def has_ps(self) -> bool:
        """Whether jobs of these kinds have parameter servers."""
        return self.architecture is Architecture.PS

    @classmethod
    def of(cls, kind: TrainingKind) -> Group:
        """Return the group of a kind."""
        return cls(kind.architecture, kind.consistency)


def inputs_and_trend(sizes: Ints, group: Group) -> tuple[Floats, Floats]:
    """Kernel inputs and prior trend of the logarithm of samples/s.

    Parameters
    ----------
    sizes
        Workers and PSs, shape (n, 2).

    Returns
    -------
    Inputs of shape (n, 3), or (n, 1) for all-reduce jobs, and trend of shape (n,).
    """
    log_counts = np.log2(np.maximum(sizes, 1))
    # An all-reduce job has the trend of a job with as many PSs as workers.
    doublings = log_counts.sum(axis=1) if group.has_ps else 2.0 * log_counts[:, 0]
    return kernel_inputs(log_counts, group), _TREND * float(np.log(2.0)) * doublings


def kernel_inputs(log_counts: Floats, group: Group) -> Floats:
    """Kernel inputs of log2 of workers and PSs, shape (n, 2); shape (n, 3), or (n, 1) for all-reduce jobs."""
    workers, ps = log_counts.T
    return np.stack([workers, ps, workers - ps] if group.has_ps else [workers], axis=1)


def shared_covariance(inputs_a: Floats, inputs_b: Floats) -> Floats:
    """Prior covariance of the component that a group shares, between a and b inputs; shape (a, b)."""
    return _matern(distances(inputs_a, inputs_b), _SHARED_LENGTH, _SHARED_VARIANCE)


def kind_covariance(inputs_a: Floats, inputs_b: Floats) -> Floats:
    """Prior covariance of the component of one kind, including its level, between a and b inputs; shape (a, b)."""
    return _LEVEL_VARIANCE + _matern(distances(inputs_a, inputs_b), _KIND_LENGTH, _KIND_VARIANCE)


def precision(covariance: Floats, noise_variance: Floats) -> Floats:
    """Inverse of the covariance of measurements: that of the function, plus nugget and noise variances."""
    return np.asarray(np.linalg.inv(covariance + np.diag(NUGGET_VARIANCE + noise_variance)), dtype=np.float64)


def distances(inputs_a: Floats, inputs_b: Floats) -> Floats:
    """Euclidean distances between a and b inputs, in doublings; shape (a, b)."""
    squares = np.zeros((len(inputs_a), len(inputs_b)))
    for column_a, column_b in zip(inputs_a.T, inputs_b.T, strict=True):
        squares += (column_a[:, None] - column_b) ** 2
    return np.sqrt(squares)


def _matern(distance: Floats, length: float, variance: float) -> Floats:
    scaled = distance * (np.sqrt(3.0) / length)
    covariance: Floats = variance * (1.0 + scaled) * np.exp(-scaled)
    return covariance
