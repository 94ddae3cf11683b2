from __future__ import annotations

import itertools

import numpy as np
import pytest
from msgspec import structs

from dl2d.core.cluster import NodeState, Snapshot
from dl2d.core.decision import Constraint, Decision, Reason
from dl2d.core.jobs import NOTHING
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import Policy
from dl2d.learning.replay_check import ReplayCheck, generated_load, replay_check
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.common.greedy_allocation import GreedyAllocation
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.simulation.workload.workload_file import Workload
from dl2d.testing import make_nodes
from dl2d.tick.policy_check.policy_starts_jobs_check import requests_to_try
from dl2d.tick.tick_context import GuardRules

NODES = make_nodes(2, cpu=8, gpu=4)


class StartsTen(Drf):
    """Starts only the first ten jobs; with ``raises`` it fails as soon as there are more."""

    def __init__(self, *, raises: bool = False) -> None:
        super().__init__()
        self._raises = raises
        self._known: dict[object, int] = {}

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        for job in snapshot.jobs:
            self._known.setdefault(job.key, len(self._known))
        if self._raises and len(self._known) > 10:
            raise ZeroDivisionError("the eleventh job")
        allocation = GreedyAllocation(snapshot, packing)
        for job in snapshot.jobs:
            starts = self._known[job.key] < 10 and allocation.allocations[job.key] == NOTHING
            if not starts or allocation.grow(job) is None:
                allocation.refuse(job, Reason(Constraint.SATISFIED, "no"))
        return allocation.decision(self)


def load() -> Workload:
    made = generated_load(requests_to_try(LoadBalance(), NODES), NODES, (), 300.0)
    assert made is not None
    return made


def checked(policy: Policy) -> ReplayCheck:
    return replay_check(policy, LoadBalance(), {"the load": load()}, GuardRules(), clock=lambda: 0.0, most_seconds=60.0)


def test_the_generated_load_has_jobs_with_and_without_servers_that_come_over_time() -> None:
    jobs = load().jobs
    assert len(jobs) == 30
    assert {job.architecture.value for job in jobs} == {"ps", "allreduce"}
    assert len({job.submit_slot for job in jobs}) > 10
    assert load() == load()


def test_without_nodes_or_requests_there_is_none() -> None:
    down = [structs.replace(node, state=NodeState.DOWN) for node in NODES]
    assert generated_load(requests_to_try(LoadBalance(), NODES), down, (), 300.0) is None
    assert generated_load([], NODES, (), 300.0) is None


@pytest.mark.parametrize("policy", [Drf(), Fifo()])
def test_policies_without_weights_end_all_jobs(policy: Policy) -> None:
    assert checked(policy) == ReplayCheck(problem="", ended=30, jobs=30)


def test_jobs_that_are_left_waiting_are_counted() -> None:
    found = checked(StartsTen())
    assert found.problem == "leaves 20 of 30 jobs waiting on an idle cluster in a replay of the load"
    assert found.ended == 10


def test_a_decision_that_fails_is_told() -> None:
    assert checked(StartsTen(raises=True)).problem.startswith("fails in a replay of the load: ")


def test_it_ends_when_time_is_up() -> None:
    times = itertools.chain([0.0] * 100, itertools.repeat(61.0))
    found = replay_check(
        Drf(), LoadBalance(), {"the load": load(), "a recorded day": load()}, GuardRules(), clock=lambda: next(times),
        most_seconds=60.0,
    )  # fmt: skip
    assert (found.problem, found.cut_short) == ("", ("the load", "a recorded day"))
    assert 0 <= found.ended < found.jobs == 60
