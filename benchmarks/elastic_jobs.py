"""Jobs of the runtime's benchmarks: their description, and a run of one as real processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pslite.coordinator import Settings
from pslite.job.job_spec import SGD, JobSpec, Part, Segment, block_bytes_for
from pslite.testing import LocalResult, run_local


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
