"""Store against resource manager: single cases by hand, then every combination by what must always hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from dl2d.core.backoff_after_failed_starts import StartFailures
from dl2d.core.cluster import ANCHOR, Task, TaskState, task_tag
from dl2d.core.jobs import FailureCause, Job, JobKey, JobState, Progress, Role
from dl2d.core.resource_manager import GrowthLimit, RmJob, RmJobState, RmListing
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange
from dl2d.simulation.in_memory_store import MemoryStore
from dl2d.testing import make_job
from dl2d.tick.observation.observe import LiveJobs
from dl2d.tick.observation.task_time_in_state import Elapsed, StateSince, update_state_since
from dl2d.tick.reconciliation.compare_store_with_listing import Changes, find_changes
from dl2d.tick.reconciliation.stop_tasks_and_anchors import ended_jobs_to_check
from dl2d.tick.reconciliation.task_matching import match_listing
from dl2d.tick.reconciliation.unlisted_tasks_and_silent_coordinators import update_calling_since
from dl2d.tick.tick_context import Timeouts

KEY = JobKey("here", "1", 1000)
NOW = 10_000.0
TIMEOUTS = Timeouts(
    unseen_seconds=15, start_seconds=600, drain_seconds=60, end_seconds=10, silent_seconds=60, start_failures=3
)
T, R, J, F = TaskState, RmJobState, JobState, FailureCause


def a_job(state: JobState = J.RUNNING, *, anchor: str = "a", called: float = NOW, ended: float | None = None) -> Job:
    ended = NOW if ended is None and state.ended else ended
    return replace(
        make_job(1, cluster="here", state=state),
        anchor=anchor,
        address="h:1",
        progress=Progress(at=called),
        ended_at=ended,
    )


def a_task(state: TaskState = T.CONFIRMED, *, since: float = NOW, handle: str = "h0", note: str = "") -> Task:
    return Task(
        job=KEY, id="worker-0", role=Role.WORKER, node="n1", demand=Resources.of(cpu=1), state=state,
        handle=handle, asked_at=since, since=since, note=note,
    )  # fmt: skip


def an_rm_job(
    state: RmJobState, *, handle: str = "h0", tag: str | None = None, reason: str = "", user: str = "ann"
) -> RmJob:
    tag = task_tag(KEY, "worker-0") if tag is None else tag
    return RmJob(handle=handle, state=state, tag=tag, reason=reason, user=user)


ANCHOR_RUNS = RmJob(handle="a", state=R.RUNNING, tag=task_tag(KEY, ANCHOR), user="ann")


def see(
    job: Job | None, tasks: list[Task], rm_jobs: list[RmJob], *, told: float | None = 0.0, failures: int = 0,
    outside: int = 0, gone: bool = True, asked: tuple[str, ...] = ("worker-0", "worker-1", ANCHOR),
) -> Changes:  # fmt: skip
    """What has to change. ``gone``: what is not listed has not been for long. ``asked``: tasks that there were once."""
    live = LiveJobs((job,) if job is not None and not job.state.ended else (), tuple(tasks))
    ended = [job] if job is not None and job.state.ended else []
    listing = RmListing(NOW, (), tuple(rm_jobs))
    matches = match_listing(live, {KEY: job} if job is not None else {}, listing, cluster="here")
    strays = {stray.identity: job for stray, _, name in matches.strays if name in asked and job is not None}
    return find_changes(
        live, ended, listing, matches, matches.unlisted if gone else (),
        timeouts=TIMEOUTS, start_failures={KEY: StartFailures(failures, "exit status 1", from_outside=outside)},
        elapsed={
            task.tag: Elapsed(NOW - task.since, None if told is None else NOW - max(told, task.since)) for task in tasks
        },
        strays_asked_for=strays,
    )  # fmt: skip


def stopped_handles(changes: Changes) -> dict[str, str]:
    return {listed.handle: reason for listed, reason in changes.stops}


def test_why_a_task_waits_and_how_it_ended_are_kept() -> None:
    waits = see(a_job(), [a_task(T.ASKED)], [ANCHOR_RUNS, an_rm_job(R.PENDING, reason="Priority")])
    assert [(change.state, change.note) for change in waits.tasks] == [(T.ASKED, "Priority")]
    again = see(a_job(), [a_task(T.ASKED, note="Priority")], [ANCHOR_RUNS, an_rm_job(R.PENDING, reason="Priority")])
    assert again.tasks == ()
    ended = see(a_job(), [a_task()], [ANCHOR_RUNS, an_rm_job(R.FAILED, reason="killed by signal 9 (SIGKILL)")])
    assert ended.tasks[0].note == "killed by signal 9 (SIGKILL)"


def test_a_coordinator_that_ended_well_without_a_word_has_failed_and_why_is_told() -> None:
    ended = replace_struct(ANCHOR_RUNS, state=R.DONE, reason="exit status 0")
    ((_, change),) = see(a_job(J.SUBMITTED), [], [ended]).jobs
    assert (change.state, change.cause) == (J.FAILED, F.FAILED)
    assert "without an error (exit status 0), and had never reported to dl2d: it trained nothing" in change.end_reason


@pytest.mark.parametrize("state", [T.ASKED, T.CONFIRMED])
def test_the_node_is_the_one_that_the_resource_manager_chose(state: TaskState) -> None:
    listed = replace_struct(an_rm_job(R.RUNNING), node="n2")
    (change,) = see(a_job(), [a_task(state, note="kept")], [ANCHOR_RUNS, listed]).tasks
    after = change.applied(a_task(state, note="kept"), NOW)
    assert (after.node, after.state) == ("n2", T.GRANTED if state is T.ASKED else state)
    assert see(a_job(), [after], [ANCHOR_RUNS, listed]).tasks == ()


def test_that_a_task_does_not_execute_is_kept_until_it_does() -> None:
    runs = an_rm_job(R.RUNNING)
    suspended = replace_struct(runs, not_executing=True, reason="suspended by Slurm")
    (change,) = see(a_job(), [a_task()], [ANCHOR_RUNS, suspended]).tasks
    after = change.applied(a_task(), NOW + 5)
    assert (after.state, after.since) == (T.CONFIRMED, NOW)
    assert after.why_not_executing == "suspended by Slurm since 1970-01-01 02:46:40 UTC"
    assert see(a_job(), [after], [ANCHOR_RUNS, suspended]).tasks == ()
    (change,) = see(a_job(), [after], [ANCHOR_RUNS, runs]).tasks
    assert change.applied(after, NOW) == a_task()


@pytest.mark.parametrize(
    ("since", "told", "late"),
    [
        (NOW - 61, NOW - 100, True),
        (NOW - 61, NOW - 59, False),  # the daemon was away while it should have been told
        (NOW - 9999, NOW - 61, True),
        (NOW - 9999, None, False),  # its coordinator does not call: it cannot know
    ],
)
def test_who_was_not_told_to_leave_is_not_late(since: float, told: float | None, late: bool) -> None:
    found = see(a_job(), [a_task(T.DRAINING, since=since)], [ANCHOR_RUNS, an_rm_job(R.RUNNING)], told=told)
    assert bool(found.stops) is late


def test_what_its_anchor_waits_for_is_a_jobs_reason_until_its_coordinator_calls() -> None:
    waits = [replace_struct(ANCHOR_RUNS, state=R.PENDING, reason="no room in the queue")]
    ((_, change),) = see(a_job(J.SUBMITTED), [], waits).jobs
    assert change == JobChange(waits_for="no room in the queue")
    assert see(change.applied(a_job(J.SUBMITTED), NOW), [], waits).jobs == ()
    assert change.applied(a_job(J.READY), NOW) == a_job(J.READY)  # its coordinator called in between
    called = JobChange(state=J.READY).applied(change.applied(a_job(J.SUBMITTED), NOW), NOW)  # or after that
    assert (called.state, called.end_reason) == (J.READY, "")
    assert see(a_job(J.READY), [], waits).jobs == ()


def test_tasks_that_never_join_end_their_job_in_the_end() -> None:
    assert see(a_job(), [], [ANCHOR_RUNS], failures=2).jobs == ()
    ((_, change),) = see(a_job(), [], [ANCHOR_RUNS], failures=3).jobs
    assert (change.state, change.end_reason) == (
        J.FAILED,
        "3 attempts in a row to start its tasks failed; the last: exit status 1",
    )


@pytest.mark.parametrize(
    ("state", "note", "since", "why", "ends"),
    [
        (J.READY, "QOSMinGRES", NOW - 31, "the QOS demands gpu:1", True),
        (J.RUNNING, "QOSMinGRES", NOW - 31, "the QOS demands gpu:1", False),  # it trains on
        (J.READY, "", NOW - 31, "the QOS demands gpu:1", False),  # the first listing that says so
        (J.READY, "QOSMinGRES", NOW - 29, "the QOS demands gpu:1", False),
        (J.READY, "QOSMinGRES", NOW - 31, "", False),
    ],
)
def test_a_job_ends_of_which_a_task_of_its_smallest_size_never_starts(
    state: JobState, note: str, since: float, why: str, ends: bool
) -> None:
    waits = replace_struct(an_rm_job(R.PENDING, reason="QOSMinGRES"), never_starts=why)
    changes = see(a_job(state), [a_task(T.ASKED, note=note, since=since)], [ANCHOR_RUNS, waits])
    ended = [(change.state, change.end_reason, change.cause) for _, change in changes.jobs]
    reason = "worker-0 can never start: the QOS demands gpu:1"
    assert ended == ([(J.FAILED, reason, F.REFUSED)] if ends else [])
    assert not ends or [change.state for change in changes.tasks] == [T.DRAINING]


def test_a_task_beyond_the_smallest_size_that_never_starts_ends_no_job() -> None:
    waits = replace_struct(an_rm_job(R.PENDING, reason="QOSMinGRES"), never_starts="the QOS demands gpu:1")
    runs = an_rm_job(R.RUNNING, handle="h1", tag=task_tag(KEY, "worker-1"))
    tasks = [
        a_task(T.ASKED, note="QOSMinGRES", since=NOW - 31),
        replace_struct(a_task(T.CONFIRMED, handle="h1"), id="worker-1"),
    ]
    assert not see(a_job(J.READY), tasks, [ANCHOR_RUNS, waits, runs]).jobs


def test_attempts_that_are_ended_from_outside_count_a_tenth() -> None:
    """A task that exceeds its memory looks so in some resource managers; its job would hold its room for ever."""
    assert see(a_job(), [], [ANCHOR_RUNS], failures=1, outside=19).jobs == ()
    ((_, change),) = see(a_job(), [], [ANCHOR_RUNS], failures=1, outside=20).jobs
    assert change.end_reason == "21 attempts in a row to start its tasks failed; the last: exit status 1"


def test_a_job_that_ended_last_is_found_however_many_jobs_were_submitted_after_it() -> None:
    store = MemoryStore()
    first, *others = (make_job(number, submitted=number) for number in range(1, 300))
    for job in (first, *others):
        store.add_job(job)
    for job in (*others[:250], first):
        store.change_job(job.key, JobChange(state=J.FINISHED), NOW)
    for at, found in ((NOW, 251), (NOW + 7200, 200)):
        ended = [job.key for job in ended_jobs_to_check(store, LiveJobs(), at)]
        assert (first.key in ended, len(ended)) == (True, found)


def test_orphans() -> None:
    orphan = an_rm_job(R.RUNNING, handle="o")
    assert stopped_handles(see(a_job(), [], [ANCHOR_RUNS, orphan])) == {"o": "worker-0 of here.1.1000 is not wanted"}
    # Nothing shows that these are this daemon's: neither the job, nor the task, nor the user.
    for job, listed, asked in (
        (None, orphan, ()),
        (a_job(), orphan, ()),
        (a_job(), an_rm_job(R.RUNNING, handle="o", user="eve"), ("worker-0",)),
    ):
        found = see(job, [], [ANCHOR_RUNS, listed], asked=asked)
        assert found.stops == found.remarks == ()
        assert found.stray_remarks


def test_marks_of_other_clusters_and_jobs_without_a_mark_are_not_ours() -> None:
    there = task_tag(JobKey("there", "1", 1000), "worker-0")
    strangers = [
        an_rm_job(R.RUNNING, handle=f"s{number}", tag=tag) for number, tag in enumerate(["", "dl2:", there, "x"])
    ]
    assert see(a_job(), [], [ANCHOR_RUNS, *strangers]).stops == ()


def test_a_mark_that_stands_twice_is_the_one_that_lives() -> None:
    twice = [an_rm_job(R.FAILED, handle="old"), an_rm_job(R.RUNNING, handle="new")]
    for listed in (twice, twice[::-1]):
        found = see(a_job(), [a_task(T.ASKED, handle="")], [ANCHOR_RUNS, *listed])
        assert [(change.state, change.handle) for change in found.tasks] == [(T.GRANTED, "new")]
        assert found.stops == ()


def test_a_task_that_runs_twice_is_stopped_once() -> None:
    twice = [an_rm_job(R.RUNNING, handle="h0"), an_rm_job(R.RUNNING, handle="twin")]
    for listed in (twice, twice[::-1]):
        found = see(a_job(), [a_task()], [ANCHOR_RUNS, *listed])
        assert (found.tasks, stopped_handles(found)) == ((), {"twin": "worker-0 of here.1.1000 runs twice"})


def test_since_when_coordinators_call() -> None:
    job = a_job(called=NOW)
    assert update_calling_since({}, [job], NOW, 7.0, 60) == {KEY: 7.0}
    assert update_calling_since({KEY: 5.0}, [job], NOW + 60, 67.0, 60) == {KEY: 5.0}
    assert update_calling_since({KEY: 5.0}, [job], NOW + 61, 68.0, 60) == {}
    assert update_calling_since({KEY: 5.0}, [], NOW, 7.0, 60) == {}


def test_since_when_tasks_are_in_their_states() -> None:
    tag = task_tag(KEY, "worker-0")
    found = update_state_since({}, [a_task(T.ASKED)], 7.0, {})
    assert found == {tag: StateSince(T.ASKED, 7.0, 7.0)}
    assert update_state_since(found, [a_task(T.ASKED)], 8.0, {}) == found
    assert update_state_since(found, [a_task(T.GRANTED)], 8.0, {}) == {tag: StateSince(T.GRANTED, 8.0, 8.0)}
    assert update_state_since(found, [], 8.0, {}) == {}
    granted = {tag: StateSince(T.GRANTED, 8.0, 8.0)}
    for is_starting, since in ((False, 8.0), (True, 9.0)):
        found = update_state_since(
            granted, [a_task(T.GRANTED)], 9.0, {}, lambda task, is_starting=is_starting: is_starting
        )
        assert found == {tag: StateSince(T.GRANTED, since, since)}


def test_since_when_tasks_do_not_wait_for_a_limit() -> None:
    tag = task_tag(KEY, "worker-0")
    free = an_rm_job(R.PENDING)
    limited = replace_struct(free, limit=GrowthLimit(frozenset(), {}, "a limit"))
    found: dict[str, StateSince] = {}
    for now, listed, no_limit_since in (
        (7.0, limited, None), (8.0, limited, None), (9.0, None, None), (10.0, free, 10.0), (11.0, None, 10.0),
        (12.0, free, 10.0), (13.0, limited, None), (14.0, free, 14.0),
    ):  # fmt: skip
        found = update_state_since(found, [a_task(T.ASKED)], now, {} if listed is None else {tag: listed})
        assert found == {tag: StateSince(T.ASKED, 7.0, no_limit_since)}


def test_since_when_tasks_are_being_ended() -> None:
    tag = task_tag(KEY, "worker-0")
    found: dict[str, StateSince] = {}
    for now, state, stopping_since in (
        (7.0, R.RUNNING, None), (8.0, R.ENDING, 8.0), (9.0, None, 8.0), (10.0, R.ENDING, 8.0), (11.0, R.RUNNING, None),
    ):  # fmt: skip
        listed = {} if state is None else {tag: an_rm_job(state)}
        found = update_state_since(found, [a_task(T.CONFIRMED)], now, listed)
        assert found == {tag: StateSince(T.CONFIRMED, 7.0, 7.0, stopping_since)}


COMBINATIONS = list(product(T, [None, *R], J, [None, *R], [0.0, 1e6], ["", "h0"], [None, 0.0]))


def test_every_combination_of_states() -> None:
    """What must hold whatever the store believes and the manager has."""
    for state, rm, job_state, anchor, age, handle, told in COMBINATIONS:
        if state.ended:
            continue  # the store lists live tasks only
        job = a_job(job_state, ended=NOW - age if job_state.ended else None)
        task = a_task(state, since=NOW - age, handle=handle)
        listed = [an_rm_job(rm)] if rm is not None else []
        listed += [replace_struct(ANCHOR_RUNS, state=anchor)] if anchor is not None else []
        case = (state, rm, job_state, anchor, age, handle, told)
        found = see(job, [task], listed, told=told)
        live = {rm_job.handle for rm_job in listed if not rm_job.state.ended}
        stops = stopped_handles(found)
        assert stops.keys() <= live, case
        assert all(reason for _, reason in found.stops), case
        assert len(found.tasks) <= 1, case
        for change in found.tasks:
            assert change.state.rank >= state.rank, case
            if change.state.ended:  # room is free only when the manager has nothing of it any more
                assert rm is None or rm.ended, case
        if rm is not None and rm.ended:
            assert found.tasks[0].state.ended, case
        if "h0" in stops:  # nothing that is wanted is stopped
            assert found.tasks[0].state is T.DRAINING if found.tasks else not state.wanted, case
        for _, change in found.jobs:
            assert not job_state.ended, case
            assert change.state is None or change.state.ended, case
            if change.state is not None:
                assert anchor is None or anchor.ended, case
        if anchor is not None and anchor.ended and not job_state.ended:
            assert len(found.jobs) == 1, case


@given(st.lists(st.tuples(st.sampled_from(R), st.integers(0, 3), st.booleans()), max_size=6), st.booleans())
def test_nothing_that_is_not_listed_is_stopped_and_the_order_of_the_list_does_not_matter(listed, known) -> None:
    rm_jobs = [
        an_rm_job(state, handle=f"m{place}", tag=task_tag(KEY if ours else JobKey("there", "1", 1), f"worker-{number}"))
        for place, (state, number, ours) in enumerate(listed)
    ]
    job = a_job() if known else None
    found = see(job, [a_task(handle="")] if known else [], [ANCHOR_RUNS, *rm_jobs])
    for rm_job, _ in found.stops:
        assert not rm_job.state.ended
        assert rm_job.tag.startswith("dl2:here.")
