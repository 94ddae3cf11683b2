"""The end of a job: which worker writes its files, and when the other members may end."""

from __future__ import annotations

from coordinator.jobs import JOINED, job, sent

from pslite.coordinator import failover, job_completion

PLAN = ("worker-0", "worker-1", "ps-0")


def finished_job(tasks=PLAN, plan=PLAN):
    """A job whose workers have the last version, and of which all digests are known."""
    a_job, lines = job(tasks, plan=plan)
    for task in plan:
        a_job.state.members[task].finished = task.startswith("worker")
    a_job.state.digests_requested = True
    a_job.state.digests = {block.number: b"" for block in a_job.state.blocks}
    job_completion.check(a_job)
    return a_job, lines


def lose(a_job, task):
    member = a_job.state.members[task]
    member.lost = JOINED
    failover.check_members(a_job, JOINED + 60.0)


def test_the_others_end_once_the_first_worker_knows_that_it_writes_files():
    a_job, _ = finished_job()
    assert [sent(a_job, task) for task in PLAN] == [["Complete"], [], []]
    a_job.state.members["worker-0"].channel.confirm(1)
    job_completion.check(a_job)
    assert [sent(a_job, task) for task in PLAN] == [[], ["Complete"], ["Exit"]]


def test_another_worker_writes_files_until_then():
    a_job, lines = finished_job()
    a_job.state.members["worker-1"].heard = JOINED + 60.0
    a_job.state.members["ps-0"].heard = JOINED + 60.0
    lose(a_job, "worker-0")
    job_completion.check(a_job)
    assert lines[-1].endswith("it had finished, and another worker writes files")
    assert sent(a_job, "worker-1") == ["Complete"]


def test_a_member_that_was_drained_cannot_write_files():
    a_job, lines = finished_job(("worker-0", "ps-0", "ps-1"), ("worker-0", "ps-0"))
    a_job.state.members["ps-0"].heard = JOINED + 60.0
    drained = a_job.state.members["ps-1"]
    drained.heard = JOINED + 60.0
    drained.drain()
    lose(a_job, "worker-0")
    assert a_job.state.state == "failed"
    assert "before it had written what the script saves at its end" in lines[-1]
