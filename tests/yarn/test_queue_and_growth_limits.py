"""What a queue lets dl2d's jobs have, and why containers wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarn.fake_yarn import FakeYarn
from yarn.rm_answers import activities, amounts, client_of_lists, queue, scheduler
from yarn.test_manager import started, task, wait_until
from yarn.test_posted_services import POSTED, SETTINGS
from yarn.test_posted_services import report as posted_report

from dl2d.core.cluster import Node, NodeState
from dl2d.core.resources import Resources
from dl2d_yarn import service_resizing
from dl2d_yarn.manager import YarnManager
from dl2d_yarn.queue_and_growth_limits import (
    ACTIVITIES_PATH,
    SCHEDULER_PATH,
    Queues,
    read_pending_reason,
    read_queues,
    within_headroom,
)
from dl2d_yarn.service_description import posted_description

LARGE = (8192, 16, 4)


def queues(*children: dict[str, object]) -> Queues:
    found = read_queues(client_of_lists({SCHEDULER_PATH: scheduler(*children)}))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_the_least_of_queue_and_queues_above_counts() -> None:
    gpu = queue("gpu", (4096, 8, 4), (1024, 2, 1))
    research = queue("research", LARGE, (6144, 15, 1), queues={"queue": [gpu]})
    found = queues(research, queue("web", LARGE, (0, 0, 0), pending=(512, 3, 0)))
    assert found.headroom("gpu", "dl2d") == {"memory": 2048, "cpu": 1, "gpu": 3}
    assert found.headroom("root.research.gpu", "ml") == found.headroom("research.gpu", "dl2d")
    assert found.pending_outside(["gpu"]) == Resources.of(memory=512, cpu=3)
    assert found.pending_outside(["gpu", "web"]) == Resources()
    assert found.headroom("other", "dl2d") is None


@pytest.mark.parametrize(
    ("factor", "others_wait", "cpu"),
    [
        # What YARN reports is one container more than the user has, as long as nobody else waits.
        (1.0, False, 3),
        (3.0, False, 7),
        (-1.0, False, 7),
        (3.0, True, 2),
    ],
)
def test_a_users_limit_counts(factor: float, others_wait: bool, cpu: int) -> None:
    def user(name: str, most: tuple[int, int, int], *, waits: bool) -> dict[str, object]:
        amount = {"resourcesUsed": amounts(1024, 1, 0), "userResourceLimit": amounts(*most)}
        return {"username": name, "isActive": waits, **amount}

    users = {"user": [user("ml", (9000, 9, 9), waits=others_wait), user("dl2d", (1536, 3, 0), waits=True)]}
    small = queue("small", (8192, 8, 4), (2048, 1, 0), least=(4096, 4, 2), userLimitFactor=factor, users=users)
    headroom = queues(small).headroom("small", "dl2d")
    assert headroom is not None
    assert headroom["cpu"] == cpu


def test_a_scheduler_that_is_unknown_limits_nothing() -> None:
    fair = client_of_lists({SCHEDULER_PATH: {"scheduler": {"schedulerInfo": {"type": "fairScheduler"}}}})
    assert read_queues(fair) is None


NODES = (
    Node("n1", Resources.of(cpu=8, gpu=2), Resources.of(cpu=2)),
    Node("n2", Resources.of(cpu=8, gpu=2), Resources.of(cpu=7, gpu=1)),
    Node("n3", Resources.of(cpu=8, gpu=2), state=NodeState.DOWN),
)


def test_what_the_queue_may_not_have_counts_as_used_on_the_fullest_nodes() -> None:
    within = within_headroom(NODES, {"cpu": 5}, Resources())
    assert [node.used.get("cpu") for node in within] == [3, 8, 0]
    assert [node.used.get("gpu") for node in within] == [0, 1, 0]
    # Seven are free, of which others wait for four.
    left = within_headroom(NODES, {"cpu": 5}, Resources.of(cpu=4))
    assert [node.used.get("cpu") for node in left] == [5, 8, 0]


@given(st.integers(0, 30), st.integers(0, 30))
def test_no_more_is_free_than_allowed_and_nothing_more_is_withheld(headroom: int, pending: int) -> None:
    within = within_headroom(NODES, {"cpu": headroom}, Resources.of(cpu=pending))
    free = sum(node.capacity.get("cpu") - node.used.get("cpu") for node in within[:2])
    assert free == min(7, headroom, max(0, 7 - pending))
    assert all(node.used.fits_in(node.capacity) for node in within)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"appActivities": {"applicationId": "a", "diagnostic": "waiting for display"}}, ""),
        (activities("no room", "Queue does not have  enough headroom", "Queue does not have  enough headroom"),
         "Queue does not have enough headroom"),
        ({"unexpected": ["x", {"diagnostic": 7}]}, ""),
    ],
)  # fmt: skip
def test_the_reason_is_the_one_that_most_nodes_give(answer: dict[str, object], reason: str) -> None:
    client = client_of_lists({f"{ACTIVITIES_PATH}/application_1_0001": answer})
    assert read_pending_reason(client, "application_1_0001") == reason


@pytest.fixture
def manager(yarn: FakeYarn, monkeypatch: pytest.MonkeyPatch) -> YarnManager:
    monkeypatch.setattr(service_resizing, "DETAILS_SECONDS", 0.1)
    yarn.more[SCHEDULER_PATH] = scheduler(queue("default", (2048, 4, 0), (1024, 1, 0)))
    manager = yarn.manager()
    manager.capabilities()
    return manager


def test_the_policy_sees_what_the_queue_allows_and_a_waiting_task_says_why(
    yarn: FakeYarn, manager: YarnManager
) -> None:
    nodes = manager.listing().nodes
    free = [node.capacity.minus(node.used) for node in nodes]
    assert Resources.total(free) == Resources.of(cpu=3, memory=1024)
    started(manager)
    handle = manager.submit(task("worker-1"))
    yarn.more[f"{ACTIVITIES_PATH}/application_1795581702976_0001"] = activities("Queue does not have enough headroom")
    expected = "waits for a container: Queue does not have enough headroom"
    wait_until(lambda: expected in [job.reason for job in manager.listing().jobs if job.handle == handle])


def test_services_of_several_users_and_queues_have_their_own_limits(yarn: FakeYarn) -> None:
    mine = queue("default", (2048, 4, 0), (1024, 1, 0))
    theirs = queue("gpu", (4096, 6, 2), (2048, 4, 1), pending=(512, 1, 0))
    yarn.more[SCHEDULER_PATH] = scheduler(mine, theirs, queue("web", (2048, 4, 0), (0, 0, 0), pending=(0, 12, 0)))
    manager = yarn.manager(leave_pending=True)
    manager.capabilities()
    # Nobody else's service is there: what the daemon's queue leaves is what the nodes show.
    assert manager.listing().growth_limits == ()
    started(manager)
    service = posted_description(POSTED, SETTINGS, daemon="http://head:8910")
    application = yarn.post(service, "alice")
    yarn.apps["digits"]["queue"] = "root.gpu"
    key = manager.authenticate(application, service["configuration"]["env"]["DL2_PROOF"]).key
    # Only registered, as in modes observe and shadow: dl2d does not change it.
    assert manager.listing().growth_limits == ()
    manager.report_container(posted_report(key, "coordinator-0", 2))
    listing = manager.listing()
    limits = {limit.reason: limit for limit in listing.growth_limits}
    assert limits["queue root.gpu leaves no more to alice"].left == {"memory": 2048, "cpu": 2, "gpu": 1}
    assert limits["queue root.gpu leaves no more to alice"].anchors == {application}
    assert limits["queue root.default leaves no more to dl2d"].left == {"memory": 1024, "cpu": 3, "gpu": 0}
    # The nodes show the sum, but of their 16 CPUs not the 12 that the third queue waits for.
    free = Resources.total(node.capacity.minus(node.used) for node in listing.nodes)
    assert free == Resources.of(cpu=4, memory=3072, gpu=1)
