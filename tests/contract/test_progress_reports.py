"""Contract of all policies: scripts with a loop of their own (MXNet's KVStore) are decided on as any job is.

Such a script reports versions of its weights and how many batches one of them stands for; a job whose loop
pslite runs (``ElasticJob``) reports epochs and samples per second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from daemon.api.api_world import ApiWorld
from policies.dl2_paper.test_policy import a_checkpoint

from dl2d.core.decision import Reason
from dl2d.core.jobs import Allocation
from dl2d.plugins import POLICIES, FactoryArguments, available, load_policy
from dl2d.testing import make_nodes
from dl2d.tick.record_slot import Report

BATCH, SAMPLES, WORKERS = 32, 6400, 2
#: By job: its model, epochs, versions so far, and versions per second. The order of the jobs by remaining work would
#: change if a version were counted as one batch instead of one batch of each worker.
JOBS = (
    ("resnet-50", 50.0, 3000, 1.5),
    ("vgg-16", 8.0, 500, 1.0),
    ("resnet-50", 200.0, 4000, 1.5),
    ("vgg-16", 30.0, 100, 1.5),
)


@pytest.fixture
def worlds(request: pytest.FixtureRequest) -> Iterator[list[ApiWorld]]:
    # No checkpoint of the paper's network comes with dl2d.
    given = (
        FactoryArguments(checkpoint=a_checkpoint(resources=["cpu", "gpu"])) if request.param == "dl2-original" else None
    )
    made = [
        ApiWorld(policy=load_policy(request.param, given=given), cluster_nodes=make_nodes(2, cpu=12, gpu=3))
        for _ in range(2)
    ]
    yield made
    for world in made:
        world.close()


def with_versions(epochs: float, version: int, rate: float) -> dict[str, Any]:
    """What the coordinator of a KVStore job reports."""
    del epochs
    return {"version": version, "steps_per_second": rate, "batches_per_version": WORKERS}


def with_epochs(epochs: float, version: int, rate: float) -> dict[str, Any]:
    """What the coordinator of an ``ElasticJob`` at the same point reports."""
    batch = BATCH * WORKERS
    return {
        "version": version, "total_versions": int(epochs * SAMPLES / batch), "epoch": version * batch / SAMPLES,
        "epochs": epochs, "steps_per_second": rate, "samples_per_second": rate * batch,
    }  # fmt: skip


def ticks(world: ApiWorld, report: Any) -> list[Report]:
    """Ticks of some intervals, in which four jobs train, as far as they have workers."""
    keys = [
        world.submit(model=model, epochs=epochs, batch=BATCH, samples_per_epoch=SAMPLES) for model, epochs, *_ in JOBS
    ]
    versions = [version for _, _, version, _ in JOBS]
    made = []
    for _ in range(4):
        for index, (key, (_, epochs, _, rate)) in enumerate(zip(keys, JOBS, strict=True)):
            tasks = world.store.tasks(live=True, job=key)
            members = [{"task": task.id, "role": task.role.value, "state": "active"} for task in tasks]
            versions[index] += int(60 * rate) if members else 0
            progress = report(epochs, versions[index], rate)
            assert world.heartbeat(key, state="running", members=members, **progress).status_code == 200
        made.append(world.tick(60.0))
    return made


def progress(report: Report) -> list[tuple[float, float | None]]:
    return [(job.progress.epoch, job.progress.samples_per_second) for job in report.snapshot.jobs]


def decisions(report: Report) -> list[tuple[Allocation, Reason]]:
    return [(each.allocation, each.reason) for each in report.decision.jobs]


@pytest.mark.parametrize("worlds", sorted(available(POLICIES)), indirect=True)
def test_every_policy_decides_the_same(worlds: list[ApiWorld]) -> None:
    for one, other in zip(ticks(worlds[0], with_versions), ticks(worlds[1], with_epochs), strict=True):
        assert progress(one) == progress(other)
        assert one.snapshot.speeds == other.snapshot.speeds
        assert decisions(one) == decisions(other)
        assert any(allocation.workers for allocation, _ in decisions(one))
