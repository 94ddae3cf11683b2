"""Speeds as an analytical model has them: what OfflineRL, a baseline of the paper (section 6.3), is trained on.

A model that was never resized has no measurements but those of a trial: some sizes with as many workers as parameter
servers, as Optimus has them (EuroSys 2018, section 3.2). A formula of what hardware does is laid through them, and the
policy is trained on the formula alone. Where the formula is wrong, so is the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dl2d.core.array_types import Floats
from dl2d.core.jobs import Architecture
from dl2d.simulation.speeds.speed_models import AllReduce, Physical, SpeedModel
from dl2d.simulation.workload.workload_file import Workload

#: Workers of the trial, and as many parameter servers.
_TRIED = (1, 2, 3, 4, 6, 8, 12, 16)
#: Samples of a step of a model that does not tell: so many that there is one for each worker.
_BATCH = 4096
#: Of links, bytes per second: 10 Gbit/s. Only the time that they take counts.
_BANDWIDTH = 1.25e9
_MIN_SECONDS = 1e-12


def analytical(workload: Workload) -> Workload:
    """The same jobs, with speeds by formula instead of the true ones."""
    speeds = {}
    for model, truth in workload.speeds.items():
        jobs = [job for job in workload.jobs if job.model == model]
        most = max((max(job.max_workers, 1) for job in jobs), default=1)
        if truth.architecture is Architecture.PS:
            most = min(most, max((max(job.max_ps, 1) for job in jobs), default=1))
        speeds[model] = formula_of(truth, [size for size in _TRIED if size <= most])
    return replace(workload, speeds=speeds)


def formula_of(truth: SpeedModel, tried: Sequence[int]) -> SpeedModel:
    """``Physical`` (``AllReduce``) through the speeds of some sizes with as many PSs as workers (with none).

    Seconds a step are ``compute x B/w + 2 x bytes / bandwidth x max(1, w/p)``, where all of what does not shrink with
    workers counts as communication; for all-reduce ``compute x B/w + 2 (w-1)/w x bytes / bandwidth + overhead``.
    Neither number is below 0, and relative errors count.
    """
    from scipy.optimize import nnls  # noqa: PLC0415 - a quarter of a second that experiments without it need not wait

    collective = truth.architecture is Architecture.ALLREDUCE
    batch = getattr(truth, "batch", None) or _BATCH
    workers = np.array(tried, float)
    rates = np.array([truth.samples_per_second(size, 0 if collective else size) for size in tried])
    ran = rates > 0.0
    if not ran.any():
        # Every trial failed: as slow as can be told.
        workers, rates, ran = np.ones(1), np.full(1, 1e-6), np.ones(1, bool)
    workers, seconds = workers[ran], batch / rates[ran]
    share = np.maximum(batch / workers, 1.0)
    ones = np.ones_like(workers)
    terms = [share, 2.0 * (workers - 1.0) / workers, ones] if collective else [share, 2.0 * ones]
    found: Floats = nnls(np.stack(terms, axis=1) / seconds[:, None], ones)[0]
    compute, sent = max(float(found[0]), _MIN_SECONDS), float(found[1])
    if collective:
        return AllReduce(
            batch=batch, compute=compute, model_bytes=sent * _BANDWIDTH, bandwidth=_BANDWIDTH, overhead=float(found[2])
        )
    return Physical(
        batch=batch, compute=compute, model_bytes=sent * _BANDWIDTH, worker_bandwidth=_BANDWIDTH,
        ps_bandwidth=_BANDWIDTH,
    )  # fmt: skip
