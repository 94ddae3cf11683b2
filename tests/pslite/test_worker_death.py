"""A worker dies: the others do its part, nothing is rolled back, and the weights are those of the static run."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
from collections import Counter
from dataclasses import replace

import pytest
from pslite_jobs import LEASE, PATIENT, KillAt, Kills, Replace, command, run_job, schedules, static_digest
from rehearsal import job

from pslite.coordinator.stall_detector import ProgressRule
from pslite.job.reduction_tree import cover
from pslite.job.shard_and_block_assignment import ranges
from pslite.testing import Resize, run_local
from pslite.worker.training_session import Share

SLOW = ("--step-seconds", "0.02", "--epochs", "10")


def test_the_others_do_the_part_of_a_killed_worker(tmp_path):
    """The first of those that are left writes the files."""
    task, saved = "worker-0", tmp_path / "weights.npy"
    kill = KillAt(task, 20, planned=True)
    result = run_local(command(*SLOW, "--save", str(saved)), workers=3, servers=2, on_status=kill)
    assert saved.exists()
    assert result.state == "finished", result.log
    assert result.digest == static_digest(*SLOW)
    died = f"{task} on {socket.gethostname()} (pid {kill.pid}) died: killed by signal 9 (SIGKILL); "
    assert any(line.startswith(died) and "nothing is lost" in line for line in result.log)
    # the next plan is made without it
    assert [(p.workers, p.servers) for p in result.plans] == [(3, 2), (2, 2)]
    assert result.plans[1].removed == [task]
    assert result.exit_codes.pop(task) == 128 + 9
    assert set(result.exit_codes.values()) == {0}


@pytest.mark.parametrize(
    "options",
    [
        ("--optimizer", "lamb", "--clip", "0.5"),
        pytest.param(("--table", "--optimizer", "adam", "--wire", "bfloat16"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("transport", ["tcp"])
def test_whatever_is_trained_and_sent(options, transport):
    """A process is killed, and both roles are resized afterwards."""
    environ = {**os.environ, "DL2_TRANSPORT": transport}
    result = run_job(
        command(*SLOW, *options), workers=3, servers=2, environ=environ, on_status=KillAt("worker-1", 20),
        schedule=[Resize(40, 3, 1, wait=False), Resize(70, 2, 3)],
    )  # fmt: skip
    assert result.digest == static_digest(*SLOW, *options)
    assert len(result.plans) >= 3


@pytest.mark.slow
def test_a_process_that_stands_still_is_given_up_after_its_lease_and_killed_by_its_dl2_run():
    """Otherwise it would keep its GPU, and nobody would start another one in its place."""

    class Stop(KillAt):
        def __call__(self, status, director):
            if self.pid is None:
                return super().__call__(status, director)
            return director.processes[self.task].poll() is None

    stop = Stop("worker-1", 20, signal.SIGSTOP)
    result = run_job(command(*SLOW), workers=2, servers=1, on_status=stop, settings=LEASE)
    assert result.digest == static_digest(*SLOW)
    assert any(f"(pid {stop.pid}) died or hangs: silent for 8 s; worker-0 does its part" in line for line in result.log)
    assert result.exit_codes == {"worker-0": 0, "ps-0": 0, "worker-1": 128 + 9}


#: twice that before the first step
SOON = replace(PATIENT, progress=ProgressRule(seconds=4.0, factor=5.0))


@pytest.mark.parametrize("architecture", ["ps", pytest.param("allreduce", marks=pytest.mark.slow)])
def test_a_script_that_hangs_is_given_up_and_the_others_do_its_part(architecture, capfd):
    options = ("--epochs", "10", "--hang-at", "20", "--hang-task", "worker-1")
    servers = 1 if architecture == "ps" else 0
    result = run_job(command(*options), workers=3, servers=servers, settings=SOON)
    assert result.digest == static_digest("--epochs", "10")
    assert any(re.match(r"no progress for \d+ s: the job is still at version 20", line) for line in result.log)
    hung = r"no progress at version 20 for \d+ s: it has been computing step 20 .* in before_step"
    place = rf"worker-1 on .* died or hangs: {hung}"
    assert any(re.match(place, line) for line in result.log), result.log
    assert result.exit_codes == {task: int(task == "worker-1") for task in result.exit_codes}
    # all tasks have written their stacks
    assert capfd.readouterr().err.count("most recent call first") >= len(result.exit_codes)


@pytest.mark.slow
def test_a_script_that_hangs_again_after_its_restart_ends_the_job():
    result = run_job(command("--epochs", "10", "--hang-at", "20"), workers=1, servers=1, settings=SOON, state="failed")
    assert re.match(r"no progress at version 20 for \d+ s: worker-0 on .* has been computing step 20", result.reason)
    assert "this happened before within 24 h" in result.reason
    assert any("the job goes back to its beginning" in line for line in result.log)


def test_the_death_of_the_last_worker_ends_the_job_by_its_name():
    class KillBoth:
        pids: tuple[int, ...] = ()

        def __call__(self, status, director):
            workers = [m for m in status.members if m.role == "worker" and m.state == "active"]
            if not self.pids and status.version >= 20 and len(workers) == 2:
                self.pids = tuple(m.pid for m in workers)
                for pid in self.pids:
                    os.kill(pid, signal.SIGKILL)
            return not self.pids

    kill = KillBoth()
    result = run_job(command(*SLOW), workers=2, servers=1, on_status=kill, state="failed")
    assert any(f"(pid {pid}) died: killed by signal 9 (SIGKILL)" in result.reason for pid in kill.pids)


@pytest.mark.slow
def test_another_worker_comes_in_the_place_of_the_only_one(tmp_path):
    options, saved = (*SLOW, "--optimizer", "momentum"), tmp_path / "weights.npy"
    result = run_job(
        command(*options, "--save", str(saved)), workers=1, servers=2, on_status=Replace("worker-0", 20)
    )  # fmt: skip
    assert any("it was the last worker; the job goes back to its beginning" in line for line in result.log)
    assert result.digest == static_digest(*options)
    assert saved.exists()
    assert set(result.exit_codes.values()) == {0, 128 + 9}


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7])
def test_shares_cover_every_shard_once(mode, workers):
    spec = job(samples=64, batch=32, mode=mode, shards=16)
    shares = [Share(spec, workers, index) for index in range(workers)]
    parts = [part for share in shares for part in share.parts(share.nodes)]
    assert Counter(shard for part in parts for shard in range(part.low, part.high)) == Counter(range(16))
    # another worker computes the same for the nodes of one that is gone
    assert shares[-1].parts(shares[0].nodes) == shares[0].parts(shares[0].nodes)
    if mode == "exact":
        assert [share.nodes for share in shares] == [cover(low, high, 16) for low, high in ranges(16, workers)]


@pytest.mark.parametrize("seed", schedules(20, landing=3, fast=1))
def test_deaths_in_the_middle_of_resizes(seed):
    rng = random.Random(seed)
    schedule, version = [], 0
    for _ in range(rng.randint(1, 3)):
        version += rng.randint(5, 40)
        schedule.append(
            Resize(version, rng.randint(2, 4), rng.randint(1, 3), wait=rng.random() < 0.5, oldest=rng.random() < 0.3)
        )
    kills = [(max(1, rng.choice(schedule).at_version + rng.randint(-1, 3)), rng.random(), "worker") for _ in range(2)]
    result = run_job(
        command("--epochs", "20"), workers=3, servers=rng.randint(1, 3), schedule=schedule, on_status=Kills(kills)
    )
    assert result.digest == static_digest("--epochs", "20")
