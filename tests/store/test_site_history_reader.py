"""What a store tells of the past, on each database."""

from __future__ import annotations

import math
from dataclasses import replace

from msgspec import structs
from store.samples import PS, WORKER, a_job, a_slot, starts

from dl2d.core.cluster import Node, TaskState
from dl2d.core.jobs import NO_LAUNCH, NOTHING, Allocation, Job, JobKey, JobState, Progress
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange, RetentionTimes, RuntimePlan, TaskChange
from dl2d.store.sql_store import SqlStore

BEGIN, END = 1_000_000.0, 1_010_000.0


def test_jobs_that_were_there_at_some_time_in_between(store: SqlStore) -> None:
    def added(number: int, submitted: float, ended: float | None) -> None:
        job = a_job(number, submitted=int(submitted))
        store.add_job(job)
        if ended is not None:
            store.change_job(job.key, JobChange(state=JobState.FINISHED), ended)

    added(1, BEGIN - 500, BEGIN - 1)  # over before
    added(2, BEGIN - 500, BEGIN + 1)
    added(3, BEGIN - 500, None)
    added(4, BEGIN, END + 5)
    added(5, END - 1, None)
    added(6, END, None)  # not there yet
    history = store.history(BEGIN, END)
    assert (history.begin, history.end) == (BEGIN, END)
    assert [job.key.id for job in history.jobs] == ["2", "3", "4", "5"]
    assert [job.state.ended for job in history.jobs] == [True, False, True, False]
    assert all(job.launch == NO_LAUNCH for job in history.jobs)  # nobody needs what may be secret


