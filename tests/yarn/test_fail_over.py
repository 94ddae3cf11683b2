"""Two real ResourceManagers: a standby redirects, and takes over where the active one is killed."""

from __future__ import annotations

import time

import pytest
import yarn_cluster

from dl2d.core.errors import ResourceManagerError
from dl2d.core.resource_manager import RmJobState
from dl2d_yarn.listing import SERVICES_PATH, read_listing
from dl2d_yarn.rest_client import RestClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.yarn,
    pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there"),
]
SLEEPER = {
    "name": "sleeper",
    "version": "1",
    "components": [
        {"name": "main", "number_of_containers": 1, "launch_command": "sleep 600",
         "resource": {"cpus": 1, "memory": "64"}},
    ],
}  # fmt: skip


def states(client: RestClient) -> list[RmJobState]:
    return [application.state for application in read_listing(client).applications]


def test_the_standby_redirects_and_takes_over() -> None:
    with yarn_cluster.YarnCluster(nodes=1, fail_over=True) as cluster:
        masters = {"rm": cluster.address, "rm2": cluster.address2}

        def client(*names: str) -> RestClient:
            return RestClient([masters[name] for name in names], user=cluster.user, timeout_seconds=20)

        # Whichever is the standby: its answers lead to the other one, the body of a change is sent again there.
        with client("rm") as one, client("rm2") as other:
            one.send("POST", SERVICES_PATH, SLEEPER)
            assert len(states(one)) == 1
            assert states(one) == states(other)
        active = next(name for name in masters if _is_active(masters[name], cluster.user))
        standby = next(name for name in masters if name != active)
        with client(active, standby) as both:
            deadline = time.monotonic() + 60
            while states(both) != [RmJobState.RUNNING]:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            cluster.kill(active)
            while True:
                assert time.monotonic() < deadline + 60
                try:
                    after = states(both)
                    break
                except ResourceManagerError:
                    time.sleep(0.2)
            # It is neither gone nor ended: its master has to find the new ResourceManager.
            assert len(after) == 1
            assert not after[0].ended
            assert _is_active(masters[standby], cluster.user)
            both.send("DELETE", f"{SERVICES_PATH}/sleeper")


def _is_active(address: str, user: str) -> bool:
    with RestClient([address], user=user, timeout_seconds=20) as client:
        return client.get("/ws/v1/cluster/info", dict)["clusterInfo"]["haState"] == "ACTIVE"
