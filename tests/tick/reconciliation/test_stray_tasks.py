"""Jobs with dl2d's tags that are no tasks of the store: which of them the store has asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import structs

from dl2d.core.cluster import ANCHOR, task_tag
from dl2d.core.jobs import Job, JobKey
from dl2d.core.resource_manager import RmJob, RmJobState, RmListing
from dl2d.testing import MemoryStore, make_job
from dl2d.tick.observation.observe import LiveJobs
from dl2d.tick.reconciliation.stray_tasks import (
    MAX_JOBS_OF_USER,
    compare_strays,
    strays_of_known_jobs,
    tasks_of_another_database,
)
from dl2d.tick.reconciliation.task_matching import match_listing


def test_a_user_who_writes_thousands_of_tags_costs_few_lookups_and_hides_no_stray_of_another() -> None:
    looked_up: list[JobKey] = []

    class Counting(MemoryStore):
        def job(self, key: JobKey) -> Job | None:
            looked_up.append(key)
            return super().job(key)

    store = Counting()
    jobs = [make_job(number) for number in range(1, 301)]
    for job in jobs:
        store.add_job(job)
    keys = [*(job.key for job in jobs), *(jobs[0].key._replace(id=str(number)) for number in range(1000, 4000))]
    listed = [
        RmJob(handle=f"{user}{place}", state=RmJobState.PENDING, tag=task_tag(key, ANCHOR), user=user, submitted=9)
        for user, of in (("bob", keys), ("eve", keys[299:300]))
        for place, key in enumerate(of)
    ]
    matches = match_listing(LiveJobs(), {}, RmListing(0.0, (), tuple(listed)), cluster=keys[0].cluster)
    found = strays_of_known_jobs(store, matches)
    asked_for = Counter(identity.user for identity, job in found.items() if job is not None)
    assert asked_for == {"bob": MAX_JOBS_OF_USER, "eve": 1}
    _, remarks = compare_strays(matches, (), found)
    assert len(remarks) == 3000  # of those that the store never asked for, not of those that were not looked up
    assert len(looked_up) == MAX_JOBS_OF_USER + 1


def test_unknown_tasks_count_while_they_run_and_the_anchor_of_their_job_is_listed_with_their_user() -> None:
    key = make_job(1).key
    anchor = RmJob(handle=key.id, state=RmJobState.RUNNING, user="bob", submitted=key.submitted)
    task = RmJob(handle="20", state=RmJobState.RUNNING, tag=task_tag(key, "worker-0"), user="bob", submitted=9)
    element = make_job(2).key._replace(id="12_3")

    def unknown(*listed: RmJob) -> Mapping[str, int]:
        listing = RmListing(0.0, (), listed)
        matches = match_listing(LiveJobs(), {}, listing, cluster=key.cluster)
        return tasks_of_another_database(matches, listing, {})

    assert unknown(anchor, task, structs.replace(task, handle="21")) == {"bob": 2}
    assert unknown(anchor, structs.replace(task, state=RmJobState.PENDING)) == {}
    assert unknown(anchor, structs.replace(task, user="eve")) == {}
    for other in ({"submitted": 3}, {"handle": "2"}, {"user": "eve"}, {"state": RmJobState.DONE}):
        assert unknown(structs.replace(anchor, **other), task) == {}
    # An anchor that a daemon started has a tag, and another id than its job; one in a job array has the id of the task.
    assert unknown(structs.replace(anchor, handle="x", submitted=4, tag=task_tag(key, ANCHOR)), task) == {"bob": 2}
    listed = structs.replace(anchor, handle="13", array_id="12_3", submitted=element.submitted)
    assert unknown(listed, structs.replace(task, tag=task_tag(element, "ps-0"))) == {"bob": 1}
