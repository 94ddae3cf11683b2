"""Applications that run without dl2d, in modes observe and shadow."""

from __future__ import annotations

import pytest
from yarn.fake_yarn import FakeYarn
from yarn.rm_answers import amounts, app
from yarn.test_manager import wait_until

from dl2d.core.errors import ConfigError
from dl2d.core.resource_manager import RmJobState, StaticJob
from dl2d.core.resources import Resources
from dl2d_yarn import service_resizing
from dl2d_yarn.manager import YarnManager
from dl2d_yarn.settings import YarnSettings

RULES = [
    {"queue": "root.gpu", "name": "bert-*", "type": "TENSORFLOW", "model": "bert", "ps": 1},
    {"queue": "root.gpu", "model": "other", "size": "gpu", "hours": 2},
]
ID = "application_1795581702976_0003"


def application(number: int, **more: object) -> dict[str, object]:
    usage = {"partitionName": "", "used": amounts(4480, 9, 4), "amUsed": amounts(384, 1, 0)}
    given = {
        "user": "nobody-here", "name": "bert-large", "applicationType": "TENSORFLOW", "queue": "root.gpu",
        "runningContainers": 5, "finishedTime": 0, "launchTime": 1795581714000,
        "resourceInfo": {"resourceUsagesByPartition": [usage]}, **more,
    }  # fmt: skip
    return app(number, **given)


def containers(*nodes: int) -> dict[str, object]:
    listed = [
        {
            "containerId": f"container_1795581702976_0003_01_{place:06}",
            "nodeId": f"node{node}:{45000 + node}",
            "startedTime": f"{1795581714250 + 3000 * place}",
        }
        for place, node in enumerate((1, *nodes), start=1)
    ]
    return {"container": listed if nodes else listed[0]}


def path_of(name: str) -> str:
    return f"/ws/v1/cluster/apps/{name}/appattempts/{name.replace('application', 'appattempt')}_000001/containers"


@pytest.fixture
def manager(yarn: FakeYarn, monkeypatch: pytest.MonkeyPatch) -> YarnManager:
    monkeypatch.setattr(service_resizing, "DETAILS_SECONDS", 0.1)
    return yarn.manager(watch=RULES)


def static_of(manager: YarnManager) -> StaticJob | None:
    (job,) = manager.listing().jobs
    return job.static


@pytest.mark.parametrize("time", ["9" * 5000, "-1", "soon", ""])
def test_a_time_that_cannot_be_read_leaves_the_size_known(yarn: FakeYarn, manager: YarnManager, time: str) -> None:
    yarn.apps["bert-large"] = application(3)
    answer = containers(1, 1, 2, 2)
    for container in answer["container"]:  # type: ignore[attr-defined]
        container["startedTime"] = time
    yarn.more[path_of(ID)] = answer
    manager.listing()
    wait_until(lambda: static_of(manager) is not None)


def test_an_application_is_watched_with_its_size_and_nodes(yarn: FakeYarn, manager: YarnManager) -> None:
    yarn.apps["bert-large"] = application(3)
    yarn.apps["web"] = application(4, queue="root.web")
    yarn.more[path_of(ID)] = containers(1, 1, 2, 2)
    # Before its containers are known, as after a restart of the daemon, it is listed, without a size.
    (unknown,) = manager.listing().jobs
    assert (unknown.state, unknown.static) == (RmJobState.RUNNING, None)
    wait_until(lambda: static_of(manager) is not None)
    (job,) = manager.listing().jobs
    static = job.static
    assert static is not None
    assert (job.handle, job.state, job.tag) == ("1795581702976_0003", RmJobState.RUNNING, "")
    assert (static.model, static.workers, static.ps, static.owner.user) == ("bert", 3, 1, "nobody-here")
    assert static.nodes == ("node1", "node1", "node2", "node2")
    # Without its master's part.
    assert (static.task, static.started) == (Resources.of(cpu=2, memory=1024, gpu=1), 1795581720.25)
    # Two calls a listing; the containers are asked for when their number changes.
    before = len(yarn.calls)
    manager.listing()
    assert [call for call in yarn.calls[before:] if "scheduler" not in call] == [
        "GET /ws/v1/cluster/apps", "GET /ws/v1/cluster/nodes"
    ]  # fmt: skip
    asked = yarn.calls.count(f"GET {path_of(ID)}")
    for count, nodes in ((3, (1, 2)), (1, ())):
        # Fewer than the rule's least: it is the same job all the same.
        yarn.apps["bert-large"] |= {"runningContainers": count}
        yarn.more[path_of(ID)] = containers(*nodes)
        manager.listing()
        wait_until(lambda: (static_of(manager) or static).workers == max(0, len(nodes) - 1))  # noqa: B023
    assert yarn.calls.count(f"GET {path_of(ID)}") == asked + 2
    # Its master is started again: its containers run meanwhile, and are not known.
    yarn.apps["bert-large"] |= {"state": "ACCEPTED", "runningContainers": 0}
    assert [(each.state, each.static) for each in manager.listing().jobs] == [(RmJobState.RUNNING, None)]
    yarn.apps["bert-large"] |= {"state": "FINISHED", "finalStatus": "SUCCEEDED", "finishedTime": 1795581800500}
    (ended,) = manager.listing().jobs
    assert (ended.state, ended.ended) == (RmJobState.DONE, 1795581800.5)


