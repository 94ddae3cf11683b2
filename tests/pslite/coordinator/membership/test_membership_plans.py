"""Which plan is next, from the state alone, and what members are told of it."""

from __future__ import annotations

import pytest
from coordinator.jobs import JOINED, job, member, sent, spec
from msgspec import structs

from pslite.coordinator.membership import membership_plans
from pslite.coordinator.membership.joining_and_start import check_start, give_ranks
from pslite.coordinator.state.job_state import PendingPlan, Reassignment
from pslite.job.job_spec import SGD, Part, Segment
from pslite.net.messages import Announced, Drained, Moved, Nack, Pushed, Ready

W0, W1, W2, P0, P1 = "worker-0", "worker-1", "worker-2", "ps-0", "ps-1"


def undescribed(state):
    state.describe(None)


def at_the_end(state):
    state.digests_requested = True


def reassigning(state):
    state.reassignment = Reassignment(1, {P0})


@pytest.mark.parametrize(
    ("tasks", "how", "change", "objection"),
    [
        ([W0, P0], {}, undescribed, "no worker has described the job"),
        ([W0, P0], {}, at_the_end, "the job has reached its last version"),
        ([W0, P0], {"wanted": None}, None, "it is not known which tasks are wanted"),
        ([W0, P0], {"plan": (W0, P0)}, reassigning, "servers are told who does the work of a dead worker"),
        ([W0, W1], {}, None, "there is not a member for each role"),
        ([P0], {}, None, "there is not a member for each role"),
    ],
)
def test_no_plan_can_be_made(tasks, how, change, objection):
    a_job, _ = job(tasks, **how)
    if change is not None:
        change(a_job.state)
    assert membership_plans.choose_members(a_job.state).objection == objection
    assert membership_plans.consider(a_job, JOINED) == objection


@pytest.mark.parametrize(
    ("tasks", "how", "workers", "servers"),
    [
        ([W0, W1, P0], {}, (W0, W1), (P0,)),
        ([W0, W1, P0], {"wanted": (W0, P0)}, (W0,), (P0,)),
        ([W0, W1, P0], {"plan": (W0, P0)}, (W0, W1), (P0,)),
        # nobody who is wanted is left: the present ones stay
        ([W0, W1, P0], {"plan": (W0, P0), "wanted": (W1, P1)}, (W1,), (P0,)),
        ([W0, W1, P0], {"described": spec(shards=1)}, (W0,), (P0,)),
        # servers have no weights: one that has them stays
        ([W0, W1, P0], {"described": spec(architecture="allreduce")}, (W0, W1), ()),
    ],
)
def test_who_becomes_a_member(tasks, how, workers, servers):
    a_job, _ = job(tasks, **how)
    choice = membership_plans.choose_members(a_job.state)
    assert (choice.objection, choice.workers, choice.servers) == ("", workers, servers)


def test_ranks_go_by_number_at_the_start_and_one_that_comes_late_has_the_next():
    tasks = ["worker-10", W2, W0, P0]
    a_job, _ = job(tasks, wanted=(*tasks, W1), described=spec(mode="open", epochs=0))
    members = a_job.state.members
    for task in tasks[:3]:
        members[task].described = False
    members[W0].joined += 2.0
    give_ranks(a_job, JOINED + 60.0)
    assert [members[task].seat for task in (W0, W2, "worker-10")] == [0, 1, 2]
    members[W1] = member(W1, described=False)
    give_ranks(a_job, JOINED + 60.0)
    assert [members[task].seat for task in (W0, W2, "worker-10", W1)] == [0, 1, 2, 3]
    for task in members:
        members[task].described = True
    assert membership_plans.choose_members(a_job.state).workers == (W0, W2, "worker-10", W1)


@pytest.mark.parametrize(
    ("tasks", "wanted", "reason"),
    [
        # the coordinator was not executed until the limit had passed
        (["worker-0", "ps-0"], ["worker-0", "ps-0"], None),
        (["worker-0"], ["worker-0", "ps-0"], "no server joined within 60 s"),
        (["worker-0", "ps-0"], ["worker-1", "ps-0"], "no wanted member joined within 60 s"),
    ],
)
def test_a_job_whose_first_plan_is_about_to_be_made_does_not_fail_for_the_time_limit_of_its_start(
    tasks, wanted, reason
):
    a_job, _ = job(tasks, wanted=wanted, start=60.0)
    for each in a_job.state.members.values():
        each.described = True
    check_start(a_job, JOINED + 60)
    check_start(a_job, JOINED + 61)
    assert a_job.state.reason == reason


