"""The managers that the contract suite runs over. To add one: a harness, and an entry in ``HARNESSES``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_cluster
import yarn_cluster
from rm_harness import Harness, LocalHarness, MemoryHarness
from slurm_harness import SlurmHarness
from yarn_harness import YarnHarness, YarnService

_NO_SLURM = slurm_cluster.why_not() or slurm_cluster.why_no_cgroups()
_SLURM = (pytest.mark.slurm, pytest.mark.skipif(bool(_NO_SLURM), reason=_NO_SLURM))
_NO_SLURMRESTD = _NO_SLURM or slurm_cluster.why_no_slurmrestd()
_REST = (pytest.mark.slurm, pytest.mark.skipif(bool(_NO_SLURMRESTD), reason=_NO_SLURMRESTD))
_NO_PYSLURM = _NO_SLURM or slurm_cluster.why_no_pyslurm()
_PYSLURM = (pytest.mark.slurm, pytest.mark.skipif(bool(_NO_PYSLURM), reason=_NO_PYSLURM))
_NO_YARN = yarn_cluster.why_not()
_YARN = (pytest.mark.yarn, pytest.mark.slow, pytest.mark.skipif(bool(_NO_YARN), reason=_NO_YARN))

#: Makes a harness in a fresh folder; slow or privileged managers carry marks.
HARNESSES: dict[str, tuple[Callable[[Path, pytest.FixtureRequest], Harness], tuple[pytest.MarkDecorator, ...]]] = {
    "memory": (lambda folder, _request: MemoryHarness(folder), ()),
    "local": (lambda folder, _request: LocalHarness(folder), ()),
    "slurm": (lambda _folder, request: _slurm(request, "command"), _SLURM),
    "slurm-rest": (lambda _folder, request: _slurm(request, "rest"), _REST),
    "slurm-pyslurm": (lambda _folder, request: _slurm(request, "pyslurm"), _PYSLURM),
    "yarn": (lambda folder, request: YarnHarness(request.getfixturevalue("yarn_service"), folder), _YARN),
}


@pytest.fixture(scope="session")
def slurm_of_two_nodes() -> Iterator[tuple[slurm_cluster.SlurmCluster, slurm_cluster.User]]:
    slurmrestd = not slurm_cluster.why_no_slurmrestd()
    with slurm_cluster.SlurmCluster(nodes=2, cgroups=True, slurmrestd=slurmrestd) as cluster:
        yield cluster, cluster.add_user("alice")


def _slurm(request: pytest.FixtureRequest, backend: str) -> SlurmHarness:
    cluster, user = request.getfixturevalue("slurm_of_two_nodes")
    cluster.use_backend(backend)
    return SlurmHarness(cluster, user)


@pytest.fixture(scope="module")
def yarn_service() -> Iterator[YarnService]:
    with yarn_cluster.YarnCluster() as cluster, YarnService(cluster) as service:
        yield service


_MANAGERS = [pytest.param(name, marks=marks) for name, (_, marks) in HARNESSES.items()]


@pytest.fixture(params=_MANAGERS)
def any_rm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Every resource manager with an empty cluster, the simulator's too; afterwards nothing may be left."""
    yield from _harness(request, tmp_path)


@pytest.fixture(params=_MANAGERS[1:])
def rm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Those that run processes."""
    yield from _harness(request, tmp_path)


def _harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    make, _ = HARNESSES[request.param]
    harness = make(tmp_path, request)
    if reason := harness.not_applicable.get(request.function.__name__):
        harness.end_all()
        pytest.skip(f"{request.param}: {reason}")
    yield harness
    harness.end_all()
