"""Groups of plans that come, are given up, and take each other's place."""

from __future__ import annotations

import threading

import pytest
from own_loop import own_loop

from pslite.errors import ProtocolError
from pslite.job.membership_plan import Member, make_plan
from pslite.job.weight_blocks import cut
from pslite.net.messages import Abort, Commit, Complete, Nack, PlanDone, Prepare, Ready, Seat
from pslite.numeric.gradient_sums import Bundle, Supply
from pslite.worker.allreduce.plan_groups import GroupBroken, PlanGroups

SPEC = own_loop(mode="exact", epochs=1, samples=64, batch=8, shards=8, architecture="allreduce")
BLOCKS = cut(SPEC)


class World:
    """A worker's plans; each has one member, so that nobody waits for others."""

    def __init__(self):
        self.sent, self.answered = [], threading.Semaphore(0)
        nbytes = Bundle(SPEC, BLOCKS).memory.size
        self.groups = PlanGroups("worker-0", SPEC, nbytes, Supply(SPEC, BLOCKS), self.send, lambda: None)
        self.groups.host = "127.0.0.1"

    def send(self, message):
        self.sent.append(message)
        self.answered.release()

    def prepare(self, number, *, worker="worker-0", spec=SPEC, recover=False):
        """Have a plan be prepared, and wait until that is answered."""
        plan = make_plan(number, BLOCKS, [Member(worker, worker, "host", 1)], [], None)
        self.groups.hear(Prepare(plan=plan, previous=None, spec=spec, recover=recover))
        assert self.answered.acquire(timeout=60)

    def use(self, number):
        self.groups.current = number


@pytest.fixture
def world():
    there = World()
    yield there
    there.groups.close()


def test_a_worker_that_joins_takes_the_newest_plan(world):
    world.prepare(1)
    world.prepare(2)
    assert world.sent == [Ready(plan=1), Ready(plan=2)]
    assert world.groups.replacement(any_plan=True).plan.number == 2


def test_a_plan_that_this_worker_is_not_in_has_no_group(world):
    world.prepare(1)
    world.use(1)
    world.prepare(2, worker="worker-1")
    assert world.groups.ready(2).group is None
    assert world.groups.ready(1).group is not None


def test_who_waits_with_a_broken_group_is_told_that_another_one_is_made(world):
    world.prepare(1)
    world.use(1)
    world.prepare(2)
    world.groups.look()
    world.prepare(3, recover=True)
    assert world.groups.superseded
    with pytest.raises(GroupBroken):
        world.groups.wait(lambda: False)
    assert world.groups.replacement(any_plan=False).plan.number == 3
    world.use(3)
    world.groups.look()


def test_plans_that_are_over_or_given_up_are_closed(world):
    for number in (1, 2, 3):
        world.prepare(number)
    world.groups.hear(Abort(plan=3, reason="a member is gone"))
    assert world.groups.replacement(any_plan=True).plan.number == 2
    world.groups.hear(PlanDone(plan=2))
    with pytest.raises(KeyError):
        world.groups.ready(1)
    assert world.groups.ready(2)


def test_a_plan_with_another_description_is_refused(world):
    world.prepare(1, spec=own_loop())
    assert world.sent == [Nack(plan=1, reason="the plan's job description differs from that of this worker's script")]


def test_what_the_coordinator_says_is_kept_for_the_scripts_thread(world):
    world.groups.hear(Commit(plan=2))
    world.groups.hear(Complete(chief="worker-1"))
    assert (world.groups.committed, world.groups.chief) == (2, "worker-1")
    with pytest.raises(ProtocolError, match="no worker of an all-reduce job accepts"):
        world.groups.hear(Seat(rank=0, workers=1))
