"""What every resource manager does alike, seen through the public contract and the machine's own process table."""

from __future__ import annotations

import json
import random
import sys
import time

import pytest
from msgspec import structs
from rm_harness import MARK, Harness

from dl2d.core.cluster import NodeState, parse_tag
from dl2d.core.errors import Denied, NotFound, Rejected
from dl2d.core.jobs import Launch, Role
from dl2d.core.resource_manager import RmJobState
from dl2d.core.resources import NO_RESOURCES, Resources

#: Runs until it is signalled; the shell itself stays as the parent.
FOREVER = "echo $$ >started; while :; do sleep 0.1; done"
DEAF = "trap '' TERM; echo $$ >started; while :; do sleep 0.1; done"


def test_nodes_are_empty_and_take_tasks_at_first(any_rm: Harness) -> None:
    listing = any_rm.manager.listing()
    listed = {node.name: node for node in listing.nodes}
    assert set(any_rm.nodes) <= listed.keys()
    assert len(any_rm.nodes) >= 2
    for name in any_rm.nodes:
        assert listed[name].state is NodeState.UP
        assert listed[name].used == NO_RESOURCES
        assert listed[name].capacity.get("cpu") == 8
    assert not [job for job in listing.jobs if not job.state.ended]


def test_a_task_runs_on_the_named_node_and_counts_there_until_it_is_done(rm: Harness) -> None:
    before = int(time.time())
    task = rm.spec(
        "touch started; while [ ! -e go ]; do sleep 0.05; done", demand=Resources.of(cpu=3), node=rm.nodes[1]
    )
    handle = rm.manager.submit(task)
    job = rm.wait_for(handle, RmJobState.RUNNING)
    assert (job.tag, job.node, job.user) == (task.tag, rm.nodes[1], rm.owner.user)
    assert before <= job.submitted <= time.time() + 1
    assert rm.node(rm.nodes[1]).used.get("cpu") == 3
    assert rm.node(rm.nodes[0]).used == NO_RESOURCES
    (rm.cwd / "go").touch()
    job = rm.wait_for_end(handle)
    assert job.state is RmJobState.DONE
    assert job.tag == task.tag
    rm.wait_until(lambda: rm.node(rm.nodes[1]).used == NO_RESOURCES, "free room")


@pytest.mark.parametrize(
    ("script", "state", "word"),
    [
        ("exit 0", RmJobState.DONE, ""),
        ("exit 3", RmJobState.FAILED, "3"),
        ("kill -9 $$", RmJobState.FAILED, "9"),
        ("kill -SEGV $$", RmJobState.FAILED, "11"),
    ],
)
def test_the_end_of_a_task_is_told_with_its_reason(rm: Harness, script: str, state: RmJobState, word: str) -> None:
    job = rm.wait_for_end(rm.manager.submit(rm.spec(script)))
    assert job.state is state
    assert word in job.reason
    # Ended tasks stay listed, however often and by whomever one looks.
    assert rm.job_of(job.handle).state is state


def test_argv_folder_and_environment_are_exactly_those_of_the_launch(rm: Harness) -> None:
    report = (
        "import json, os, sys; json.dump([sys.argv[1:], os.getcwd(), dict(os.environ), sys.stdin.read()], "
        "open('report.new', 'w')); os.rename('report.new', 'report')"
    )
    words = ("two words", "*", "$HOME", "", "`id`", "ü", "it's", 'a "b"', "line\nbreak", "--", "\\")
    given = {MARK: rm.mark, "PATH": "/usr/bin:/bin", "QUOTED": "a 'b' \"c\" $d\n#e ü", "EMPTY": "", "LANG": "C.UTF-8"}
    launch = Launch((sys.executable, "-I", "-c", report, *words), str(rm.cwd), tuple(given.items()))
    job = rm.wait_for_end(rm.manager.submit(structs.replace(rm.spec(""), launch=launch)))
    assert job.state is RmJobState.DONE, job
    rm.wait_until((rm.cwd / "report").exists, "the report")
    argv, folder, environment, stdin = json.loads((rm.cwd / "report").read_text())
    assert tuple(argv) == words
    assert folder == str(rm.cwd)
    assert stdin == ""
    assert {name: environment.get(name) for name in given} == given
    assert [name for name in environment.keys() - given.keys() if not name.startswith(rm.own_variables)] == []


