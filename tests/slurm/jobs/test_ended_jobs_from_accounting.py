"""Jobs that ended while dl2d was away: what is asked of sacct, and what is made of its answer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from slurm_fakes import Clock, FakeSlurm, Managers, job_row

from dl2d.core.errors import Unavailable
from dl2d.core.jobs import Owner
from dl2d.core.resource_manager import RmJob, RmJobState, StaticJob
from dl2d.core.resources import Resources

RULES = [{"partition": "gpu", "name": "bert-*", "model": "bert"}, {"partition": "ml", "model": "gpt", "size": "gpu"}]
BY_GPU = [{"partition": "gpu", "model": "bert", "size": "gpu"}]
HOUR = 3600.0


def ended(number: int, **more: object) -> dict[str, object]:
    """As sacct of Slurm 22.05 shows a job of two nodes."""
    row = {
        "JobIDRaw": number, "JobID": number, "State": "COMPLETED", "Submit": 995_000, "Start": 995_100, "End": 998_000,
        "ExitCode": "0:0", "User": "alice", "UID": 1001, "GID": 1002, "Account": "lab", "Partition": "gpu",
        "QOS": "normal", "NodeList": "n[1-2]", "NNodes": 2, "AllocTRES": "billing=6,cpu=6,gres/gpu=3,mem=600M,node=2",
        "ReqTRES": "billing=6,cpu=6,gres/gpu=3,mem=600M,node=2", "Timelimit": "02:00:00", "Reason": "None",
        "JobName": "bert-large",
    }  # fmt: skip
    return {**row, **more}


def step(number: int, name: str, tasks: int) -> dict[str, object]:
    return {"JobIDRaw": f"{number}.{name}", "JobID": f"{number}.{name}", "State": "COMPLETED", "NTasks": tasks}


def from_accounting(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, *rows: dict[str, object], rules: object = RULES
) -> list[RmJob]:
    slurm.answer("sacct", rows=list(rows))
    listing = manager_on(watch=rules).listing(clock.now - HOUR)
    assert listing.ended_until == clock.now
    return list(listing.jobs)


def test_a_job_that_slurmctld_has_forgotten(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    rows = (ended(7), step(7, "batch", 1), step(7, "0", 3), step(7, "1", 2))
    assert from_accounting(slurm, manager_on, clock, *rows) == [
        RmJob(
            handle="7", state=RmJobState.DONE, user="alice", node="n1", submitted=995_000, ended=998_000.0,
            static=StaticJob(
                name="bert-large", model="bert", owner=Owner("alice", 1001, 1002, "lab", "gpu", "normal"), workers=3,
                task=Resources.of(cpu=2, memory=200, gpu=1), nodes=("n1", "n1", "n2"), limit=7200.0, started=995_100.0,
            ),
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "state", "reason"),
    [
        ({"State": "CANCELLED by 1001"}, RmJobState.CANCELLED, "CANCELLED by 1001"),
        ({"State": "FAILED", "ExitCode": "3:0"}, RmJobState.FAILED, "FAILED, exit status 3"),
        ({"State": "FAILED", "ExitCode": "0:15"}, RmJobState.CANCELLED, "FAILED, signal 15"),
        ({"State": "TIMEOUT", "ExitCode": "0:0"}, RmJobState.TIME_LIMIT, "TIMEOUT"),
        ({"State": "NODE_FAIL"}, RmJobState.LOST, "NODE_FAIL"),
        ({"State": "OUT_OF_MEMORY", "ExitCode": "0:125"}, RmJobState.OUT_OF_MEMORY, "OUT_OF_MEMORY, signal 125"),
    ],
)
def test_how_it_ended(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, more: dict[str, object], state: RmJobState, reason: str
) -> None:
    (job,) = from_accounting(slurm, manager_on, clock, ended(7, **more))
    assert (job.state, job.reason) == (state, reason)


def test_a_job_that_was_held_while_it_ran(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    jobs = from_accounting(slurm, manager_on, clock, ended(7, Eligible="Unknown"), ended(8))
    assert [(job.handle, job.state) for job in jobs] == [("7", RmJobState.DONE), ("8", RmJobState.DONE)]


def test_sizes(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    # Without steps of its own a job has one task on each node; GPUs are accounted for.
    (job,) = from_accounting(slurm, manager_on, clock, ended(7), step(7, "batch", 1))
    assert job.static is not None
    assert (job.static.workers, job.static.task.get("cpu")) == (2, 3)
    (job,) = from_accounting(slurm, manager_on, clock, ended(7, JobName="x|\ny"), rules=BY_GPU)
    assert job.static is not None
    assert (job.static.workers, job.static.nodes, job.static.name) == (3, ("n1", "n1", "n2"), "x|?y")
    assert "--allocations" in slurm.calls("sacct")[-1].argv
    # One that was cancelled while it waited.
    waited = ended(7, State="CANCELLED by 0", Start=998_000, NodeList="None assigned", AllocTRES="")
    (job,) = from_accounting(slurm, manager_on, clock, waited, rules=BY_GPU)
    assert job.static is not None
    assert (job.static.workers, job.static.nodes, job.static.started) == (3, (), 0.0)


def test_arrays_have_the_ids_that_users_know(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    rows = [ended(13, JobID="12_3"), step(13, "batch", 1), ended(12, JobID="12_[4-5%1]", State="PENDING")]
    slurm.answer("squeue", rows=[job_row(12, State="PENDING", NodeList="", JobArrayID=f"12_{task}", SubmitTime=995_000)
                                 for task in (4, 5)])  # fmt: skip
    jobs = from_accounting(slurm, manager_on, clock, *rows)
    assert [(job.handle, job.array_id, job.state) for job in jobs] == [
        ("12", "12_4", RmJobState.PENDING), ("12", "12_5", RmJobState.PENDING), ("13", "12_3", RmJobState.DONE),
    ]  # fmt: skip


def test_what_is_listed_or_no_training_job_is_left_out(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    slurm.answer("squeue", rows=[job_row(7, State="COMPLETED", SubmitTime=995_000)])
    others = (ended(7), ended(8, JobName="notebook"), ended(9, Partition="cpu"), ended(10, JobName="dl2-3-worker-1"))
    jobs = from_accounting(slurm, manager_on, clock, *others, ended(7, Submit=994_000), rules=[*RULES, *BY_GPU])
    assert [(job.handle, job.submitted) for job in jobs] == [("7", 995_000), ("8", 995_000), ("7", 994_000)]


def test_it_is_asked_only_where_slurmctld_may_have_forgotten(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    slurm.answer("sacct", rows=[])
    manager = manager_on(watch=RULES)
    for since in (None, clock.now, clock.now + 50, clock.now - 280):
        assert manager.listing(since).ended_until == clock.now
    assert slurm.calls("sacct") == []
    assert manager.listing(clock.now - 300).ended_until == clock.now
    (call,) = slurm.calls("sacct")
    times = {"--starttime=1970-01-12T13:41:30", "--endtime=1970-01-12T13:46:50"}
    assert {"--allusers", "--local", "--partition=gpu,ml", *times} <= {*call.argv}
    assert (call.env["TZ"], call.env["SLURM_TIME_FORMAT"]) == ("UTC", "%s")
    slurm.forget()
    assert manager_on().listing(0.0).ended_until == clock.now  # without rules nothing is asked
    assert [call.name for call in slurm.calls()] == ["squeue", "sinfo"]


def test_a_long_time_is_made_up_for_day_by_day(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    clock.now += 90 * 24 * HOUR
    slurm.answer("sacct", rows=[])
    manager, since, asked = manager_on(watch=RULES), clock.now - 60 * 24 * HOUR, 0
    while since < clock.now:
        since = manager.listing(since).ended_until or 0.0
        asked += 1
    assert asked == len(slurm.calls("sacct")) == 30  # further back than that nothing is looked for


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 1, "stderr": "sacct: error: Problem talking to the database: Connection refused\n"},
        {"rows": [ended(7)], "stdout": "8|"},
        {"rows": [ended(7, State="RUNNING", End="Unknown")]},
    ],
)
def test_an_answer_that_is_missing_torn_or_late_is_asked_for_again(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, answer: dict[str, object]
) -> None:
    slurm.answer("sacct", **answer)
    manager, since = manager_on(watch=RULES), clock.now - HOUR
    for _ in range(8):
        listing = manager.listing(since)
        assert (listing.jobs, listing.ended_until) == ((), since)
        clock.now += 15
    assert len(slurm.calls("sacct")) == 2  # once a minute
    slurm.answer("sacct", rows=[ended(7)])
    clock.now += 60
    known = set()
    while since < clock.now:
        listing = manager.listing(since)
        known |= {job.handle for job in listing.jobs}
        since = listing.ended_until or 0.0
    assert known == {"7"}


def test_what_never_answers_is_given_up(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    slurm.answer("sacct", status=1, stderr="sacct: error: Connection refused\n")
    manager, since, begin = manager_on(watch=RULES), clock.now - HOUR, clock.now
    while since < clock.now - 300:
        clock.now += 120
        since = manager.listing(since).ended_until or 0.0
    assert HOUR <= clock.now - begin < 2 * HOUR


def test_a_site_without_accounting(slurm: FakeSlurm, manager_on: Managers, clock: Clock) -> None:
    slurm.answer("sacct", status=1, stderr="Slurm accounting storage is disabled\n")
    manager = manager_on(watch=RULES)
    for _ in range(3):
        assert manager.listing(clock.now - HOUR).ended_until == clock.now
    assert len(slurm.calls("sacct")) == 1
    (slurm.folder / "sacct").unlink()
    assert manager_on(watch=RULES).listing(clock.now - HOUR).ended_until == clock.now


def test_a_listing_that_is_given_again_is_no_answer_to_another_question(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
) -> None:
    slurm.answer("sacct", rows=[ended(7)])
    manager = manager_on(watch=RULES, poll_floor_seconds=60)
    manager.listing()
    clock.now += 5
    assert [job.handle for job in manager.listing(clock.now - HOUR).jobs] == ["7"]
    clock.now += 5
    assert [job.handle for job in manager.listing(clock.now - 5).jobs] == ["7"]
    assert len(slurm.calls("squeue")) == 2


def test_how_jobs_ended_that_are_not_listed_any_more(slurm: FakeSlurm, manager_on: Managers) -> None:
    rows = [
        ended(7, JobName="dl2-5-worker-0", State="FAILED", ExitCode="3:0"), ended(8),
        ended(9, State="RUNNING", End="Unknown"), ended(10),
    ]  # fmt: skip
    slurm.answer("sacct", rows=rows)
    manager = manager_on()
    found = manager.final_states(["7", "8", "9", "x;y"])
    assert [(job.handle, job.state, job.reason, job.submitted, job.user) for job in found] == [
        ("7", RmJobState.FAILED, "FAILED, exit status 3", 995_000, "alice"),
        ("8", RmJobState.DONE, "", 995_000, "alice"),
        ("9", RmJobState.RUNNING, "", 995_000, "alice"),
    ]
    slurm.forget()
    assert len(manager.final_states([str(number) for number in range(1, 1201)])) == 4
    assert len(slurm.calls("sacct")) == 3
    slurm.answer("sacct", stderr="sacct: error: slurmdbd: Connection refused\n", status=1)
    with pytest.raises(Unavailable):
        manager.final_states(["7"])
    slurm.answer("sacct", stderr="Slurm accounting storage is disabled\n", status=1)
    assert manager.final_states(["7"]) == ()
    slurm.forget()
    assert manager.final_states(["7"]) == ()
    assert slurm.calls() == []


def test_the_documented_query_sums_what_all_tasks_of_a_job_used(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "slurm.md").read_text(encoding="utf-8")
    query = re.search(r"^```sh\n(sacct .*?)^```$", text.partition("### What a job used")[2], re.MULTILINE | re.DOTALL)
    assert query is not None
    rows = (
        "4711|digits|7200|7200|billing=1,cpu=1,mem=1G,node=1|ann",
        "4712|dl2-4711-worker-0|3600|900|cpu=4,gres/gpu=2,mem=1G|ann",
        "4713|dl2-4711-ps-0|1800|900|cpu=2|ann",
        "4714|dl2-47-worker-0|999|999|cpu=1,gres/gpu=9|ann",
        "47|dl2-47111-worker-0|999|999|cpu=1|ann",
        "4715|dl2-4711-worker-9|9999|9999|cpu=1,gres/gpu=4|bob",
    )
    sacct = tmp_path / "sacct"
    # As the real one: with states and without an end it finds nothing, without states not what was held while it ran.
    lines = ["for each; do", "  case $each in --state=*,R,*) states=1 ;; --endtime=now) end=1 ;; esac", "done",
             '[ "$states$end" = 11 ] || exit', *(f"echo '{row}'" for row in rows)]  # fmt: skip
    sacct.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    sacct.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", "-c", query[1]], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert (done.stdout, done.stderr) == ("3.50 CPU-hours, 0.50 GPU-hours\n", "")
