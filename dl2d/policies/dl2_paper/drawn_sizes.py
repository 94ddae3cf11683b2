"""Exploration of speeds on a cluster: which jobs run at a drawn size in a slot, so that their speed there is known.

The paper's exploration (``dl2d.policies.dl2_paper.exploration``) changes nothing where a job has a few tasks at most,
and speeds are known at the sizes only that the previous scheduler gave.
"""

from __future__ import annotations

import hashlib
from typing import Final

from dl2d.core.jobs import Allocation, Job

#: Bytes of a digest that make one draw.
_DRAW_BYTES: Final = 8


def drawn_size(job: Job, slot: int, epsilon: float) -> Allocation | None:
    """Random size within a job's bounds with probability ``epsilon``, at which it runs in a slot; otherwise None.

    The random numbers are a hash of the slot and the job's id, so that the result can be computed again afterwards, to
    tell which actions were the policy's.
    """
    request, least = job.request, job.request.min_size
    if not epsilon or job.static:
        return None
    digest = hashlib.sha256(f"{slot}:{job.key.id}".encode()).digest()
    explores, workers, ps = (
        int.from_bytes(digest[start : start + _DRAW_BYTES], "big") / 256**_DRAW_BYTES
        for start in range(0, 3 * _DRAW_BYTES, _DRAW_BYTES)
    )
    if explores >= epsilon:
        return None
    drawn = least.workers + int(workers * (request.max_workers - least.workers + 1))
    return Allocation(
        max(request.largest_allowed(drawn), least.workers), least.ps + int(ps * (request.max_ps - least.ps + 1))
    )
