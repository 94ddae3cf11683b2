"""Jobs of the runtime's benchmarks: their description, their workers, and a run of one as real processes here."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pslite.coordinator import Settings
from pslite.job.job_spec import SGD, JobSpec, Part, Segment, block_bytes_for
from pslite.numeric.gradient_sums import GradientSums
from pslite.testing import LocalResult, run_local
from pslite.worker.elastic_job_base import session_for


def describe(shapes: Sequence[tuple[int, ...]], steps: int, **changes: Any) -> JobSpec:
    """Return a job that trains float32 tensors with momentum SGD."""
    parts = tuple(Part(f"t{i}", shape) for i, shape in enumerate(shapes))
    segments = (Segment(dtype="float32", optimizer=SGD(lr=0.01, momentum=0.9), parts=parts),)
    given = {
        "segments": segments,
        "samples": 64 * steps,
        "batch": 64,
        "epochs": 1,
        "seed": 1,
        "mode": "fast",
        "shards": 16,
    }
    return JobSpec(**{**given, "block_bytes": block_bytes_for(segments[0].nbytes), **changes})


def started(spec: JobSpec) -> tuple[Any, GradientSums]:
    """Return the session of this worker, begun with weights from -1 to 1, and the sums of its gradients."""
    session = session_for(spec)
    weights = session.weights.arrays[0]
    weights[:] = np.linspace(-1, 1, weights.size, dtype=np.float32)
    session.start()
    return session, GradientSums(spec, session.supply)


def exchange(session: Any, sums: GradientSums, seconds: float = 0.0) -> None:
    """Do a step: gradients that depend on the weights, and a sleep for each shard in place of its passes."""
    share, weights = session.share, session.weights.arrays[0]
    nodes, again = share.nodes, False
    while nodes:
        sums.begin(share.leaves, nodes, again=again)
        for leaf, low, high in share.parts(nodes):
            time.sleep(seconds * (high - low))
            bundle = sums.take(zero=False)
            np.multiply(weights, 0.1 * (high - low), out=bundle.arrays[0])
            sums.add(leaf, bundle)
        nodes, again = session.exchange(sums.contributions, 0.0, 1), True


def run_job(
    command: Sequence[str], *, timeout: float, settings: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None, **options: Any,
) -> LocalResult:  # fmt: skip
    """Run a job to its end; members are waited for as long as a busy machine needs.

    Raises SystemExit if it fails.
    """
    result = run_local(
        command, timeout=timeout, environ={**os.environ, "DL2_QUIET": "1", **(environ or {})},
        settings=Settings(grace=120.0, start=120.0, settle=120.0, lease=60.0, **(settings or {})), **options,
    )  # fmt: skip
    if result.state != "finished":
        raise SystemExit("\n".join([*result.log, str(result.reason)]))
    return result
