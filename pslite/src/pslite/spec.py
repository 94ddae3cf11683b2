"""Public name of `pslite.job.spec` for training scripts that use the runtime without an adapter."""

from __future__ import annotations

from pslite.job.spec import LAMB, SGD, Adam, JobSpec, Part, Segment, block_bytes_for

__all__ = ["LAMB", "SGD", "Adam", "JobSpec", "Part", "Segment", "block_bytes_for"]
