"""A worker's steps, with servers that answer at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from own_loop import own_loop

from pslite.errors import UsageError
from pslite.fault_points import FaultPoints
from pslite.job.membership_plan import Member, make_plan
from pslite.net.messages import Drained, Pushed
from pslite.numeric.gradient_sums import Contribution
from pslite.worker.progress_reports import Progress, ProgressReports
from pslite.worker.ps.known_plans import PlanTable, PreparedPlan
from pslite.worker.ps.model_buffers import ModelBuffers
from pslite.worker.ps.step_exchange import StepExchange

SPEC = own_loop(mode="exact", epochs=1, samples=64, batch=8, shards=8)


class Left(Exception):
    """Nothing that is waited for comes any more."""


class World:
    """The worker, whose events are those of servers that answer each push while it waits."""

    def __init__(self):
        self.model, self.plans, self.progress = ModelBuffers(SPEC), PlanTable("worker-0"), Progress()
        self.sent, self.pushed = [], []
        #: called before servers answer
        self.meanwhile = lambda: None
        initial = SimpleNamespace(asked=None)
        self.events = SimpleNamespace(
            take_all=lambda: None, wait=self.wait, initial=initial,
            plane=SimpleNamespace(unsent=False, leaving=False),
        )  # fmt: skip
        self.reports = ProgressReports(self.progress, self.sent.append)
        self.steps = StepExchange(
            self.model, self.plans, self.progress, self, self.events, self.reports,
            FaultPoints(None, "worker-0"),
        )  # fmt: skip
        self.steps.enter(self.prepare(1, ["worker-0", "worker-1"]), 0)

    def prepare(self, number, workers):
        there = self.plans.current
        plan = make_plan(
            number, self.model.blocks, [Member(task, task, "host", 1) for task in workers],
            [Member("ps-0", "ps-0", "host", 2)], there,
        )  # fmt: skip
        prepared = PreparedPlan(plan, there, SPEC)
        self.plans.add(prepared)
        if there is None:
            self.plans.begin(number)
        return prepared

    def wait(self, done, *, patient=False):
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        if not done():
            self.progress.missing.clear()
        if not done():
            raise Left

    @property
    def nodes(self):
        return {contribution.node for contribution in self.pushed}

    def push(self, contributions):
        self.pushed += contributions

    def begin_step(self):
        self.pushed.clear()

    def exchange(self, nodes):
        bundle = self.model.supply.take()
        return self.steps.exchange([Contribution(node, bundle) for node in nodes], 1.0, 4)


@pytest.fixture
def world():
    return World()


def test_a_step_ends_with_the_next_version_and_the_first_one_reports_its_plan(world):
    for version in (1, 2):
        assert world.exchange(world.steps.share.nodes) == ()
        assert world.progress.version == version
    assert [message for message in world.sent if isinstance(message, Pushed)] == [Pushed(plan=1, suspension_ms=None)]


def test_gradients_of_other_nodes_than_those_due_are_refused(world):
    with pytest.raises(UsageError, match="the gradients given for step 0 must be those of the tree nodes"):
        world.exchange([*world.steps.share.nodes, 99])


def test_what_a_dead_worker_has_left_undone_is_due_in_a_further_call_and_then_in_each_step(world):
    own = world.steps.share.nodes
    world.meanwhile = lambda: world.plans.lose_workers(["worker-1"], {1: (3,)})
    assert world.exchange(own) == (3,)
    assert world.progress.version == 0
    assert world.exchange([3]) == ()
    assert world.progress.version == 1
    assert world.steps.share.nodes == (*own, 3)


def test_an_announced_plan_is_in_force_from_its_first_version_on(world):
    world.prepare(2, ["worker-0", "worker-1", "worker-2"])
    before = world.steps.share.nodes
    world.plans.announced(2, 2)
    world.exchange(before)
    assert world.plans.current.number == 1
    world.exchange(before)
    assert (world.plans.current.number, world.plans.first, world.plans.next) == (2, 2, None)
    assert world.steps.share.nodes != before


def test_a_worker_that_is_not_in_the_next_plan_leaves_once_its_last_push_is_sent(world):
    world.prepare(2, ["worker-1"])
    world.plans.announced(2, 1)
    with pytest.raises(Left):
        world.exchange(world.steps.share.nodes)
    assert world.nodes
    assert world.events.plane.leaving
    beat, drained = world.sent[-2:]
    assert (beat.samples, drained) == (4, Drained(plan=2))