def test_an_application_whose_containers_wait_has_the_size_that_it_asks_for(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    asked = [
        {"resourceName": name, "numContainers": 4, "capability": amounts(1024, 2, 1)}
        for name in ("*", "/rack", "node1")
    ]
    usage = {"partitionName": "", "used": amounts(384, 1, 0), "amUsed": amounts(384, 1, 0)}
    waits = {"resourceInfo": {"resourceUsagesByPartition": [usage]}, "runningContainers": 1}
    yarn.apps["bert-large"] = application(3, resourceRequests=asked, **waits)
    yarn.more[path_of(ID)] = containers()
    manager.listing()
    wait_until(lambda: static_of(manager) is not None)
    (job,) = manager.listing().jobs
    assert job.static is not None
    assert (job.state, job.reason) == (RmJobState.PENDING, "waits for 4 containers")
    assert (job.static.workers, job.static.ps, job.static.nodes, job.static.started) == (3, 1, (), 0.0)
    assert job.static.task == Resources.of(cpu=2, memory=1024, gpu=1)
    # One that YARN has not started yet may have any size.
    yarn.apps["bert-large"] = application(3, state="ACCEPTED", launchTime=0)
    assert [(each.state, each.static) for each in manager.listing().jobs] == [(RmJobState.PENDING, None)]


def test_an_application_that_has_no_containers_yet_is_read_again(yarn: FakeYarn, manager: YarnManager) -> None:
    usage = {"partitionName": "", "used": amounts(384, 1, 0), "amUsed": amounts(384, 1, 0)}
    alone = {"resourceInfo": {"resourceUsagesByPartition": [usage]}, "runningContainers": 1}
    yarn.apps["bert-large"] = application(3, **alone)
    yarn.more[path_of(ID)] = containers()
    manager.listing()
    wait_until(lambda: yarn.calls.count(f"GET {path_of(ID)}") > 0)
    assert static_of(manager) is None
    asked = [{"resourceName": "*", "numContainers": 4, "capability": amounts(1024, 2, 1)}]
    yarn.apps["bert-large"] = application(3, resourceRequests=asked, **alone)
    wait_until(lambda: static_of(manager) is not None)
    (job,) = manager.listing().jobs
    assert (job.state, job.reason) == (RmJobState.PENDING, "waits for 4 containers")


def test_gpus_may_be_what_counts(yarn: FakeYarn, manager: YarnManager) -> None:
    yarn.apps["x"] = application(3, name="resnet")
    yarn.more[path_of(ID)] = containers(1, 2)
    manager.listing()
    wait_until(lambda: static_of(manager) is not None)
    static = static_of(manager)
    assert static is not None
    assert (static.model, static.workers, static.limit) == ("other", 4, 7200)
    assert static.nodes == ("node1", "node1", "node2", "node2")


def test_nothing_else_is_asked_for_without_rules(yarn: FakeYarn) -> None:
    yarn.apps["bert-large"] = application(3)
    manager = yarn.manager()
    assert manager.listing().jobs == ()


def test_a_rule_without_a_queue_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"yarn\.watch.*queue"):
        YarnSettings.parse({"addresses": ["http://rm:8088"], "watch": [{"model": "bert"}]})
