"""How long a job may stand still, and which member is found to hold it up."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from coordinator.jobs import JOINED, job

from pslite.coordinator.failures.stall_handling import check, stuck_members, take_stacks
from pslite.coordinator.stall_detector import ProgressRule, ProgressWatch
from pslite.coordinator.state.status_report import report
from pslite.failure_rate_limits import Incident
from pslite.job.job_status import Cause
from pslite.net.messages import Stacks

RULE = ProgressRule(60.0, 10.0)
NONE: tuple[int, ...] = ()


def test_a_deadline_is_learned_from_steps():
    watch = ProgressWatch()
    watch.note(0.0, 0, NONE)
    assert watch.deadline(RULE) == 120.0  # before the first step
    watch.note(1.0, 1, NONE)
    assert watch.deadline(RULE) == 60.0
    watch.note(21.0, 3, NONE)  # two steps of 10 s
    assert watch.deadline(RULE) == 100.0
    watch.note(22.0, 4, NONE)
    assert (watch.since, watch.deadline(RULE)) == (22.0, 100.0)
    # what takes long because members change is no step
    watch.note(500.0, 5, (2,))
    assert watch.deadline(RULE) == 100.0
    # a day later the slow step does not count any more
    watch.rest(90_000.0)
    watch.note(90_000.0, 5, (2,))
    assert watch.deadline(RULE) == 120.0
    watch.note(90_001.0, 6, (2,))
    assert watch.deadline(RULE) == 60.0


def test_a_job_without_a_deadline_may_stand_still_for_ever():
    watch = ProgressWatch()
    watch.note(0.0, 0, NONE)
    assert watch.deadline(ProgressRule(0.0)) == watch.longest(ProgressRule(0.0)) == 0.0


def test_a_worker_that_does_not_describe_the_job_is_given_up():
    a_job, lines = job(["worker-0", "worker-1", "ps-0"], plan=(), progress=RULE)
    late = a_job.state.members["worker-1"]
    late.described = False
    check(a_job, JOINED + 120.0)
    assert late.present
    check(a_job, JOINED + 121.0)
    assert not late.present
    (line,) = lines
    assert re.match(r"worker-1 on n .* its script has not created its ElasticJob .* within 120 s .* in no plan", line)
    (shown,) = (member for member in report(a_job).members if member.task == "worker-1")
    assert (shown.cause, shown.how) == (Cause.HUNG, late.hung)


def test_the_worker_because_of_which_a_job_fails_is_reported_as_hung():
    a_job, _ = job(["worker-0", "ps-0"], plan=["worker-0", "ps-0"], progress=RULE)
    a_job.state.stalls.append(Incident(JOINED - 1000.0, 0))
    check(a_job, JOINED)
    check(a_job, JOINED + 121.0)
    for task, stacks in (("worker-0", computes()), ("ps-0", waits("worker-0"))):
        take_stacks(a_job, a_job.state.members[task], stacks)
    check(a_job, JOINED + 122.0)
    assert a_job.state.state == "failed"
    shown = {member.task: (member.cause, member.how) for member in report(a_job).members}
    how = "no progress at version 0 for 120 s: it has been computing step 0 since then, at train.py:12 in load"
    assert shown == {"worker-0": (Cause.HUNG, how), "ps-0": (None, "")}


def computes(place="train.py:12 in load"):
    return Stacks(computes=True, place=place)


def waits(*tasks):
    return Stacks(waits_for=tasks)


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        pytest.param({"w0": waits("s0"), "w1": computes()}, ["w1"], id="a script that hangs"),
        pytest.param({"w0": computes(), "w1": computes()}, ["w0", "w1"], id="all scripts hang"),
        pytest.param({"w0": waits("s0")}, ["w1"], id="a process that does not answer"),
        pytest.param(
            {"w0": waits("s0", "s1"), "w1": waits("s1"), "s0": waits("w1"), "s1": waits("w1")}, ["w1"],
            id="a worker and a server cannot reach each other",
        ),
        pytest.param(
            {"w0": waits("s0"), "w1": waits("s0"), "s0": waits("w0", "w1"), "s1": waits()}, ["s0"],
            id="a server takes nothing",
        ),
        pytest.param(
            {"w0": waits("s0"), "w1": waits("s0"), "s0": waits("s1"), "s1": waits()}, ["s1"],
            id="a replica is not confirmed",
        ),
        pytest.param({"w0": waits("s0"), "w1": waits("s0"), "s1": waits()}, ["s0"], id="a server does not answer"),
        pytest.param(
            {"w0": waits(), "w1": waits("s0"), "s0": waits("w0"), "s1": waits()}, ["w0"],
            id="a worker at a barrier for whose part others do not step in (update_on_kvstore=False)",
        ),
        pytest.param({"w0": waits(), "w1": waits()}, [], id="all-reduce: all wait for the others"),
    ],
)  # fmt: skip
def test_who_holds_a_job_up(answers, found):
    assert [each.task for each in stuck_members(5, ["w0", "w1"], answers)] == found
