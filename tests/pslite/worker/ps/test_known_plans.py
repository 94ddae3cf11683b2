"""What a worker knows of plans: which is in force, who owns what, and what deaths change."""

from __future__ import annotations

import pytest
from own_loop import own_loop

from pslite.job.membership_plan import Member, Plan
from pslite.worker.ps.known_plans import PlanTable, PreparedPlan


def member(task):
    return Member(task=task, incarnation=f"{task}-first", host="host", pid=1, address=f"{task}:1")


def plan(number, workers, servers, owners):
    return Plan(
        number=number, workers=tuple(map(member, workers)), servers=tuple(map(member, servers)), owners=tuple(owners)
    )


SPEC = own_loop()
FIRST = plan(1, ["w0", "w1"], ["s0", "s1"], [0, 0, 1])
SECOND = plan(2, ["w0", "w1", "w2"], ["s1", "s2"], [0, 1, 0])


@pytest.fixture
def table():
    """Of w1, which works under the first plan from version 0 on."""
    known = PlanTable("w1")
    known.add(PreparedPlan(FIRST, None, SPEC))
    prepared = known.begin(1)
    known.enter(prepared, 0)
    return known


def test_a_plan_that_was_given_up_while_it_was_prepared_is_not_taken_up(table):
    table.give_up(2)
    assert not table.add(PreparedPlan(SECOND, FIRST, SPEC))
    assert table.begin(2) is None
    assert table.current == FIRST


def test_servers_of_both_plans_are_needed_until_all_have_moved(table):
    second = PreparedPlan(SECOND, FIRST, SPEC)
    assert table.add(second)
    assert table.servers().keys() == {"s0", "s1", "s2"}
    assert table.may_own(1) == {"s0", "s2"}
    assert table.enter(second, 7)
    assert table.first == 7
    assert table.settle(2) == {"s0"}
    assert table.servers().keys() == {"s1", "s2"}
    assert table.may_own(1) == {"s2"}


def test_a_worker_that_comes_with_a_plan_was_no_member_of_the_one_before():
    known = PlanTable("w2")
    known.add(PreparedPlan(SECOND, FIRST, SPEC))
    assert not known.enter(known.begin(2), 7)


def test_the_next_plan_takes_effect_at_the_version_that_is_announced(table):
    second = PreparedPlan(SECOND, FIRST, SPEC)
    table.add(second)
    table.announced(2, 9)
    assert table.following(8) is None
    assert table.following(9) is second


def test_a_plan_that_was_announced_and_given_up_does_not_follow(table):
    table.add(PreparedPlan(SECOND, FIRST, SPEC))
    table.announced(2, 9)
    table.give_up(2)
    assert table.following(9) is None
    table.announced(2, 9)  # in weights of a server that hears of it later
    assert table.following(9) is None
    assert table.next is None


def test_blocks_of_a_dead_server_have_other_owners_in_all_plans(table):
    table.add(PreparedPlan(SECOND, FIRST, SPEC))
    table.replace_owners(["s1"], {0: member("s2"), 2: member("s2")})
    assert table.gone == {"s1"}
    assert table.current.owner(2).task == "s2"
    assert "s1" not in table.servers()
    assert [table.may_own(block) for block in range(3)] == [{"s2"}, {"s0", "s2"}, {"s2"}]


def test_the_nodes_of_a_dead_worker_are_inherited(table):
    second = PreparedPlan(SECOND, FIRST, SPEC)
    table.add(second)
    table.enter(second, 7)
    table.lose_workers(["w0"], {2: (4, 5)})
    assert table.workers() == ["w1", "w2"]
    assert table.inherited == (4, 5)
