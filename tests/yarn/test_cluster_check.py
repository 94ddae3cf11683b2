"""What ``dl2d check`` says of a YARN cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import httpx2
import pytest
import yarn_cluster
from yarn.rm_answers import client_of, lists, node, queue, scheduler

from dl2d_yarn.cluster_check import check_cluster
from dl2d_yarn.queue_and_growth_limits import SCHEDULER_PATH
from dl2d_yarn.settings import YarnSettings

GOOD = {
    "yarn.resourcemanager.am.max-attempts": "20",
    "yarn.resourcemanager.recovery.enabled": "true",
    "yarn.service.framework.path": "hdfs:///apps/service-dep.tar.gz",
    "yarn.nodemanager.sleep-delay-before-sigkill.ms": "5000",
    "hadoop.proxyuser.dl2d.hosts": "head",
    "hadoop.proxyuser.dl2d.groups": "ml",
}


def found(
    conf: dict[str, str], *, settings: Mapping[str, object] = MappingProxyType({}), **answers: Any
) -> dict[str, tuple[bool, str]]:
    known = {
        **lists([], [node(1)]),
        "/app/v1/services/version": {"version": "3.4.2"},
        SCHEDULER_PATH: scheduler(queue("default", (1, 1, 0), (0, 0, 0)), queue("gpu", (1, 1, 0), (0, 0, 0))),
        "/conf": {"properties": [{"key": key, "value": value, "isFinal": False} for key, value in conf.items()]},
        **answers,
    }

    def answer(request: httpx2.Request) -> httpx2.Response:
        content = known[request.url.path]
        return content if isinstance(content, httpx2.Response) else httpx2.Response(200, content=json.dumps(content))

    parsed = YarnSettings.parse({"addresses": ["http://rm:8088"], "user": "dl2d", **settings})
    return {item: (good, text) for item, good, text in check_cluster(parsed, client=client_of(answer))}


def test_a_good_cluster() -> None:
    findings = found(GOOD)
    assert all(good for good, _ in findings.values())
    assert findings["yarn cluster"][1] == "Hadoop 3.4.2, 1 node"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "yarn.resourcemanager.am.max-attempts",
            "2",
            "is 2 on the ResourceManager: a service's ApplicationMaster that crashes more often",
        ),
        ("yarn.resourcemanager.recovery.enabled", "false", "set it to true in yarn-site.xml"),
        (
            "yarn.service.framework.path",
            "",
            "is not set on the ResourceManager: without it each submission uploads all jars",
        ),
        ("yarn.nodemanager.sleep-delay-before-sigkill.ms", "250", "set it to 5000"),
    ],
)
def test_settings_to_change_are_named(key: str, value: str, said: str) -> None:
    good, text = found({**GOOD, key: value})[key]
    assert (good, said in text) == (False, True)


def test_a_template_that_cannot_be_used_is_told() -> None:
    good, text = found(GOOD, settings={"template": "/no/such/file.json"})["yarn template"]
    assert not good
    assert text.startswith("resource_manager.yarn.template: /no/such/file.json: No such file or directory")


def test_a_user_that_may_not_act_for_others_is_told() -> None:
    good, text = found({key: value for key, value in GOOD.items() if "groups" not in key})["hadoop.proxyuser.dl2d"]
    assert not good
    assert "set hadoop.proxyuser.dl2d.hosts and hadoop.proxyuser.dl2d.users" in text


@pytest.mark.parametrize(
    ("settings", "good", "said"),
    [
        ({"queue": "gpu"}, True, "root.default, root.gpu"),
        ({"queue": "root.gpu"}, True, "root.default, root.gpu"),
        ({"queue": "gpus"}, False, "resource_manager.yarn.queue: there is no queue gpus; there are root.default"),
        ({"watch": [{"queue": "root.g*", "model": "bert"}]}, True, "root.default, root.gpu"),
        (
            {"watch": [{"queue": "gpu", "model": "bert"}]},
            False,
            "watch[0].queue: no queue matches gpu; there are root.default, root.gpu",
        ),
    ],
)
def test_queues_that_the_scheduler_does_not_have_are_told(settings: dict[str, Any], good: bool, said: str) -> None:
    was_good, text = found(GOOD, settings=settings)["yarn queues"]
    assert (was_good, said in text) == (good, True)


def test_queues_that_cannot_be_read_are_not_blamed() -> None:
    for answer in (httpx2.Response(403), {"scheduler": {"schedulerInfo": {"type": "fairScheduler"}}}):
        good, text = found(GOOD, settings={"queue": "gpus"}, **{SCHEDULER_PATH: answer})["yarn queues"]
        assert (good, text.startswith("not checked")) == (True, True)


def test_the_services_interface_is_off() -> None:
    good, text = found(GOOD, **{"/app/v1/services/version": httpx2.Response(404)})["yarn services"]
    assert (good, "yarn.webapp.api-service.enable" in text) == (False, True)


def test_a_cluster_that_hides_its_settings_or_does_not_answer() -> None:
    good, text = found(GOOD, **{"/conf": httpx2.Response(403)})["yarn settings"]
    assert (good, "not checked" in text) == (True, True)
    down = found(GOOD, **{"/ws/v1/cluster/info": httpx2.Response(503)})
    assert list(down) == ["yarn cluster"]
    assert not down["yarn cluster"][0]


@pytest.mark.slow
@pytest.mark.yarn
@pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there")
def test_a_real_cluster() -> None:
    settings = {"yarn.resourcemanager.am.max-attempts": "2", "yarn.webapp.api-service.enable": "false"}
    with yarn_cluster.YarnCluster(nodes=1, properties=settings) as cluster:
        parsed = YarnSettings.parse({"addresses": [cluster.address], "user": cluster.user})
        findings = {item: (good, text) for item, good, text in check_cluster(parsed)}
    assert findings["yarn cluster"] == (True, "Hadoop 3.4.2, 1 node")
    assert findings["yarn services"][0] is False
    assert "yarn.webapp.api-service.enable" in findings["yarn services"][1]
    assert findings["yarn.resourcemanager.am.max-attempts"][0] is False
    assert "yarn.resourcemanager.recovery.enabled" not in findings