def test_a_restarted_manager_finds_tasks_by_their_tags_and_can_stop_them(rm: Harness) -> None:
    running, ended = rm.spec(FOREVER, demand=Resources.of(cpu=2)), rm.spec("exit 4")
    handles = [rm.manager.submit(running), rm.manager.submit(ended)]
    rm.wait_for_file("started")
    rm.wait_for_end(handles[1])
    rm.restart()
    found = {job.tag: job for job in rm.manager.listing().jobs}
    assert found[running.tag].state is RmJobState.RUNNING
    assert found[running.tag].handle == handles[0]
    assert found[ended.tag].state is RmJobState.FAILED
    assert parse_tag(running.tag) == (rm.job, running.name)
    assert rm.node().used.get("cpu") == 2
    rm.stop(handles[0], grace=0)
    assert rm.wait_for_end(handles[0]).state is RmJobState.CANCELLED


def test_an_end_during_the_restart_is_not_lost(rm: Harness) -> None:
    handle = rm.manager.submit(rm.spec("echo >started; while [ ! -e go ]; do sleep 0.05; done; exit 5"))
    rm.wait_for_file("started")
    rm.manager.close()
    (rm.cwd / "go").touch()
    rm.wait_until_quiet()
    rm.restart()
    job = rm.wait_for_end(handle)
    assert job.state is RmJobState.FAILED
    assert "5" in job.reason


def test_a_task_that_ends_in_time_is_not_killed(rm: Harness) -> None:
    script = "trap 'sleep 0.3; echo saved >saved; exit 0' TERM; echo >started; while :; do sleep 0.1; done"
    handle = rm.manager.submit(rm.spec(script))
    rm.wait_for_file("started")
    rm.stop(handle, grace=60)
    assert rm.wait_for_end(handle).state in (RmJobState.CANCELLED, RmJobState.DONE)
    assert rm.wait_for_file("saved") == "saved\n"


def test_stop_does_not_wait_and_a_deaf_task_holds_its_room_while_its_time_runs(rm: Harness) -> None:
    handle = rm.manager.submit(rm.spec(DEAF))
    rm.wait_for_file("started")
    rm.stop(handle, grace=3600)
    assert rm.job_of(handle).state in (RmJobState.ENDING, RmJobState.RUNNING)
    assert rm.node().used.get("cpu") == 1
    # A later stop may shorten the time but not lengthen it.
    rm.stop(handle, grace=0.5)
    rm.stop(handle, grace=3600)
    assert rm.wait_for_end(handle).state is RmJobState.CANCELLED
    assert rm.processes() == []


def test_deadlines_hold_although_nobody_asks_again(rm: Harness) -> None:
    handle = rm.manager.submit(rm.spec(DEAF))
    rm.wait_for_file("started")
    rm.stop(handle, grace=0.5)
    rm.wait_until_quiet()
    assert rm.wait_for_end(handle).state is RmJobState.CANCELLED


def test_no_grace_kills_at_once(rm: Harness) -> None:
    handle = rm.manager.submit(rm.spec(f"trap 'echo >asked' TERM; {FOREVER}"))
    rm.wait_for_file("started")
    rm.stop(handle, grace=0)
    assert rm.wait_for_end(handle).state is RmJobState.CANCELLED


@pytest.mark.parametrize("child", ["sh -c", "setsid sh -c"])
def test_children_and_their_children_die_with_the_task(rm: Harness, child: str) -> None:
    deaf = f"{child} \"trap '' TERM; sh -c 'while :; do sleep 0.1; done' & echo >started; wait\""
    handle = rm.manager.submit(rm.spec(f"{deaf} & wait"))
    rm.wait_for_file("started")
    assert len(rm.processes()) >= 3
    rm.stop(handle, grace=0.5)
    rm.wait_for_end(handle)
    assert rm.processes() == []


