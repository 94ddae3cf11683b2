from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl2d.core.cluster import (
    Node,
    NodeGrant,
    NodeState,
    Snapshot,
    Task,
    TaskState,
    in_submit_order,
    parse_tag,
    task_tag,
)
from dl2d.core.jobs import Allocation, Job, JobKey, Role
from dl2d.core.json_codec import decode, encode
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.testing import make_job

WORDS = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True)
KEYS = st.builds(JobKey, WORDS, WORDS, st.integers(min_value=0, max_value=10**12 - 1))


def task(key: JobKey, name: str, role: Role = Role.WORKER, state: TaskState = TaskState.CONFIRMED) -> Task:
    return Task(job=key, id=name, role=role, node="n", demand=Resources.of(cpu=1), state=state)


def snapshot(jobs: list[Job], tasks: list[Task], nodes: tuple[Node, ...] = (), **more: object) -> Snapshot:
    return Snapshot(0.0, 1, nodes, tuple(jobs), tuple(tasks), **more)  # type: ignore[arg-type]


# Tags


@given(KEYS, st.from_regex(r"(worker|ps)-[0-9]{1,6}", fullmatch=True))
def test_a_tag_is_read_back(key: JobKey, name: str) -> None:
    tag = task_tag(key, name)
    assert parse_tag(tag) == (key, name)
    assert task(key, name).tag == tag
    assert task(key, name).number == int(name.partition("-")[2])


@pytest.mark.parametrize(
    "text",
    [
        "", "dl2", "dl2:", "dl2:c.1.5", "dl2:c.1.5:", "dl2::worker-1", "dl2:c.1:worker-1", "dl2:c.1.x:worker-1",
        "xdl2:c.1.5:worker-1", "DL2:c.1.5:worker-1", "dl2:c c.1.5:worker-1", "dl2:c.1.5.6:worker-1", "a comment",
        "dl2:c.1.5:worker-1 please call me", "dl2:c.1.5:worker-", "dl2:c.1.5:worker-\u0661", "dl2:c.1.5:coordinator-0",
    ],
)  # fmt: skip
def test_marks_of_others_are_not_ours(text: str) -> None:
    assert parse_tag(text) is None


@given(st.text(max_size=40))
def test_no_text_breaks_the_reader(text: str) -> None:
    parse_tag(text)
    parse_tag(f"dl2:{text}")


# States


def test_states_are_in_the_order_of_a_task_s_life() -> None:
    life = ["asked", "granted", "joined", "confirmed", "draining", "drained", "released"]
    ranks = [TaskState(name).rank for name in life]
    assert ranks == sorted(set(ranks))
    assert TaskState.FAILED.rank == TaskState.RELEASED.rank


@pytest.mark.parametrize("state", TaskState)
def test_a_task_is_wanted_or_leaving_or_ended(state: TaskState) -> None:
    leaving = state in (TaskState.DRAINING, TaskState.DRAINED)
    assert [state.wanted, leaving, state.ended].count(True) == 1
    assert state.wanted == (state.value in {"asked", "granted", "joined", "confirmed"})


# Snapshots


def test_capacity_counts_only_nodes_that_take_tasks() -> None:
    nodes = tuple(
        Node(state.value, Resources.of(cpu=10**place), Resources.of(cpu=1), state)
        for place, state in enumerate(NodeState)
    )
    assert snapshot([], [], nodes).capacity == Resources.of(cpu=1)
    assert snapshot([], []).capacity == NO_RESOURCES


def test_held_counts_what_is_wanted_of_each_role() -> None:
    one, two, other = make_job(1), make_job(2), make_job(3)
    tasks = [
        *(task(one.key, f"worker-{number}", state=state) for number, state in enumerate(TaskState)),
        task(one.key, "ps-0", Role.PS, TaskState.ASKED),
        task(one.key, "ps-1", Role.PS, TaskState.DRAINING),
        task(one.key, "coordinator-0", Role.COORDINATOR),
        task(other.key, "worker-0"),
    ]
    assert snapshot([one, two], tasks).held() == {one.key: Allocation(4, 1), two.key: Allocation(0, 0)}


def test_submit_order_is_by_time_then_by_number_then_by_cluster() -> None:
    wanted = [
        JobKey("z", "99", 1),
        JobKey("a", "9", 5),
        JobKey("b", "9", 5),
        JobKey("a", "10", 5),
        JobKey("a", "10_9", 5),
        JobKey("a", "10_10", 5),
        JobKey("a", "11", 5),
        JobKey("a", "10_x", 5),
        JobKey("a", "abc", 5),
        JobKey("a", "1", 6),
    ]
    jobs = [replace(make_job(), key=key) for key in wanted]
    shuffle = random.Random(7)
    for _ in range(20):
        shuffle.shuffle(jobs)
        assert [item.key for item in in_submit_order(jobs)] == wanted


@given(st.lists(KEYS, unique=True, max_size=6))
def test_submit_order_is_total(keys: list[JobKey]) -> None:
    jobs = [replace(make_job(), key=key) for key in keys]
    ordered = in_submit_order(jobs)
    assert sorted(item.key for item in ordered) == sorted(keys)
    for before, after in itertools.pairwise(ordered):
        assert before.key.submitted <= after.key.submitted


def test_grants_are_stored_under_their_former_name() -> None:
    grant = NodeGrant(handle="812", user="bob", priority=9000, nodes=("n",), room=(NO_RESOURCES,))
    made = snapshot([], [], grants=(grant,))
    assert b'"claims":[{' in encode(made)
    assert decode(encode(made), Snapshot) == made
