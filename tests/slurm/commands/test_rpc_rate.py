"""How many RPCs the manager sends to slurmctld, seen by fakes of Slurm's commands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, repeat

import pytest
from slurm_fakes import Clock, FakeSlurm, Managers, identity, job_row, task

from dl2d.core.errors import Unavailable, Waiting
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.manager import SlurmManager

#: RPCs of a listing: of squeue and sinfo at most, and of the reservations, which are asked for once a minute.
LISTING = 5


def submit_all(manager: SlurmManager) -> int:
    """Submit as many tasks as are allowed; returns how many."""
    done = 0
    while manager.start_allowance().tasks:
        manager.submit(task())
        done += 1
    return done


def register(slurm: FakeSlurm, manager: SlurmManager, uid: int) -> None:
    """Authenticate a job of a user."""
    row = {"UserID": uid, "GroupID": 1, "Name": "x", "admin_comment": "", "Container": "", "MCSLabel": ""}
    slurm.answer("squeue", rows=[job_row(12, **row)])
    slurm.answer("scontrol", stdout="#!/bin/sh\n")
    slurm.answer("unmunge", stdout=f"STATUS:          0\nUID:             {uid}\nLENGTH:          7\n\ndl2d:12")
    manager.authenticate("12", "MUNGE:AwQDAAB...:")


def register_all(slurm: FakeSlurm, manager: SlurmManager, uids: Iterator[int]) -> tuple[int, str]:
    """Authenticate a job of each of these users until the manager says to wait; returns how many, and why."""
    for done, uid in enumerate(uids):
        try:
            register(slurm, manager, uid)
        except Waiting as waits:
            return done, str(waits)
    raise AssertionError("all have registered")


def test_starts_registrations_and_listings_have_each_a_part_of_their_own(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    manager = manager_on(rpcs_per_minute=100, submit_rate_per_second=1000, cluster="fake")
    manager.listing()
    assert manager.start_allowance().tasks == 50 - LISTING
    assert submit_all(manager) == 50 - LISTING
    assert manager.start_allowance().reason == (
        "50 RPCs were sent to slurmctld in the last minute (rpcs_per_minute=100)"
    )
    slurm.answer("squeue", rows=[job_row(number) for number in range(20)])
    manager.stop([identity(number) for number in range(20)], 0.0)
    done, reason = register_all(slurm, manager, count(1001))
    assert (done > 0, "RPCs were sent to slurmctld" in reason) == (True, True)
    assert manager.start_allowance().tasks == 0
    assert manager.listing().nodes
    clock.now += 61
    assert manager.start_allowance().tasks == 50
    assert "RPCs were sent to slurmctld" in register_all(slurm, manager, count(1001))[1]
    assert submit_all(manager) == 100 // 6


def test_a_user_whose_jobs_register_too_often_waits_alone(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    manager = manager_on(rpcs_per_minute=100, cluster="fake")
    register(slurm, manager, 1002)
    done, reason = register_all(slurm, manager, repeat(1001))
    assert "jobs of user 1001 have registered too often in the last minute" in reason
    register(slurm, manager, 1002)
    assert manager.start_allowance().tasks > 100 // 6
    clock.now += 61
    alone, reason = register_all(slurm, manager, repeat(1001))
    assert alone > done
    assert "jobs of user 1001 have registered too often in the last minute" in reason
    submit_all(manager)
    register(slurm, manager, 1002)
    clock.now += 59
    assert register_all(slurm, manager, repeat(1001))[0] == 0


def test_listings_are_limited_by_themselves(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    manager = manager_on(rpcs_per_minute=100)
    for _ in range(6):
        clock.now += 1
        manager.listing()
    with pytest.raises(Waiting, match=r"30 RPCs .* in the last minute, 30 of them for listings .* again in 55 s"):
        manager.listing()
    clock.now += 56
    slurm.forget()
    manager.listing()
    assert [call.name for call in slurm.calls()] == ["squeue", "sinfo"]


def test_no_more_than_the_maximum_is_sent_whatever_listings_and_registrations_ask_besides(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    """There are a reservation and, in each listing, new jobs, of which the nodes that they exclude are asked for."""
    manager = manager_on(rpcs_per_minute=100, submit_rate_per_second=1000, cluster="fake")
    submit_all(manager)
    register_all(slurm, manager, count(1001))
    slurm.answer("scontrol", stdout=f"ReservationName=ml StartTime=1 EndTime={clock.now + 900:.0f} Nodes=n2 TRES=cpu=8")
    for number in count(100):
        slurm.answer("squeue", rows=[job_row(number, State="PENDING", Reason="Resources")])
        clock.now += 1
        try:
            manager.listing()
        except Waiting:
            break
    assert 80 < manager.call_statistics().last_minute <= 100
    assert manager.start_allowance().tasks == 0
    slurm.answer("squeue", rows=[job_row(number) for number in range(80)])
    manager.stop([identity(number) for number in range(80)], 0.0)
    clock.now += 58
    manager.listing()  # those that cancelled the jobs do not count


def test_registrations_that_run_at_once_count_with_all_that_they_may_send(clock: Clock) -> None:
    rate = RpcRate(100, clock.timer)
    over = threading.Event()

    def register(user: int) -> bool:
        try:
            with rate.registration(user):
                admitted.release()
                return over.wait(30)
        except Waiting:
            admitted.release()
            return False

    admitted = threading.Semaphore(0)
    with ThreadPoolExecutor(9) as pool:
        running = [pool.submit(register, user) for user in range(8)]
        for _ in running:
            assert admitted.acquire(timeout=30)
        with rate.listing():
            assert rate.start_allowance().tasks == 100 // 6
        over.set()
    assert sum(each.result() for each in running) == 5
    assert rate.start_allowance().tasks == 50


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (1, "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"),
        (1, "sbatch: error: Batch job submission failed: Resource temporarily unavailable"),
        (1, "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"),
        (0, "sbatch: RPC rate limited 1 time(s). Sleeping for 1 seconds then trying again."),
    ],
)
def test_after_an_overload_all_but_cancelling_waits_and_twice_as_long_each_time(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, status: int, said: str
) -> None:
    slurm.answer("squeue", rows=[job_row(1)])
    manager = manager_on()
    manager.listing()

    def overload() -> None:
        slurm.answer("sbatch", status=status, stdout="77\n", stderr=f"{said}\n")
        if status:
            with pytest.raises(Unavailable):
                manager.submit(task())
        else:
            manager.submit(task())

    def waits(seconds: int) -> None:
        reason = f"Slurm is overloaded or limits the rate of RPCs; dl2d asks again in {seconds} s"
        assert manager.start_allowance() == (0, reason)
        for call in (manager.listing, lambda: manager.authenticate("12", "MUNGE:AwQDAAB...:")):
            with pytest.raises(Waiting, match=reason):
                call()
        slurm.forget()
        manager.stop([identity(1)], 0.0)
        assert [call.name for call in slurm.calls()] == ["squeue", "scancel"]
        clock.now += seconds
        assert manager.start_allowance().tasks

    for seconds in (5, 10, 20, 40, 60, 60):
        overload()
        overload()  # of several commands at once, the first counts
        waits(seconds)
    clock.now += 60
    overload()
    waits(5)
    assert manager.call_statistics().overloads == 13


def test_a_listing_without_an_answer_counts_as_an_overload(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    manager = manager_on(command_timeout_seconds=1)
    slurm.answer("squeue", delay=30)
    with pytest.raises(Unavailable, match="did not answer"):
        manager.listing()
    # It is said what was seen, and a part of a second is no 0 s.
    for seconds, says in ((0.0, "5 s"), (4.8, "1 s")):
        clock.now += seconds
        with pytest.raises(Waiting, match=f"^squeue did not answer within 1 s; dl2d asks again in {says}$"):
            manager.listing()


def test_one_users_start_and_limits_without_an_answer_are_no_overload(
    slurm: FakeSlurm, manager_on: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dl2d_slurm.limits.association_limits._ANSWER_SECONDS", 0.5)
    manager = manager_on(command_timeout_seconds=2, poll_floor_seconds=0)
    slurm.answer("squeue", rows=[job_row(1)])
    slurm.answer("scontrol", delay=30)
    slurm.answer("sbatch", delay=30)
    manager.listing()
    with pytest.raises(Unavailable, match="sbatch did not answer"):
        manager.submit(task())
    assert manager.call_statistics().overloads == 0
    assert manager.listing().jobs
    assert manager.start_allowance().tasks


def test_calls_are_counted_by_command(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    slurm.answer("squeue", rows=[job_row(number) for number in range(3)])
    manager = manager_on()
    manager.listing()
    manager.stop([identity(number) for number in range(3)], 30.0)
    found = manager.call_statistics()
    assert found.calls == {"sinfo": 1, "scontrol": 5, "squeue": 2, "scancel": 2}
    assert found.seconds.keys() == found.calls.keys()
    assert found.last_minute == 2 * 3 + 2 + 5 * 2 + 2 * (2 + 3)
    clock.now += 61
    assert manager.call_statistics().last_minute == 0