def test_the_cluster_is_seen_once_an_hour_without_our_own_tasks(store: SqlStore) -> None:
    job = a_job(1, submitted=int(BEGIN), progress=Progress(at=BEGIN, epoch=2.5))
    store.add_job(job)
    tasks = store.ask_tasks(starts(job, workers=2, ps=1), BEGIN)
    node = Node("n1", Resources.of(cpu=16, gpu=4, memory=90_000), WORKER * 2 + PS + Resources.of(cpu=3))
    for number, at in enumerate((BEGIN - 10, BEGIN + 10, BEGIN + 900, BEGIN + 3600, END - 1, END + 1), start=1):
        slot = a_slot(number, (job,), tasks)
        store.record_slot(
            replace(slot, at=at, snapshot=structs.replace(slot.snapshot, at=at, nodes=(node,), tasks=tasks))
        )
    cluster_states = store.history(BEGIN, END).cluster_states
    hours = [int(state.at // 3600) for state in cluster_states]
    assert hours == sorted(set(hours))
    assert [state.at for state in cluster_states][:2] == [BEGIN + 10, BEGIN + 900]  # the hour turns between the two
    assert all(state.epochs == {job.key: 2.5} for state in cluster_states)
    assert {state.nodes[0].used for state in cluster_states} == {Resources.of(cpu=3)}


def test_sizes_of_static_jobs_that_ran_between_two_slots_are_those_that_the_manager_told(store: SqlStore) -> None:
    def added(number: int, started: float | None, *, static: bool = True) -> JobKey:
        job = a_job(number, submitted=int(BEGIN) - 100, static=static, progress=Progress(workers=3, ps=1))
        store.add_job(job)
        if started is not None:
            store.change_job(job.key, JobChange(state=JobState.RUNNING), started)
        store.change_job(job.key, JobChange(state=JobState.FINISHED), BEGIN + 9)
        return job.key

    before, between = added(1, BEGIN - 50), added(2, BEGIN + 4)
    added(3, None)  # cancelled while it waited
    added(4, BEGIN + 4, static=False)
    sizes = store.history(BEGIN, END, unreported=True).sizes
    assert sizes == {before: ((BEGIN, Allocation(3, 1)),), between: ((BEGIN + 4, Allocation(3, 1)),)}


def test_from_when_on_nothing_was_deleted_and_the_sizes_that_jobs_had_then(store: SqlStore) -> None:
    """Slots of before have no decisions any more, or jobs of before are gone; where no job had come, nothing is."""
    early, late = a_job(1, submitted=int(BEGIN)), a_job(2, submitted=int(BEGIN) + 2000)
    for job in (early, late):
        store.add_job(job)

    def recorded(number: int, *jobs: Job, had: Allocation, given: Allocation) -> None:
        slot, at = a_slot(number, jobs), BEGIN + 1000 * number
        entries = tuple(replace(each, previous=had, allocation=given) for each in slot.decision.jobs)
        snapshot = structs.replace(slot.snapshot, at=at)
        decision = replace(slot.decision, jobs=entries)
        store.record_slot(replace(slot, at=at, snapshot=snapshot, decision=decision, proposed=decision))

    def pruned(**keep: float) -> float:
        times = {"progress": math.inf, "decisions": math.inf, "slots": math.inf, "jobs": math.inf, **keep}
        while store.prune(RetentionTimes(**times), END):
            pass
        return store.history(BEGIN - 5000, END).complete_from

    one, two = Allocation(1, 1), Allocation(2, 1)
    recorded(1, had=NOTHING, given=NOTHING)
    recorded(2, early, had=NOTHING, given=one)
    recorded(3, early, late, had=one, given=one)
    recorded(4, early, late, had=one, given=two)
    assert pruned() == 0.0
    assert store.history(BEGIN, END).sizes[early.key] == ((BEGIN + 2000, one), (BEGIN + 4000, two))
    assert BEGIN + 2000 < pruned(decisions=END - BEGIN - 2500) < BEGIN + 2001
    assert store.history(BEGIN, END).sizes[early.key] == ((BEGIN, one), (BEGIN + 4000, two))
    assert BEGIN + 4000 < pruned(decisions=0.0) < BEGIN + 4001
    store.change_job(early.key, JobChange(state=JobState.FINISHED), BEGIN + 4500)
    assert BEGIN + 4000 < pruned(jobs=END - BEGIN - 4600) < BEGIN + 4001


def test_speeds_plans_and_how_long_tasks_took_to_start(store: SqlStore) -> None:
    job, other = a_job(1, submitted=int(BEGIN)), a_job(2, submitted=int(END) + 9)
    for each in (job, other):
        store.add_job(each)
    store.ask_tasks(starts(job, workers=2), BEGIN + 1)
    store.change_tasks([TaskChange(job.key, "worker-0", TaskState.GRANTED)], BEGIN + 2)
    store.change_tasks([TaskChange(job.key, "worker-0", TaskState.CONFIRMED)], BEGIN + 8.5)
    store.change_tasks([TaskChange(job.key, "worker-1", TaskState.FAILED, note="no")], BEGIN + 9)
    plans = [
        RuntimePlan(number=number, at=at, first_version=1, workers=1, servers=1, added=("worker-0",))
        for number, at in ((1, BEGIN - 1), (2, BEGIN + 1), (3, END))
    ]
    store.add_runtime_plans(job.key, plans)
    store.report_progress(job.key, Progress(at=BEGIN + 20, samples_per_second=12.5, workers=1, ps=1))
    history = store.history(BEGIN, END)
    assert history.starts == (7.5,)
    assert history.plans == (plans[1],)
    ((point,),) = [speeds.points for speeds in history.speeds]
    assert (point.allocation, point.samples_per_second) == (Allocation(1, 1), 12.5)


def test_nobody_waited_less_than_no_time_where_a_clock_was_set_back(store: SqlStore) -> None:
    jobs = [a_job(number, submitted=int(BEGIN)) for number in (1, 2)]
    for job in jobs:
        store.add_job(job)
    store.record_slot(a_slot(1, jobs, ()))
    for job, began in zip(jobs, (BEGIN - 3600, BEGIN + 30), strict=True):
        store.change_job(job.key, JobChange(state=JobState.RUNNING), began)
        store.change_job(job.key, JobChange(state=JobState.FINISHED), began + 60)
    with store._database.reading("a test") as connection:
        waited = connection.exec_driver_sql("SELECT waiting_seconds FROM job_completion ORDER BY job_id").scalars()
        assert list(waited) == [0.0, 30.0]
        assert connection.exec_driver_sql("SELECT mean_waiting_seconds FROM policy_performance").scalar_one() == 15.0


def test_an_empty_store_has_an_empty_history(store: SqlStore) -> None:
    history = store.history(BEGIN, END)
    assert (history.jobs, history.cluster_states, history.speeds, history.plans, history.starts) == ((), (), (), (), ())
