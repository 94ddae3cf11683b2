"""A server dies whose blocks have replicas: another one goes on in its place, and no bit differs."""

from __future__ import annotations

import random
import re
import signal
import socket

import pytest
from pslite_jobs import LEASE, KillAt, Kills, Replace, command, run_job, schedules, static_digest
from rehearsal import job

from pslite.errors import SpecError
from pslite.storage.checkpoint_files import latest
from pslite.testing import Resize

SLOW = ("--step-seconds", "0.02", "--epochs", "10")
DURABLE = ("--durability", "durable")


def test_another_server_goes_on_in_the_place_of_a_killed_one():
    task = "ps-0"
    kill = KillAt(task, 20, planned=True)
    result = run_job(command(*SLOW, *DURABLE), workers=2, servers=3, on_status=kill)
    assert result.digest == static_digest(*SLOW)
    died = f"{task} on {socket.gethostname()} (pid {kill.pid}) died: killed by signal 9 (SIGKILL)"
    assert f"{died}; other servers take over its blocks" in result.log
    assert [(p.workers, p.servers) for p in result.plans] == [(2, 3), (2, 2)]
    assert result.exit_codes.pop(task) == 128 + 9
    assert set(result.exit_codes.values()) == {0}


@pytest.mark.slow
def test_a_server_that_hangs_is_given_up_after_its_lease():
    kill = KillAt("ps-1", 20, signal.SIGSTOP)
    result = run_job(command(*SLOW, *DURABLE), workers=2, servers=2, on_status=kill, settings=LEASE)
    assert result.digest == static_digest(*SLOW)
    assert any("died or hangs: silent for 8 s; other servers take over its blocks" in line for line in result.log)


def test_the_death_of_the_only_server_fails_the_job_by_name():
    kill = KillAt("ps-0", 20)
    result = run_job(command(*SLOW, *DURABLE), workers=2, servers=1, on_status=kill, state="failed")
    assert f"ps-0 on {socket.gethostname()} (pid {kill.pid}) died: killed by signal 9 (SIGKILL)" in "\n".join(
        result.log
    )


def test_where_there_are_no_servers_nothing_is_replicated():
    with pytest.raises(SpecError, match="durability is 'durable': this is not possible in an all-reduce job"):
        job(durability="durable", architecture="allreduce")


def test_another_durability_is_refused():
    with pytest.raises(SpecError, match="durability is 'relaxed': it must be 'none' or 'durable'"):
        job(durability="relaxed")


# --- no replicas --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "how"),
    [(("--optimizer", "momentum"), KillAt), (("--optimizer", "adam"), Replace)],
)
def test_without_replicas_the_job_begins_again(options, how):
    options, kill = (*SLOW, *options), how("ps-1", 20)
    result = run_job(command(*options), workers=2, servers=2, on_status=kill)
    died = f"ps-1 on {socket.gethostname()} (pid {kill.pid}) died: killed by signal 9 (SIGKILL)"
    assert f"{died}; the job goes back to its beginning" in result.log
    assert (result.digest, result.versions) == (static_digest(*options), 110)
    assert result.exit_codes.pop("ps-1") == 128 + 9
    assert set(result.exit_codes.values()) == {0}


def test_the_job_goes_back_to_its_newest_checkpoint(tmp_path):
    """Also one that has begun anew."""
    options = (*SLOW, "--optimizer", "momentum", "--checkpoint", str(tmp_path), "--every", "10", "--begin-anew")
    kill = KillAt("ps-1", 55)

    def when_there_is_one(status, director):
        return latest(tmp_path) is None or kill(status, director)

    result = run_job(command(*options), workers=2, servers=2, on_status=when_there_is_one)
    (back,) = [line for line in result.log if "the job goes back to its checkpoint of version" in line]
    version = int(re.search(r"(\d+)$", back).group(1))
    assert version >= 10
    # a newer one may have been completed meanwhile
    went_on = [
        int(found[1]) for line in result.log if (found := re.search(r"goes on from its .* version (\d+)$", line))
    ]
    assert went_on
    assert went_on[-1] >= version
    assert result.digest == static_digest(*SLOW, "--optimizer", "momentum")


@pytest.mark.parametrize("seed", schedules(12, landing=2))
def test_deaths_in_the_middle_of_resizes(seed):
    rng = random.Random(seed)
    schedule, version = [], 0
    for _ in range(rng.randint(1, 3)):
        version += rng.randint(5, 40)
        schedule.append(Resize(version, rng.randint(2, 4), rng.randint(3, 4), wait=False, oldest=rng.random() < 0.3))
    kills = [(max(1, rng.choice(schedule).at_version + rng.randint(-1, 3)), rng.random(), "ps") for _ in range(2)]
    kills.append((rng.randint(1, version), rng.random(), "worker"))
    result = run_job(
        command("--epochs", "20", *DURABLE), workers=2, servers=4, schedule=schedule, on_status=Kills(kills)
    )
    assert result.digest == static_digest("--epochs", "20")
