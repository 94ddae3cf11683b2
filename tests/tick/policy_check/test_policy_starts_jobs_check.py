"""Whether a policy starts jobs on an idle cluster, tried before it decides on a real one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from policies.snapshots import NO_PS, a_job, cluster
from tick.world import GivesNothing

from dl2d.core.cluster import Node, NodeState
from dl2d.core.decision import Alternative
from dl2d.core.jobs import NOTHING, Allocation
from dl2d.core.resources import Resources
from dl2d.placement.best_fit import BestFit
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.placement.load_balance import LoadBalance
from dl2d.placement.optimus import Optimus
from dl2d.plugins import load_policy
from dl2d.policies.drf import Drf
from dl2d.tick.policy_check.policy_starts_jobs_check import requests_to_try, start_check

BUILT_IN = ("dl2", "drf", "fifo", "lookahead", "optimus", "srtf", "tetris")


@pytest.mark.parametrize("placement", [LoadBalance(), BestFit(), Dl2Paper(), Optimus()], ids=lambda one: one.name)
@pytest.mark.parametrize("name", BUILT_IN)
def test_what_comes_with_dl2d_starts_all(name: str, placement) -> None:
    wide = a_job(0, worker=Resources.of(cpu=4, gpu=2), min_workers=3, min_ps=2).request
    for nodes in ([], cluster(1, cpu=1), cluster(20, cpu=16, gpu=8)):
        done = start_check(load_policy(name), placement, nodes, [wide, a_job(1, **NO_PS).request])
        assert done.problem == ""
        assert done.jobs > 0


def test_one_that_gives_nothing_is_refused_with_numbers() -> None:
    done = start_check(GivesNothing(), LoadBalance(), cluster(2, cpu=8, gpu=2))
    assert len(done.waiting) == done.jobs
    assert done.problem.startswith(f"leaves {done.jobs} of {done.jobs} jobs waiting on an idle cluster (one asks for ")


class GivesGpusToNoOne(GivesNothing):
    """A policy that starts jobs that need no GPU, and leaves the others waiting."""

    def decide(self, snapshot, packing, rng):
        decision = Drf().decide(snapshot, packing, rng)
        gpu = {job.key for job in snapshot.jobs if job.request.worker.get("gpu")}
        jobs = (replace(entry, allocation=NOTHING) if entry.job in gpu else entry for entry in decision.jobs)
        return replace(decision, jobs=tuple(jobs), actions=())


def test_the_small_jobs_need_gpus_though_nodes_without_have_more_of_all_else() -> None:
    nodes = [Node("large", Resources.of(cpu=64, memory=2**20)), Node("gpu", Resources.of(cpu=8, gpu=1, memory=2**12))]
    assert start_check(GivesGpusToNoOne(), LoadBalance(), nodes).waiting


@pytest.mark.parametrize(
    ("amounts", "worker", "ps"),
    [
        ({"cpu": 8, "gpu": 2, "memory": 2**12}, {"cpu": 1, "gpu": 1}, {"cpu": 1}),
        ({"cpu": 0.5}, {"cpu": 0.5}, {"cpu": 0.5}),
        ({"gpu": 4}, {"gpu": 1}, {"gpu": 1}),
        ({"gpu": 4, "memory": 2**12}, {"gpu": 1}, {"memory": 1}),
        ({"npu": 4}, {"npu": 1}, {"npu": 1}),
        ({"memory": 2**12, "npu": 0.5}, {"memory": 1}, {"memory": 1}),
    ],
    ids=" ".join,
)
def test_the_small_jobs_ask_for_something_that_the_nodes_have(amounts, worker, ps) -> None:
    """On nodes without CPUs and GPUs they asked for nothing, and a policy that left them out was refused."""
    nodes = cluster(3, **amounts)
    small = requests_to_try(LoadBalance(), nodes)
    assert {request.worker for request in small} == {Resources.of(worker)}
    assert {request.ps for request in small if request.max_ps} == {Resources.of(ps)}
    for name in ("dl2", "drf"):
        assert start_check(load_policy(name), LoadBalance(), nodes).problem == ""


def test_nodes_that_have_nothing_have_no_small_jobs() -> None:
    assert requests_to_try(LoadBalance(), cluster(2)) == []


class OnlyRings:
    """A policy that has never seen a parameter server, and gives jobs that ask for one nothing."""

    name, version, needs = "rings", "1", Drf.needs

    def decide(self, snapshot, packing, rng):
        decision = Drf().decide(snapshot, packing, rng)
        with_ps = {job.key for job in snapshot.jobs if job.request.max_ps}
        return replace(
            decision,
            jobs=tuple(
                replace(entry, allocation=Allocation(0, 0)) if entry.job in with_ps else entry
                for entry in decision.jobs
            ),
            actions=(),
        )


def test_a_kind_of_job_that_is_never_started_is_found_and_named() -> None:
    done = start_check(OnlyRings(), LoadBalance(), cluster(2, cpu=8, gpu=2))
    assert 0 < len(done.waiting) < done.jobs
    assert "a PS, at least 1w+1ps)" in done.problem


class Odd(OnlyRings):
    def __init__(self, how: str) -> None:
        self.how = how

    def decide(self, snapshot, packing, rng):
        decision = Drf().decide(snapshot, packing, rng)
        if self.how == "raises":
            raise ValueError("cut short")
        if self.how == "overflows":
            np.float32(3e38) * np.float32(np.arange(9)).sum()
            scores = (Alternative(Allocation(1, 1), float("nan")),)
            return replace(decision, jobs=tuple(replace(entry, alternatives=scores) for entry in decision.jobs))
        return replace(decision, jobs=decision.jobs[1:])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "ValueError: cut short"),
        ("overflows", "with score nan, which is not a finite number"),
        ("forgets", "exactly once"),
    ],
)
def test_what_fails_is_told_in_one_sentence(how: str, words: str) -> None:
    problem = start_check(Odd(how), LoadBalance(), []).problem
    assert problem.startswith("fails on an idle cluster: ")
    assert words in problem
    assert "\n" not in problem


def test_jobs_that_could_never_start_and_nodes_that_take_none_are_left_out() -> None:
    huge = a_job(0, worker=Resources.of(cpu=900)).request
    down = Node("down", Resources.of(cpu=1000, gpu=8), state=NodeState.DOWN)
    assert start_check(Drf(), LoadBalance(), [*cluster(1, cpu=8, gpu=2), down], [huge]).problem == ""
