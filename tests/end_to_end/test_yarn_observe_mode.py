"""Modes observe and shadow under a real YARN: users' applications run as YARN has them, and dl2d only records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yarn_cluster
from yarn_daemon import YarnDaemon

from dl2d.core.cluster import TaskState
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Constraint
from dl2d.core.jobs import NOTHING, Allocation, Architecture, JobKey, JobState, Role
from dl2d.core.resources import Resources

pytestmark = [
    pytest.mark.slow,
    pytest.mark.yarn,
    pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there"),
]
WATCH = [{"queue": "root.default", "name": "bert-*", "type": "yarn-service", "model": "bert"}]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[YarnDaemon]:
    with (
        yarn_cluster.YarnCluster(nodes=3, vcores=6) as yarn,
        YarnDaemon(tmp_path, yarn, mode="observe", watch=WATCH) as daemon,
    ):
        yield daemon


def given(daemon: YarnDaemon, key: JobKey) -> Allocation:
    entries = daemon.store.decisions(key, limit=1)
    return entries[0].decided.allocation if entries else NOTHING


def found(daemon: YarnDaemon, job: str) -> JobKey:
    daemon.wait_until(lambda: daemon.store.find_jobs(job), f"job {job} is seen")
    return daemon.store.find_jobs(job)[0].key


def app(daemon: YarnDaemon, job: str) -> dict[str, Any]:
    return next(app for app in daemon.apps() if app["id"] == f"application_{job}")


@pytest.mark.nightly
def test_applications_are_recorded_and_not_changed(daemon: YarnDaemon) -> None:
    # A node has room for one of these containers.
    demand = {"cpu": 2, "memory": 5120, "gpu": 1}
    large = daemon.post_plain("bert-large", "alice", containers=3, **demand)
    daemon.post_plain("notebook", "bob", containers=2)
    first = found(daemon, large)
    daemon.wait_until(lambda: given(daemon, first) == Allocation(3, 0), "what YARN gave is recorded")
    huge = daemon.post_plain("bert-huge", "alice", containers=3, **demand)
    job = daemon.job(first)
    assert (job.state, job.static, job.owner.user, job.request.model) == (JobState.RUNNING, True, "alice", "bert")
    assert (job.request.name, job.request.architecture, job.request.epochs) == (
        "bert-large",
        Architecture.ALLREDUCE,
        24,
    )
    tasks = daemon.tasks(first, live=True)
    assert {(task.role, task.state, task.handle) for task in tasks} == {(Role.WORKER, TaskState.CONFIRMED, large)}
    assert {task.node for task in tasks} == {
        f"localhost:{daemon.yarn.port_of(name)}" for name in daemon.yarn.node_managers
    }
    # Without what the application's master has.
    assert {task.demand for task in tasks} == {Resources.of(demand)}
    assert job.key.submitted == app(daemon, large)["startedTime"] // 1000
    assert job.started_at is not None
    assert job.started_at * 1000 > app(daemon, large)["launchTime"]
    entry = daemon.store.decisions(first, limit=1)[0]
    assert (entry.policy, entry.decided.reason.constraint) == ("observed", Constraint.OBSERVED)
    assert entry.policy_version.startswith("yarn 3.")

    second = found(daemon, huge)
    # The job's row is written before those of its first slot.
    waits = "gave nothing yet: waits for 3 containers"
    daemon.wait_until(
        lambda: any(waits in entry.decided.reason.text for entry in daemon.store.decisions(second, limit=1)),
        "that it waits is recorded",
    )
    assert (daemon.job(second).state, daemon.job(second).request.worker) == (JobState.READY, Resources.of(demand))

    # A restart of the daemon loses no job, although YARN does not list the containers.
    assert daemon.stop() == 0
    daemon.start()
    daemon.flex_plain("bert-large", "alice", 2)
    daemon.wait_until(lambda: given(daemon, first) == Allocation(2, 0), "it has been made smaller")
    daemon.delete_plain("bert-large", "alice")
    daemon.wait_for_end(first)
    ended = daemon.job(first)
    assert (ended.state, ended.ended_at) == (JobState.CANCELLED, app(daemon, large)["finishedTime"] / 1000)
    assert ended.end_reason.startswith("Stopped by user alice")
    daemon.wait_until(lambda: given(daemon, second) == Allocation(3, 0), "the one that waited has room")
    assert daemon.job(second).started_at > ended.started_at  # type: ignore[operator]
    assert daemon.store.find_jobs("notebook") == ()

    daemon.settings["mode"] = "shadow"
    daemon.write()
    assert daemon.process is not None
    slot = daemon.store.last_slot_number()
    daemon.process.send_signal(1)
    daemon.wait_until(lambda: daemon.store.last_slot_number() > slot + 1, "it decides in shadow")
    last = daemon.store.slot(daemon.store.last_slot_number())
    assert last is not None
    assert last.shadow is not None
    assert (last.decision.policy, last.shadow.policy) == ("observed", "drf")
    assert [change.after for change in daemon.store.mode_changes()] == [Mode.SHADOW, Mode.OBSERVE]
    assert "decision of dl2d, not carried out" in daemon.dl2d("why", huge, cwd=daemon.directory)
    # It ends while the daemon does not look.
    assert daemon.stop() == 0
    daemon.delete_plain("bert-huge", "alice")
    daemon.wait_until(lambda: app(daemon, huge)["state"] == "FINISHED", "it has ended")
    daemon.start()
    daemon.wait_for_end(second)
    assert daemon.job(second).ended_at == app(daemon, huge)["finishedTime"] / 1000
    assert daemon.store.tasks(live=True) == ()
    # Nothing was posted, and nothing ended but by its owner.
    assert {each["name"]: each["state"] for each in daemon.apps()} == {
        "bert-large": "FINISHED", "bert-huge": "FINISHED", "notebook": "RUNNING"
    }  # fmt: skip
    assert daemon.store.resizes() == ()
