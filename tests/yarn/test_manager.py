"""The manager on a ResourceManager in memory."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
from msgspec import structs
from structlog.testing import capture_logs
from yarn.fake_yarn import FakeYarn, wait_for_rounds
from yarn.posted_service import POSTED, SETTINGS
from yarn.rm_answers import activities, amounts, app, lists, node, scheduler

from dl2d.core.cluster import NodeState, task_tag
from dl2d.core.errors import ConfigError, NotFound, Rejected, Unavailable, Waiting
from dl2d.core.jobs import JobKey, Launch, Owner, Role
from dl2d.core.resource_manager import ContainerManager, ContainerReport, RmIdentity, RmJobState, TaskSpec
from dl2d.core.resources import NO_RESOURCES, Resources, Shortfall
from dl2d_yarn import manager as manager_module
from dl2d_yarn import service_resizing
from dl2d_yarn.listed_services import REMOVE_AGAIN_SECONDS
from dl2d_yarn.manager import YarnManager, create
from dl2d_yarn.queue_and_growth_limits import ACTIVITIES_PATH
from dl2d_yarn.service_description import posted_description
from dl2d_yarn.settings import YarnSettings

JOB = JobKey("yarn", "7", 1_795_581_700)
NAME = "dl2-7-1795581700"
ENVIRONMENT = {"DL2_DAEMON": "http://head:8290", "DL2_JOB": JOB.slug, "DL2_CREDENTIAL": "ab" * 32, "API_KEY": "hunter2"}
OWNER = Owner("dl2d", 990, 990)
CONTAINER = "container_1795581702976_0001_01_%06d"


def anchor(**environment: str) -> TaskSpec:
    demands = ((Role.WORKER, Resources.of(cpu=2, gpu=1, memory=2048)), (Role.PS, Resources.of(cpu=1)))
    launch = Launch(("python", "train.py"), "/home/ml", tuple({**ENVIRONMENT, **environment}.items()))
    return TaskSpec(
        tag=task_tag(JOB, "anchor"), job=JOB, role=Role.COORDINATOR, name="anchor", demand=NO_RESOURCES, node="",
        owner=OWNER, launch=launch, member_demands=demands,
    )  # fmt: skip


def task(name: str, *, node: str = "node1", demand: Resources | None = None) -> TaskSpec:
    return TaskSpec(
        tag=task_tag(JOB, name), job=JOB, role=Role(name.partition("-")[0]), name=name, node=node, owner=OWNER,
        demand=Resources.of(cpu=1) if demand is None else demand, launch=Launch(("python",), "/", ()),
    )  # fmt: skip


def report(name: str, number: int, **more: object) -> ContainerReport:
    role, _, position = name.partition("-")
    given = {"incarnation": "a", "node": "node1:45001", **more}
    return ContainerReport(job=JOB, role=Role(role), position=int(position), container=CONTAINER % number, **given)  # type: ignore[arg-type]


def identities(manager: YarnManager, *handles: str) -> list[RmIdentity]:
    return [job.identity for job in manager.listing().jobs if job.handle in handles]


def wait_until(predicate: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def manager(yarn: FakeYarn) -> YarnManager:
    return yarn.listed_manager(report_seconds=0.1)


def states(manager: YarnManager) -> dict[str, RmJobState]:
    """States of the listed jobs by handle."""
    return {job.handle: job.state for job in manager.listing().jobs}


def started(manager: YarnManager) -> str:
    handle = manager.submit(anchor())
    manager.listing()
    return handle


def test_a_job_is_a_service_and_its_secrets_are_not_in_it(yarn: FakeYarn, manager: YarnManager) -> None:
    handle = started(manager)
    service = yarn.posted[NAME]
    assert "hunter2" not in str(service)
    assert "train.py" not in str(service)
    assert service["configuration"]["env"] == {
        "DL2_DAEMON": "http://head:8290", "DL2_JOB": JOB.slug, "DL2_CREDENTIAL": "ab" * 32, "DL2_ROLE": "container",
        "DL2_INSTANCE": "${COMPONENT_INSTANCE_NAME}",
    }  # fmt: skip
    coordinator, ps, worker = service["components"]
    assert [each["number_of_containers"] for each in service["components"]] == [1, 0, 0]
    assert (coordinator["name"], coordinator["restart_policy"], ps["restart_policy"]) == (
        "coordinator",
        "ON_FAILURE",
        "ALWAYS",
    )
    assert worker["resource"] == {"cpus": 2, "memory": "2048", "additional": {"yarn.io/gpu": {"value": 1, "unit": ""}}}
    assert ps["resource"] == {"cpus": 1, "memory": "1024", "additional": {}}
    (listed,) = manager.listing().jobs
    assert (listed.handle, listed.tag, listed.state) == (handle, task_tag(JOB, "anchor"), RmJobState.RUNNING)
    assert handle == yarn.apps[NAME]["id"]


def test_containers_get_the_certificate_by_which_they_verify_the_daemon(yarn: FakeYarn, manager: YarnManager) -> None:
    text = "der:MIIB+/8="
    manager.submit(anchor(DL2_DAEMON_CERTIFICATE=text))
    assert yarn.posted[NAME]["configuration"]["env"]["DL2_DAEMON_CERTIFICATE"] == text


def test_containers_get_the_daemons_account(yarn: FakeYarn, manager: YarnManager) -> None:
    manager.submit(anchor(DL2_DAEMON_UID="64"))
    assert yarn.posted[NAME]["configuration"]["env"]["DL2_DAEMON_UID"] == "64"


def test_the_containers_ask_for_nodes_with_the_attributes_of_the_configuration(yarn: FakeYarn) -> None:
    manager = yarn.manager(node_attributes=["nm.yarn.io/gpu=a100", "rm.yarn.io/zone=b"])
    assert manager.listing().nodes == ()
    manager.submit(anchor())
    wanted = {"nm.yarn.io/gpu": ["a100"], "rm.yarn.io/zone": ["b"]}
    constraint = {"type": "AFFINITY", "scope": "NODE", "node_attributes": wanted}
    for component in yarn.posted[NAME]["components"]:
        assert component["placement_policy"] == {"constraints": [constraint]}


def test_a_listing_takes_two_calls_whatever_the_number_of_jobs(yarn: FakeYarn, manager: YarnManager) -> None:
    started(manager)
    for name in ("worker-1", "worker-2"):
        manager.submit(task(name))
    yarn.apps |= {f"other-{number}": app(number, name=f"other-{number}") for number in range(50)}
    wait_until(lambda: len(yarn.flexes) == 1)
    yarn.calls.clear()
    listing = manager.listing()
    assert yarn.calls == ["GET /ws/v1/cluster/apps", "GET /ws/v1/cluster/nodes"]
    # Services of others are listed, as on Slurm, and are none of dl2d's.
    assert len([job for job in listing.jobs if job.tag]) == 3


def test_all_starts_of_a_tick_are_one_flex_and_all_stops_another(yarn: FakeYarn, manager: YarnManager) -> None:
    started(manager)
    handles = [manager.submit(task(name)) for name in ("worker-1", "ps-1", "worker-2")]
    wait_until(lambda: len(yarn.flexes) == 1)
    assert yarn.flexes == [{"ps": 1, "worker": 2}]
    assert manager.report_container(report("worker-0", 3)).task == "worker-1"
    assert manager.report_container(report("worker-1", 4)).task == "worker-2"
    assert manager.report_container(report("ps-0", 5)).task == "ps-1"
    manager.stop(identities(manager, handles[2]), 30)
    assert manager.report_container(report("worker-1", 4, task="worker-2")).grace == pytest.approx(30, abs=1)
    manager.report_container(report("worker-1", 4, task="worker-2", exit_code=0))
    wait_until(lambda: len(yarn.flexes) == 2)
    wait_for_rounds(manager)
    assert yarn.flexes[1:] == [{"ps": 1, "worker": 1}]


def test_what_is_not_granted_is_taken_back(yarn: FakeYarn, manager: YarnManager) -> None:
    started(manager)
    handle = manager.submit(task("worker-1"))
    wait_until(lambda: yarn.flexes == [{"ps": 0, "worker": 1}])
    manager.stop(identities(manager, handle), 30)
    wait_until(lambda: yarn.flexes[1:] == [{"ps": 0, "worker": 0}])
    assert states(manager)[handle] is RmJobState.CANCELLED


def test_a_flex_that_fails_is_repeated_and_told(yarn: FakeYarn, manager: YarnManager) -> None:
    started(manager)
    said = "flex can only be invoked when service is running"

    def refuse(request: httpx2.Request) -> httpx2.Response | None:
        return httpx2.Response(400, json={"diagnostics": said}) if request.method == "PUT" else None

    yarn.instead = refuse
    handle = manager.submit(task("worker-1"))
    wait_until(lambda: any(said in job.reason for job in manager.listing().jobs if job.handle == handle))
    yarn.instead = lambda _request: None
    wait_until(lambda: yarn.flexes == [{"ps": 0, "worker": 1}])


@pytest.mark.parametrize(("code", "state"), [(0, RmJobState.DONE), (1, RmJobState.FAILED)])
def test_the_end_of_the_coordinator_ends_the_service(
    yarn: FakeYarn, manager: YarnManager, code: int, state: RmJobState
) -> None:
    handle = started(manager)
    manager.submit(task("worker-1"))
    assert manager.report_container(report("coordinator-0", 2)).task == "anchor"
    manager.report_container(report("coordinator-0", 2, task="anchor", exit_code=code))
    assert states(manager)[handle] is state
    if code == 0:  # YARN ends it by itself
        yarn.end(NAME, "SUCCEEDED")
        manager.listing()
    wait_until(lambda: NAME not in yarn.posted)
    jobs = {job.handle: job for job in manager.listing().jobs}
    assert jobs[handle].state is state
    assert all(job.state.ended for job in jobs.values())


def test_a_worker_that_fails_after_the_end_of_the_coordinator_does_not_end_the_service(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    """YARN ends it, as one that has succeeded."""
    started(manager)
    manager.submit(task("worker-1"))
    manager.report_container(report("coordinator-0", 2))
    manager.report_container(report("worker-0", 3))
    manager.report_container(report("coordinator-0", 2, task="anchor", exit_code=0))
    manager.report_container(report("worker-0", 3, task="worker-1", exit_code=1))
    wait_for_rounds(manager)
    assert NAME in yarn.posted


def test_a_service_that_ends_after_its_coordinator_is_no_failure_to_resize(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    """Its ApplicationMaster says that it succeeds before the list has the application as ended."""
    started(manager)
    manager.submit(task("worker-1"))
    manager.report_container(report("coordinator-0", 2))
    wait_until(lambda: len(yarn.flexes) == 1)
    manager.report_container(report("worker-0", 3))
    ending = {"name": NAME, "state": "SUCCEEDED", "id": yarn.apps[NAME]["id"]}
    answer = httpx2.Response(200, json=ending)
    yarn.instead = lambda request: answer if request.url.path.endswith(NAME) else None
    asked = len(yarn.calls)
    with capture_logs() as logs:
        manager.report_container(report("worker-0", 3, task="worker-1", exit_code=0))
        manager.report_container(report("coordinator-0", 2, task="anchor", exit_code=0))
        wait_until(lambda: len(yarn.calls) > asked)
        wait_for_rounds(manager)
    assert [entry for entry in logs if entry["log_level"] == "warning"] == []
    assert len(yarn.flexes) == 1


def test_a_service_that_ended_otherwise_ends_its_tasks(yarn: FakeYarn, manager: YarnManager) -> None:
    handle = started(manager)
    worker = manager.submit(task("worker-1"))
    wait_until(lambda: bool(yarn.flexes))
    manager.report_container(report("worker-0", 3))
    yarn.apps[NAME] |= {"state": "FAILED", "finalStatus": "FAILED", "diagnostics": "AM crashed"}
    jobs = {job.handle: job for job in manager.listing().jobs}
    assert (jobs[handle].state, jobs[handle].reason) == (RmJobState.FAILED, "AM crashed")
    assert jobs[worker].state is RmJobState.CANCELLED
    assert "AM crashed" in jobs[worker].reason


def test_the_service_of_a_stopped_anchor_is_removed_after_the_grace_time(yarn: FakeYarn) -> None:
    manager = yarn.listed_manager(yarn.clock)
    handle = started(manager)
    manager.report_container(report("coordinator-0", 2))
    manager.stop([*identities(manager, handle), *(RmIdentity(each, 0, "", "") for each in ("nonsense", ""))], 60)
    assert manager.report_container(report("coordinator-0", 2, task="anchor")).grace == 60
    assert [job.state for job in manager.listing().jobs] == [RmJobState.ENDING]
    wait_for_rounds(manager)
    assert NAME in yarn.posted
    yarn.now += 61
    wait_until(lambda: NAME not in yarn.posted)
    assert [job.state for job in manager.listing().jobs] == [RmJobState.CANCELLED]


def test_after_a_restart_there_is_no_listing_until_the_containers_may_have_reported(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    handle = started(manager)
    running = manager.submit(task("worker-1"))
    wait_until(lambda: bool(yarn.flexes))
    manager.report_container(report("worker-0", 3))
    second = yarn.manager(yarn.clock, report_seconds=3.0)
    with pytest.raises(Waiting, match="for their first report"):
        second.listing()
    second.report_container(report("worker-0", 3, task="worker-1"))
    flexes = len(yarn.flexes)
    yarn.now += 10
    assert states(second) == {handle: RmJobState.RUNNING, running: RmJobState.RUNNING}
    # The size that was asked for last is not known: YARN is asked, and nothing changed where it is right.
    wait_until(lambda: yarn.calls[-1] == f"GET /app/v1/services/{NAME}")
    assert len(yarn.flexes) == flexes


def test_containers_that_an_earlier_daemon_told_a_longer_interval_have_the_time_to_report(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    started(manager)
    yarn.apps[NAME]["runningContainers"] = 3
    second = yarn.manager(yarn.clock, report_seconds=0.5)
    with pytest.raises(Waiting, match=r"have up to 65\.0 s"):
        second.listing()
    assert second.report_container(report("coordinator-0", 2, task="anchor")).report_seconds == 0.5
    yarn.now += 40
    with pytest.raises(Waiting, match=r"have up to 25\.0 s"):
        second.listing()
    second.report_container(report("worker-0", 3, task="worker-1"))
    assert f"dl2:{JOB.slug}:worker-1" in {job.handle for job in second.listing().jobs}
    # One that hangs does not hold up the others for ever. Until it reports, its task is not missed.
    third = yarn.manager(yarn.clock, report_seconds=0.5)
    with pytest.raises(Waiting):
        third.listing()
    third.report_container(report("coordinator-0", 2, task="anchor"))
    yarn.now += 66
    listing = third.listing()
    assert [job.handle for job in listing.jobs] == [yarn.apps[NAME]["id"]]
    assert listing.unreported == {yarn.apps[NAME]["id"]}
    third.report_container(report("worker-0", 3, task="worker-1"))
    assert third.listing().unreported == frozenset()


def test_after_a_restart_a_posted_service_is_unreported_until_all_its_containers_have_reported(yarn: FakeYarn) -> None:
    application = yarn.post(posted_description(POSTED, SETTINGS, daemon="http://head:8290"), "alice")
    yarn.apps["digits"]["runningContainers"] = 4
    manager = yarn.manager(yarn.clock, report_seconds=0.5)
    with pytest.raises(Waiting):
        manager.listing()
    # A service of which nothing has reported is not known to be dl2d's: the other jobs do not wait for it.
    yarn.now += 40
    assert manager.listing().unreported == {application}
    job = JobKey("yarn", application.removeprefix("application_"), yarn.apps["digits"]["startedTime"] // 1000)
    for name, number in (("coordinator-0", 2), ("worker-0", 3), ("worker-1", 4)):
        assert manager.listing().unreported == {application}
        manager.report_container(structs.replace(report(name, number), job=job))
    assert manager.listing().unreported == frozenset()


def test_a_container_that_yarn_lists_and_that_never_reported_keeps_its_service_unreported(
    yarn: FakeYarn, manager: YarnManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of containers alone does not show it: another one has ended since it reported."""
    monkeypatch.setattr(service_resizing, "DETAILS_SECONDS", 0.1)
    second = restarted_with_worker_1(yarn, manager, listed=2)
    wait_until(lambda: second.listing().unreported == {yarn.apps[NAME]["id"]})
    second.report_container(report("worker-1", 4))
    wait_until(lambda: not second.listing().unreported)


