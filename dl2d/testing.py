"""For tests of dl2d and of plug-ins: nodes, requests and jobs with plain defaults; manager and store in memory.

A test names only the values that matter to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dl2d.core.cluster import Node
from dl2d.core.jobs import Job, JobKey, JobRequest, JobState, Launch, Owner
from dl2d.core.resources import Resources
from dl2d.simulation.in_memory_resource_manager import MemoryManager
from dl2d.simulation.in_memory_store import MemoryStore

__all__ = ["LAUNCH", "OWNER", "MemoryManager", "MemoryStore", "make_job", "make_nodes", "make_request"]

OWNER = Owner("ann", 1000, 1000)
LAUNCH = Launch(("python", "train.py"), "/home/ann", (("PATH", "/usr/bin"), ("DL2_ROLE", "stale")))


def make_nodes(count: int = 4, **resources: float) -> list[Node]:
    """Empty nodes ``n1``, ``n2``, ..., each with 8 CPUs and 2 GPUs or what ``resources`` says."""
    return [Node(f"n{number}", Resources.of(resources or {"cpu": 8, "gpu": 2})) for number in range(1, count + 1)]


def make_request(**changes: Any) -> JobRequest:
    """A request for at most 4 workers of 2 CPUs and a GPU, and as many parameter servers of one CPU."""
    plain = JobRequest(
        name="job", model="resnet-50", epochs=10, samples_per_epoch=1000, steps_per_epoch=None, batch=32,
        worker=Resources.of(cpu=2, gpu=1), ps=Resources.of(cpu=1), max_workers=4, max_ps=4,
    )  # fmt: skip
    return replace(plain, **changes)


def make_job(
    number: int | str = 1,
    *,
    cluster: str = "test",
    submitted: int = 1000,
    state: JobState = JobState.SUBMITTED,
    **changes: Any,
) -> Job:
    """A job of ``OWNER`` with no tasks; ``changes`` are those of its request."""
    key = JobKey(cluster, str(number), submitted)
    return Job(key=key, request=make_request(**changes), owner=OWNER, launch=LAUNCH, state=state)
