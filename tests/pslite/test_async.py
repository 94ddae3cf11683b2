"""Async mode: a push is applied when it comes, within bounds; resizes and deaths are gone through, and it learns."""

from __future__ import annotations

import math
import os
import random
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
from pslite_jobs import KillAt, Replace, command, run_job
from regression import Regression, table_segments
from rehearsal import QUICK, Event, Rehearsal, job, random_events
from variants import first, nightly
from weather import CutData, rough_weather

from pslite.errors import SpecError
from pslite.job.job_spec import LAMB, SGD, Segment
from pslite.storage.checkpoint_files import Checkpoint, latest
from pslite.testing import Resize
from pslite.worker.single_process_session import SingleSession

#: of those with deaths of servers; more are gone through by setting it so
SCHEDULES = int(os.environ.get("PSLITE_SCHEDULES", "8"))
FIRST = int(os.environ.get("PSLITE_FIRST_SCHEDULE", "0"))


#: a member that dies unseen while there is no coordinator is given up so many seconds later
BRIEF = replace(QUICK, lease=6.0)


class Loose(Regression):
    """What is pushed is added up in the order in which it comes."""

    exact = False

    def train(self, session, **hooks):
        super().train(session, **hooks)
        self.ends.append(session.weights.arrays[1].copy())

    def __init__(self, spec):
        super().__init__(spec)
        #: of each worker that has stayed to the end, what it has seen then
        self.ends = []


def expected_weights(spec):
    session = SingleSession(spec)
    Regression(spec).train(session)
    return session.weights.arrays[0]


def at_the_end(folder):
    return Checkpoint(latest(folder)).tensors()


def counted(tmp_path, **changes):
    """A job that keeps a checkpoint of its last version, where every contribution must be in."""
    return job(mode="async", checkpoint=str(tmp_path), checkpoint_every=60, resume=False, **changes)


@pytest.mark.parametrize("transport", ["", "tcp"])
@pytest.mark.parametrize("staleness", [0, 1, 5])
@pytest.mark.parametrize("seed", first(1, range(6)))
def test_every_contribution_is_applied_once_whatever_the_resizes(seed, staleness, transport, monkeypatch, tmp_path):
    monkeypatch.setenv("DL2_TRANSPORT", transport)
    every_contribution_is_applied_once(seed, staleness, tmp_path)


@pytest.mark.parametrize("seed", first(2, range(FIRST, FIRST + SCHEDULES)))
def test_every_contribution_is_applied_once_although_connections_break(seed, monkeypatch, tmp_path):
    monkeypatch.setenv("DL2_TRANSPORT", ("", "tcp")[seed % 2])
    cuts = CutData(seed, often=0.02)
    every_contribution_is_applied_once(seed, (0, 1, 5)[seed % 3], tmp_path, cuts.faults)
    assert cuts.broken


def every_contribution_is_applied_once(seed, staleness, tmp_path, faults=()):
    spec = counted(tmp_path, staleness=staleness)
    rng = random.Random(seed)
    events = random_events(rng, last=45, kills=[])
    rehearsal = Rehearsal(
        spec, workers=rng.randint(1, 4), servers=rng.randint(1, 4), events=events, faults=faults, model=Loose
    )
    outcome = rehearsal.run()
    assert outcome.status.state == "finished", outcome.log
    assert not outcome.surprises, (outcome.surprises, outcome.log)
    # nobody ends without what others have pushed last
    assert rehearsal.model.ends
    np.testing.assert_allclose(rehearsal.model.ends, 60.0, rtol=1e-12)
    tensors = at_the_end(tmp_path)
    # the counter moves by its samples' part of the batch with each contribution
    np.testing.assert_allclose(tensors["seen"], 60.0, rtol=1e-12)
    weights = np.concatenate([tensors["weight"], tensors["bias"]])
    reference = expected_weights(job(mode="fast"))
    assert np.linalg.norm(weights - reference) < 0.1 * np.linalg.norm(reference)


@pytest.mark.parametrize("transport", ["", "tcp"])
@pytest.mark.parametrize("seed", first(2, range(8)))
def test_deaths_leave_samples_out_but_nothing_hangs(seed, transport, monkeypatch, tmp_path):
    monkeypatch.setenv("DL2_TRANSPORT", transport)
    spec = counted(tmp_path, staleness=2)
    rng = random.Random(seed)
    events = random_events(rng, last=45, kills=["worker"] * rng.randint(1, 2))
    outcome = Rehearsal(
        spec, workers=rng.randint(2, 4), servers=rng.randint(1, 3), events=events, model=Loose
    ).run()  # fmt: skip
    assert outcome.status.state == "finished", outcome.log
    assert not outcome.surprises, (outcome.surprises, outcome.log)
    seen = at_the_end(tmp_path)["seen"]
    assert np.all(seen <= 60.0 + 1e-9)
    # at most the parts of the dead, until the plan without them: who is left has a quarter of each batch at least, but
    # for the last one of an epoch, which has one sample
    plans = {task: plan.first_version for plan in outcome.status.plans for task in plan.removed}
    until = max(plans.get(task, 60) for task in outcome.killed) if outcome.killed else 0
    steps = math.ceil(spec.samples / spec.batch)
    least = 0.25 * (until - math.ceil(until / steps))
    assert np.all(seen >= 60.0 - until + least - 1e-9), (seen, outcome.killed, plans)


@pytest.mark.parametrize(
    "seed", [seed if seed in (0, 3, 4) else nightly(seed) for seed in range(FIRST, FIRST + SCHEDULES)]
)
def test_a_job_goes_back_when_a_server_dies(seed, monkeypatch, tmp_path):
    goes_back_when_a_server_dies(seed, monkeypatch, tmp_path, rough_weather(seed) if seed % 5 == 4 else ())


