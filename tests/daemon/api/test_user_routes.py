"""Routes for users: everybody sees their own jobs, operators see all, and a credential serves for one request."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import httpx2
import pytest
from daemon.api.api_world import SECRET_OF_THE_USER, ApiWorld, error

from dl2d.core.job_views import HistoryView, StatusView, UsageView, WhyView, request_payload
from dl2d.core.jobs import JobKey, Launch, Owner
from dl2d.core.json_codec import decode
from dl2d.daemon.api import authentication
from dl2d.policies.fifo import Fifo
from dl2d.testing import MemoryManager
from dl2d.testing.builders import LAUNCH, OWNER, make_job

BOB = Owner("bob-the-other", 4242, 4242)
OPERATOR = pwd.getpwnam("nobody")


class UserWorld(ApiWorld):
    """A world in which ann has a job, and bob two, of which one waits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.anns = self.of(OWNER, "anns-job", max_workers=6)
        self.settle()
        self.bobs = self.of(BOB, "bobs-secret-project", max_workers=4)
        self.settle()
        self.waiting = self.of(BOB, "bobs-large-project", min_workers=16, max_workers=16)
        self.settle(4)

    def of(self, owner: Owner, name: str, **changes: object) -> JobKey:
        self.number += 1
        job = make_job(self.number, submitted=int(self.now), name=name, **changes)
        secret = Launch(LAUNCH.argv, LAUNCH.cwd, (("DATA_FOLDER", SECRET_OF_THE_USER),))
        self.store.add_job(replace(job, owner=owner, launch=secret))
        return job.key

    def get(self, uid: int, path: str, **query: object) -> httpx2.Response:
        target = f"{path}?{urlencode(query)}" if query else path
        return self.ask(self.credential(uid, target), target)

    def credential(self, uid: int, target: str, *, method: str = "GET", url: str = "") -> str:
        name = f"MUNGE:{len(self.manager.credentials)}:"
        self.manager.credentials[name] = uid, request_payload(method, url or self.api_url, target)
        return name

    def ask(self, credential: str, target: str) -> httpx2.Response:
        return self.client.get(target, headers={"Authorization": f"Munge {credential}"})

    def view(self, kind: Any, uid: int, path: str, **query: object) -> Any:
        answer = self.get(uid, path, **query)
        assert answer.status_code == 200, answer.text
        return decode(answer.content, kind)


@pytest.fixture
def world() -> Iterator[UserWorld]:
    world = UserWorld(operators=(OPERATOR.pw_name,))
    yield world
    world.close()


def test_a_user_sees_their_own_jobs_and_an_operator_all(world: UserWorld):
    def seen(uid: int) -> list[JobKey]:
        return [status.job.key for status in world.view(StatusView, uid, "/v1/status").jobs]

    assert seen(OWNER.uid) == [world.anns]
    assert seen(BOB.uid) == [world.bobs, world.waiting]
    assert seen(5555) == []
    for operator in (0, os.geteuid(), OPERATOR.pw_uid):
        assert seen(operator) == [world.anns, world.bobs, world.waiting]


def test_a_user_sees_status_decisions_history_and_usage_of_a_job(world: UserWorld):
    job = world.anns.id
    status = world.view(StatusView, OWNER.uid, "/v1/status", job=job)
    assert [each.job.key for each in status.jobs] == [world.anns]
    assert {each.id for each in status.tasks} == {task.id for task in world.store.tasks(live=True, job=world.anns)}
    why = world.view(WhyView, OWNER.uid, "/v1/why", job=job, limit=100)
    assert len(why.decisions) == len(world.store.decisions(world.anns))
    assert why.tasks == world.store.tasks(live=True, job=world.anns)
    changed = world.view(HistoryView, OWNER.uid, "/v1/history", job=job)
    assert changed.resizes == world.store.resizes(world.anns)[:20][::-1]
    assert [entry.slot for entry in changed.decisions]
    assert world.view(UsageView, OWNER.uid, "/v1/usage", job=job).times == world.store.task_times(world.anns)


@pytest.mark.parametrize("path", ["/v1/status", "/v1/why", "/v1/history", "/v1/usage"])
@pytest.mark.parametrize("by", ["id", "slug", "name"])
def test_a_job_of_another_user_is_answered_like_one_that_does_not_exist(world: UserWorld, path: str, by: str):
    foreign = {"id": world.bobs.id, "slug": world.bobs.slug, "name": "bobs-secret-project"}[by]
    answers = {text: world.get(OWNER.uid, path, job=text) for text in (foreign, "nowhere")}
    for text, answer in answers.items():
        assert answer.status_code == 422
        assert error(answer) == (
            f"JOB: no such job of yours: {text!r} (`dl2d status --all` lists the jobs of the last day)"
        )
    assert world.get(0, path, job=foreign).status_code == 200


