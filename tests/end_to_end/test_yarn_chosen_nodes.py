"""Node attributes, a labelled node and flags of the Docker runtime on a real YARN."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import httpx2
import psutil
import pytest
import yarn_cluster
from local_cluster import WORKER, _static_digest
from yarn_daemon import FAST, YarnDaemon

from dl2d.core.jobs import JobState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.yarn,
    pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there"),
]
_ROOT, _NM, _RM = "yarn.scheduler.capacity.root", "yarn.nodemanager", "yarn.resourcemanager"
#: What a site's template has for Docker; the executor of the tests ignores it, but YARN passes it on.
DOCKER = {
    "YARN_CONTAINER_RUNTIME_TYPE": "docker",
    "YARN_CONTAINER_RUNTIME_DOCKER_IMAGE": "library/torch:2",
    "YARN_CONTAINER_RUNTIME_DOCKER_MOUNTS": "/data:/data:ro",
}
#: Hosts of the two nodes with the value "t4"; of these, one is in the default partition and one has the label "lab".
T4, LABELLED = "127.0.0.2", "127.0.0.3"


def having(accelerator: str) -> dict[str, str]:
    """Properties of a node with this attribute."""
    provider = f"{_NM}.node-attributes.provider"
    return {provider: "config", f"{provider}.configured-node-attributes": f"accelerator,STRING,{accelerator}"}


@pytest.fixture
def yarn(tmp_path: Path) -> Iterator[yarn_cluster.YarnCluster]:
    properties = {
        f"{_RM}.placement-constraints.handler": "scheduler",
        "yarn.node-attribute.fs-store.root-dir": f"file://{tmp_path}/attributes",
        "yarn.node-labels.enabled": "true",
        "yarn.node-labels.fs-store.root-dir": f"file://{tmp_path}/labels",
    }
    queues = {f"{queue}.accessible-node-labels": "*" for queue in (_ROOT, f"{_ROOT}.default")}
    queues |= {f"{queue}.accessible-node-labels.lab.capacity": "100" for queue in (_ROOT, f"{_ROOT}.default")}
    nodes = [having("a100"), having("t4"), having("t4")]
    with yarn_cluster.YarnCluster(
        nodes=3, vcores=8, properties=properties, scheduler=queues, of_nodes=nodes
    ) as cluster:
        ask = {"params": {"user.name": cluster.user}, "timeout": 30, "trust_env": False}
        listed = httpx2.get(f"{cluster.address}/ws/v1/cluster/nodes", **ask).json()["nodes"]["node"]
        labelled = next(node["id"] for node in listed if node["id"].startswith(LABELLED))
        for path, content in (
            ("add-node-labels", {"nodeLabelInfo": [{"name": "lab", "exclusivity": True}]}),
            ("replace-node-to-labels", {"nodeToLabels": [{"nodeId": labelled, "labels": ["lab"]}]}),
        ):
            answer = httpx2.post(f"{cluster.address}/ws/v1/cluster/{path}", json=content, **ask)
            assert answer.status_code == 200, answer.text
        yield cluster


@pytest.fixture
def template(tmp_path: Path) -> Path:
    service = json.loads((resources.files("dl2d_yarn") / "templates" / "service.json").read_text())
    service["configuration"]["env"] |= DOCKER
    path = tmp_path / "template.json"
    path.write_text(json.dumps(service))
    return path


def environments(processes: list[psutil.Process]) -> list[dict[str, str]]:
    return [process.environ() for process in processes]


def shown(daemon: YarnDaemon) -> set[str]:
    """Names of the nodes that the policy saw last."""
    slot = daemon.store.slot(daemon.store.last_slot_number())
    assert slot is not None
    return {node.name for node in slot.snapshot.nodes}


def test_a_job_runs_where_the_attribute_is_and_yarn_gets_the_flags_of_docker(
    yarn: yarn_cluster.YarnCluster, template: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "hold-job"
    gate.touch()
    chosen = {"template": str(template), "node_attributes": ["nm.yarn.io/accelerator=t4"]}
    with YarnDaemon(tmp_path, yarn, **chosen) as daemon:
        key = daemon.train("chosen", *FAST, epochs=12, gate=gate, max_workers=2, max_ps=1)
        daemon.wait_for_size(key, 2, 1)
        found = environments(daemon.processes_of(key, str(WORKER)))
        assert {environment["NM_HOST"] for environment in found} == {T4}
        # What YARN got for the containers; the environment of a task is its job's.
        containers = [each for each in environments(daemon.processes_of(key)) if "DL2_INSTANCE" in each]
        assert {each["DL2_INSTANCE"] for each in containers} == {"coordinator-0", "ps-0", "worker-0", "worker-1"}
        assert all(each.items() >= DOCKER.items() for each in containers)
        assert {task.node for task in daemon.tasks(key)} == shown(daemon) == {T4}
        gate.unlink()
        daemon.wait_for_end(key)
        job = daemon.job(key)
        assert (job.state, job.digest) == (JobState.FINISHED, _static_digest(("--optimizer", "momentum"), 12))
        daemon.wait_until_gone(key)
