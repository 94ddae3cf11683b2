"""All-reduce jobs: the bits of the static run under any schedule of resizes and deaths, and what is refused."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pslite_jobs import LEASE, PATIENT, KillAt, Kills, command, run_job, schedules, static_digest
from regression import Regression, segments
from rehearsal import QUICK, Event, Fault, Rehearsal, job
from rehearsal import static_digest as rehearsed_digest

from pslite.checkpoint import latest
from pslite.coordinator.stall_detector import ProgressRule
from pslite.errors import SpecError
from pslite.fault_points import FaultPoint
from pslite.job.job_spec import SGD, Part, Segment
from pslite.job.membership_plan import reduction
from pslite.job.reduction_tree import ROOT, TreeSum
from pslite.job.weight_blocks import cut
from pslite.numeric.gradient_sums import Bundle
from pslite.testing import Resize, run_local
from pslite.worker.allreduce.gradient_summing import Division, add_slices
from pslite.worker.single_process_session import SingleSession

TORCH = str(Path(__file__).with_name("torch_worker.py"))
SLOW = ("--step-seconds", "0.02", "--epochs", "8")


# --- who adds up what ---------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 16), st.data())
def test_slices_added_up_by_anybody_are_the_sum_along_the_tree(features, shards, data):
    spec = job(
        segments=segments(features, SGD(lr=0.1)), samples=64, batch=32, shards=shards, block_bytes=1024,
        architecture="allreduce",
    )  # fmt: skip
    blocks = cut(spec)
    size = data.draw(st.integers(1, 6))
    ready = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    like = Bundle(spec, blocks)
    how = Division(spec, size, ready, like.memory.size)
    rng = np.random.Generator(np.random.PCG64(data.draw(st.integers(0, 1000))))
    nodes = [node for own in how.nodes for node in own]
    assert sorted(nodes) == sorted(node for own in reduction(spec, len(how.active)).nodes for node in own)
    sums = {}
    for node in nodes:
        bundle = sums[node] = Bundle(spec, blocks)
        for array in bundle.arrays:
            array[:] = rng.standard_normal(array.size) * 10.0 ** rng.integers(-3, 4, array.size)

    def added(left, right):
        return [a + b for a, b in zip(left, right, strict=True)]

    tree = TreeSum(how.leaves, frozenset((ROOT,)))
    expected = None
    for node in nodes:
        done = tree.add(node, [array.copy() for array in sums[node].arrays], added)
        expected = done[1] if done else expected
    total = Bundle(spec, blocks)
    for rank in range(size):
        low, high = how.slices[rank]
        pieces = {node: bundle.memory[low:high].copy() for node, bundle in sums.items()}
        if high > low:
            total.memory[low:high] = add_slices(how.leaves, pieces, like, low)
        # what is sent to this member is what it expects
        for index in range(how.rounds):
            assert how.received(index, rank) == [how.sent(index, other)[rank] for other in range(size)]
    assert sorted(node for index in range(how.rounds) for node in how.origins(index)) == sorted(nodes)
    assert sum(how.width(rank) for rank in range(size)) == like.memory.size
    for mine, theirs in zip(total.arrays, expected, strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wire": "bfloat16"}, "wire is 'bfloat16': this is not possible in an all-reduce job"),
        ({"mode": "open", "epochs": 0}, "mode is 'open': this is not possible in an all-reduce job"),
        (
            {"segments": (Segment(dtype="float32", optimizer=SGD(lr=0.1), parts=(Part("w", (4, 2)),), sparse=True),)},
            "w is sparse: this is not possible in an all-reduce job",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(changes, message):
    with pytest.raises(SpecError, match=message):
        job(architecture="allreduce", **changes)


# --- whole jobs in one process ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected():
    # of a job with servers, in one process: the architecture makes no difference
    return rehearsed_digest(job())


def test_a_job_can_move_to_other_workers_altogether(expected):
    # the first goes only when another one has its state
    spec = job(architecture="allreduce")
    events = [Event(10, workers=2), Event(25, workers=1, oldest=True)]
    outcome = Rehearsal(spec, workers=1, servers=0, events=events).run()
    assert outcome.status.result.digest == expected
    assert outcome.status.plans[-1].removed == ["worker-0"]


def test_a_server_has_no_place_in_it():
    outcome = Rehearsal(job(architecture="allreduce"), workers=1, servers=1, step_seconds=0.01).run()
    assert outcome.status.state == "finished", (outcome.status.reason, outcome.log)
    assert {(p.workers, p.servers) for p in outcome.status.plans} == {(1, 0)}


def test_fast_mode_stays_close():
    class Kept(Regression):
        def __init__(self, spec):
            super().__init__(spec)
            self.trained = []

        def train(self, session, **hooks):
            super().train(session, **hooks)
            self.trained.append(session.weights.arrays[0].copy())

    spec = job(mode="fast", architecture="allreduce")
    alone = Kept(spec)
    alone.train(SingleSession(spec))
    rehearsal = Rehearsal(spec, workers=2, servers=0, events=[Event(10, workers=3)], model=Kept)
    outcome = rehearsal.run()
    outcome.check()
    assert outcome.status.plans[-1].workers == len(rehearsal.model.trained) == 3
    for weights in rehearsal.model.trained:
        np.testing.assert_allclose(weights, alone.trained[0], rtol=1e-4, atol=1e-6)


# --- real processes -----------------------------------------------------------------------------------------------


def environ():
    return {k: v for k, v in os.environ.items() if not k.startswith("DL2_")}


def test_resizes_of_real_processes():
    result = run_job(
        command("--optimizer", "adam", "--clip", "0.5"),
        workers=1,
        servers=0,
        schedule=[Resize(4, 3, 0), Resize(30, 2, 0, oldest=True)],
        settings=PATIENT,
    )
    assert [(p.workers, p.servers) for p in result.plans] == [(1, 0), (3, 0), (2, 0)]
    assert result.digest == static_digest("--optimizer", "adam", "--clip", "0.5")
    assert set(result.exit_codes.values()) == {0}


def test_the_others_go_on_without_a_killed_worker():
    kill = KillAt("worker-0", 20)
    result = run_job(command(*SLOW), workers=3, servers=0, on_status=kill)
    assert result.digest == static_digest(*SLOW)
    assert any(
        f"(pid {kill.pid}) died: killed by signal 9 (SIGKILL); the others go on without it" in line
        for line in result.log
    )
    assert [p.workers for p in result.plans] == [3, 2]
    assert result.exit_codes == {"worker-0": 128 + 9, "worker-1": 0, "worker-2": 0}


@pytest.mark.slow
def test_a_worker_that_hangs_is_given_up_after_its_lease():
    kill = KillAt("worker-1", 20, signal.SIGSTOP)
    result = run_job(command(*SLOW), workers=3, servers=0, on_status=kill, settings=LEASE)
    assert result.digest == static_digest(*SLOW)
    assert any(f"(pid {kill.pid}) died or hangs: silent for 8 s; the others go on" in line for line in result.log)


def test_the_death_of_the_last_worker_ends_the_job():
    kill = KillAt("worker-0", 20)
    result = run_job(command(*SLOW), workers=1, servers=0, on_status=kill, state="failed")
    assert f"(pid {kill.pid}) died: killed by signal 9 (SIGKILL)" in result.reason


def all_hang(*versions):
    """Have all scripts hang for longer than the deadline, once at each version."""

    def hang(moment):
        hung = moment.rehearsal.flag(f"{moment.task} at {moment.subject}")
        if moment.subject in versions and not hung.is_set():
            hung.set()
            moment.rehearsal.flag(f"told at {moment.subject}").wait(20.0)

    def told(moment):
        goes = [line for line in moment.rehearsal.log if line.startswith("no progress") and "goes back" in line]
        for version in versions[: len(goes)]:
            moment.rehearsal.flag(f"told at {version}").set()

    settings = replace(QUICK, progress=ProgressRule(seconds=2.0, factor=5.0))
    faults = [Fault("version", hang, always=True), Fault(FaultPoint.TICK, told, always=True)]
    return Rehearsal(job(architecture="allreduce"), workers=2, servers=0, settings=settings, faults=faults).run()


def test_all_workers_that_hang_begin_again_once():
    outcome = all_hang(20)
    outcome.check(rehearsed_digest(job()))
    (line,) = [line for line in outcome.log if "goes back" in line]
    assert line.count("has been computing step 20 since then") == 2, line
    assert line.endswith("the job goes back to its beginning")


@pytest.mark.slow
def test_a_job_goes_on_from_a_checkpoint_of_the_other_architecture(tmp_path):
    options = ("--optimizer", "momentum", "--checkpoint", str(tmp_path), "--every", "11")
    run_job(command(*options, "--epochs", "4"), workers=2, servers=0)
    saved = int(latest(tmp_path).name)  # 44, unless the disk is too slow to keep every one
    assert saved
    second = run_job(command(*options, "--epochs", "10"), workers=1, servers=2)
    assert any(f"goes on from its checkpoint of version {saved}" in line for line in second.log)
    assert second.digest == static_digest("--optimizer", "momentum")


@pytest.mark.slow
def test_a_network_of_torch_has_one_digest_alone_with_servers_and_without(tmp_path):
    alone = subprocess.run(
        [sys.executable, TORCH], env=environ(), capture_output=True, text=True, timeout=200, check=True
    )
    kill = KillAt("worker-0", 20)
    without = run_job([sys.executable, TORCH], workers=2, servers=0, schedule=[Resize(8, 3, 0)], on_status=kill)
    servers = run_local([sys.executable, TORCH], workers=1, servers=1)
    assert {alone.stdout.strip()} == {without.digest, servers.digest}


@pytest.mark.slow
def test_a_loop_in_the_style_of_ddp_has_one_digest_at_any_size():
    command_ = [sys.executable, TORCH, "--own-backward"]
    alone = subprocess.run(command_, env=environ(), capture_output=True, text=True, timeout=200, check=True)
    schedule = [Resize(5, 2, 0), Resize(15, 1, 0, oldest=True)]
    result = run_job(command_, workers=1, servers=0, schedule=schedule)
    assert result.digest == alone.stdout.strip()


@pytest.mark.parametrize("seed", schedules(15, landing=2))
def test_kills_in_the_middle_of_resizes_of_real_processes(seed):
    rng = random.Random(seed)
    schedule, version = [], 0
    for _ in range(rng.randint(1, 3)):
        version += rng.randint(5, 60)
        schedule.append(Resize(version, rng.randint(2, 4), 0, wait=rng.random() < 0.5, oldest=rng.random() < 0.3))
    at = [max(1, rng.choice(schedule).at_version + rng.randint(-1, 3)) for _ in range(2)]
    kills = Kills([(version, rng.random(), "worker") for version in at])
    result = run_job(command("--epochs", "20"), workers=3, servers=0, schedule=schedule, on_status=kills)
    assert result.digest == static_digest("--epochs", "20")
