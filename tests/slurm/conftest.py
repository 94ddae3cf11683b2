"""Fakes of Slurm's commands, and a private real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, why_not
from slurm_fakes import Clock, FakeSlurm, Managers, Real

#: A partition of some of the nodes, whose jobs end after a minute if they say nothing of their time.
SMALL = "PartitionName=small Nodes=n1,n2 DefaultTime=1:00 MaxTime=2:00:00 State=UP"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin")


@pytest.fixture
def manager_on(slurm: FakeSlurm, clock: Clock) -> Iterator[Managers]:
    managers = Managers(slurm, clock)
    yield managers
    managers.close()


@pytest.fixture(scope="session")
def private_slurm() -> Iterator[Real]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with SlurmCluster(extra=SMALL) as cluster:
        alice = cluster.add_user("alice")
        cluster.add_group(alice, "lab")
        yield Real(cluster, alice, cluster.add_user("bob"))


@pytest.fixture
def real(private_slurm: Real) -> Iterator[Real]:
    """The cluster, empty before and after each test."""
    yield private_slurm
    private_slurm.cluster.clear()
