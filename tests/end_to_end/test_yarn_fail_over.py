"""Two real ResourceManagers: a standby redirects, and takes over where the active one is killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import pytest
import yarn_cluster
from yarn_cluster import YarnCluster

from dl2d.core.errors import Rejected, ResourceManagerError
from dl2d.core.resource_manager import RmJobState
from dl2d_yarn.client_command import decommission
from dl2d_yarn.listing import SERVICES_PATH, read_listing, read_service
from dl2d_yarn.observed_jobs import read_containers
from dl2d_yarn.queue_limits import Queues, read_pending_reason, read_queues
from dl2d_yarn.rest_client import RestClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.yarn,
    pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there"),
]
_ROOT = "yarn.scheduler.capacity.root"
QUEUES = {
    f"{_ROOT}.queues": "default,small", f"{_ROOT}.default.capacity": "75", f"{_ROOT}.small.capacity": "25",
    f"{_ROOT}.small.maximum-capacity": "50", f"{_ROOT}.small.user-limit-factor": "10",
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[YarnCluster]:
    with YarnCluster(nodes=1, fail_over=True, scheduler=QUEUES) as cluster:
        yield cluster


@pytest.fixture
def masters(cluster: YarnCluster) -> dict[str, str]:
    return {"rm": cluster.address, "rm2": cluster.address2}


def sleeper(**containers: int) -> dict[str, object]:
    """A service of which each component sleeps in one container of so many vcores, in a queue of half the cluster."""
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


def test_the_standby_redirects_and_takes_over(cluster: YarnCluster, masters: dict[str, str]) -> None:
    def client(*names: str) -> RestClient:
        return RestClient([masters[name] for name in names], user=cluster.user, timeout_seconds=20)

    # Whichever is the standby: its answers lead to the other one, the body of a change is sent again there.
    with client("rm", "rm2") as one, client("rm2", "rm") as other:
        one.send("POST", SERVICES_PATH, sleeper(one=1, two=1, three=4))
        assert len(states(one)) == 1
        assert states(one) == states(other)
    active = next(name for name in masters if _is_active(masters[name], cluster.user))
    standby = next(name for name in masters if name != active)
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
        assert service.decommissioned == {"one": set(), "two": {0}, "three": set()}
        assert service.sizes == {"one": 1, "two": 0, "three": 1}
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
        assert _is_active(masters[standby], cluster.user)
        both.send("DELETE", f"{SERVICES_PATH}/sleeper")


def queues(client: RestClient) -> Queues:
    found = read_queues(client)
    assert found is not None
    return found


def headroom(client: RestClient, queue: str, cluster: YarnCluster) -> Mapping[str, float]:
    found = queues(client).headroom(queue, cluster.user)
    assert found is not None
    return found


def _is_active(address: str, user: str) -> bool:
    with RestClient([address], user=user, timeout_seconds=20) as client:
        return client.get("/ws/v1/cluster/info", dict)["clusterInfo"]["haState"] == "ACTIVE"
