"""How a server announces a plan, and that it stops to when the plan is given up."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from parts import Parts, a_job, a_plan

from pslite.net.messages import Announced
from pslite.server.plan_activation import NO_ANNOUNCEMENT, Announcement


def test_a_plan_that_is_given_up_once_it_is_announced_is_announced_no_longer():
    """Nor by those workers that have not heard of it."""
    spec = a_job()
    parts = Parts(spec)
    parts.begin(a_plan(spec, workers=2, servers=1))
    activation, block = parts.state.activation, parts.state.owned[0]
    activation.commit(2)
    activation.announce_if_due(block)
    block.version = 1
    assert activation.for_workers(block) == Announcement(2, 2)
    assert parts.messages[-1:] == [Announced(plan=2, first=2)]
    activation.forget_plan(2)
    assert activation.for_workers(block) == NO_ANNOUNCEMENT
    activation.take(2, 2, prepared=False)
    assert activation.for_workers(block) == NO_ANNOUNCEMENT
    activation.take(3, 2, prepared=True)
    assert activation.for_workers(block) == Announcement(3, 2)
