"""What a worker pushes to servers, and pushes again to those that take the place of others."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
from own_loop import own_loop

from pslite.job.membership_plan import Member, make_plan
from pslite.net.tensor_frames import PUSH, REGION
from pslite.numeric.gradient_sums import Contribution
from pslite.worker.progress_reports import Progress
from pslite.worker.ps.gradient_sender import GradientSender
from pslite.worker.ps.known_plans import PlanTable, PreparedPlan
from pslite.worker.ps.model_buffers import ModelBuffers


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
    """Return a worker's sender of gradients, its model, and its connections, of which there is one."""
    model, plans, link = ModelBuffers(own_loop()), PlanTable("worker-0"), Sent()
    members = [Member(task, task, "host", 1) for task in ("worker-0", "ps-0")]
    plan = make_plan(1, model.blocks, members[:1], members[1:], None)
    plans.add(PreparedPlan(plan, None, model.spec))
    plans.enter(plans.begin(1), 0)
    plane = SimpleNamespace(links={"ps-0": link}, flush=lambda link: None)
    return GradientSender(model, plans, Progress(), plane), model, plane.links


def test_blocks_of_a_plan_that_the_worker_has_not_entered_are_not_pushed_again():
    """Servers that take the place of a dead one are told which they own of the coming plan, too."""
    sender, model, links = a_sender()
    link = links["ps-0"]
    sender.push([Contribution(1, model.supply.take())])
    link.take()
    last = len(model.blocks) - 1
    sender.push_again([last, last + 1])
    assert [(frame.kind, frame.block) for frame in link.take()] == [(PUSH, last)]


def test_numbers_of_shared_memory_that_is_gone_are_given_out_again():
    """The server forgets it then; one whose connection broke is handed all again."""
    sender, model, links = a_sender()
    kept, left = model.supply.take(), model.supply.take()
    if kept.region.fd < 0:
        pytest.skip("no shared memory on this machine")

    def regions(*bundles):
        sender.begin_step()
        sender.push([Contribution(1, bundle) for bundle in bundles])
        return [frame.region for frame in links["ps-0"].take() if frame.kind == REGION]

    links["ps-0"].local = False
    assert regions(left) == []
    links["ps-0"].local = True
    assert regions(kept, left) == [1, 2]
    assert regions(kept, left) == []
    sender.begin_step()
    del left
    gc.collect()
    another = model.supply.take()
    assert regions(another, kept) == [2]
    links["ps-0"] = Sent()
    assert regions(another, kept) == [2, 1]