def test_who_is_wanted_no_more_is_dismissed_and_who_is_too_many_waits():
    a_job, lines = job([W0, W1, W2, P0], wanted=(W0, W2, P0), plan=(W0, P0), described=spec(shards=1))
    a_job.state.once_wanted = frozenset({W0, W1, W2, P0})
    assert membership_plans.consider(a_job, JOINED) == "members and their work stay as they are"
    assert sent(a_job, W1) == ["Exit"]
    assert a_job.state.members[W1].state == "draining"
    assert sent(a_job, W2) == []
    assert len(lines) == 1
    assert lines[0].startswith("worker-2 waits: the job has 1 shards for workers")


def test_servers_of_an_all_reduce_job_are_dismissed():
    a_job, _ = job([W0, P0], described=spec(architecture="allreduce"))
    choice = membership_plans.choose_members(a_job.state)
    assert choice.unwanted == {P0: "the job's architecture is allreduce: it has no servers"}


@pytest.mark.parametrize(
    ("tasks", "how", "now", "waits"),
    [
        # at the start: `grace` after one worker and one server are there
        ([W0, P0], {"wanted": (W0, W1, P0)}, JOINED + 2.9, True),
        ([W0, P0], {"wanted": (W0, W1, P0)}, JOINED + 3.0, False),
        ([W0, P0], {"wanted": (W0, P0)}, JOINED, False),
        ([W0, P0], {"wanted": None}, JOINED + 1, True),
        # a resize: `settle` after the last one has joined
        ([W0, W1, P0], {"plan": (W0, P0), "wanted": (W0, W1, W2, P0)}, JOINED + 0.2, True),
        ([W0, W1, P0], {"plan": (W0, P0), "wanted": (W0, W1, W2, P0)}, JOINED + 0.4, False),
        ([W0, W1, P0], {"plan": (W0, P0), "wanted": (W0, W1, P0)}, JOINED, False),
    ],
)
def test_a_plan_waits_for_those_who_are_wanted(tasks, how, now, waits):
    a_job, _ = job(tasks, **how)
    reason = membership_plans.reason_to_wait(a_job.state, a_job.settings, now)
    assert reason == ("wanted tasks may join soon" if waits else "")


def resize():
    """A job of one worker and one server to which a worker comes, and the plan on its way."""
    a_job, lines = job([W0, W1, P0], plan=(W0, P0))
    assert membership_plans.consider(a_job, JOINED) == ""
    return a_job, a_job.state.pending, lines


def test_a_plan_is_prepared_committed_and_done():
    a_job, pending, lines = resize()
    state = a_job.state
    assert all(sent(a_job, task) == ["Prepare"] for task in (W0, W1, P0))
    for task in (W0, W1, P0):
        membership_plans.take(a_job, state.members[task], Ready(plan=2))
    assert pending.ready == {W0, W1, P0}
    membership_plans.commit(a_job, pending)
    assert sent(a_job, P0) == ["Prepare", "Commit"]
    assert state.members[W1].state == "active"
    membership_plans.take(a_job, state.members[P0], Announced(plan=2, first=5))
    membership_plans.take(a_job, state.members[P0], Moved(plan=2, sent_bytes=0, move_ms=1.0))
    membership_plans.take(a_job, state.members[W0], Pushed(plan=2, suspension_ms=0.5))
    assert membership_plans.follow(a_job, pending) is None
    membership_plans.take(a_job, state.members[W1], Pushed(plan=2, suspension_ms=None))
    assert membership_plans.follow(a_job, pending) == set()
    assert (state.plan, state.pending, state.suspensions) == (pending.plan, None, [0.5])
    assert all(sent(a_job, task)[-1] == "PlanDone" for task in (W0, W1, P0))
    assert lines[-1].startswith("plan 2 done at version 5: 2 workers, 1 servers")


