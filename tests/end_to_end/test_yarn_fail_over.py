"""Two real ResourceManagers: a standby redirects, and takes over where the active one is killed, under a job too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx2
import pytest
import yarn_cluster
from local_cluster import _static_digest
from yarn_cluster import YarnCluster
from yarn_daemon import FAST, YarnDaemon

from dl2d.core.cluster import TaskState
from dl2d.core.errors import Rejected, ResourceManagerError
from dl2d.core.jobs import JobState
from dl2d.core.resource_manager import RmJobState
from dl2d_yarn.cluster_listing import SERVICES_PATH, read_listing, read_service
from dl2d_yarn.queue_and_growth_limits import Queues, read_pending_reason, read_queues
from dl2d_yarn.rest_client import RestClient
from dl2d_yarn.static_jobs import read_containers
from dl2d_yarn.yarn_command import decommission

pytestmark = [
    pytest.mark.slow,
    pytest.mark.yarn,
    pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there"),
]
_ROOT = "yarn.scheduler.capacity.root"
QUEUES = {
    f"{_ROOT}.queues": "default,small", f"{_ROOT}.default.capacity": "75", f"{_ROOT}.small.capacity": "25",
    f"{_ROOT}.small.maximum-capacity": "25", f"{_ROOT}.small.user-limit-factor": "10",
    f"{_ROOT}.default.user-limit-factor": "10",
}  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[YarnCluster]:
    with YarnCluster(nodes=1, vcores=16, fail_over=True, scheduler=QUEUES) as cluster:
        yield cluster
    assert cluster.container_processes() == []


@pytest.fixture
def cluster(running: YarnCluster) -> YarnCluster:
    """The cluster, with an active ResourceManager and a standby."""
    for name in running.addresses.keys() - running.processes.keys():
        running.start(name)
    wait_until(lambda: sorted(role(running, name) for name in running.addresses) == ["ACTIVE", "STANDBY"])
    running.wait_for_nodes(1)
    return running


def role(cluster: YarnCluster, name: str) -> str:
    """What a ResourceManager says that it is; "" while it does not answer."""
    parameters = {"user.name": cluster.user}
    try:
        answer = httpx2.get(
            f"{cluster.addresses[name]}/ws/v1/cluster/info", params=parameters, timeout=20, trust_env=False
        )
    except httpx2.TransportError:
        return ""
    return str(answer.json()["clusterInfo"]["haState"])


def roles(cluster: YarnCluster) -> tuple[str, str]:
    """Names of the active ResourceManager and of the standby."""
    active, standby = sorted(cluster.addresses, key=lambda name: role(cluster, name))
    return active, standby


def sleeper(**containers: int) -> dict[str, object]:
    """A service of which each component sleeps in one container of so many vcores, in a queue of four."""
    components = [
        {"name": name, "number_of_containers": 1, "launch_command": "sleep 600",
         "resource": {"cpus": cpus, "memory": "64"}}
        for name, cpus in containers.items()
    ]  # fmt: skip
    return {"name": "sleeper", "version": "1", "queue": "small", "components": components}


def states(client: RestClient) -> list[RmJobState]:
    return [application.state for application in read_listing(client).applications]


def wait_until(true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_standby_redirects_and_takes_over(cluster: YarnCluster) -> None:
    def client(*names: str) -> RestClient:
        return RestClient([cluster.addresses[name] for name in names], user=cluster.user, timeout_seconds=20)

    # Whichever is the standby: its answers lead to the other one, the body of a change is sent again there.
    with client("rm", "rm2") as one, client("rm2", "rm") as other:
        one.send("POST", SERVICES_PATH, sleeper(one=1, two=1, three=4))
        assert len(states(one)) == 1
        assert states(one) == states(other)
    active, standby = roles(cluster)
    with client(active, standby) as both:
        wait_until(lambda: states(both) == [RmJobState.RUNNING])
        (application,) = read_listing(both, all_types=True).applications

        # The queue may have 4 vcores; the master and the small containers have three of them, so one waits.
        # A service's master often asks for a container too many, which counts as used until it gives it back.
        wait_until(lambda: len(read_containers(both, application).nodes) == 2)
        wait_until(lambda: headroom(both, "small", cluster)["cpu"] == 1)
        wait_until(lambda: queues(both).pending_outside(["root.default"]).get("cpu") == 4)
        assert queues(both).pending_outside(["small"]).get("cpu") == 0
        assert headroom(both, "default", cluster).keys() == {"cpu", "memory", "gpu"}
        wait_until(lambda: "headroom" in read_pending_reason(both, application.id))
        assert application.queue == "root.small"
        assert read_containers(both, application).waiting == 1

        decommission(cluster.command(), "sleeper", "two-0")
        service = read_service(both, "sleeper")
        decommissioned = {name: component.decommissioned for name, component in service.components.items()}
        assert decommissioned == {"one": frozenset(), "two": {0}, "three": frozenset()}
        assert {name: component.size for name, component in service.components.items()} == {
            "one": 1,
            "two": 0,
            "three": 1,
        }
        with pytest.raises(Rejected, match="one-7 is not removed"):
            decommission(cluster.command(), "no-such-service", "one-7")

        cluster.kill(active)
        after: list[RmJobState] = []

        def answered() -> bool:
            try:
                after[:] = states(both)
            except ResourceManagerError:
                return False
            return True

        wait_until(answered)
        # It is neither gone nor ended: its master has to find the new ResourceManager.
        assert len(after) == 1
        assert not after[0].ended
        assert role(cluster, standby) == "ACTIVE"
        both.send("DELETE", f"{SERVICES_PATH}/sleeper")


def test_a_job_trains_through_a_fail_over_and_is_resized_after_it(cluster: YarnCluster, tmp_path: Path) -> None:
    active, standby = roles(cluster)
    gate = tmp_path / "hold-job"
    gate.touch()
    # The cluster has room for three workers, beside masters, coordinators and servers.
    worker = {"cpu": 4, "memory": 256}
    with YarnDaemon(tmp_path, cluster) as daemon:
        first = daemon.train("first", *FAST, epochs=60, gate=gate, worker=worker, max_workers=2, max_ps=1)
        daemon.wait_for_size(first, 2, 1)
        daemon.wait_until(lambda: daemon.containers(first) == {"READY": 4}, "YARN knows all containers' addresses")
        before = {task.id for task in daemon.tasks(first, live=True)}

        def unharmed() -> bool:
            assert {task.id for task in daemon.tasks(first, live=True)} == before, str(daemon.tasks(first))
            assert daemon.confirmed(first) == (2, 1), f"{daemon.tasks(first)}\n{daemon.store.decisions(first, limit=3)}"
            return True

        cluster.kill(active)
        daemon.wait_until(lambda: unharmed() and "no ResourceManager answers" in daemon.said(), "a tick fails")
        epoch = daemon.job(first).progress.epoch
        daemon.wait_until(lambda: unharmed() and role(cluster, standby) == "ACTIVE", "the standby has taken over")
        daemon.wait_until(lambda: unharmed() and daemon.job(first).progress.epoch > epoch, "the first job trains on")
        daemon.wait_until(
            lambda: unharmed() and '"event": "tick failed' not in daemon.said(3), "ticks are complete again"
        )
        second = daemon.train("second", *FAST, epochs=15, gate=gate, worker=worker, max_workers=2, max_ps=1)
        daemon.wait_until(lambda: daemon.confirmed(second).workers >= 1, "the second job trains")
        daemon.wait_until(lambda: daemon.confirmed(first).workers == 1, "the first job has shrunk")
        gate.unlink()
        daemon.wait_for_end(first, second)
        for key, epochs in ((first, 60), (second, 15)):
            job = daemon.job(key)
            assert (job.state, job.end_reason) == (JobState.FINISHED, "did all epochs")
            assert job.digest == _static_digest(("--optimizer", "momentum"), epochs)
        daemon.wait_until_empty()
        for key in (first, second):
            daemon.wait_until_gone(key)
            # None was lost, none failed.
            assert {task.state for task in daemon.tasks(key)} == {TaskState.RELEASED}
        finals = [each["finalStatus"] for each in daemon.apps() if each["name"].startswith("dl2-")]
        assert finals == ["SUCCEEDED", "SUCCEEDED"]


def queues(client: RestClient) -> Queues:
    found = read_queues(client)
    assert found is not None
    return found


def headroom(client: RestClient, queue: str, cluster: YarnCluster) -> Mapping[str, float]:
    found = queues(client).headroom(queue, cluster.user)
    assert found is not None
    return found
