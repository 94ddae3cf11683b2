"""Fakes of Slurm's commands, and a private real Slurm."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, why_no_pyslurm, why_no_slurmrestd, why_not
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
    with SlurmCluster(extra=SMALL, slurmrestd=not why_no_slurmrestd()) as cluster:
        alice = cluster.add_user("alice")
        cluster.add_group(alice, "lab")
        yield Real(cluster, alice, cluster.add_user("bob"))


_NO_SLURMRESTD = pytest.mark.skipif(bool(why_no_slurmrestd()), reason=why_no_slurmrestd())
_NO_PYSLURM = pytest.mark.skipif(bool(why_no_pyslurm()), reason=why_no_pyslurm())
_BACKENDS = ["command", pytest.param("rest", marks=_NO_SLURMRESTD), pytest.param("pyslurm", marks=_NO_PYSLURM)]


@pytest.fixture(params=_BACKENDS)
def real(private_slurm: Real, request: pytest.FixtureRequest) -> Iterator[Real]:
    """The cluster, empty before and after each test, with each backend."""
    private_slurm.cluster.use_backend(request.param)
    yield private_slurm
    private_slurm.cluster.clear()
    for user in (private_slurm.alice, private_slurm.bob):
        for path in user.home.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