def test_a_component_that_is_not_dl2ds_does_not_keep_its_service_unreported(
    yarn: FakeYarn, manager: YarnManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a task that was lost while the daemon was down would never be missed."""
    monkeypatch.setattr(service_resizing, "DETAILS_SECONDS", 0.1)
    started(manager)
    board = {"name": "board", "number_of_containers": 1, "resource": {"cpus": 1, "memory": "64"}}
    yarn.posted[NAME]["components"].append(board)
    second = restarted(yarn, size=1, listed=1)
    yarn.containers[NAME]["board-0"] = CONTAINER % 9
    yarn.apps[NAME]["runningContainers"] = 1 + 2
    second.report_container(report("worker-0", 3, task="worker-1"))
    yarn.now += 70
    assert second.listing().unreported == {yarn.apps[NAME]["id"]}
    wait_until(lambda: not second.listing().unreported)
    # An ApplicationMaster that was started again does not know its containers at first.
    yarn.containers[NAME] = {}
    second.submit(task("worker-2"))
    wait_until(lambda: second.listing().unreported == {yarn.apps[NAME]["id"]})


def restarted(yarn: FakeYarn, *, size: int, listed: int) -> YarnManager:
    """A second daemon's manager, after the containers had time to report; YARN has workers, and lists some of them."""
    yarn.posted[NAME]["components"][2]["number_of_containers"] = size
    yarn.containers[NAME] = {f"worker-{place}": CONTAINER % (3 + place) for place in range(listed)}
    manager = yarn.manager(yarn.clock, report_seconds=3.0)
    with pytest.raises(Unavailable):
        manager.listing()
    return manager


def restarted_with_worker_1(yarn: FakeYarn, manager: YarnManager, *, listed: int) -> YarnManager:
    """A second daemon's manager of a job with three workers, of which one container has reported in time."""
    started(manager)
    second = restarted(yarn, size=3, listed=listed)
    second.report_container(report("worker-0", 3, task="worker-1"))
    yarn.now += 10
    second.listing()
    return second


def test_after_a_start_containers_that_have_not_reported_are_not_removed(
    yarn: FakeYarn, manager: YarnManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_resizing, "DETAILS_SECONDS", 0.1)
    second = restarted_with_worker_1(yarn, manager, listed=3)
    description = f"GET /app/v1/services/{NAME}"
    wait_until(lambda: yarn.calls.count(description) > 2)
    # A stop and a start come to the same number of containers.
    handle = second.submit(task("worker-4"))
    wait_until(lambda: second.report_container(report("worker-1", 4)).task == "worker-4")
    second.stop(identities(second, handle), 30)
    second.report_container(report("worker-1", 4, task="worker-4", exit_code=0))
    asked = yarn.calls.count(description)
    wait_until(lambda: yarn.calls.count(description) > asked + 1)
    assert yarn.flexes == []
    # The last one reports its task, and later the end of it.
    assert second.report_container(report("worker-2", 5, task="worker-3")).grace is None
    assert f"dl2:{JOB.slug}:worker-3" in {job.handle for job in second.listing().jobs if not job.state.ended}
    second.report_container(report("worker-2", 5, task="worker-3", exit_code=0))
    wait_until(lambda: yarn.flexes == [{"ps": 0, "worker": 1}])


def test_containers_that_an_earlier_daemon_asked_for_and_yarn_has_not_are_taken_back(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    restarted_with_worker_1(yarn, manager, listed=1)
    wait_until(lambda: yarn.flexes == [{"ps": 0, "worker": 1}])


def test_a_service_of_which_nothing_is_known_keeps_its_size(yarn: FakeYarn, manager: YarnManager) -> None:
    """Its containers do not reach this daemon, but may train."""
    handle = started(manager)
    second = restarted(yarn, size=3, listed=0)
    yarn.now += 10
    for _ in range(2):
        assert [job.state for job in second.listing().jobs] == [RmJobState.RUNNING]
        wait_for_rounds(second)
    assert yarn.flexes == []
    # Once it is told to stop it, it is this daemon's.
    second.stop(identities(second, handle), 0)
    wait_until(lambda: NAME not in yarn.posted)


def test_the_time_in_which_containers_may_report_begins_after_an_incomplete_listing_too(yarn: FakeYarn) -> None:
    manager = yarn.manager(yarn.clock)
    yarn.apps["x"] = {"id": 1}
    with pytest.raises(Waiting, match="for their first report"):
        manager.listing()


def test_services_are_changed_only_for_the_time_for_which_it_is_allowed(yarn: FakeYarn) -> None:
    manager = yarn.listed_manager(yarn.clock, allowed=0)
    handle = started(manager)
    tasks = [manager.submit(task(name)) for name in ("worker-1", "worker-2")]
    wait_for_rounds(manager)
    assert yarn.flexes == []
    manager.allow_changes(5)
    wait_until(lambda: yarn.flexes == [{"ps": 0, "worker": 2}])
    yarn.now += 6
    manager.stop(identities(manager, tasks[1]), 0)
    wait_for_rounds(manager)
    assert len(yarn.flexes) == 1
    manager.allow_changes(5)
    wait_until(lambda: yarn.flexes[1:] == [{"ps": 0, "worker": 1}])
    yarn.now += 6
    manager.stop(identities(manager, handle), 0)
    wait_for_rounds(manager)
    assert NAME in yarn.posted
    manager.allow_changes(5)
    wait_until(lambda: NAME not in yarn.posted)


class TwoServices:
    """A service of the daemon, and one that its user posted and whose description cannot be read."""

    def __init__(self, yarn: FakeYarn) -> None:
        self.yarn = yarn
        self.attempts = 0
        service = posted_description(POSTED, SETTINGS, daemon="http://head:8910")
        self.bad, self.proof = yarn.post(service, "alice"), service["configuration"]["env"]["DL2_PROOF"]
        self.manager = yarn.manager(yarn.clock)
        with pytest.raises(Unavailable):
            self.manager.listing()
        yarn.now += 10
        started(self.manager)

    def fail(self, request: httpx2.Request) -> httpx2.Response | None:
        if request.url.path == "/app/v1/services/digits":
            self.attempts += 1
            raise ValueError("invalid literal")
        return None


def test_a_service_that_cannot_be_changed_does_not_keep_others_and_is_tried_less_and_less_often(yarn: FakeYarn) -> None:
    world = TwoServices(yarn)
    manager = world.manager
    key = manager.authenticate(world.bad, world.proof).key
    assert manager.report_container(structs.replace(report("coordinator-0", 2), job=key)).task == "anchor"
    yarn.instead = world.fail
    waiting = manager.submit(structs.replace(task("worker-0"), job=key, tag=task_tag(key, "worker-0")))
    with capture_logs() as logs:
        wait_until(lambda: world.attempts == 1)
        manager.submit(task("worker-1"))
        wait_until(lambda: yarn.flexes == [{"ps": 0, "worker": 1}])
        reasons = {job.handle: job.reason for job in manager.listing().jobs}
        assert reasons[waiting] == "ValueError: invalid literal"
        for number, seconds in enumerate((1, 2, 4, 8, 16, 30, 30), start=1):
            yarn.now += seconds - 0.01
            manager.submit(task(f"worker-{2 * number}"))
            wait_until(lambda number=number: yarn.flexes[-1]["worker"] == 2 * number)
            assert world.attempts == number
            yarn.now += 0.02
            manager.submit(task(f"worker-{2 * number + 1}"))
            wait_until(lambda number=number: world.attempts == number + 1)
            wait_until(lambda number=number: yarn.flexes[-1]["worker"] == 2 * number + 1)
    assert {entry["name"] for entry in logs if entry["event"] == "service was not changed"} == {"digits"}


def test_reading_the_description_of_a_service_for_seconds_blocks_nothing_else(
    yarn: FakeYarn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master of the service hangs."""
    world = TwoServices(yarn)
    called, go_on = threading.Semaphore(0), threading.Event()

    def hang(request: httpx2.Request) -> httpx2.Response | None:
        if request.url.path == "/app/v1/services/digits":
            called.release()
            assert go_on.wait(30)
        return None

    yarn.instead = hang
    manager, found = world.manager, []
    threads = [
        threading.Thread(target=lambda: found.append(manager.authenticate(world.bad, world.proof))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        assert called.acquire(timeout=10)
    # Two containers of her services wait; no more may, of whichever service.
    with pytest.raises(Unavailable, match="other containers of user alice are being authenticated"):
        manager.authenticate(world.bad, world.proof)
    with pytest.raises(NotFound):
        manager.authenticate("application_1_0001", "x")
    assert manager.listing().jobs
    manager.submit(task("worker-1"))
    wait_until(lambda: yarn.flexes == [{"ps": 0, "worker": 1}])
    go_on.set()
    for thread in threads:
        thread.join()
    assert [anchor.handle for anchor in found] == [world.bad] * 2
    assert manager.authenticate(world.bad, world.proof) == found[0]
    assert manager.capabilities().parallel_authentication


def test_a_description_is_not_waited_for_as_long_as_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "SERVICE_CALL_SECONDS", 0.3)
    given_up = threading.Event()
    answers = {**lists([app(1, user="alice")], [node(1)]), "/ws/v1/cluster/scheduler": scheduler()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/app"):
                given_up.wait(20)  # its master hangs
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[path]).encode())

        def log_message(self, *given: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {"addresses": [f"http://127.0.0.1:{server.server_port}"], "timeout_seconds": 30, "user": "dl2d"}
    manager = YarnManager(YarnSettings.parse(settings), clock=time.time)
    try:
        with pytest.raises(Unavailable):
            manager.authenticate("application_1795581702976_0001", "x")
        assert not given_up.is_set()
    finally:
        given_up.set()
        manager.close()
        server.shutdown()
        server.server_close()


def test_looking_up_an_application_changes_nothing_else(yarn: FakeYarn, manager: YarnManager) -> None:
    handle = started(manager)
    manager.submit(task("worker-1"))
    ended = dict(yarn.apps[NAME])
    yarn.apps[NAME] |= {"state": "FAILED", "finalStatus": "FAILED"}
    with pytest.raises(NotFound):
        manager.authenticate("application_1_0001", "x")
    wait_for_rounds(manager)
    assert NAME in yarn.posted
    yarn.apps[NAME] = ended
    assert {job.state for job in manager.listing().jobs if job.handle == handle} == {RmJobState.RUNNING}


def test_the_description_says_that_a_request_without_an_answer_was_carried_out(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    started(manager)

    def lose(request: httpx2.Request) -> httpx2.Response | None:
        if request.method != "PUT":
            return None
        yarn.instead = lambda _request: None
        yarn.answer(request)
        raise httpx2.ReadTimeout("no answer")

    yarn.instead = lose
    handle = manager.submit(task("worker-1"))
    wait_until(lambda: yarn.flexes == [{"ps": 0, "worker": 1}])
    manager.stop(identities(manager, handle), 0)
    wait_until(lambda: yarn.flexes[1:] == [{"ps": 0, "worker": 0}])


def test_a_number_of_containers_that_somebody_else_changed_is_corrected(
    yarn: FakeYarn, manager: YarnManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_resizing, "DETAILS_SECONDS", 0.1)
    started(manager)
    manager.submit(task("worker-1"))
    wait_until(lambda: yarn.flexes == [{"ps": 0, "worker": 1}])
    assert manager.report_container(report("worker-0", 3)).task == "worker-1"
    yarn.posted[NAME]["components"][2]["number_of_containers"] = 2
    manager.report_container(report("worker-1", 4))
    wait_until(lambda: yarn.flexes[1:] == [{"ps": 0, "worker": 1}])
    # One less than there should be shows in a task that waits.
    manager.submit(task("worker-2"))
    wait_until(lambda: yarn.flexes[2:] == [{"ps": 0, "worker": 2}])
    yarn.posted[NAME]["components"][2]["number_of_containers"] = 1
    wait_until(lambda: yarn.flexes[3:] == [{"ps": 0, "worker": 2}])


@pytest.mark.parametrize("path", ["/ws/v1/cluster/apps", "/ws/v1/cluster/nodes"])
def test_an_incomplete_list_ends_nothing(yarn: FakeYarn, manager: YarnManager, path: str) -> None:
    started(manager)
    worker = manager.submit(task("worker-1"))
    wait_until(lambda: bool(yarn.flexes))
    yarn.calls.clear()
    yarn.instead = lambda request: httpx2.Response(200, content=b"{}") if request.url.path == path else None
    with pytest.raises(Unavailable):
        manager.listing()
    wait_for_rounds(manager)
    assert {call.partition(" ")[0] for call in yarn.calls} == {"GET"}
    yarn.instead = lambda _request: None
    assert worker in {job.handle for job in manager.listing().jobs if not job.state.ended}


def test_a_task_whose_container_yarn_does_not_list_any_more_is_lost(yarn: FakeYarn) -> None:
    manager = yarn.listed_manager(yarn.clock)
    started(manager)
    handles = [manager.submit(task(name)) for name in ("worker-1", "worker-2")]
    wait_until(lambda: bool(yarn.flexes))
    manager.report_container(report("worker-0", 3))
    manager.report_container(report("worker-1", 4))
    yarn.containers[NAME] = {"worker-0": CONTAINER % 3}
    yarn.now += 60
    manager._changer.check_overdue()
    found = states(manager)
    assert [found[handle] for handle in handles] == [RmJobState.RUNNING, RmJobState.LOST]


def test_tasks_of_a_node_that_is_down_are_lost_and_what_is_left_of_them_ends(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    started(manager)
    handle = manager.submit(task("worker-1"))
    wait_until(lambda: bool(yarn.flexes))
    assert manager.report_container(report("worker-0", 3)).task == "worker-1"
    yarn.nodes[0] = node(1, "LOST")
    (lost,) = [job for job in manager.listing().jobs if job.handle == handle]
    assert (lost.state, lost.reason) == (RmJobState.LOST, "node1:45001 is down")
    assert manager.report_container(report("worker-0", 3, task="worker-1")).grace == 0.0
    (anchor_job,) = [job for job in manager.listing().jobs if job.handle != handle]
    assert anchor_job.state is RmJobState.RUNNING


@pytest.mark.parametrize("states", [("LOST", "RUNNING"), ("RUNNING", "LOST")])
def test_a_node_that_is_listed_as_lost_and_as_running_loses_no_task(
    yarn: FakeYarn, manager: YarnManager, states: tuple[str, str]
) -> None:
    started(manager)
    handle = manager.submit(task("worker-1"))
    wait_until(lambda: bool(yarn.flexes))
    manager.report_container(report("worker-0", 3))
    yarn.nodes[:1] = [node(1, state) for state in states]
    listing = manager.listing()
    assert {job.handle: job.state for job in listing.jobs}[handle] is RmJobState.RUNNING
    assert (listing.nodes[0].name, listing.nodes[0].state) == ("node1", NodeState.UP)


def test_nodes_have_time_to_register_after_a_restart_of_the_resource_manager(yarn: FakeYarn) -> None:
    manager = yarn.manager(yarn.clock)
    assert len(manager.listing().nodes) == 2
    gone, yarn.nodes = yarn.nodes[1], yarn.nodes[:1]
    for _ in range(2):
        with pytest.raises(Unavailable, match="1 nodes are missing from YARN's list, such as node2:45002; waiting"):
            manager.listing()
        yarn.now += 50
    assert len(manager.listing().nodes) == 1
    yarn.nodes.append(gone)
    assert len(manager.listing().nodes) == 2


def test_nodes_on_which_containers_run_have_time_to_register_after_a_restart_of_both(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    started(manager)
    second = yarn.manager(yarn.clock, report_seconds=0.5)
    gone, yarn.nodes = yarn.nodes[1], yarn.nodes[:1]
    with pytest.raises(Waiting):
        second.listing()
    second.report_container(report("coordinator-0", 2, task="anchor", node="node1:45001"))
    second.report_container(report("worker-0", 3, task="worker-1", node="node2:45002"))
    yarn.now += 10
    with pytest.raises(Unavailable, match="1 nodes are missing from YARN's list, such as node2:45002; waiting"):
        second.listing()
    yarn.now += 50
    yarn.nodes.append(gone)
    assert len(second.listing().nodes) == 2


def test_a_coordinator_of_a_lost_node_does_not_end_the_service(yarn: FakeYarn, manager: YarnManager) -> None:
    started(manager)
    assert manager.report_container(report("coordinator-0", 2)).task == "anchor"
    assert manager.report_container(report("coordinator-0", 9, incarnation="b")).task == "anchor"
    assert manager.report_container(report("coordinator-0", 2, task="anchor")).grace == 0.0
    manager.report_container(report("coordinator-0", 2, task="anchor", exit_code=-9))
    wait_for_rounds(manager)
    assert NAME in yarn.posted
    manager.report_container(report("coordinator-0", 9, incarnation="b", task="anchor", exit_code=1))
    wait_until(lambda: NAME not in yarn.posted)


@pytest.mark.parametrize("says", [True, False])
def test_a_job_whose_coordinators_container_is_gone_goes_on_in_the_next_one(yarn: FakeYarn, *, says: bool) -> None:
    manager = yarn.listed_manager(yarn.clock)
    handle = started(manager)
    assert manager.report_container(report("coordinator-0", 2)).task == "anchor"
    worker = manager.submit(task("worker-1"))
    wait_until(lambda: bool(yarn.flexes))
    manager.report_container(report("worker-0", 3))
    if says:
        manager.report_container(report("coordinator-0", 2, task="anchor", ending=True))
    yarn.now += 60
    yarn.containers[NAME] = {"worker-0": CONTAINER % 3}
    yarn.dead[NAME] = CONTAINER % 2
    manager._changer.check_overdue()
    yarn.now += 60
    manager._changer.check_overdue()
    # A worker without its coordinator ends by itself.
    manager.report_container(report("worker-0", 3, task="worker-1", exit_code=1))
    wait_for_rounds(manager)
    assert states(manager) == {handle: RmJobState.RUNNING, worker: RmJobState.FAILED}
    assert NAME in yarn.posted
    assert manager.report_container(report("coordinator-0", 9, incarnation="b")).task == "anchor"


def test_containers_that_report_long_after_a_restart_of_the_daemon_go_on(yarn: FakeYarn, manager: YarnManager) -> None:
    """The daemon could not be reached; it has read the service's description meanwhile."""
    started(manager)
    manager.report_container(report("coordinator-0", 2))
    manager.submit(task("worker-1"))
    wait_until(lambda: bool(yarn.flexes))
    assert manager.report_container(report("worker-0", 3)).task == "worker-1"
    manager.close()
    second = restarted(yarn, size=1, listed=1)
    yarn.containers[NAME] = {"coordinator-0": CONTAINER % 2, "worker-0": CONTAINER % 3}
    yarn.apps[NAME]["runningContainers"] = 3
    asked = yarn.calls.count(f"GET /app/v1/services/{NAME}")
    for _ in range(30):
        yarn.now += 10
        with contextlib.suppress(Waiting):
            second.listing()
    second._changer._run_round(details=True)
    assert yarn.calls.count(f"GET /app/v1/services/{NAME}") > asked
    assert second.report_container(report("worker-0", 3, task="worker-1")).grace is None


def test_a_service_is_not_made_smaller_before_all_its_containers_are_known(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    """Daemon and ApplicationMaster were restarted: it lists one of three workers, of which two have not reported."""
    started(manager)
    manager.close()
    second = restarted(yarn, size=3, listed=1)
    yarn.apps[NAME]["runningContainers"] = 5
    second.report_container(report("coordinator-0", 2, task="anchor"))
    second.report_container(report("worker-0", 3, task="worker-1"))
    yarn.now += 70
    second.listing()
    for _ in range(3):
        yarn.now += 40
        second._changer._run_round(details=True)
    assert yarn.flexes == []
    for position in (1, 2):
        order = second.report_container(report(f"worker-{position}", 3 + position, task=f"worker-{position + 1}"))
        assert order.grace is None


def test_tasks_that_an_incomplete_description_does_not_list_are_not_lost(yarn: FakeYarn, manager: YarnManager) -> None:
    """An ApplicationMaster that was restarted lists the containers that it has recovered so far."""
    second = yarn.listed_manager(yarn.clock)
    started(second)
    second.report_container(report("coordinator-0", 2))
    handles = [second.submit(task(name)) for name in ("worker-1", "worker-2")]
    wait_until(lambda: bool(yarn.flexes))
    for position in (0, 1):
        second.report_container(report(f"worker-{position}", 3 + position))
    yarn.containers[NAME] = {"coordinator-0": CONTAINER % 2, "worker-0": CONTAINER % 3}
    yarn.apps[NAME]["runningContainers"] = 4
    second.listing()
    yarn.now += 70
    second._changer.check_overdue()
    assert states(second)[handles[1]] is RmJobState.RUNNING
    yarn.apps[NAME]["runningContainers"] = 3
    second.listing()
    second._changer.check_overdue()
    assert states(second)[handles[1]] is RmJobState.LOST


def test_a_coordinator_that_waits_for_a_container_while_the_daemon_starts_has_not_failed(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    handle = started(manager)
    assert manager.report_container(report("coordinator-0", 2)).task == "anchor"
    second = restarted(yarn, size=1, listed=1)
    second.report_container(report("worker-0", 3, task="worker-1"))
    yarn.dead[NAME] = CONTAINER % 2
    for _ in range(2):
        yarn.now += 70
        assert states(second)[handle] is RmJobState.RUNNING
        second._changer.check_overdue()
    second.report_container(report("worker-0", 3, task="worker-1", exit_code=1))
    wait_for_rounds(second)
    assert NAME in yarn.posted
    assert second.report_container(report("coordinator-0", 9, incarnation="b")).task == "anchor"


def test_a_container_without_a_task_counts_as_free(yarn: FakeYarn, manager: YarnManager) -> None:
    started(manager)
    first, second = (manager.submit(task(name)) for name in ("worker-1", "worker-2"))
    wait_until(lambda: yarn.flexes == [{"worker": 2, "ps": 0}])
    yarn.nodes[0] = node(1, used=(1024, 3, 0))
    manager.report_container(report("worker-0", 3))
    manager.report_container(report("worker-1", 4))
    assert manager.listing().nodes[0].used == Resources.of(cpu=3, memory=1024)
    # YARN cannot remove the first container while the second one has a task.
    manager.report_container(report("worker-0", 3, task="worker-1", exit_code=1))
    assert manager.listing().nodes[0].used == Resources.of(cpu=2, memory=1024)
    assert {first, second} <= {job.handle for job in manager.listing().jobs}


@pytest.mark.parametrize(
    ("used", "state", "idle", "left"),
    [
        # Of the CPUs that count as free, each job may have those of its own container.
        ((6, 4), "RUNNING", {1: 1}, {1: 8.0, 2: 6.0, 3: 6.0}),
        ((8, 8), "RUNNING", {1: 1, 2: 1}, {1: 2.0, 2: 2.0, 3: 0.0}),
        ((8, 4), "RUNNING", {1: 1, 2: 2}, {1: 6.0, 2: 6.0, 3: 4.0}),
        # On such a node nothing counts as free.
        ((6, 8), "UNHEALTHY", {1: 2}, {}),
        ((6, 8), "RUNNING", {1: 3}, {}),
    ],
)
def test_only_its_own_job_can_use_a_container_without_a_task(
    yarn: FakeYarn, used: tuple[int, int], state: str, idle: dict[int, int], left: dict[int, float]
) -> None:
    yarn.nodes = [node(1, used=(100, used[0], 0)), node(2, state, used=(100, used[1], 0))]
    manager = yarn.listed_manager(report_seconds=0.1)
    jobs = {number: JobKey("yarn", str(number), 1_795_581_700) for number in (1, 2, 3)}
    handles = {
        number: manager.submit(structs.replace(anchor(), job=job, tag=task_tag(job, "anchor")))
        for number, job in jobs.items()
    }
    manager.listing()
    for number, host in idle.items():
        job, place = jobs[number], {"node": f"node{host}:4500{host}"}
        for name in ("worker-0", "worker-1"):
            spec = task(name, demand=Resources.of(cpu=2))
            manager.submit(structs.replace(spec, job=job, tag=task_tag(job, name)))
        wait_until(lambda: yarn.flexes and yarn.flexes.pop() == {"worker": 2, "ps": 0})
        for name, more in (("worker-0", {}), ("worker-1", {}), ("worker-0", {"task": "worker-0", "exit_code": 0})):
            container = f"container_1795581702976_{number:04}_01_{3 + int(name[-1]):06}"
            manager.report_container(structs.replace(report(name, 3, **place, **more), job=job, container=container))
    limits = manager.listing().growth_limits
    found = {
        number: [each.left["cpu"] for each in limits if handle in each.anchors] for number, handle in handles.items()
    }
    assert {number: min(each) for number, each in found.items() if each} == left
    assert {limit.reason for limit in limits} <= {
        "idle containers of other jobs (they run no task) are room for those jobs only"
    }


def test_the_time_of_a_service_in_its_queue_does_not_count_against_its_coordinator(yarn: FakeYarn) -> None:
    manager = yarn.listed_manager(yarn.clock)
    manager.submit(anchor())
    yarn.apps[NAME]["state"] = "ACCEPTED"
    manager.listing()
    manager._changer.check_overdue()
    yarn.now += 600
    yarn.apps[NAME]["state"] = "RUNNING"
    yarn.dead[NAME] = CONTAINER % 2
    for _ in range(2):
        assert manager.listing().jobs[0].state is RmJobState.RUNNING
        manager._changer.check_overdue()
        yarn.now += 50


def test_services_whose_application_masters_hang_delay_a_round_for_seconds_at_most(yarn: FakeYarn) -> None:
    manager = yarn.listed_manager(yarn.clock)
    for number in range(10, 20):
        job = JobKey("yarn", str(number), 1_795_581_700)
        manager.submit(structs.replace(anchor(), job=job, tag=task_tag(job, "anchor")))
    manager.listing()
    manager._changer.check_overdue()
    yarn.now += 100
    asked = []

    def hang(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.path)
        yarn.now += 5
        raise httpx2.ReadTimeout("the master hangs")

    yarn.instead = hang
    for number in (1, 2):
        manager._changer.check_overdue(yarn.now + 5)
        # The next one is another one.
        assert len(set(asked)) == len(asked) == number


def test_a_coordinator_that_cannot_start_fails(yarn: FakeYarn) -> None:
    """Containers that ended may have been preempted, or on a node that was lost: its job waits for the next ones."""
    manager = yarn.listed_manager(yarn.clock)
    handle = started(manager)
    manager._changer.check_overdue()
    yarn.now += 70
    # The last three are found within five minutes, and no three before them; one that is found twice counts once.
    for number, seconds in ((5, 0), (5, 5), (6, 195), (7, 101), (8, 20)):
        (job,) = manager.listing().jobs
        assert (job.handle, job.state) == (handle, RmJobState.RUNNING)
        yarn.dead[NAME] = CONTAINER % number
        yarn.now += seconds
        manager._changer.check_overdue()
        (job,) = manager.listing().jobs
        assert f"{number:06} ended before it reported to dl2d; see its log in YARN" in job.reason
    assert job.state is RmJobState.FAILED
    wait_until(lambda: NAME not in yarn.posted)


def test_a_coordinator_fails_if_yarn_avoids_the_nodes_on_which_it_failed(yarn: FakeYarn) -> None:
    """Then no more of its containers start; a container that waits for room after a preemption is no failure."""
    manager = yarn.listed_manager(yarn.clock)
    started(manager)
    manager._changer.check_overdue()
    yarn.dead[NAME] = CONTAINER % 5
    for said, state in (("Queue is full", RmJobState.RUNNING), ("Node is blacklisted", RmJobState.FAILED)):
        yarn.more[f"{ACTIVITIES_PATH}/{yarn.apps[NAME]['id']}"] = activities(said)
        yarn.now += 600
        manager.listing()
        manager._changer._read_pending_reasons(yarn.now + 5)
        manager._changer.check_overdue()
        assert [job.state for job in manager.listing().jobs] == [state]


def test_a_coordinator_that_cannot_start_fails_after_a_restart_of_the_daemon_too(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    """It may have run before, so more of its containers have to end."""
    started(manager)
    manager.close()
    second = yarn.manager(yarn.clock)
    with pytest.raises(Waiting):
        second.listing()
    yarn.now += 61
    second.listing()
    second._changer.check_overdue()
    yarn.now += 61
    for number in range(4, 10):
        assert [job.state for job in second.listing().jobs] == [RmJobState.RUNNING]
        yarn.dead[NAME] = CONTAINER % number
        yarn.now += 20
        second._changer.check_overdue()
    assert [job.state for job in second.listing().jobs] == [RmJobState.FAILED]


def test_thousands_of_containers_of_an_earlier_daemon_report_rarely_from_the_first_listing_on(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    started(manager)
    manager.close()
    yarn.apps[NAME]["runningContainers"] = 6001
    second = yarn.manager(report_seconds=3)
    with pytest.raises(Waiting):
        second.listing()
    assert second.report_container(report("worker-0", 3)).report_seconds == pytest.approx(30, abs=0.1)
    # Those of a service that is to end report until they have ended.
    second._services.by_job[JOB].remove_by(1e9)
    with pytest.raises(Waiting):
        second.listing()
    assert second.report_container(report("worker-0", 3)).report_seconds == pytest.approx(30, abs=0.1)


def test_containers_report_rarely_while_yarn_does_not_answer_after_a_start(yarn: FakeYarn) -> None:
    manager = yarn.manager(report_seconds=0.1)
    yarn.instead = lambda _request: httpx2.Response(503)
    for position in range(200):
        manager.report_container(report(f"worker-{position}", 3 + position, task=f"worker-{position}"))
    with pytest.raises(Unavailable):
        manager.listing()
    order = manager.report_container(report("worker-0", 3, task="worker-0"))
    assert order.report_seconds == pytest.approx(1.0)


def test_a_container_that_has_not_reported_yet_does_not_count_twice(yarn: FakeYarn, manager: YarnManager) -> None:
    started(manager)
    assert manager.report_container(report("coordinator-0", 2)).task == "anchor"
    handles = [manager.submit(task(name, node="node1")) for name in ("worker-1", "worker-2")]
    wait_until(lambda: yarn.flexes == [{"worker": 2, "ps": 0}])
    yarn.nodes[0] = node(1, used=(1024, 3, 0))
    yarn.apps[NAME]["runningContainers"] = 2  # its master and coordinator
    assert manager.listing().nodes[0].used == Resources.of(cpu=3, memory=1024)
    # One of the workers has a container, on node2; the tick counts both on node1, where they were planned.
    yarn.apps[NAME]["runningContainers"] = 3
    yarn.nodes[1] = node(2, used=(0, 1, 0))
    assert [each.used.get("cpu") for each in manager.listing().nodes] == [2, 1]
    assert manager.report_container(report("worker-0", 3, node="node2:45002")).task == "worker-1"
    assert [each.used.get("cpu") for each in manager.listing().nodes] == [3, 1]
    assert {job.handle for job in manager.listing().jobs if job.node == "node2"} == {handles[0]}


def test_a_container_without_a_task_is_decommissioned_with_the_yarn_command(
    yarn: FakeYarn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_resizing, "DETAILS_SECONDS", 0.1)
    monkeypatch.setattr(service_resizing, "IDLE_SECONDS", 0.5)
    manager = yarn.listed_manager(yarn_command=str(yarn.command(tmp_path)))
    started(manager)
    for name in ("worker-1", "worker-2"):
        manager.submit(task(name))
    wait_until(lambda: yarn.flexes == [{"worker": 2, "ps": 0}])
    manager.report_container(report("worker-0", 3))
    manager.report_container(report("worker-1", 4))
    manager.report_container(report("worker-0", 3, task="worker-1", exit_code=1))

    def given_up() -> bool:
        manager.report_container(report("worker-0", 3))
        return bool(yarn.commands())

    wait_until(given_up)
    assert yarn.commands() == [f"dl2d:app -decommission {NAME} -instances worker-0"]
    # Neither is anything else asked for, nor is the position used again.
    wait_for_rounds(manager)
    assert len(yarn.flexes) == 1
    manager.submit(task("worker-3"))
    wait_until(lambda: yarn.flexes[1:] == [{"worker": 2, "ps": 0}])
    assert manager.report_container(report("worker-2", 6)).task == "worker-3"


def test_a_yarn_command_that_fails_is_not_repeated_at_once_and_its_container_goes_on(
    yarn: FakeYarn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_resizing, "DETAILS_SECONDS", 0.1)
    monkeypatch.setattr(service_resizing, "IDLE_SECONDS", 0.5)
    called, go_on = tmp_path / "began", tmp_path / "go-on"
    command = yarn.command(tmp_path, f"echo x >>{called}", f"until [ -e {go_on} ]; do sleep 0.05; done", "exit 1")
    manager = yarn.listed_manager(yarn_command=str(command))
    started(manager)
    for name in ("worker-1", "worker-2"):
        manager.submit(task(name))
    wait_until(lambda: yarn.flexes == [{"worker": 2, "ps": 0}])
    manager.report_container(report("worker-0", 3))
    manager.report_container(report("worker-1", 4))
    manager.report_container(report("worker-0", 3, task="worker-1", exit_code=1))

    def is_called() -> bool:
        manager.report_container(report("worker-0", 3))
        return called.exists()

    wait_until(is_called)
    # While the command runs the container gets nothing.
    manager.submit(task("worker-3"))
    assert manager.report_container(report("worker-0", 3)).task == ""
    go_on.touch()
    # It failed, so the container is one of those that YARN has, as YARN says.
    wait_until(lambda: manager.report_container(report("worker-0", 3)).task == "worker-3")
    assert len(yarn.flexes) == 1
    manager.report_container(report("worker-0", 3, task="worker-3", exit_code=1))
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        manager.report_container(report("worker-0", 3))
        time.sleep(0.05)
    assert called.read_text() == "x\n"


def test_the_end_of_the_daemon_does_not_wait_for_a_call_for_long(
    yarn: FakeYarn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_resizing, "_CLOSE_SECONDS", 0.2)
    manager = yarn.listed_manager()
    started(manager)
    called, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(request: httpx2.Request) -> httpx2.Response | None:
        if request.method == "PUT":
            called.set()
            go_on.wait(10)
            ended.set()
        return None

    yarn.instead = hang
    manager.submit(task("worker-1"))
    assert called.wait(5)
    manager.close()
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(5)


def test_a_warning_is_logged_once_also_after_many_others(yarn: FakeYarn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "_MAX_WARNINGS", 2)
    manager = yarn.listed_manager()
    with capture_logs() as logs:
        for state in ("A", "B", "C", "C", "D", "A"):
            yarn.apps["x"] = app(1, state=state)
            manager.listing()
    odd = [str(entry["remark"]) for entry in logs if "remark" in entry]
    assert [remark.partition("state '")[2][:1] for remark in odd] == ["A", "B", "C", "D", "A"]


def test_containers_of_a_node_that_restarted_under_another_id_do_not_hide_those_that_it_has(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    started(manager)
    for name in ("worker-1", "worker-2", "worker-3"):
        manager.submit(task(name))
    wait_until(lambda: yarn.flexes == [{"worker": 3, "ps": 0}])
    for place, node_id in enumerate(("node1:45001", "node1:46001", "node2:45002")):
        assert manager.report_container(report(f"worker-{place}", 3 + place, node=node_id)).task
    for place, node_id in enumerate(("node1:45001", "node1:46001")):
        manager.report_container(report(f"worker-{place}", 3 + place, node=node_id, task=f"worker-{place + 1}",
                                        exit_code=1))  # fmt: skip
    for old in ("LOST", "REBOOTED"):
        yarn.nodes = [
            node(1, used=(0, 3, 0)) | {"id": "node1:46001"}, node(2), node(1, old) | {"id": "node1:45001"}
        ]  # fmt: skip
        free = 1 if old == "LOST" else 2
        assert {each.name: each.used.get("cpu") for each in manager.listing().nodes}["node1"] == 3 - free


def test_refusals(yarn: FakeYarn, manager: YarnManager) -> None:
    with pytest.raises(NotFound, match="no service"):
        manager.submit(task("worker-1"))
    started(manager)
    with pytest.raises(Rejected, match="cpu: wanted 9, had 8"):
        manager.submit(task("worker-1", demand=Resources.of(cpu=9)))
    with pytest.raises(NotFound, match="no-such-node"):
        manager.submit(task("worker-1", node="no-such-node"))
    with pytest.raises(NotFound, match="no such service"):
        manager.authenticate("application_1_0001", "proof")
    with pytest.raises(Rejected, match="DL2_DAEMON is empty"):
        manager.submit(anchor(DL2_DAEMON=""))
    assert isinstance(manager, ContainerManager)


def test_tasks_are_compared_once_with_each_size_of_nodes_after_each_listing(
    yarn: FakeYarn, manager: YarnManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    yarn.nodes += [node(3), node(4, "LOST")]
    started(manager)
    compared: list[Resources] = []
    shortfalls = Resources.shortfalls

    def noted(demand: Resources, room: Resources) -> tuple[Shortfall, ...]:
        compared.append(demand)
        return shortfalls(demand, room)

    monkeypatch.setattr(Resources, "shortfalls", noted)
    for number in range(5):
        manager.submit(task(f"worker-{number}", node="node3"))
        manager.submit(task(f"ps-{number}", demand=Resources.of(cpu=2)))
    assert len(compared) == 4  # a node that is lost has no resources
    for each in yarn.nodes:
        each |= {"usedResource": amounts(0, 0, 0), "availableResource": amounts(4096, 1, 2)}
    manager.listing()
    with pytest.raises(Rejected, match="cpu: wanted 2, had 1"):
        manager.submit(task("ps-5", demand=Resources.of(cpu=2)))


def lost_answer(yarn: FakeYarn) -> Callable[[httpx2.Request], httpx2.Response | None]:
    """A handler with which YARN carries out a POST and its answer is lost."""

    def lose(request: httpx2.Request) -> httpx2.Response | None:
        if request.method == "POST":
            yarn.instead = lambda _request: None
            yarn.answer(request)
            raise httpx2.ReadTimeout("slow", request=request)
        return None

    return lose


def test_a_service_whose_posts_answer_was_lost_is_found_by_the_next_attempt(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    yarn.instead = lost_answer(yarn)
    with pytest.raises(Unavailable, match="may have been carried out"):
        manager.submit(anchor())
    assert manager.report_container(report("coordinator-0", 2)).task == "anchor"
    incomplete = httpx2.Response(200, content=b'{"state": "ACCEPTED"}')
    yarn.instead = lambda request: incomplete if request.url.path.endswith(NAME) else None
    with pytest.raises(Unavailable, match="a service of this name exists; retrying"):
        manager.submit(anchor())
    yarn.instead = lambda _request: None
    application = manager.submit(anchor())
    assert application == yarn.apps[NAME]["id"]
    # The coordinator that runs already goes on.
    assert manager.report_container(report("coordinator-0", 2, task="anchor")).grace is None
    (listed,) = manager.listing().jobs
    assert (listed.handle, listed.state) == (application, RmJobState.RUNNING)
    manager.submit(task("worker-1"))
    wait_until(lambda: yarn.flexes == [{"worker": 1, "ps": 0}])
    assert f"DELETE /app/v1/services/{NAME}" not in yarn.calls


@pytest.mark.parametrize("variable", ["DL2_JOB", "DL2_CREDENTIAL"])
def test_another_dl2ds_service_of_the_same_name_is_left_alone(
    yarn: FakeYarn, manager: YarnManager, variable: str
) -> None:
    manager.submit(anchor(**{variable: "other"}))
    with pytest.raises(Rejected, match="of another dl2d daemon has this name; give each daemon its own"):
        manager.submit(anchor())
    yarn.apps[NAME]["user"] = "mallory"
    with pytest.raises(Unavailable, match="of user mallory has it"):
        manager.submit(anchor())
    assert NAME in yarn.posted


def test_a_service_that_is_no_application_is_removed_only_long_after_its_post(yarn: FakeYarn) -> None:
    """YARN writes the description first, copies files, and then submits the application. The clock may be set."""
    manager = yarn.manager(itertools.count(1e9, 3600).__next__, timer=yarn.clock)
    yarn.instead = lost_answer(yarn)
    with pytest.raises(Unavailable):
        manager.submit(anchor())
    running = yarn.apps.pop(NAME)
    for later, posted in ((0, True), (200, True), (99, True), (2, False)):
        yarn.now += later
        with pytest.raises(Unavailable, match="a service of this name exists"):
            manager.submit(anchor())
        assert (NAME in yarn.posted) is posted
    # The next POST is as slow, and has the same time.
    yarn.instead = lost_answer(yarn)
    with pytest.raises(Unavailable):
        manager.submit(anchor())
    yarn.now += 299
    del yarn.apps[NAME]
    with pytest.raises(Unavailable):
        manager.submit(anchor())
    yarn.apps[NAME] = running
    assert manager.submit(anchor()) == running["id"]


@pytest.mark.parametrize("ended_first", [True, False])
@pytest.mark.parametrize("seen_before", [True, False])
def test_the_end_of_another_service_of_its_name_removes_no_service_that_runs(
    yarn: FakeYarn, manager: YarnManager, *, ended_first: bool, seen_before: bool
) -> None:
    ended = {"old": app(9, "FINISHED", "FAILED", name=NAME, user="dl2d")}
    if seen_before:
        started(manager)
        yarn.end(NAME, "FAILED")
        manager.listing()
        wait_until(lambda: NAME not in yarn.posted)
        ended = {"old": yarn.apps[NAME]}
    yarn.apps = dict(ended)
    manager.submit(anchor())
    runs = {NAME: yarn.apps[NAME]}
    yarn.apps = ended | runs if ended_first else runs | ended
    assert states(manager) == {runs[NAME]["id"]: RmJobState.RUNNING}
    manager.submit(task("worker-1"))
    wait_until(lambda: yarn.flexes == [{"worker": 1, "ps": 0}])
    assert NAME in yarn.posted


def test_an_ended_service_is_left_where_yarn_does_not_say_whose_its_name_is_now(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    """Its name may have been taken again by one that is no application yet."""
    started(manager)
    yarn.end(NAME, "SUCCEEDED")
    again = httpx2.Response(200, json={"name": NAME, "state": "STOPPED"})
    yarn.instead = lambda request: again if request.url.path.endswith(NAME) and request.method == "GET" else None
    with capture_logs() as logs:
        manager.listing()
        wait_until(lambda: any("does not say" in str(entry) for entry in logs))
    assert any(f"yarn app -destroy {NAME}" in str(entry) for entry in logs)
    assert f"DELETE /app/v1/services/{NAME}" not in yarn.calls
    yarn.instead = lambda _request: None
    wait_until(lambda: NAME not in yarn.posted)


def test_a_service_whose_coordinator_ends_before_it_is_listed_is_removed(yarn: FakeYarn, manager: YarnManager) -> None:
    manager.submit(anchor())
    assert manager.report_container(report("coordinator-0", 2)).task == "anchor"
    manager.report_container(report("coordinator-0", 2, task="anchor", exit_code=1))
    wait_for_rounds(manager)  # rounds in which it is not known yet which application it is
    manager.listing()
    wait_until(lambda: NAME not in yarn.posted)


def test_a_service_that_yarn_does_not_find_once_is_removed_later(yarn: FakeYarn) -> None:
    """Another ResourceManager, or a file system that is away, answers that it does not exist; its application runs."""
    manager = yarn.listed_manager(yarn.clock)
    handle = started(manager)
    unknown = httpx2.Response(404, json={"diagnostics": "Service not found"})
    yarn.instead = lambda request: unknown if NAME in request.url.path else None
    with capture_logs() as logs:
        manager.stop(identities(manager, handle), 0.0)
        wait_until(lambda: any("lists its application" in str(entry) for entry in logs))
    yarn.instead = lambda _request: None
    yarn.now += 60
    wait_until(lambda: NAME not in yarn.posted)


def test_a_service_whose_removal_had_no_effect_is_removed_again(yarn: FakeYarn) -> None:
    manager = yarn.listed_manager(yarn.clock)
    handle = started(manager)
    done = httpx2.Response(200, json={"diagnostics": "Successfully destroyed service"})
    yarn.instead = lambda request: done if request.method == "DELETE" else None
    asked = f"DELETE /app/v1/services/{NAME}"
    manager.stop(identities(manager, handle), 0.0)
    wait_until(lambda: asked in yarn.calls)
    wait_for_rounds(manager)
    assert yarn.calls.count(asked) == 1
    yarn.instead = lambda _request: None
    yarn.now += REMOVE_AGAIN_SECONDS
    wait_until(lambda: NAME not in yarn.posted)


def test_a_service_whose_job_ended_while_no_daemon_ran_is_removed(yarn: FakeYarn, manager: YarnManager) -> None:
    started(manager)
    manager.report_container(report("coordinator-0", 2))
    manager.close()
    yarn.end(NAME, "SUCCEEDED")
    yarn.listed_manager()
    wait_until(lambda: NAME not in yarn.posted)


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_coordinator_that_yarn_starts_again_after_it_has_reported_its_end_does_not_keep_its_service(
    yarn: FakeYarn, exit_code: int
) -> None:
    """Its container was lost before it ended by itself; and one list may lack the application."""
    manager = yarn.listed_manager(allowed=0)
    started(manager)
    manager.report_container(report("coordinator-0", 2))
    for _ in range(2):  # its first answer may be lost
        manager.report_container(report("coordinator-0", 2, task="anchor", exit_code=exit_code))
    if exit_code:
        listed = yarn.apps.pop(NAME)
        manager.listing()
        yarn.apps[NAME] = listed
        manager.listing()
    manager.allow_changes(math.inf)
    wait_for_rounds(manager)
    assert (NAME in yarn.posted) == (exit_code == 0)
    manager.report_container(report("coordinator-0", 7, incarnation="b"))
    wait_until(lambda: NAME not in yarn.posted)


def test_reads_that_succeed_do_not_reset_the_failures_of_changes_that_hang(
    yarn: FakeYarn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_resizing.ServiceChanger, "start", lambda _self: None)  # rounds are done here
    manager = yarn.listed_manager(yarn.clock)
    jobs = [JobKey("yarn", str(number), 1_795_581_700) for number in range(20)]
    for number, job in enumerate(jobs, 1):
        manager.submit(structs.replace(anchor(), job=job, tag=task_tag(job, "anchor")))
        manager.listing()
        container = f"container_1795581702976_{number:04}_01_000002"
        manager.report_container(structs.replace(report("coordinator-0", 2), job=job, container=container))
        manager.submit(structs.replace(task("worker-0"), job=job, tag=task_tag(job, "worker-0")))

    def hangs(request: httpx2.Request) -> None:
        if request.method == "PUT":
            yarn.now += 30
            raise httpx2.ReadTimeout("")

    yarn.instead = hangs
    lasted = []
    for _ in range(6):
        began = yarn.now
        manager._changer._run_round(details=True)
        lasted.append(yarn.now - began)
        yarn.now += 0.2
    assert lasted[0] == 600  # none had failed before
    assert max(lasted[1:]) <= 30 * service_resizing.PARALLEL_CHANGES


def test_what_yarn_says_to_a_submission_is_told(yarn: FakeYarn, manager: YarnManager) -> None:
    said = "org.apache.hadoop.yarn.exceptions.YarnException: Application submitted to unknown queue: gold"
    yarn.instead = lambda request: (
        httpx2.Response(500, json={"diagnostics": said}) if request.method == "POST" else None
    )
    with pytest.raises(Rejected, match="unknown queue: gold"):
        manager.submit(anchor())


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, "addresses: missing"),
        ({"addresses": []}, "addresses"),
        ({"addresses": ["rm:8088"]}, r"addresses\[0\]"),
        ({"addresses": ["http://rm:8088"], "queu": "x"}, "queu: unknown key"),
        ({"addresses": ["http://rm:8088"], "runner": "dl2-run"}, "runner"),
    ],
)
def test_settings_name_the_key_at_fault(given: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"resource_manager.yarn.{key}"):
        create(given, clock=time.time)
