"""Limits of a real slurmdbd: tasks are submitted only as far as they leave room."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from slurm_accounting import AccountingCluster, why_not
from slurm_cluster import PATH

from dl2d_slurm.manager import SlurmManager
from dl2d_slurm.settings import SlurmSettings

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "all of it is there"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[AccountingCluster]:
    with AccountingCluster(nodes=2) as made:
        yield made


@pytest.fixture
def manager(cluster: AccountingCluster) -> Iterator[SlurmManager]:
    settings = SlurmSettings.parse({"rpcs_per_minute": 1_000_000, "poll_floor_seconds": 0})
    environ = {"PATH": PATH, "SLURM_CONF": str(cluster.conf)}
    made = SlurmManager(settings, clock=time.time, environ=environ)
    yield made
    made.close()


def test_limits_of_slurmdbd_leave_less_than_the_nodes_do(cluster: AccountingCluster, manager: SlurmManager) -> None:
    alice = cluster.add_user("alice")
    cluster.sacctmgr("add", "qos", "small", "GrpTRES=cpu=9,gres/gpu=3", "MaxTRESPerUser=cpu=6")
    cluster.sacctmgr("modify", "user", alice.name, "set", "qos+=small", "MaxJobs=3")
    cluster.sacctmgr("modify", "account", "lab", "set", "GrpTRES=mem=2000")
    script = "#!/bin/sh\nsleep 600\n"
    small = cluster.submit_as(alice, script, "--qos=small", "--mem=100")
    large = cluster.submit_as(alice, script, "--qos=small", "--mem=300", "--cpus-per-task=2", "--gres=gpu:1")
    cluster.wait_until(lambda: {cluster.job_state(job) for job in (small, large)} == {"RUNNING"}, "both run")
    listing = manager.listing()
    found = {limit.reason.removeprefix("Slurm's limit "): limit for limit in listing.growth_limits}
    assert {title: limit.left for title, limit in found.items()} == {
        "GrpTRES of QOS small": {"cpu": 6.0, "gpu": 2.0},
        f"MaxTRESPerUser of QOS small for user {alice.name}": {"cpu": 3.0},
        "GrpTRES of account lab": {"memory": 1600.0},
    }
    assert {limit.anchors for limit in found.values()} == {frozenset({small, large})}