def test_nothing_of_another_users_job_is_in_an_answer(world: UserWorld):
    everything = b""
    targets = [("/v1/status", {}), ("/v1/status", {"ended_since": 0}), ("/v1/usage", {"job": world.anns.id})]
    targets += [(path, {"job": world.anns.id, "limit": 100}) for path in ("/v1/status", "/v1/why", "/v1/history")]
    targets += [("/v1/why", {"job": world.anns.id, "slot": n + 1}) for n in range(world.store.last_slot_number())]
    for path, query in targets:
        everything += world.get(OWNER.uid, path, **query).content
    assert b"anns-job" in everything
    for word in (b"bob", b"project", world.bobs.slug.encode(), SECRET_OF_THE_USER.encode()):
        assert word not in everything
    # The reasons of the jobs do name one another: an operator reads them.
    recorded = world.get(0, "/v1/why", job=world.waiting.id, limit=100).content
    assert b"bobs-large-project" in recorded


def test_the_reason_of_a_waiting_job_names_no_other_users_job():
    with closing(UserWorld(policy=Fifo())) as world:
        mine = world.of(OWNER, "behind", max_workers=2)
        world.settle(3)
        shown = world.view(StatusView, 0, "/v1/status", job=mine.id).jobs[0].decided.binding_reason
        assert "bobs-secret-project" in shown.text
        for path, kind in (("/v1/status", StatusView), ("/v1/why", WhyView)):
            view = world.view(kind, OWNER.uid, path, job=mine.id)
            decided = view.jobs[0].decided if path == "/v1/status" else view.decisions[0].entry.decided
            assert decided.binding_reason.text == "other jobs are served first"


def test_the_history_of_the_cluster_is_for_operators(world: UserWorld):
    refused = world.get(OWNER.uid, "/v1/history")
    assert refused.status_code == 403
    assert "only operators" in error(refused)
    assert world.view(HistoryView, OPERATOR.pw_uid, "/v1/history").slots == world.store.slots(limit=20)[::-1]


def test_a_credential_serves_for_one_request_to_this_daemon(world: UserWorld):
    target = f"/v1/why?job={world.anns.id}"
    good = world.credential(OWNER.uid, target)
    assert world.ask(good, target).status_code == 200
    assert world.ask(good, target).status_code == 403
    for made in (
        world.credential(OWNER.uid, target, method="POST"),
        world.credential(OWNER.uid, target, url="https://another.daemon:8910"),
        world.credential(OWNER.uid, f"/v1/status?job={world.anns.id}"),
        world.credential(OWNER.uid, f"/v1/why?job={world.bobs.id}"),
        "MUNGE:made-up:",
    ):
        assert world.ask(made, target).status_code == 403


@pytest.mark.parametrize("shown", ["", "Munge", "Bearer MUNGE:0:", "Basic YTpi"])
def test_a_request_without_a_credential_is_refused(world: UserWorld, shown: str):
    answer = world.client.get("/v1/status", headers={"Authorization": shown})
    assert answer.status_code == 401
    assert world.client.get("/v1/why?limit=x", headers={"Authorization": shown}).status_code == 401


def test_a_request_has_no_body(world: UserWorld):
    shown = {"Authorization": f"Munge {world.credential(OWNER.uid, '/v1/status')}"}
    assert world.client.request("GET", "/v1/status", content=b"x", headers=shown).status_code == 413


def test_the_credential_of_the_daemons_account_is_for_other_routes(world: UserWorld):
    shown = {"Authorization": f"Bearer {world.credentials.for_submission()}"}
    assert world.client.get("/v1/status", headers=shown).status_code == 401


def test_a_credential_crosses_no_network_in_clear_text(world: UserWorld, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(authentication, "is_loopback", lambda _: False)
    answer = world.get(OWNER.uid, "/v1/status")
    assert answer.status_code == 403
    assert "over https only" in error(answer)


def test_a_resource_manager_that_knows_no_users_shows_nothing(world: UserWorld):
    world.access.manager = MemoryManager((), lambda: world.now)
    answer = world.get(OWNER.uid, "/v1/status")
    assert answer.status_code == 403
    assert "does not authenticate users" in error(answer)


@pytest.mark.parametrize("query", [{"limit": 101}, {"limit": 0}, {"slot": -1}, {"job": ""}, {"job": "x" * 301}])
def test_requests_are_limited(world: UserWorld, query: dict[str, object]):
    assert world.get(OWNER.uid, "/v1/why", **{"job": world.anns.id, **query}).status_code == 422


def test_users_leave_threads_for_heartbeats(world: UserWorld):
    viewing = world.api.state.services.viewing
    while viewing.acquire(blocking=False):
        pass
    answer = world.get(OWNER.uid, "/v1/status")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    viewing.release()
    for _ in range(5):  # each gives back what it took, also where it is refused
        assert world.get(OWNER.uid, "/v1/status").status_code == 200
        assert world.get(OWNER.uid, "/v1/why", job="nowhere").status_code == 422
        assert world.ask("MUNGE:made-up:", "/v1/status").status_code == 403


def test_requests_of_users_count_towards_the_rate_of_their_address():
    with closing(UserWorld(burst=2.0)) as world:
        assert [world.get(OWNER.uid, "/v1/status").status_code for _ in range(3)] == [200, 200, 429]
