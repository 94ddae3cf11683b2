"""How many RPCs the manager sends to slurmctld, seen by fakes of Slurm's commands."""

from __future__ import annotations

import pytest
from slurm_fakes import Clock, FakeSlurm, Managers, identity, job_row, task

from dl2d.core.errors import Unavailable, Waiting
from dl2d_slurm.manager import SlurmManager

#: RPCs of a listing: of squeue and sinfo at most, and of the reservations, which are asked for once a minute.
LISTING = 5


def submit_all(manager: SlurmManager) -> int:
    """Submit as many tasks as are allowed; returns how many."""
    count = 0
    while manager.start_allowance().tasks:
        manager.submit(task())
        count += 1
    return count


def test_starts_leave_room_for_registrations_and_these_for_listings(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    manager = manager_on(rpcs_per_minute=100, submit_rate_per_second=1000)
    manager.listing()
    assert manager.start_allowance().tasks == 50 - LISTING
    assert submit_all(manager) == 50 - LISTING
    assert manager.start_allowance().reason == (
        "50 RPCs were sent to slurmctld in the last minute (rpcs_per_minute=100)"
    )
    slurm.answer("squeue", rows=[job_row(number) for number in range(20)])
    manager.stop([identity(number) for number in range(20)], 0.0)
    with pytest.raises(Waiting, match="RPCs were sent to slurmctld"):
        manager.authenticate("12", "MUNGE:AwQDAAB...:")
    assert manager.listing().nodes
    clock.now += 61
    assert manager.start_allowance().tasks == 50


def test_listings_are_limited_by_themselves(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    manager = manager_on(rpcs_per_minute=100)
    for _ in range(6):
        clock.now += 1
        manager.listing()
    with pytest.raises(Waiting, match=r"listed 6 times in the last minute.* again in 55 s"):
        manager.listing()
    clock.now += 56
    slurm.forget()
    manager.listing()
    assert [call.name for call in slurm.calls()] == ["squeue", "sinfo"]


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
        reason = f"Slurm is overloaded or limits the rate of RPCs; asked again in {seconds} s"
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


def test_a_command_without_an_answer_counts_as_an_overload(slurm: FakeSlurm, manager_on: Managers) -> None:
    manager = manager_on(command_timeout_seconds=1)
    slurm.answer("squeue", delay=30)
    with pytest.raises(Unavailable, match="did not answer"):
        manager.listing()
    with pytest.raises(Waiting):
        manager.listing()


def test_calls_are_counted_by_command(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    slurm.answer("squeue", rows=[job_row(number) for number in range(3)])
    manager = manager_on()
    manager.listing()
    manager.stop([identity(number) for number in range(3)], 30.0)
    found = manager.call_statistics()
    assert found.calls == {"sinfo": 1, "scontrol": 2, "squeue": 2, "scancel": 2}
    assert found.seconds.keys() == found.calls.keys()
    assert found.last_minute == 2 * 3 + 2 + 2 * 2 + 2 * (2 + 3)
    clock.now += 61
    assert manager.call_statistics().last_minute == 0