def goes_back_when_a_server_dies(seed, monkeypatch, tmp_path, faults):
    """It has every contribution once, but for those of dead workers."""
    monkeypatch.setenv("DL2_TRANSPORT", ("", "tcp")[seed % 2])
    rng = random.Random(seed)
    kills = [*["ps"] * rng.randint(1, 2), *["worker"] * rng.choice((0, 0, 1))]
    kills += ["coordinator"] * rng.choice((0, 0, 0, 1))
    events = random_events(rng, last=45, kills=kills)
    workers, servers = rng.randint(1, 4), rng.randint(1, 4)
    spec = counted(tmp_path, staleness=rng.choice((0, 1, 2, 5, 1024)))
    settings = QUICK if "coordinator" not in kills else BRIEF
    rehearsal = Rehearsal(
        spec, workers=workers, servers=servers, events=events, faults=faults, settings=settings, model=Loose
    )
    outcome = rehearsal.run()
    story = f"seed {seed}: {workers} workers, {servers} servers, killed {outcome.killed}\n{outcome.story}"
    assert outcome.status.state == "finished", story
    assert outcome.status.version == spec.total_versions, story
    assert not outcome.surprises, story
    seen = at_the_end(tmp_path)["seen"]
    assert np.all(seen <= 60.0 + 1e-9), story
    if not any(task.startswith("worker") for task in outcome.killed):
        np.testing.assert_allclose(seen, 60.0, rtol=1e-12)


def test_with_staleness_nobody_waits_for_the_slowest_within_its_bound():
    """A worker that stands still holds the other one up after `staleness` versions, and not before."""
    reached, stands, goes_on = [], threading.Event(), threading.Event()
    lock, slow = threading.Lock(), []

    class Uneven(Loose):
        def train(self, session, *, before_step):
            def wait(version):
                before_step(version)
                with lock:
                    if version == 10 and not slow:
                        slow.append(session)
                if slow and slow[0] is session:
                    if version == 10:
                        stands.set()
                        assert goes_on.wait(120)
                elif stands.is_set() and not goes_on.is_set():
                    reached.append(version)
                    if version == 13:
                        threading.Timer(0.3, goes_on.set).start()

            super().train(session, before_step=wait)

    outcome = Rehearsal(job(mode="async", staleness=3), workers=2, servers=2, model=Uneven).run()
    assert outcome.status.state == "finished", outcome.log
    assert not outcome.surprises, outcome.surprises
    # version 10 is not complete: the other one computes steps up to 13 and gets no version 14
    assert max(reached) == 13


def test_a_plan_takes_effect_while_workers_are_at_different_versions(tmp_path):
    events = [Event(10, workers=3, servers=3), Event(20, workers=1, servers=1, oldest=True), Event(30, workers=4)]
    spec = counted(tmp_path, staleness=8)
    outcome = Rehearsal(spec, workers=2, servers=1, events=events, model=Loose).run()
    assert outcome.status.state == "finished", outcome.log
    assert not outcome.surprises, (outcome.surprises, outcome.log)
    assert len(outcome.status.plans) >= 3
    np.testing.assert_allclose(at_the_end(tmp_path)["seen"], 60.0, rtol=1e-12)


@pytest.mark.parametrize("transport", first(1, ("", "tcp")))
def test_processes_are_killed_and_resized(transport):
    environ = {**os.environ, "DL2_TRANSPORT": transport}
    result = run_job(
        command("--mode", "async", "--staleness", "3", "--step-seconds", "0.01", "--epochs", "15"),
        workers=3, servers=2, environ=environ, on_status=KillAt("worker-1", 20),
        schedule=[Resize(50, 3, 1, wait=False)],
    )  # fmt: skip
    assert any("its samples are left out until the next plan" in line for line in result.log)


ASYNC = ("--mode", "async", "--staleness", "3", "--step-seconds", "0.01", "--epochs", "15")


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "how", "task"), [(2, KillAt, "ps-1"), (1, Replace, "ps-0")])
def test_a_job_whose_server_is_killed_begins_again(servers, how, task):
    options = command(*ASYNC, "--optimizer", "momentum")
    result = run_job(options, workers=3, servers=servers, on_status=how(task, 20))
    assert any("the job goes back to its beginning" in line for line in result.log)


def test_who_prefers_it_has_the_job_end_with_a_server():
    kill = KillAt("ps-1", 20)
    result = run_job(command(*ASYNC, "--on-loss", "fail"), workers=2, servers=2, on_status=kill, state="failed")
    died = f"ps-1 on {socket.gethostname()} (pid {kill.pid}) died: killed by signal 9 (SIGKILL)"
    assert result.reason.startswith(died)
    assert "on_loss is 'fail'" in result.reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"clip_norm": 1.0},
            "clip_norm is 1.0: this is not possible in async mode, where workers do not take their steps together",
        ),
        ({"durability": "durable"}, "durability is 'durable': this is not possible in async mode"),
        ({"segments": table_segments(9, 2, SGD(lr=0.1))}, "table is sparse: this is not possible in async mode"),
        (
            {"segments": (Segment("float32", LAMB(), job().segments[0].parts),)},
            "LAMB: this is not possible in async mode",
        ),
        ({"staleness": -1}, "staleness is -1"),
        ({"mode": "fast", "staleness": 1}, "staleness is 1: it needs mode"),
    ],
)
def test_what_needs_a_common_step_is_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        job(**{"mode": "async", **changes})
