"""What was recorded and is sent again: it is taken once, sets nothing back, and lets nobody in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon.api.api_world import ApiWorld, error

from dl2d.core.jobs import JobKey


@pytest.fixture
def world() -> Iterator[ApiWorld]:
    world = ApiWorld()
    yield world
    world.close()


def beat(number: int, sender: str = "coordinator-1", **said: object) -> dict[str, object]:
    return {"address": f"{sender}:1", "state": "running", "version": number, "sender": sender, "number": number, **said}


def send(world: ApiWorld, job: JobKey, *beats: dict[str, object]) -> list[int]:
    return [world.post_beat(job, each).status_code for each in beats]


def test_a_heartbeat_is_taken_once_and_in_order(world: ApiWorld) -> None:
    job = world.submit()
    assert send(world, job, beat(1), beat(2), beat(3)) == [200] * 3
    before = world.store.job(job), world.store.series(job), world.tasks()
    world.now += 100.0
    refused = world.post_beat(job, beat(3))
    assert (refused.status_code, "received before" in error(refused)) == (409, True)
    assert send(world, job, beat(1), beat(2, state="failed", reason="forged")) == [409, 409]
    assert (world.store.job(job), world.store.series(job), world.tasks()) == before
    assert send(world, job, beat(4)) == [200]


def test_which_tasks_are_starting_is_what_the_last_heartbeat_says(world: ApiWorld) -> None:
    job = world.submit()
    assert world.answered.last(job).connected_tasks is None
    said = []
    for number, starting in enumerate(([], ["worker-0", "ps-3"], None)):
        more = {} if starting is None else {"starting": starting}
        assert send(world, job, beat(number, **more)) == [200]
        said.append(world.answered.last(job).connected_tasks)
    assert said == [frozenset(), {"worker-0", "ps-3"}, None]


def test_whether_a_jobs_training_is_done_is_what_the_last_heartbeat_says(world: ApiWorld) -> None:
    job = world.submit()
    assert not world.answered.last(job).training_done
    for number, ending in enumerate((False, True, False)):
        assert send(world, job, beat(number, ending=ending)) == [200]
        assert world.answered.last(job).training_done is ending


def test_the_first_heartbeat_after_a_gap_may_be_as_old_as_the_gap(world: ApiWorld) -> None:
    job = world.submit()
    found = []
    for number, seconds in enumerate((0.0, 59.0, 61.0, 1.0, 61.0)):
        world.elapsed += seconds
        world.now += seconds
        assert send(world, job, beat(number)) == [200]
        found.append(world.answered.last(job).after_gap)
    assert found == [False, False, True, False, True]


def test_a_late_heartbeat_of_a_dead_coordinator_does_not_set_the_address_back(world: ApiWorld) -> None:
    job = world.submit()
    old = beat(7, "first")
    assert send(world, job, beat(6, "first"), old, beat(1, "second")) == [200] * 3
    assert send(world, job, old) == [409]
    found = world.store.job(job)
    assert found is not None
    assert found.address == "second:1"


def test_the_same_numbers_of_another_job_are_its_own(world: ApiWorld) -> None:
    first, second = world.submit(), world.submit()
    assert send(world, first, beat(1)) + send(world, second, beat(1)) == [200, 200]
    credential = world.credentials.for_job(first)
    assert world.post(f"/v1/jobs/{second.slug}/heartbeat", beat(2), credential).status_code == 403


def test_heartbeats_at_once_over_many_connections_are_one(world: ApiWorld) -> None:
    job = world.submit()
    answers = world.at_once(16, lambda: world.post_beat(job, beat(1)))()
    taken, *others = sorted(answer.status_code for answer in answers)
    assert (taken, set(others) - {429}) == (200, {409})  # 429: others of the job were waiting


def test_older_runtimes_that_do_not_number_their_heartbeats_are_heard(world: ApiWorld) -> None:
    job = world.submit()
    assert [world.heartbeat(job, version=number).status_code for number in (1, 1, 2)] == [200] * 3


def test_a_recorded_registration_makes_no_second_job_and_takes_none_over(world: ApiWorld) -> None:
    """With a proof that serves once, as munge's do, it is refused; with one that lasts it is the same job."""
    key = world.add_anchor()
    first = world.register()
    assert send(world, key, beat(1)) == [200]
    before = world.store.job(key)
    again = world.post(
        "/v1/register", {"rm_id": "7", "proof": "ann", "address": "evil:1", "argv": ["evil"], "cwd": "/tmp", "env": {}}
    )
    assert again.json() == first.json()
    assert world.store.job(key) == before
    assert len(world.store.jobs(live=False)) == 1


def test_a_job_that_floods_with_its_own_credential_is_slowed_and_no_other() -> None:
    world = ApiWorld(beat_burst=5.0)
    try:
        flooding, other = world.submit(), world.submit()
        assert send(world, flooding, *map(beat, range(1, 9))) == [200] * 5 + [429] * 3
        assert send(world, other, beat(1)) == [200]
        world.now += 1.0
        assert send(world, flooding, beat(9), beat(10)) == [200, 429]
    finally:
        world.close()