def test_what_a_task_leaves_behind_dies_and_keeps_the_room_till_then(rm: Harness) -> None:
    left = "(trap 'sleep 0.5; echo >saved; exit' TERM; echo >started; while :; do sleep 0.1; done) &"
    handle = rm.manager.submit(rm.spec(f"{left} while [ ! -e started ]; do sleep 0.05; done; exit 0"))
    rm.wait_until(lambda: rm.node().used == NO_RESOURCES, "free room")
    # The listing came first: what runs now ran then.
    assert rm.processes() == []
    if rm.asks_what_is_left:
        assert rm.wait_for_file("saved") == "\n"
    assert rm.wait_for_end(handle).state is RmJobState.DONE


def test_room_is_free_only_when_the_task_has_really_ended(rm: Harness) -> None:
    full = rm.node().capacity
    handle = rm.manager.submit(rm.spec(DEAF, demand=full))
    rm.wait_for_file("started")
    rm.stop(handle, grace=1)
    assert rm.node().used == full
    rm.wait_until(lambda: rm.node().used != full, "free room")
    # The listing came first: what runs now ran then.
    assert rm.processes() == []
    again = rm.manager.submit(rm.spec("exit 0", demand=full))
    assert rm.wait_for_end(again).state is RmJobState.DONE


def test_stop_may_be_repeated_and_passes_over_what_it_does_not_know(rm: Harness) -> None:
    running, ended = rm.manager.submit(rm.spec(FOREVER)), rm.manager.submit(rm.spec("exit 0"))
    rm.wait_for_file("started")
    rm.wait_for_end(ended)
    for _ in range(2):
        rm.stop(rm.unknown_handle, ended, running, grace=5)
    assert rm.wait_for_end(running).state is RmJobState.CANCELLED
    rm.stop(rm.unknown_handle, ended, running, grace=0)
    rm.stop(grace=0)
    assert rm.job_of(ended).state is RmJobState.DONE


def test_stopping_one_task_leaves_the_others_alone(rm: Harness) -> None:
    first = rm.manager.submit(rm.spec(FOREVER))
    other = rm.manager.submit(rm.spec("while :; do sleep 0.1; done"))
    rm.wait_for_file("started")
    rm.wait_for(other, RmJobState.RUNNING)
    rm.stop(first, grace=0)
    rm.wait_for_end(first)
    assert rm.job_of(other).state is RmJobState.RUNNING
    assert rm.processes() != []


def test_what_has_another_identity_by_now_is_not_stopped(any_rm: Harness) -> None:
    """As where the id was given to another user or to another job of its user, or the job was requeued."""
    handle = any_rm.manager.submit(any_rm.spec(FOREVER))
    listed = any_rm.wait_for(handle, RmJobState.RUNNING)
    assert (listed.tag, bool(listed.user), listed.submitted > 0) == (listed.identity.tag, True, True)
    for other in (
        listed.identity._replace(user="eve"),
        listed.identity._replace(submitted=listed.submitted - 500),
        listed.identity._replace(submitted=listed.submitted + 500, user="eve", tag=""),
    ):
        any_rm.manager.stop([other], 0)
        any_rm.manager.stop([other], 3600)
    assert any_rm.job_of(handle).state is RmJobState.RUNNING
    assert any_rm.manager.listing().incomplete == ()
    any_rm.manager.stop([listed.identity], 0)
    any_rm.wait_for_end(handle)


def test_a_demand_that_no_node_can_hold_is_refused_with_amounts(any_rm: Harness) -> None:
    with pytest.raises(Rejected, match="cpu") as caught:
        any_rm.manager.submit(any_rm.spec("exit 0", demand=Resources.of(cpu=9)))
    assert "9" in str(caught.value)
    assert not [job for job in any_rm.manager.listing().jobs if not job.state.ended]


