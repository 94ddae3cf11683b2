"""What a queue lets dl2d's jobs have, and why containers wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarn.fake_yarn import FakeYarn
from yarn.rm_answers import client_of_lists, queue, scheduler
from yarn.test_manager import started, task, wait_until

from dl2d.core.cluster import Node, NodeState
from dl2d.core.resources import Resources
from dl2d_yarn import manager as manager_module
from dl2d_yarn.manager import YarnManager
from dl2d_yarn.queue_limits import (
    ACTIVITIES_PATH,
    SCHEDULER_PATH,
    QueueLimits,
    read_pending_reason,
    read_queue_limits,
    within_limits,
)

LARGE = (8192, 16, 4)


def limits(*queues: dict[str, object], name: str = "gpu", **more: object) -> QueueLimits | None:
    client = client_of_lists({SCHEDULER_PATH: scheduler(*queues, **more)})  # type: ignore[arg-type]
    return read_queue_limits(client, name, "dl2d")


def test_the_least_of_queue_queues_above_and_user_counts() -> None:
    gpu = queue("gpu", (4096, 8, 4), (1024, 2, 1), queuePath="root.research.gpu")
    research = queue("research", LARGE, (6144, 15, 1), queues={"queue": [gpu]})
    found = limits(research, queue("web", LARGE, (0, 0, 0), pending=(512, 3, 0)))
    assert found == QueueLimits({"memory": 2048, "cpu": 1, "gpu": 3}, Resources.of(memory=512, cpu=3))
    assert limits(research, name="research.gpu") == limits(research)
    entry = {
        "username": "dl2d",
        "resourcesUsed": queue("", LARGE, (1024, 2, 1))["resources"]["resourceUsagesByPartition"][0]["used"],
        "userResourceLimit": queue("", LARGE, (1536, 9, 1))["resources"]["resourceUsagesByPartition"][0]["used"],
    }
    mine = limits({**gpu, "users": {"user": [{**entry, "username": "ml"}, entry]}})
    assert mine is not None
    assert mine.headroom == {"memory": 512, "cpu": 6, "gpu": 0}


def test_a_queue_or_scheduler_that_is_unknown_limits_nothing() -> None:
    assert limits(name="other") is None
    fair = client_of_lists({SCHEDULER_PATH: {"scheduler": {"schedulerInfo": {"type": "fairScheduler"}}}})
    assert read_queue_limits(fair, "default", "dl2d") is None


NODES = (
    Node("n1", Resources.of(cpu=8, gpu=2), Resources.of(cpu=2)),
    Node("n2", Resources.of(cpu=8, gpu=2), Resources.of(cpu=7, gpu=1)),
    Node("n3", Resources.of(cpu=8, gpu=2), state=NodeState.DOWN),
)


def test_what_the_queue_may_not_have_counts_as_used_on_the_fullest_nodes() -> None:
    within = within_limits(NODES, QueueLimits({"cpu": 5}, Resources.of(cpu=4)), leave_pending=False)
    assert [node.used.get("cpu") for node in within] == [3, 8, 0]
    assert [node.used.get("gpu") for node in within] == [0, 1, 0]
    # Seven are free, of which others wait for four.
    left = within_limits(NODES, QueueLimits({"cpu": 5}, Resources.of(cpu=4)), leave_pending=True)
    assert [node.used.get("cpu") for node in left] == [5, 8, 0]


@given(st.integers(0, 30), st.integers(0, 30), st.booleans())
def test_no_more_is_free_than_allowed_and_nothing_more_is_withheld(headroom: int, pending: int, leave: bool) -> None:
    limits = QueueLimits({"cpu": headroom}, Resources.of(cpu=pending))
    within = within_limits(NODES, limits, leave_pending=leave)
    free = sum(node.capacity.get("cpu") - node.used.get("cpu") for node in within[:2])
    assert free == min(7, headroom, max(0, 7 - pending) if leave else 7)
    assert all(node.used.fits_in(node.capacity) for node in within)


def activities(*texts: str) -> dict[str, object]:
    attempts = [{"allocationState": "SKIPPED", "diagnostic": text, "nodeId": "n1:1"} for text in texts]
    requests = [{"requestPriority": "1", "allocationState": "SKIPPED", "allocationAttempt": attempts}]
    allocations = [{"nodeId": "n1:1", "queueName": "root.default", "requestAllocation": requests}]
    return {"appActivities": {"applicationId": "application_1_0001", "allocations": allocations}}


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
def yarn() -> FakeYarn:
    return FakeYarn()


@pytest.fixture
def manager(yarn: FakeYarn, monkeypatch: pytest.MonkeyPatch) -> Iterator[YarnManager]:
    monkeypatch.setattr(manager_module, "_OVERDUE_SECONDS", 0.3)
    yarn.more[SCHEDULER_PATH] = scheduler(queue("default", (2048, 4, 0), (1024, 1, 0)))
    manager = yarn.manager()
    manager.capabilities()
    yield manager
    manager.close()


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
