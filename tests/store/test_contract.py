"""What every store must do: tests with ``any_store`` what a tick needs, those with ``store`` all of the SQL store."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from store.samples import PS, WORKER, a_job, a_slot, starts

from dl2d.core.cluster import Task, TaskState
from dl2d.core.decision import Alternative
from dl2d.core.errors import DuplicateJob, StoreError
from dl2d.core.jobs import (
    NO_LAUNCH,
    Allocation,
    Architecture,
    Consistency,
    Job,
    JobKey,
    JobState,
    Launch,
    Owner,
    Progress,
    Role,
    User,
)
from dl2d.core.measured_speeds_and_losses import (
    MAX_LOSSES,
    JobSpeeds,
    LossPoint,
    MeasuredSpeeds,
    SpeedPoint,
    TrainingKind,
)
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.store import JobChange, ResizeEvent, RuntimePlan, TaskChange, TaskReport
from dl2d.store.sql_store import SqlStore
from dl2d.store.tables.membership_changes import MAX_KEPT


def keys(jobs: tuple[Job, ...]) -> list[JobKey]:
    return [job.key for job in jobs]


class TestJobs:
    def test_a_job_comes_back_as_it_was_given(self, any_store):
        progress = Progress(
            at=5.5, version=3, total_versions=9, epoch=0.25, loss=1e-300, steps_per_second=2.5, workers=2, ps=1
        )
        job = a_job(progress=progress, state=JobState.READY, anchor="77", address="h:1", started_at=4.25, digest="ff")
        any_store.add_job(job)
        assert any_store.job(job.key) == job
        assert any_store.jobs(live=True) == (job,)

    def test_texts_of_all_kinds_come_back(self, store):
        job = a_job(name="Prüfung “α” 🚂 100%")
        job = replace(job, launch=Launch(("sh", "-c", "a\nb\0c 'd' \"e\" {f} %(g)s :h"), "/tmp/Ä b", ()))
        store.add_job(job)
        assert store.job(job.key) == job
        assert keys(store.find_jobs("Prüfung “α” 🚂 100%")) == [job.key]

    def test_the_environment_of_a_job_that_ends_is_forgotten(self, any_store):
        job = a_job()
        any_store.add_job(job)
        assert any_store.change_job(job.key, JobChange(state=JobState.READY), 1.0).launch == job.launch
        any_store.change_job(job.key, JobChange(state=JobState.CANCELLED), 2.0)
        assert any_store.job(job.key).launch == Launch(job.launch.argv, job.launch.cwd)

    def test_the_same_job_twice_is_refused_and_the_first_kept(self, any_store):
        first = a_job()
        any_store.add_job(first)
        with pytest.raises(DuplicateJob, match=r"main\.1\.1700000000 is known already"):
            any_store.add_job(a_job(name="other"))
        assert any_store.jobs(live=False) == (first,)

    def test_an_id_used_again_is_another_job(self, store):
        old, new = a_job(submitted=100), a_job(submitted=200)
        store.add_job(old)
        store.add_job(new)
        assert store.find_jobs("1") == (replace(new, launch=NO_LAUNCH), replace(old, launch=NO_LAUNCH))
        assert keys(store.find_jobs(old.key.slug)) == [old.key]
        assert keys(store.find_jobs("digits-1")) == [new.key, old.key]
        assert store.find_jobs("nothing") == ()
        assert store.find_jobs("' OR 1=1 --\0") == ()

    @pytest.mark.parametrize("key", [JobKey("a.b", "1", 1), JobKey("a", "", 1), JobKey("a", "1", -1)])
    def test_a_key_that_is_no_slug_is_refused(self, store, key):
        with pytest.raises(StoreError, match="no job key"):
            store.add_job(a_job(key=key))

    def test_jobs_stand_in_submit_order_and_then_by_number(self, any_store):
        for number, submitted in [(10, 5), ("b", 5), (9, 5), (100, 4), (1, 6)]:
            any_store.add_job(a_job(number, submitted=submitted))
        assert [job.key.id for job in any_store.jobs(live=True)] == ["100", "9", "10", "b", "1"]

    def test_limit_takes_the_newest(self, any_store):
        for number in range(8, 13):
            any_store.add_job(a_job(number, submitted=7))
        assert [job.key.id for job in any_store.jobs(live=False, limit=3)] == ["10", "11", "12"]

    def test_jobs_of_one_owner_are_found_among_those_of_others(self, store):
        own, other = (Owner(name, 1001, 1001) for name in ("ada", "who-had-the-id-before"))
        for number in range(1, 5):
            store.add_job(a_job(number, name="train", owner=own))
        for number in range(5, 8):
            store.add_job(a_job(number, name="train", owner=other))
        for number in range(1, 4):
            store.change_job(JobKey("main", str(number), 1_700_000_000), JobChange(state=JobState.FINISHED), number)
        ada = User(1001, "ada")
        assert [job.key.id for job in store.find_jobs("train", ada)] == ["4", "3", "2", "1"]
        assert store.find_jobs("5", ada) == store.find_jobs("main.5.1700000000", ada) == ()
        assert store.list_jobs(User(1002, "ada"), ended_since=0.0, limit=9) == ((), 0)
        for owner, since, limit, ids, total in (
            (ada, math.inf, 9, ["4"], 1),
            (ada, 2.0, 9, ["2", "3", "4"], 3),
            (ada, 0.0, 2, ["3", "4"], 4),
            (None, 3.0, 9, ["3", "4", "5", "6", "7"], 5),
            (None, 0.0, 1, ["7"], 7),
        ):
            listed = store.list_jobs(owner, ended_since=since, limit=limit)
            assert ([job.key.id for job in listed.jobs], listed.total) == (ids, total)
            assert {job.launch for job in listed.jobs} == {NO_LAUNCH}

    def test_which_of_some_jobs_are_known(self, any_store):
        jobs = [a_job(number) for number in range(1, 4)]
        for job in jobs[:2]:
            any_store.add_job(job)
        any_store.change_job(jobs[0].key, JobChange(state=JobState.FINISHED), 1.0)
        assert any_store.known_jobs([job.key for job in jobs]) == {jobs[0].key, jobs[1].key}
        assert any_store.known_jobs([]) == any_store.known_jobs([jobs[2].key]) == set()

    def test_the_elastic_jobs_that_ended_last_whenever_they_were_submitted(self, any_store):
        for number in range(1, 6):
            any_store.add_job(a_job(number, submitted=number, static=number == 2))
        for at, number in enumerate([3, 1, 2, 5]):
            any_store.change_job(JobKey("main", str(number), number), JobChange(state=JobState.FINISHED), 100.0 + at)
        assert [job.key.id for job in any_store.last_ended(2)] == ["5", "1"]
        assert [job.key.id for job in any_store.last_ended(9)] == ["5", "1", "3"]

    def test_an_unknown_job(self, store):
        key = JobKey("main", "404", 1)
        assert store.job(key) is None
        assert store.series(key) == store.runtime_plans(key) == store.decisions(key) == store.resizes(key) == ()
        for write in (
            lambda: store.change_job(key, JobChange(anchor="1"), 1.0),
            lambda: store.report_progress(key, Progress(at=1.0)),
            lambda: store.ask_tasks([Start(key, Role.WORKER, "n1", WORKER)], 1.0),
            lambda: store.change_tasks([TaskChange(key, "worker-0", TaskState.GRANTED)], 1.0),
            lambda: store.add_runtime_plans(
                key, [RuntimePlan(number=1, at=1.0, first_version=0, workers=1, servers=1)]
            ),
        ):
            with pytest.raises(StoreError, match=r"no job main\.404\.1"):
                write()

    def test_a_life(self, any_store):
        any_store.add_job(job := a_job())
        assert any_store.change_job(job.key, JobChange(anchor="55"), 10.0) == replace(job, anchor="55")
        ready = any_store.change_job(job.key, JobChange(state=JobState.READY, address="h:5"), 11.0)
        assert (ready.state, ready.address, ready.started_at) == (JobState.READY, "h:5", None)
        assert any_store.change_job(job.key, JobChange(state=JobState.RUNNING), 12.0).started_at == 12.0
        again = any_store.change_job(job.key, JobChange(state=JobState.READY), 13.0)
        assert (again.state, again.started_at) == (JobState.RUNNING, 12.0)
        assert any_store.change_job(job.key, JobChange(state=JobState.RUNNING), 14.0).started_at == 12.0
        done = any_store.change_job(
            job.key, JobChange(state=JobState.FINISHED, end_reason="all epochs", digest="aa"), 15.0
        )
        assert (done.state, done.ended_at, done.end_reason, done.digest) == (
            JobState.FINISHED,
            15.0,
            "all epochs",
            "aa",
        )
        late = any_store.change_job(job.key, JobChange(state=JobState.FAILED, end_reason="no", digest="bb"), 16.0)
        assert late == done
        assert any_store.job(job.key) == done
        assert any_store.jobs(live=True) == ()
        assert any_store.jobs(live=False) == (done,)

    def test_ids_are_never_given_twice(self, store):
        assert [store.next_job_id("a"), store.next_job_id("b"), store.next_job_id("a")] == ["1", "1", "2"]


class TestProgress:
    def test_the_series_is_thinned_and_ends_with_the_last_report(self, store):
        store.add_job(job := a_job())
        reports = [Progress(at=100.0 + second, version=second, epoch=second / 7, loss=1 / 3) for second in range(26)]
        for report in reports:
            store.report_progress(job.key, report)
        assert store.job(job.key).progress == reports[-1]
        assert [point.at for point in store.series(job.key)] == [100.0, 110.0, 120.0]
        store.change_job(job.key, JobChange(state=JobState.FINISHED), 130.0)
        assert store.series(job.key) == (reports[0], reports[10], reports[20], reports[25])

    @pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
    def test_a_loss_that_is_not_a_number_is_none(self, store, loss):
        store.add_job(job := a_job())
        store.report_progress(job.key, Progress(at=1.0, loss=loss, samples_per_second=loss))
        assert store.job(job.key).progress == Progress(at=1.0)
        assert store.series(job.key) == (Progress(at=1.0),)

    def test_a_clock_that_is_set_back_does_no_harm(self, store):
        store.add_job(job := a_job())
        for at in (100.0, 50.0, 100.0, 111.0):
            store.report_progress(job.key, Progress(at=at))
        assert [point.at for point in store.series(job.key)] == [100.0, 111.0]

    def test_a_number_too_large_for_a_column_is_refused_as_ours(self, store):
        store.add_job(job := a_job())
        with pytest.raises(StoreError):
            store.report_progress(job.key, Progress(at=1.0, version=2**70))
        assert store.job(job.key).progress == Progress()


class TestTasks:
    def test_tasks_are_numbered_on_and_never_again(self, any_store):
        any_store.add_job(job := a_job())
        any_store.add_job(other := a_job(2))
        first = any_store.ask_tasks(starts(job, workers=2, ps=1), 10.0)
        assert [task.id for task in first] == ["worker-0", "worker-1", "ps-0"]
        assert first[0] == Task(
            job=job.key, id="worker-0", role=Role.WORKER, node="n1", demand=WORKER, asked_at=10.0, since=10.0
        )
        any_store.change_tasks([TaskChange(job.key, "worker-1", TaskState.RELEASED)], 11.0)
        mixed = any_store.ask_tasks([*starts(job), *starts(other), *starts(job, ps=1)], 12.0)
        assert [(task.job.id, task.id) for task in mixed] == [
            ("1", "worker-2"),
            ("2", "worker-0"),
            ("1", "worker-3"),
            ("1", "ps-1"),
        ]

    def test_tasks_stand_by_job_role_and_number(self, store):
        store.add_job(late := a_job(1, submitted=9))
        store.add_job(early := a_job(2, submitted=8))
        store.ask_tasks(starts(late, ps=1), 1.0)
        store.ask_tasks(starts(early, workers=11, ps=1), 1.0)
        store.change_tasks([TaskChange(early.key, "worker-3", TaskState.FAILED, note="oom")], 2.0)
        expected = [(early.key, f"worker-{number}") for number in range(11)]
        expected += [(early.key, "ps-0"), (late.key, "worker-0"), (late.key, "ps-0")]
        assert [(task.job, task.id) for task in store.tasks(live=False)] == expected
        expected.remove((early.key, "worker-3"))
        assert [(task.job, task.id) for task in store.tasks(live=True)] == expected
        assert [task.id for task in store.tasks(live=True, job=late.key)] == ["worker-0", "ps-0"]

    def test_each_change_may_have_a_time_of_its_own(self, any_store):
        any_store.add_job(job := a_job())
        any_store.ask_tasks(starts(job, workers=2), 10.0)
        changes = [
            TaskChange(job.key, "worker-0", TaskState.CONFIRMED, at=4.0),
            TaskChange(job.key, "worker-1", TaskState.CONFIRMED),
        ]
        assert [task.since for task in any_store.change_tasks(changes, 11.0)] == [4.0, 11.0]
        assert [task.since for task in any_store.tasks(live=True)] == [4.0, 11.0]

    def test_tasks_by_their_ids_ended_ones_included(self, store):
        store.add_job(job := a_job())
        store.add_job(other := a_job(2))
        store.ask_tasks([*starts(job, workers=3, ps=1), *starts(other, workers=9)], 1.0)
        store.change_tasks([TaskChange(job.key, "worker-0", TaskState.FAILED)], 2.0)
        found = store.named_tasks(job.key, {"ps-0", "worker-0", "worker-2", "worker-8"})
        assert [(task.id, task.state) for task in found] == [
            ("worker-0", TaskState.FAILED), ("worker-2", TaskState.ASKED), ("ps-0", TaskState.ASKED),
        ]  # fmt: skip
        assert store.named_tasks(job.key, ()) == store.named_tasks(a_job(3).key, {"worker-0"}) == ()

    def test_nothing_to_ask_or_change(self, any_store):
        assert any_store.ask_tasks([], 1.0) == any_store.change_tasks([], 1.0) == ()

    def test_an_unknown_task_spoils_the_whole_batch(self, store):
        store.add_job(job := a_job())
        before = store.ask_tasks(starts(job), 1.0)
        with pytest.raises(StoreError, match="no task worker-7"):
            store.change_tasks([TaskChange(job.key, name, TaskState.GRANTED) for name in ("worker-0", "worker-7")], 2.0)
        assert store.tasks(live=True) == before

    def test_a_later_word_changes_no_state_but_handle_and_note(self, store):
        store.add_job(job := a_job())
        store.ask_tasks(starts(job), 1.0)
        change = TaskChange(job.key, "worker-0", TaskState.JOINED)
        assert [task.state for task in store.change_tasks([change], 2.0)] == [TaskState.JOINED]
        late = TaskChange(job.key, "worker-0", TaskState.GRANTED, handle="4711", note="on n1\0")
        assert store.change_tasks([late], 3.0) == ()
        store.change_tasks([TaskChange(job.key, "worker-0", TaskState.JOINED, node="n9")], 4.0)
        assert [task.node for task in store.tasks(live=True) if task.id == "worker-0"] == ["n9"]
        (task,) = store.tasks(live=True)
        assert (task.state, task.since, task.handle, task.note) == (TaskState.JOINED, 2.0, "4711", "on n1\ufffd")

    def test_the_first_end_stays(self, store):
        store.add_job(job := a_job())
        store.ask_tasks(starts(job), 1.0)
        store.change_tasks([TaskChange(job.key, "worker-0", TaskState.FAILED)], 2.0)
        assert store.change_tasks([TaskChange(job.key, "worker-0", TaskState.RELEASED)], 3.0) == ()
        assert store.tasks(live=False)[0].state is TaskState.FAILED


class TestResizes:
    def test_growing_and_shrinking_with_every_state(self, store):
        store.add_job(job := a_job())
        store.ask_tasks(starts(job), 1.0)
        path = list(TaskState)[1:-1]
        for second, state in enumerate(path, start=2):
            store.change_tasks([TaskChange(job.key, "worker-0", state, note=state.value.upper())], float(second))
        shrink, grow = store.resizes(job.key)
        assert (grow.direction, grow.task, grow.role, grow.node) == ("grow", "worker-0", Role.WORKER, "n1")
        assert [(event.state.value, event.at) for event in grow.events] == [
            ("asked", 1.0),
            ("granted", 2.0),
            ("joined", 3.0),
            ("confirmed", 4.0),
        ]
        assert shrink.direction == "shrink"
        assert shrink.events == (
            ResizeEvent(TaskState.DRAINING, 5.0, "DRAINING"),
            ResizeEvent(TaskState.DRAINED, 6.0, "DRAINED"),
            ResizeEvent(TaskState.RELEASED, 7.0, "RELEASED"),
        )

    @pytest.mark.parametrize(
        ("path", "grown", "shrunk"),
        [
            ("failed", "asked failed", ""),
            ("joined failed", "asked joined failed", ""),
            ("confirmed failed", "asked confirmed", "failed"),
            ("granted draining failed", "asked granted", "draining failed"),
            ("released", "asked", "released"),
            ("draining confirmed released", "asked", "draining released"),
        ],
    )
    def test_where_an_end_belongs(self, store, path, grown, shrunk):
        store.add_job(job := a_job())
        store.ask_tasks(starts(job), 1.0)
        # All in one batch: a batch may move a task more than once.
        store.change_tasks([TaskChange(job.key, "worker-0", TaskState(state)) for state in path.split()], 2.0)
        found = {resize.direction: " ".join(event.state for event in resize.events) for resize in store.resizes()}
        assert found == ({"grow": grown, "shrink": shrunk} if shrunk else {"grow": grown})

    def test_a_task_that_runs_on_another_node_than_it_was_asked_for(self, store):
        store.add_job(job := a_job())
        store.ask_tasks(starts(job), 1.0)
        store.change_tasks([TaskChange(job.key, "worker-0", TaskState.GRANTED, node="n2")], 2.0)
        assert [resize.node for resize in store.resizes(job.key)] == ["n2"]

    def test_newest_first_and_limited(self, store):
        store.add_job(job := a_job())
        store.add_job(other := a_job(2))
        store.ask_tasks(starts(job, workers=2), 1.0)
        store.ask_tasks(starts(other), 2.0)
        assert [(resize.job.id, resize.task) for resize in store.resizes(limit=2)] == [
            ("2", "worker-0"),
            ("1", "worker-1"),
        ]
        assert [resize.task for resize in store.resizes(job.key)] == ["worker-1", "worker-0"]

    def test_runtime_plans_are_kept_once(self, store):
        store.add_job(job := a_job())
        plans = [
            RuntimePlan(
                number=number,
                at=5.0,
                first_version=number * 10,
                workers=2,
                servers=1,
                added=("worker-1",),
                moved_bytes=2**40,
                prepare_ms=1.5,
                suspension_max_ms=0.1,
                longest_step_ms=12.5,
                median_step_ms=None,
            )
            for number in (2, 1)
        ]
        store.add_runtime_plans(job.key, plans)
        store.add_runtime_plans(job.key, [replace(plans[0], workers=9), replace(plans[0], number=3)])
        store.add_runtime_plans(job.key, [])
        assert store.runtime_plans(job.key) == (plans[1], plans[0], replace(plans[0], number=3))

    def test_the_last_runtime_plans_of_a_job_are_kept_whatever_it_reports(self, store):
        store.add_job(job := a_job())
        store.add_job(other := a_job(2))
        plan = RuntimePlan(number=1, at=5.0, first_version=0, workers=1, servers=1)
        store.add_runtime_plans(other.key, [plan])
        numbers = [*range(1, MAX_KEPT), 2**62]
        store.add_runtime_plans(job.key, [replace(plan, number=number) for number in numbers])
        assert len(store.runtime_plans(job.key)) == MAX_KEPT
        store.add_runtime_plans(job.key, [replace(plan, number=number) for number in (0, MAX_KEPT, MAX_KEPT + 1)])
        kept = [plan.number for plan in store.runtime_plans(job.key)]
        assert kept == [*range(3, MAX_KEPT + 2), 2**62]
        assert store.runtime_plans(other.key) == (plan,)

    def test_what_is_said_of_a_task_takes_the_place_of_what_was_said_before(self, store):
        store.add_job(job := a_job())
        store.add_job(other := a_job(2))
        full = TaskReport(
            task="worker-10", at=5.0, cpu_seconds=1.5, cpu_percent=212.25, memory=900.5, memory_peak=1000.0, gpus=2,
            gpu_percent=55.5, gpu_memory=2048.0, step_ms=3.25, step_p95_ms=4.0, slowdown=2.5,
            slowdown_reason="has \0time",
        )  # fmt: skip
        ended = TaskReport(task="worker-9", at=5.0, cause="out-of-memory", how="died: killed by signal 9 (SIGKILL)")
        server = TaskReport(task="ps-0", at=5.0, cpu_percent=3.0)
        store.report_progress(job.key, Progress(at=5.0), [full, server, ended])
        store.report_progress(other.key, Progress(at=5.0), [replace(full, at=6.0)])
        read = replace(full, slowdown_reason="has \ufffdtime")
        assert store.task_reports(job.key) == (ended, read, server)
        store.report_progress(job.key, Progress(at=7.0))
        store.report_progress(job.key, Progress(at=8.0), [TaskReport(task="worker-10", at=8.0, memory=1.0)])
        assert store.task_reports(job.key) == (ended, TaskReport(task="worker-10", at=8.0, memory=1.0), server)
        assert store.task_reports(other.key) == (replace(read, at=6.0),)
        assert store.task_reports(JobKey("main", "404", 1)) == ()


class TestSlots:
    @pytest.mark.parametrize("guarded", [True, False])
    def test_a_slot_comes_back_equal(self, store, guarded):
        jobs = (a_job(), a_job(2))
        for job in jobs:
            store.add_job(job)
        tasks = store.ask_tasks(starts(jobs[0], workers=2, ps=1), 5.0)
        slot = a_slot(7, jobs, tasks, guarded=guarded)
        store.record_slot(slot)
        assert store.slot(7) == slot
        assert store.slot(9) is None
        assert store.last_slot_number() == 7
        (entry,) = store.decisions(jobs[1].key)
        assert entry.decided == slot.decision.jobs[1]
        assert store.last_decisions([jobs[1].key, JobKey("main", "404", 1)]) == {jobs[1].key: entry.decided}
        for number, job in enumerate(jobs):
            part = store.job_slot(7, job.key)
            assert (part.entry,) == store.decisions(job.key)
            assert (part.proposed, part.shadow) == (slot.proposed.jobs[number], None)
            assert part.deferred == tuple(each for each in slot.plan.deferred if each.job == job.key)
            assert part.failures == tuple(each for each in slot.outcome.failures if each.job == job.key)
            assert (part.usable, part.nodes) == (None, len(slot.snapshot.nodes))
        assert slot.plan.deferred
        assert slot.outcome.failures
        assert store.job_slot(7, JobKey("main", "404", 1)).entry is None
        assert store.job_slot(8, job.key) is None
        more = tuple(each for each in slot.decision.jobs if sum(each.allocation) > sum(each.previous))
        assert more or guarded
        assert store.grown_jobs(7) == store.grown_jobs(7, User(job.owner.uid, job.owner.user)) == more
        assert store.grown_jobs(7, User(job.owner.uid, "other")) == ()
        store.record_slot(a_slot(8, jobs[:1], tasks))
        assert store.last_decisions([jobs[1].key]) == store.last_decisions([]) == {}
        assert (entry.slot, entry.at, entry.policy, entry.measure) == (7, slot.at, "drf", "dominant share")

    def test_a_slot_without_jobs(self, store):
        assert store.last_slot_number() == 0
        store.record_slot(slot := a_slot(1, ()))
        assert store.slot(1) == slot

    def test_summaries_newest_first(self, store):
        store.add_job(job := a_job())
        tasks = store.ask_tasks(starts(job, workers=2), 5.0)
        for number in (1, 2, 3):
            store.record_slot(a_slot(number, (job,), tasks, guarded=number == 2))
        found = store.slots(limit=2)
        assert [summary.number for summary in found] == [3, 2]
        newest = found[0]
        assert (newest.changed, newest.started, newest.draining, newest.failures) == (1, 2, 1, 1)
        assert (newest.policy, newest.policy_version, newest.seconds) == ("drf", "1", 0.125)
        assert found[1].changed == 0
        assert [entry.slot for entry in store.decisions(job.key, limit=2)] == [3, 2]
        # The limit is one of slots that count.
        (second,) = store.slots(limit=1, policy="drf", outside=[(newest.at, newest.at + 1.0), (0.0, 1.0)])
        assert second.number == 2
        assert store.slots(policy="fifo") == ()
        # Slots without jobs are passed over.
        store.record_slot(a_slot(4, ()))
        store.record_slot(a_slot(5, ()))
        assert [summary.number for summary in store.slots(limit=2, with_jobs=True)] == [3, 2]

    def test_slots_whose_decisions_were_deleted_may_have_had_jobs(self, store):
        store.record_slot(a_slot(1, ()))
        assert [summary.number for summary in store.slots(with_jobs=True)] == [1]

    def test_a_number_can_be_recorded_once(self, store):
        store.add_job(job := a_job())
        store.record_slot(first := a_slot(1, (job,)))
        with pytest.raises(StoreError, match="recording slot 1"):
            store.record_slot(a_slot(1, (job,), guarded=True))
        assert store.slot(1) == first

    def test_an_unknown_job_spoils_the_slot(self, any_store):
        with pytest.raises(StoreError, match="no job"):
            any_store.record_slot(a_slot(1, (a_job(),)))
        assert any_store.last_slot_number() == 0

    @pytest.mark.parametrize("score", [math.nan, math.inf])
    def test_a_score_that_could_not_be_read_back_is_refused(self, store, score):
        store.add_job(job := a_job())
        slot = a_slot(1, (job,))
        bad = replace(slot.proposed.jobs[0], alternatives=(Alternative(Allocation(1, 1), score),))
        with pytest.raises(StoreError, match=r"drf .*main\.1\.1700000000 .*finite"):
            store.record_slot(replace(slot, proposed=replace(slot.proposed, jobs=(bad,))))

    def test_text_that_is_not_unicode_is_refused_as_ours(self, store):
        store.add_job(job := a_job())
        slot = a_slot(1, (job,))
        with pytest.raises(StoreError, match="recording slot 1"):
            store.record_slot(replace(slot, inputs_hash="\udc80"))


def test_a_closed_store_says_so(store: SqlStore):
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.jobs(live=True)


def test_the_demand_of_a_task_is_exact(any_store):
    any_store.add_job(job := a_job())
    demand = PS * 3 + WORKER
    any_store.ask_tasks([Start(job.key, Role.PS, "n1", demand)], 1.0)
    assert any_store.tasks(live=True)[0].demand == demand


class TestEvidence:
    """What policies may need to know of the past."""

    KIND = TrainingKind("digits-mlp", Architecture.PS, Consistency.SYNC)

    def test_speeds_are_means_by_size_over_all_jobs_of_a_kind(self, any_store):
        one, other = a_job(), a_job(number=2)
        for job in (one, other):
            any_store.add_job(job)
        kind = TrainingKind.of(one.request)
        any_store.report_progress(one.key, Progress(at=100.0, samples_per_second=10.0, workers=2, ps=1))
        any_store.report_progress(other.key, Progress(at=100.0, samples_per_second=11.0, workers=2, ps=1))
        any_store.report_progress(other.key, Progress(at=110.0, samples_per_second=12.0, workers=2, ps=1))
        any_store.report_progress(other.key, Progress(at=120.0, samples_per_second=7.0, workers=1, ps=3))
        points = (
            SpeedPoint(Allocation(1, 3), 7.0, 1, jobs=1, last_measured=120.0, first_measured=120.0),
            SpeedPoint(Allocation(2, 1), pytest.approx(11.0), 3, jobs=2, last_measured=110.0, first_measured=100.0),
        )
        assert any_store.speeds([kind]) == (MeasuredSpeeds(kind, points),)
        assert any_store.speeds([kind._replace(model="another"), kind._replace(consistency=Consistency.ASYNC)]) == ()
        assert any_store.speeds([]) == ()

    def test_old_measurements_of_a_size_lose_their_weight(self, any_store):
        any_store.add_job(job := a_job())
        reports = [50.0] * 40 + [60.0] * 40
        for number, speed in enumerate(reports):
            any_store.report_progress(
                job.key, Progress(at=100.0 + 10 * number, samples_per_second=speed, workers=1, ps=1)
            )
        [measured] = any_store.speeds([TrainingKind.of(job.request)])
        # All but (15/16)^40 of the way from 50 to 60; a plain mean would be at 55.
        [point] = measured.points
        assert point.samples_per_second == pytest.approx(60 - 10 * (15 / 16) ** 40)
        assert point.measurements == 16

    def test_what_one_job_alone_says_counts_when_another_says_so_too(self, any_store):
        jobs = [a_job(number=number) for number in (1, 2, 3)]
        for job in jobs:
            any_store.add_job(job)
        kind = TrainingKind.of(jobs[0].request)

        def said(job, at, speed):
            any_store.report_progress(job.key, Progress(at=at, samples_per_second=speed, workers=1, ps=1))
            return any_store.speeds([kind])[0].points

        for at in (100.0, 110.0, 120.0):
            said(jobs[0], at, 50.0)
        usual = SpeedPoint(Allocation(1, 1), 50.0, 3, jobs=1, last_measured=120.0, first_measured=100.0)
        assert said(jobs[1], 120.0, 5.0) == (usual,)
        assert said(jobs[1], 130.0, 5.0) == (usual,)
        changed = SpeedPoint(
            Allocation(1, 1), 5.0, 3, jobs=2, last_measured=125.0, first_measured=120.0, previous_speed=50.0
        )
        assert said(jobs[2], 125.0, 5.0) == (changed,)

    def test_a_job_whose_speed_was_set_aside_counts_at_no_other_size_until_it_was_right(self, any_store):
        jobs = [a_job(number=number) for number in (1, 2, 3)]
        for job in jobs:
            any_store.add_job(job)
        kind = TrainingKind.of(jobs[0].request)

        def said(job, at, speed, workers=1):
            any_store.report_progress(job.key, Progress(at=at, samples_per_second=speed, workers=workers, ps=1))
            return {tuple(point.allocation): point.samples_per_second for point in any_store.speeds([kind])[0].points}

        for at in (100.0, 110.0, 120.0):
            said(jobs[0], at, 50.0)
        assert said(jobs[1], 120.0, 30.0) == {(1, 1): 50.0}
        assert said(jobs[1], 130.0, 7.0, workers=2) == {(1, 1): 50.0}
        # Others count there, and so does this one again after another has said the same as it.
        assert said(jobs[0], 140.0, 90.0, workers=2) == {(1, 1): 50.0, (2, 1): 90.0}
        assert said(jobs[2], 140.0, 30.0) == {(1, 1): 30.0, (2, 1): 90.0}
        assert said(jobs[1], 150.0, 30.0)[1, 1] == 30.0
        assert said(jobs[1], 160.0, 8.0, workers=3)[3, 1] == 8.0

    def test_what_a_job_alone_showed_is_forgotten_when_two_others_know_better_of_it(self, any_store):
        jobs = [a_job(number=number) for number in (1, 2, 3)]
        other = replace(a_job(number=4), request=replace(a_job(number=4).request, model="other"))
        for job in (*jobs, other):
            any_store.add_job(job)
        kind = TrainingKind.of(jobs[0].request)

        def said(job, at, speed, workers):
            any_store.report_progress(job.key, Progress(at=at, samples_per_second=speed, workers=workers, ps=1))
            return {tuple(point.allocation): point.samples_per_second for point in any_store.speeds([kind])[0].points}

        said(jobs[0], 100.0, 50.0, 1)
        said(jobs[1], 110.0, 50.0, 1)
        said(other, 110.0, 3.0, 2)
        said(jobs[2], 120.0, 7.0, 2)
        said(jobs[2], 130.0, 70.0, 3)
        said(jobs[0], 140.0, 70.0, 3)
        said(jobs[2], 150.0, 9.0, 4)
        assert said(jobs[1], 160.0, 90.0, 4) == {(1, 1): 50.0, (2, 1): 7.0, (3, 1): 70.0, (4, 1): 9.0}
        # The second size nobody else was at, the fourth another said otherwise of, and did not count for it elsewhere.
        assert said(jobs[2], 170.0, 5.0, 1) == {(1, 1): 50.0, (3, 1): 70.0, (4, 1): 90.0}
        # Who was the first somewhere, and is outvoted there, is forgotten alike.
        said(jobs[0], 200.0, 99.0, 5)
        said(jobs[0], 210.0, 88.0, 6)
        said(jobs[1], 220.0, 90.0, 4)
        said(jobs[1], 230.0, 9.0, 5)
        assert said(jobs[1], 240.0, 9.0, 5) == {(1, 1): 50.0, (3, 1): 70.0, (4, 1): 90.0, (5, 1): 9.0}
        [apart] = any_store.speeds([TrainingKind.of(other.request)])
        assert [point.samples_per_second for point in apart.points] == [3.0]

    def test_speeds_of_other_kinds_come_by_when_they_were_measured_last(self, any_store):
        kinds = []
        for number, at in enumerate([300.0, 100.0, 200.0, 200.0], start=1):
            job = a_job(number=number)
            job = replace(job, request=replace(job.request, model=f"m{number}"))
            any_store.add_job(job)
            any_store.report_progress(job.key, Progress(at=at, samples_per_second=1.0, workers=1, ps=1))
            kinds.append(TrainingKind.of(job.request))

        def asked(others):
            return [speeds.kind.model for speeds in any_store.speeds([kinds[1]], others=others)]

        assert [asked(others) for others in (0, 1, 2, 3, 9)] == [
            ["m2"], ["m1", "m2"], ["m1", "m2", "m3"], ["m1", "m2", "m3", "m4"], ["m1", "m2", "m3", "m4"]
        ]  # fmt: skip

    def test_speeds_of_one_job_are_means_of_its_last_reports_at_each_size(self, any_store):
        one, other = a_job(), a_job(number=2)
        for job in (one, other):
            any_store.add_job(job)
        assert any_store.job_speeds([one.key, other.key]) == ()
        for number in range(20):
            said = Progress(at=100.0 + 10 * number, samples_per_second=float(number), workers=2, ps=1)
            any_store.report_progress(one.key, said)
        any_store.report_progress(one.key, Progress(at=400.0, samples_per_second=0.0, workers=3, ps=1))
        any_store.report_progress(one.key, Progress(at=410.0, workers=4, ps=1))
        any_store.report_progress(one.key, Progress(at=420.0, samples_per_second=0.0))
        any_store.report_progress(other.key, Progress(at=100.0, samples_per_second=9.0, workers=2, ps=1))
        points = (
            SpeedPoint(Allocation(2, 1), pytest.approx(11.5), 16, jobs=1, last_measured=290.0, first_measured=140.0),
            SpeedPoint(Allocation(3, 1), 0.0, 1, jobs=1, last_measured=400.0, first_measured=400.0),
        )
        assert any_store.job_speeds([other.key, one.key])[0] == JobSpeeds(one.key, points)
        assert any_store.job_speeds([other.key]) == (
            JobSpeeds(
                other.key, (SpeedPoint(Allocation(2, 1), 9.0, 1, jobs=1, last_measured=100.0, first_measured=100.0),)
            ),
        )

    def test_measurements_of_a_job_are_dropped_when_it_ends(self, store):
        store.add_job(job := a_job())
        store.report_progress(job.key, Progress(at=100.0, samples_per_second=9.0, loss=0.5, workers=2, ps=1))
        assert (len(store.job_speeds([job.key])), len(store.losses([job.key]))) == (1, 1)
        store.change_job(job.key, JobChange(state=JobState.FINISHED), 200.0)
        store.report_progress(job.key, Progress(at=300.0, samples_per_second=9.0, loss=0.5, workers=2, ps=1))
        assert (store.job_speeds([job.key]), store.losses([job.key])) == ((), ())

    def test_what_says_no_speed_counts_for_none(self, any_store):
        any_store.add_job(job := a_job())
        for at, more in enumerate([{}, {"samples_per_second": 0.0, "workers": 1}, {"samples_per_second": 5.0},
                                   {"samples_per_second": math.nan, "workers": 1}], start=1):  # fmt: skip
            any_store.report_progress(job.key, Progress(at=100.0 * at, **more))
        assert any_store.speeds([TrainingKind.of(job.request)]) == ()

    def test_reports_that_do_not_enter_the_series_are_not_counted(self, store):
        store.add_job(job := a_job())
        for at in (100.0, 101.0, 102.0):
            store.report_progress(job.key, Progress(at=at, samples_per_second=8.0, workers=1, ps=1))
        [measured] = store.speeds([TrainingKind.of(job.request)])
        assert measured.points == (
            SpeedPoint(Allocation(1, 1), 8.0, 1, jobs=1, last_measured=100.0, first_measured=100.0),
        )

    def test_losses_are_thinned_evenly_and_end_with_the_newest(self, any_store):
        any_store.add_job(job := a_job())
        any_store.add_job(a_job(number=2))
        for number in range(100):
            loss = None if number == 50 else 1.0 / (1 + number)
            any_store.report_progress(job.key, Progress(at=100.0 + 10 * number, epoch=number / 4, loss=loss))
        [fell] = any_store.losses([job.key, a_job(number=2).key])
        assert fell.job == job.key
        assert len(fell.points) <= MAX_LOSSES
        assert fell.points[-1] == LossPoint(99 / 4, 1 / 100)
        apart = [after.epoch - before.epoch for before, after in pairwise(fell.points)]
        assert set(apart) <= {1.0, 1.25}
        assert any_store.losses([]) == ()
