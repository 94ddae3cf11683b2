"""Applications that run without dl2d, in modes observe and shadow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from yarn.fake_yarn import FakeYarn
from yarn.rm_answers import amounts, app, client_of_lists
from yarn.test_manager import wait_until

from dl2d.core.errors import ConfigError
from dl2d.core.resource_manager import RmJobState
from dl2d.core.resources import Resources
from dl2d_yarn import manager as manager_module
from dl2d_yarn.manager import YarnManager
from dl2d_yarn.observed_jobs import read_nodes
from dl2d_yarn.settings import YarnSettings

RULES = [
    {"queue": "root.gpu", "name": "bert-*", "type": "TENSORFLOW", "model": "bert", "ps": 1},
    {"queue": "root.gpu", "model": "other", "size": "gpu", "hours": 2},
]
ID = "application_1795581702976_0003"


def application(number: int, **more: object) -> dict[str, object]:
    usage = {"partitionName": "", "used": amounts(4096, 8, 4)}
    given = {
        "user": "nobody-here", "name": "bert-large", "applicationType": "TENSORFLOW", "queue": "root.gpu",
        "runningContainers": 5, "finishedTime": 0, "resourceInfo": {"resourceUsagesByPartition": [usage]}, **more,
    }  # fmt: skip
    return app(number, **given)


def containers(*nodes: int) -> dict[str, object]:
    listed = [
        {"containerId": f"container_1795581702976_0003_01_{place:06}", "nodeId": f"node{node}:{45000 + node}"}
        for place, node in enumerate((1, *nodes), start=1)
    ]
    return {"container": listed if nodes else listed[0]}


def path_of(name: str) -> str:
    return f"/ws/v1/cluster/apps/{name}/appattempts/{name.replace('application', 'appattempt')}_000001/containers"


@pytest.fixture
def yarn() -> FakeYarn:
    return FakeYarn()


@pytest.fixture
def manager(yarn: FakeYarn, monkeypatch: pytest.MonkeyPatch) -> Iterator[YarnManager]:
    monkeypatch.setattr(manager_module, "_OVERDUE_SECONDS", 0.3)
    manager = yarn.manager(watch=RULES)
    yield manager
    manager.close()


def test_an_application_is_watched_with_its_size_and_nodes(yarn: FakeYarn, manager: YarnManager) -> None:
    yarn.apps["bert-large"] = application(3)
    yarn.apps["web"] = application(4, queue="root.web")
    yarn.more[path_of(ID)] = containers(1, 1, 2, 2)
    manager.listing()
    wait_until(lambda: len(manager.listing().jobs) == 1)
    (job,) = manager.listing().jobs
    static = job.static
    assert static is not None
    assert (job.handle, job.state, job.tag) == ("1795581702976_0003", RmJobState.RUNNING, "")
    assert (static.model, static.workers, static.ps, static.owner.user) == ("bert", 3, 1, "nobody-here")
    assert static.nodes == ("node1", "node1", "node2", "node2")
    assert static.task == Resources.of(cpu=2, memory=1024, gpu=1)
    # Two calls a listing; the nodes are asked for when the number of containers changes.
    before = len(yarn.calls)
    manager.listing()
    assert [call for call in yarn.calls[before:] if "scheduler" not in call] == [
        "GET /ws/v1/cluster/apps", "GET /ws/v1/cluster/nodes"
    ]  # fmt: skip
    asked = yarn.calls.count(f"GET {path_of(ID)}")
    yarn.apps["bert-large"] |= {"runningContainers": 3}
    yarn.more[path_of(ID)] = containers(1, 2)
    manager.listing()
    wait_until(lambda: manager.listing().jobs[0].static.workers == 1)  # type: ignore[union-attr]
    assert yarn.calls.count(f"GET {path_of(ID)}") == asked + 1
    yarn.apps["bert-large"] |= {"state": "FINISHED", "finalStatus": "SUCCEEDED", "finishedTime": 1795581800500}
    (ended,) = manager.listing().jobs
    assert (ended.state, ended.ended) == (RmJobState.DONE, 1795581800.5)


def test_gpus_may_be_what_counts(yarn: FakeYarn, manager: YarnManager) -> None:
    yarn.apps["x"] = application(3, name="resnet")
    (job,) = manager.listing().jobs
    assert job.static is not None
    assert (job.static.model, job.static.workers, job.static.nodes, job.static.limit) == ("other", 4, (), 7200)


def test_nothing_else_is_asked_for_without_rules(yarn: FakeYarn) -> None:
    yarn.apps["bert-large"] = application(3)
    manager = yarn.manager()
    assert manager.listing().jobs == ()
    manager.close()


def test_one_container_is_not_in_a_list() -> None:
    assert read_nodes(client_of_lists({path_of(ID): containers()}), ID) == ()


def test_a_rule_without_a_queue_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"yarn\.watch.*queue"):
        YarnSettings.parse({"addresses": ["http://rm:8088"], "watch": [{"model": "bert"}]})
