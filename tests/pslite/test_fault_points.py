"""Fault points: without a hook nothing happens; with one, what it says."""

from __future__ import annotations

from pslite.fault_points import FaultPoint, FaultPoints


def test_without_a_hook_no_step_is_left_out():
    assert not FaultPoints(None, "worker-0").reached(FaultPoint.MESSAGE, "a message")


def test_a_hook_hears_who_has_reached_what_and_may_leave_out_the_step():
    heard = []

    def hook(point, task, *about):
        heard.append((point, task, about))
        return point is FaultPoint.MESSAGE

    points = FaultPoints(hook, "worker-0")
    assert points.reached(FaultPoint.MESSAGE, "a message")
    assert not points.reached(FaultPoint.PAYLOAD, "a connection", "a header")
    assert heard == [
        (FaultPoint.MESSAGE, "worker-0", ("a message",)),
        (FaultPoint.PAYLOAD, "worker-0", ("a connection", "a header")),
    ]