def test_a_worker_that_a_plan_removes_pushes_its_last_step_and_is_drained():
    a_job, _ = job([W0, W1, P0], plan=(W0, W1, P0), wanted=(W0, P0))
    state = a_job.state
    assert membership_plans.consider(a_job, JOINED) == ""
    pending = state.pending
    membership_plans.commit(a_job, pending)
    assert state.members[W1].state == "draining"
    membership_plans.take(a_job, state.members[P0], Moved(plan=2, sent_bytes=0, move_ms=1.0))
    membership_plans.take(a_job, state.members[W0], Pushed(plan=2, suspension_ms=0.5))
    assert membership_plans.follow(a_job, pending) is None
    membership_plans.take(a_job, state.members[W1], Drained(plan=2))
    assert membership_plans.follow(a_job, pending) == {W1}
    assert sent(a_job, W1)[-1] == "Exit"


@pytest.mark.parametrize(
    ("who", "about", "dropped"),
    [
        (W1, "", {W1}),  # a newcomer that cannot
        (W0, W1, {W1}),  # a member that says that a newcomer is at fault
        (W0, "", set()),  # a member of the plan in force stays, whatever it says
        (W1, P0, set()),  # perhaps the server has just died
    ],
)
def test_a_plan_that_a_member_refuses_is_given_up(who, about, dropped):
    a_job, pending, lines = resize()
    state = a_job.state
    membership_plans.take(a_job, state.members[who], Nack(plan=2, reason="no memory", about=about))
    assert state.pending is None
    assert {task for task in state.members if not state.members[task].present} == dropped
    assert lines[-1] == f"plan 2 is given up: {who} on n (pid 7) cannot take part: no memory"
    assert all(sent(a_job, task)[-1] == "Abort" for task in pending.members() - dropped)
    assert state.retry_at > 0


def test_the_pause_after_plans_that_were_given_up_doubles():
    a_job, pending, _ = resize()
    pauses = []
    for _ in range(3):
        membership_plans.abort(a_job, pending, "a test")
        assert membership_plans.consider(a_job, a_job.state.retry_at - 0.01) == "a plan was given up a moment ago"
        pauses.append(a_job.state.given_up)
    assert pauses == [1, 2, 3]
    assert membership_plans.consider(a_job, a_job.state.retry_at) == ""


def test_what_is_said_of_another_plan_is_passed_over():
    a_job, pending, _ = resize()
    membership_plans.take(a_job, a_job.state.members[W0], Ready(plan=1))
    assert pending.ready == set()


def test_a_plan_that_gives_blocks_replicas_is_made_where_one_has_lost_its_server():
    a_job, _ = job([W0, P0, P1], plan=(W0, P0, P1), described=spec(durability="durable"))
    state = a_job.state
    assert membership_plans.consider(a_job, JOINED) == "members and their work stay as they are"
    owner = state.members[P0].plan_entry()
    blocks = dict.fromkeys(range(len(state.blocks)), owner)
    state.plan = state.plan.without((), blocks)
    assert -1 in state.plan.backups
    assert membership_plans.consider(a_job, JOINED) == ""
    assert isinstance(state.pending, PendingPlan)


def a_job_with_a_late_segment(wanted=()):
    """Of whose two workers the first has asked for a further segment."""
    late = Segment(dtype="float32", optimizer=SGD(lr=0.1), parts=(Part("late", (500,)),), late=True)
    a_job, _ = job([W0, W1, P0], plan=(W0, W1, P0), described=spec(mode="open", epochs=0), wanted=wanted)
    before = a_job.state.spec
    a_job.state.members[W0].spec = structs.replace(before, segments=(*before.segments, late))
    return a_job, before


def test_what_a_plan_adds_is_taken_back_with_it_if_who_has_asked_is_gone():
    a_job, before = a_job_with_a_late_segment()
    state = a_job.state
    assert membership_plans.consider(a_job, JOINED) == ""
    assert state.spec == state.members[W0].spec
    assert membership_plans.adds_blocks(state)
    state.dead[W0] = "died"
    membership_plans.abort(a_job, state.pending, "died")
    assert state.spec == before
    assert not membership_plans.adds_blocks(state)


def test_the_worker_that_adds_segments_stays_until_the_job_has_them():
    a_job, _ = a_job_with_a_late_segment(wanted=(W1, P0))
    assert membership_plans.choose_members(a_job.state).workers == (W0, W1)
    a_job.state.members[W0].spec = a_job.state.spec
    assert membership_plans.choose_members(a_job.state).workers == (W1,)
