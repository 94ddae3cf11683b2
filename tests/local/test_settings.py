from __future__ import annotations

import os

import psutil
import pytest

from dl2d.core.cluster import Node
from dl2d.core.errors import ConfigError
from dl2d.core.resources import Resources
from dl2d.local.settings import LocalSettings


def parse(**given: object) -> LocalSettings:
    return LocalSettings.parse({"state_dir": "/var/lib/dl2d/local", **given})


def test_a_count_declares_numbered_nodes() -> None:
    nodes = parse(
        nodes=[
            {"name": "laptop", "count": 2, "resources": {"cpu": 8, "gpu": 2}},
            {"name": "big", "resources": "cpu:32,memory:64G"},
        ]
    ).nodes
    small = Resources.of(cpu=8, gpu=2)
    big = Node("big", Resources.of(cpu=32, memory=65536))
    assert nodes == (Node("laptop-1", small), Node("laptop-2", small), big)


def test_without_nodes_there_is_this_machine() -> None:
    settings = parse()
    assert settings.cluster == "local"
    (node,) = settings.nodes
    assert node.capacity.get("cpu") == len(os.sched_getaffinity(0))
    assert node.capacity.get("memory") == psutil.virtual_memory().total // 2**20


NODE = {"name": "n", "resources": {"cpu": 1}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"node": []},
            r"resource_manager\.local\.node: unknown key \(did you mean nodes\?\); known are cluster, nod",
        ),
        ({"state_dir": None}, r"resource_manager\.local\.state_dir: missing"),
        ({"state_dir": ""}, r"resource_manager\.local\.state_dir: missing"),
        ({"state_dir": 5}, r"resource_manager\.local\.state_dir: expected a path"),
        ({"state_dir": "here"}, r"resource_manager\.local\.state_dir: must be an absolute path, got 'here'"),
        ({"cluster": "a b"}, r"resource_manager\.local\.cluster: .*'a b'"),
        ({"nodes": []}, r"resource_manager\.local\.nodes: expected a list"),
        ({"nodes": ["n"]}, r"resource_manager\.local\.nodes\[0\]: expected"),
        ({"nodes": [NODE, {**NODE, "cpus": 1}]}, r"resource_manager\.local\.nodes\[1\]\.cpus: unknown key"),
        ({"nodes": [{**NODE, "name": "a/b"}]}, r"nodes\[0\]\.name: .*'a/b'"),
        ({"nodes": [{"name": "n"}]}, r"nodes\[0\]\.resources: missing"),
        ({"nodes": [{**NODE, "resources": {"cpu": -1}}]}, r"local\.nodes\[0\]\.resources: cpu"),
        ({"nodes": [{**NODE, "count": 0}]}, r"nodes\[0\]\.count: .*got 0"),
        ({"nodes": [{**NODE, "count": 10**9}]}, r"nodes\[0\]\.count: .*to 10000"),
        ({"nodes": [NODE, NODE]}, r"nodes\[1\]\.name: a node called 'n' is already declared"),
    ],
)
def test_a_bad_setting_is_refused_by_its_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**given)
