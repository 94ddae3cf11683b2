"""Another tenant's application has a real YARN preempt containers of an elastic job: an ordinary resize."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yarn_cluster
from local_cluster import _static_digest
from yarn_daemon import FAST, YarnDaemon

from dl2d.core.cluster import TaskState
from dl2d.core.jobs import JobState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.yarn,
    pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there"),
]
_ROOT, _RM = "yarn.scheduler.capacity.root", "yarn.resourcemanager"
_PREEMPTION = f"{_RM}.monitor.capacity.preemption"
QUEUES = {
    f"{_ROOT}.queues": "default,prod",
    **{f"{_ROOT}.{queue}.maximum-capacity": "100" for queue in ("default", "prod")},
    **{f"{_ROOT}.{queue}.user-limit-factor": "10" for queue in ("default", "prod")},
    f"{_ROOT}.default.capacity": "40",
    f"{_ROOT}.prod.capacity": "60",
}
PROPERTIES = {
    f"{_RM}.scheduler.monitor.enable": "true",
    f"{_RM}.scheduler.monitor.policies": (
        f"{yarn_cluster.PACKAGE}.resourcemanager.monitor.capacity.ProportionalCapacityPreemptionPolicy"
    ),
    f"{_PREEMPTION}.monitoring_interval": "1000",
    f"{_PREEMPTION}.max_wait_before_kill": "2000",
    f"{_PREEMPTION}.total_preemption_per_round": "1.0",
    f"{_PREEMPTION}.natural_termination_factor": "1.0",
    f"{_PREEMPTION}.max_ignored_over_capacity": "0.0",
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[YarnDaemon]:
    with (
        yarn_cluster.YarnCluster(nodes=3, vcores=6, properties=PROPERTIES, scheduler=QUEUES) as yarn,
        YarnDaemon(tmp_path, yarn) as daemon,
    ):
        yield daemon


def app(daemon: YarnDaemon, part: str) -> dict[str, Any]:
    """The application of this id or name."""
    return next(app for app in daemon.apps() if part in (app["id"].removeprefix("application_"), app["name"]))


@pytest.mark.nightly
def test_preempted_workers_are_an_ordinary_resize(daemon: YarnDaemon, tmp_path: Path) -> None:
    gate = tmp_path / "hold-job"
    gate.touch()
    # 11 of the cluster's 18 CPUs, of which its queue is guaranteed 7: master, coordinator, PS, four workers of 2.
    key = daemon.train("elastic", *FAST, epochs=100, gate=gate, max_workers=4, max_ps=1)
    daemon.wait_for_size(key, 4, 1)
    # All the rest, in containers that fit everywhere: two of the workers have to go.
    prod = daemon.post_plain("prod", "bob", queue="prod", containers=10, cpu=1)
    daemon.wait_until(lambda: app(daemon, prod)["runningContainers"] == 11, "the other application has its containers")
    assert app(daemon, f"dl2-{key.id}-{key.submitted}")["numNonAMContainerPreempted"] >= 2
    preempted = {task.id for task in daemon.tasks(key) if task.state is TaskState.FAILED}
    daemon.wait_for_size(key, 2, 1)
    lost = [task for task in daemon.tasks(key) if task.state is TaskState.FAILED]
    assert preempted <= {task.id for task in lost}
    assert "YARN ended its container: preempted, over its memory, or its node stops" in {task.note for task in lost}
    assert all(task.id.startswith("worker") for task in lost)
    epoch = daemon.job(key).progress.epoch
    daemon.wait_until(lambda: daemon.job(key).progress.epoch > epoch, "it goes on")
    # The cluster is full: what another job waits for is shown in YARN's words.
    waits = daemon.train("waits", *FAST, epochs=1)
    daemon.wait_until(lambda: daemon.job(waits).end_reason, "YARN says why it waits")
    said = daemon.dl2d("why", "waits", cwd=tmp_path)
    assert "no decision  Application is Activated, waiting for resources to be assigned for AM." in said
    daemon.cancel(waits)
    daemon.delete_plain("prod", "bob")
    daemon.wait_for_size(key, 4, 1)
    gate.unlink()
    daemon.wait_for_end(key)
    job = daemon.job(key)
    assert (job.state, job.digest) == (JobState.FINISHED, _static_digest(("--optimizer", "momentum"), 100))
    daemon.wait_until_gone(key)
