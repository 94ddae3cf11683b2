"""Greedy allocation: what floors keep."""

from __future__ import annotations

import pytest
from msgspec import structs
from policies.snapshots import NO_PS, a_job, a_snapshot, cluster, given

from dl2d.core.cluster import SharedLimit
from dl2d.core.jobs import NOTHING, Allocation
from dl2d.policies.drf import Drf


@pytest.mark.parametrize("limits", [[], [2], [1]], ids=["no limit", "a limit that it reaches", "a limit below it"])
def test_a_floor_of_which_a_part_fits_again_keeps_that_room(limits: list[int]) -> None:
    """Of its two tasks one fits, as after a node was lost: no other job gets that room."""
    jobs = [a_job(1, min_workers=2, **NO_PS), a_job(2, **NO_PS)]
    shown = structs.replace(
        a_snapshot(jobs, cluster(1, cpu=8, gpu=1)),
        floors=((jobs[0].key, Allocation(2, 0)),),
        limits=tuple(SharedLimit((jobs[0].key,), (("gpu", 1000 * gpus),), "its limit") for gpus in limits),
    )
    assert given(Drf(), shown) == [Allocation(2, 0), NOTHING]
