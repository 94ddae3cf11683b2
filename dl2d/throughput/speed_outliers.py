"""Outliers: measured speeds of few jobs that are far from what the other sizes of their kind let one expect.

They may be of jobs that are not of the kind which their users declare, so they are given more noise. Source: Rasmussen
and Williams, "Gaussian Processes for Machine Learning", 2006, section 5.4.2 (leave-one-out residuals).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dl2d.core.array_types import Bools, Floats
from dl2d.throughput.gaussian_process_kernel import kind_covariance, precision, shared_covariance

#: From this number of jobs on, a measurement at a size is trusted.
_TRUSTED_JOBS: Final = 3
#: Standard deviations between a measurement and its prediction from other sizes beyond which it is an outlier.
_OUTLIER: Final = 4.0
#: Least number of measured sizes of a kind for such a comparison.
_MIN_COMPARED_SIZES: Final = 4


def are_few(jobs: Floats) -> Bools:
    """Whether only one or two jobs were measured, which may be mislabelled, by numbers of jobs."""
    return np.asarray((jobs > 0) & (jobs < _TRUSTED_JOBS))


def with_noise_of_outliers(noise: Floats, inputs: Floats, detrended: Floats, few_jobs: Bools) -> Floats:
    """Noise variances of the measurements of a kind, higher where one of few jobs is an outlier.

    Residuals are leave-one-out (equation 5.12).

    Parameters
    ----------
    noise
        Variances, shape (n,).
    inputs
        Inputs of the kernels, shape (n, 3) or (n, 1).
    detrended
        Logarithm of samples/s less the trend, shape (n,).
    few_jobs
        As ``are_few`` says, shape (n,).
    """
    if len(detrended) < _MIN_COMPARED_SIZES or not few_jobs.any():
        return noise
    inverse = precision(shared_covariance(inputs, inputs) + kind_covariance(inputs, inputs), noise)
    weighted = inverse @ (detrended - detrended.mean())
    diagonal = np.diagonal(inverse)
    return noise + noise_of_outliers(weighted / diagonal, 1.0 / diagonal, few_jobs)


def noise_of_outliers(residuals: Floats, variances: Floats, few_jobs: Bools) -> Floats:
    """Variance that is added to the noise of each measurement: for an outlier the square of its residual, else 0.

    Residuals are from predictions that do not know the measurement; ``variances`` are those expected of the residuals.
    """
    squares = residuals**2
    return np.where(few_jobs & (squares > _OUTLIER**2 * variances), squares, 0.0)
