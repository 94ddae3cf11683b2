"""The end of a job: which worker writes its files, and when the other members may end."""

from __future__ import annotations

import pytest
from coordinator.jobs import JOINED, job, sent, spec

from pslite.coordinator import job_completion
from pslite.coordinator.failures import failover
from pslite.coordinator.membership import membership_plans
from pslite.coordinator.state import status_report
from pslite.coordinator.state.job_state import PendingPlan
from pslite.job.membership_plan import make_plan

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
    assert (a_job.urgent, status_report.report(a_job).ending) == (True, True)  # before any member is told to end
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


@pytest.mark.parametrize("first", [8, -1])
def test_a_worker_that_a_plan_was_about_to_remove_ends_when_the_first_workers_script_has_ended(first):
    """The plan would have taken effect after the last version, or is not announced yet."""
    a_job, _ = job(PLAN, plan=PLAN, described=spec(mode="open", epochs=0, samples=1, batch=1))
    state = a_job.state
    chief, leaver, server = (state.members[task] for task in PLAN)
    plan = make_plan(2, state.blocks, [chief.plan_entry()], [server.plan_entry()], state.plan)
    state.pending = PendingPlan(plan, state.plan, JOINED)
    membership_plans.commit(a_job, state.pending)
    state.pending.first = first
    assert leaver.state == "draining"
    chief.finished = chief.chief = True
    chief.finished_version, chief.state = 7, "left"
    assert job_completion.check(a_job) == "workers end their loops"
    assert sent(a_job, "worker-1") == ["Abort", "Exit"]
    assert job_completion.check(a_job) == "workers end their loops"
    assert sent(a_job, "worker-1") == ["Abort", "Exit"]
