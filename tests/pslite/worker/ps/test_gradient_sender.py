"""What a worker pushes to servers, and pushes again to those that take the place of others."""

from __future__ import annotations

from types import SimpleNamespace

from own_loop import own_loop

from pslite.job.membership_plan import Member, make_plan
from pslite.net.tensor_frames import PUSH
from pslite.numeric.gradient_sums import Contribution
from pslite.worker.ps.gradient_sender import GradientSender
from pslite.worker.ps.known_plans import PlanTable, PreparedPlan
from pslite.worker.ps.model_buffers import ModelBuffers
from pslite.worker.step_progress import Progress


class Sent:
    """A connection to a server of the same machine, which keeps the headers that are sent over it."""

    task, local = "ps-0", True

    def __init__(self):
        self.frames = []

    def send(self, header, *payload):
        self.frames.append(header)

    def hand(self, header, descriptor):
        self.frames.append(header)

    def take(self):
        frames, self.frames = self.frames, []
        return frames


def a_sender():
    """Return a worker's sender of gradients, its model, and the connection to the one server."""
    model, plans, link = ModelBuffers(own_loop()), PlanTable("worker-0"), Sent()
    members = [Member(task, task, "host", 1) for task in ("worker-0", "ps-0")]
    plan = make_plan(1, model.blocks, members[:1], members[1:], None)
    plans.add(PreparedPlan(plan, None, model.spec))
    plans.enter(plans.begin(1), 0)
    plane = SimpleNamespace(links={"ps-0": link}, flush=lambda link: None)
    return GradientSender(model, plans, Progress(), plane), model, link


def test_blocks_of_a_plan_that_the_worker_has_not_entered_are_not_pushed_again():
    """Servers that take the place of a dead one are told which they own of the coming plan, too."""
    sender, model, link = a_sender()
    sender.push([Contribution(1, model.supply.take())])
    link.take()
    last = len(model.blocks) - 1
    sender.push_again([last, last + 1])
    assert [(frame.kind, frame.block) for frame in link.take()] == [(PUSH, last)]
