from __future__ import annotations

import gc
import threading

import pytest
from policies.snapshots import a_job, a_snapshot, cluster

from dl2d.core.decision import Constraint
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.fifo import Fifo
from dl2d.tick.decision.decide import decide
from dl2d.tick.policy_check.policy_call import Deadline, gc_paused
from dl2d.tick.tick_context import Deciders


class Watching(Fifo):
    """Notes whether garbage may be collected while it decides."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self._error = error

    def decide(self, *args, **how):
        self.seen.append(gc.isenabled())
        if self._error is not None:
            raise self._error
        return super().decide(*args, **how)


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_no_policy_is_held_up_by_the_collector_and_it_goes_on_after_it(error) -> None:
    policy = Watching(error)
    snapshot = a_snapshot([a_job(1)], cluster(1))
    decision = decide(snapshot, Deciders(policy, Fifo(), LoadBalance()), 0)
    assert policy.seen == [False]
    assert gc.isenabled()
    said = [reason.constraint for reason in decision.jobs[0].guarded]
    assert said == ([] if error is None else [Constraint.FALLBACK])


def test_a_policy_that_never_comes_back_does_not_keep_it_off() -> None:
    begun, over = threading.Event(), threading.Event()

    class Hanging(Fifo):
        def decide(self, *args, **how):
            begun.set()
            over.wait(30)
            return super().decide(*args, **how)

    deciders = Deciders(Hanging(), Fifo(), LoadBalance(), call_policy=Deadline(0.05))
    decide(a_snapshot([a_job(1)], cluster(1)), deciders, 0)
    assert begun.wait(30)
    assert gc.isenabled()
    over.set()


def test_a_collector_that_was_off_stays_so() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
