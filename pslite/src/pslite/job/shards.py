"""Logical shards: how a global batch is cut, and which worker computes which part.

A job has V shards for its whole life.  Shard i of a batch of n samples is the slice [i*n//V, (i+1)*n//V) of the batch,
whoever computes it; with n < V some shards are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

DEFAULT_SHARDS = 16


def ranges(shards: int, workers: int) -> tuple[tuple[int, int], ...]:
    """Cut [0, shards) into one contiguous, almost equal half-open range for each of `workers` <= shards workers."""
    if not 0 < workers <= shards:
        msg = f"{workers} workers cannot share {shards} shards: 1 to {shards} can"
        raise ValueError(msg)
    return tuple((i * shards // workers, (i + 1) * shards // workers) for i in range(workers))


def dealt(shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Cut the shards into one contiguous half-open range for each worker, of so many shards each, at least one."""
    if not shares or min(shares) < 1:
        msg = f"shares of {tuple(shares)} shards: every worker has at least one"
        raise ValueError(msg)
    ends = list(accumulate(shares))
    return tuple(zip([0, *ends], ends, strict=False))


def sample_slice(low: int, high: int, shards: int, samples: int) -> tuple[int, int]:
    """Return the half-open range of positions in a batch of `samples` that shards [low, high) hold."""
    return low * samples // shards, high * samples // shards
