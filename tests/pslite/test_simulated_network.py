"""Jobs on a simulated network, with partitions, pauses, deaths and stalled disks: as if nothing had happened.

Each seed is a job with its schedule of disturbances (`simulated_job.random_schedule`).  A failure is the same each
time; its text has the schedule and all that was said.  What a seed has found is a test of its own below.
"""

from __future__ import annotations

import os
import re
import threading
import time

import pytest
from rehearsal import job
from simulated_job import Disturbance, Schedule, SimulatedJob, check, random_open_schedule, random_schedule
from virtual_threads import Kernel

from pslite.net import authentication

#: how many seeds the long test goes through, from the first after those of the short one
SEEDS = int(os.environ.get("PSLITE_SIMULATION_SEEDS", "200"))
FEW, SLOW = 3, 10


@pytest.mark.parametrize("seed", range(FEW))
def test_nothing_is_lost_or_doubled_on_a_bad_network(seed, tmp_path):
    check(random_schedule(seed, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        *range(FEW, SLOW),
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(SLOW, FEW + SEEDS)),
    ],
)
def test_nothing_is_lost_or_doubled_on_a_bad_network_of_any_seed(seed, tmp_path):
    """``PSLITE_SIMULATION_SEEDS=10000`` tries so many."""
    check(random_schedule(seed, tmp_path))


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, SLOW)),
        *(pytest.param(seed, marks=(pytest.mark.slow, pytest.mark.nightly)) for seed in range(SLOW, SEEDS)),
    ],
)
def test_every_version_of_a_script_with_its_own_loop_is_that_of_one_process(seed):
    check(random_open_schedule(seed))


def test_a_thread_of_another_test_has_its_own_clock():
    read = []
    with Kernel(1).installed(("pslite",), {}):
        virtual = authentication.time.monotonic()
        thread = threading.Thread(target=lambda: read.append(authentication.time.monotonic()))
        began = time.monotonic()
        thread.start()
        thread.join()
    assert virtual == Kernel(1).now
    assert began <= read[0] <= time.monotonic()


def test_a_seed_has_the_same_course_each_time():
    """To the last switch between threads."""
    courses = []
    for _ in range(2):
        simulated = SimulatedJob(Schedule(1, job(epochs=2), 2, 2))
        simulated.simulate()
        courses.append((simulated.kernel.trace, simulated.kernel.switches, simulated.kernel.now))
    assert courses[0] == courses[1]


def test_members_do_not_count_as_late_for_a_plan_that_a_stalled_disk_holds_back():
    """A plan is sent once it is in the coordinator's log; seed 471."""
    stall = Disturbance(1.0, "stall", -1, -1, seconds=60.0)
    kill = Disturbance(2.0, "kill", 0)
    simulated = check(Schedule(1, job(epochs=10), 2, 2, [stall, kill]))
    said = "\n".join(simulated.log)
    assert "stall" in said
    assert "is killed" in said
    assert "not ready within" not in said


def test_members_wait_for_a_new_coordinator_whose_disk_stalls():
    """It takes nobody back before it has written its log; seed 1898."""
    stall = Disturbance(1.0, "stall", -1, -1, seconds=60.0)
    kill = Disturbance(1.5, "kill", -1)
    simulated = check(Schedule(1, job(epochs=10), 2, 2, [stall, kill]))
    said = "\n".join(simulated.log)
    assert "coordinator is killed" in said
    assert "goes on from its log" in said
    assert "has ended" not in said


def test_another_worker_writes_files_if_the_first_one_is_lost_before_it_knows_that_it_should():
    """The worker of rank 0 is the one that writes them; seed 542."""
    cut = Disturbance(1.0, "cut one way", -1, 2, seconds=60.0)
    simulated = check(Schedule(1, job(epochs=2), 3, 2, [cut]))
    lost = [line for line in simulated.log if "another worker writes files" in line]
    assert [line.split(maxsplit=1)[0] for line in lost] == ["worker-0"]
    assert any(line.startswith("finished") for line in simulated.log)


def test_what_a_member_says_of_an_earlier_plan_drops_nobody(tmp_path):
    """A stalled disk delays what it is told of a connection that was closed; seed 1009."""
    simulated = check(random_schedule(1009, tmp_path))
    assert not [line for line in simulated.log if "although both live" in line]


def test_files_of_a_server_that_was_given_up_before_the_job_went_back_do_not_count(tmp_path):
    """It lives, and says late that it has written them; seed 4922."""
    said = "\n".join(check(random_schedule(4922, tmp_path)).log)
    assert re.search(r"ps-\d was given up", said)
    assert "goes back to its checkpoint" in said