def test_an_unknown_node_is_not_found(any_rm: Harness) -> None:
    with pytest.raises(NotFound, match="no-such-node"):
        any_rm.manager.submit(any_rm.spec("exit 0", node="no-such-node"))
    assert not [job for job in any_rm.manager.listing().jobs if not job.state.ended]


def test_a_job_of_somebody_elses_that_trains_is_told_of_and_a_task_is_none(rm: Harness) -> None:
    ours = rm.wait_for(rm.manager.submit(rm.spec(FOREVER)), RmJobState.RUNNING)
    assert ours.static is None
    handle = rm.foreign()
    if handle is None:
        pytest.skip("nobody else starts jobs under this manager")
    job = rm.wait_for(handle, RmJobState.RUNNING)
    static = job.static
    assert static is not None
    assert (static.model, static.workers, static.ps, static.limit) == ("bert", 3, 0, 3600.0)
    assert (static.owner.user, static.owner.uid, job.tag) == (rm.owner.user, rm.owner.uid, "")
    assert len(static.nodes) == 3
    assert set(static.nodes) == set(rm.nodes[:2])
    assert static.task.get("cpu") == 2
    assert time.time() - 60 <= static.started <= time.time() + 1
    used = sum(rm.node(name).used.get("cpu") for name in rm.nodes)
    assert used == 3 * 2 + 1
    rm.stop(handle, grace=0)
    gone = rm.wait_for_end(handle)
    assert (gone.state, gone.static is not None) == (RmJobState.CANCELLED, True)


def test_handles_differ(rm: Harness) -> None:
    handles = [rm.manager.submit(rm.spec("exit 0")) for _ in range(5)]
    assert len(set(handles)) == 5
    for handle in handles:
        assert rm.wait_for_end(handle).state is RmJobState.DONE


def test_used_never_exceeds_what_a_node_has(any_rm: Harness) -> None:
    """Submits and stops at random, more than fit: refusing and queueing are both right, over-booking is not."""
    choose = random.Random(20)
    capacity = {node.name: node.capacity for node in any_rm.manager.listing().nodes}
    handles: list[str] = []
    for _ in range(14):
        task = any_rm.spec(FOREVER, demand=Resources.of(cpu=choose.randint(1, 4)), node=choose.choice(any_rm.nodes[:2]))
        try:
            handles.append(any_rm.manager.submit(task))
        except Rejected as refused:
            assert "cpu" in str(refused)  # noqa: PT017  refusing is one of two right answers
        if handles and choose.random() < 0.3:
            any_rm.stop(choose.choice(handles), grace=0)
        for node in any_rm.manager.listing().nodes:
            assert node.used.fits_in(capacity[node.name])
    any_rm.wait_until(
        lambda: any(job.state is RmJobState.RUNNING for job in any_rm.manager.listing().jobs), "a running task"
    )


def test_an_anchor_takes_no_room(rm: Harness) -> None:
    if not rm.manager.capabilities().starts_anchors:
        pytest.skip("this manager's anchors are submitted by users")
    task = rm.spec(FOREVER, role=Role.COORDINATOR, demand=NO_RESOURCES, node="")
    handle = rm.manager.submit(task)
    rm.wait_for(handle, RmJobState.RUNNING)
    assert rm.manager.submit(task) == handle  # as where the answer to its start was lost
    assert all(node.used == NO_RESOURCES for node in rm.manager.listing().nodes)
    full = rm.manager.submit(rm.spec("exit 0", demand=rm.node().capacity))
    assert rm.wait_for_end(full).state is RmJobState.DONE


def test_nobody_is_authenticated_on_a_bad_proof(any_rm: Harness) -> None:
    with pytest.raises((Denied, NotFound)):
        any_rm.manager.authenticate(any_rm.unknown_handle, "not a proof")


def test_capabilities_have_a_name_and_a_version(any_rm: Harness) -> None:
    able = any_rm.manager.capabilities()
    assert able.name
    assert able.version
    assert able == any_rm.manager.capabilities()
