"""Routes for users: everybody sees their own jobs, operators see all, and a credential serves for one request."""

from __future__ import annotations

import itertools
import os
import pwd
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import httpx2
import psutil
import pytest
from daemon.api.api_world import SECRET_OF_THE_USER, ApiWorld, error

from dl2d.core.cluster import Claimant
from dl2d.core.decision import Constraint, Reason
from dl2d.core.errors import StoreError, StoreUnavailable
from dl2d.core.job_views import HistoryView, StatusView, UsageView, WhyView, request_payload
from dl2d.core.jobs import JobKey, JobState, Launch, Owner, User
from dl2d.core.json_codec import decode
from dl2d.core.resource_manager import Claim, EligibleNodes
from dl2d.core.store import JobChange, JobList
from dl2d.daemon.api import bearer_authentication
from dl2d.policies.fifo import Fifo
from dl2d.store.tables.jobs import MAX_NAMESAKES
from dl2d.testing import LAUNCH, OWNER, MemoryManager, make_job

BOB = Owner("bob-the-other", 4242, 4242)
OPERATOR = pwd.getpwnam("nobody")
#: More than the threads in which the server answers requests.
_THREADS = 50


class UserWorld(ApiWorld):
    """A world in which ann has a job, and bob two, of which one waits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.made = itertools.count()
        self.user_names |= {BOB.uid: BOB.user, 5555: "carol", OPERATOR.pw_uid: OPERATOR.pw_name}
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
        name = f"MUNGE:{next(self.made)}:"
        self.manager.credentials[name] = uid, request_payload(method, url or self.api_url, target)
        return name

    def ask(self, credential: str, target: str) -> httpx2.Response:
        return self.client.get(target, headers={"Authorization": f"Munge {credential}"})

    def view(self, kind: Any, uid: int, path: str, **query: object) -> Any:
        answer = self.get(uid, path, **query)
        assert answer.status_code == 200, answer.text
        return decode(answer.content, kind)


class Gate:
    """A call that waits until ``open``, and counts how many wait."""

    def __init__(self) -> None:
        self._open = False
        self._changed = threading.Condition()
        self._now = self.calls = self.most = 0

    def passed(self) -> bool:
        with self._changed:
            self._now, self.calls = self._now + 1, self.calls + 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open)
            self._now -= 1
        return True

    def wait_for(self, calls: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._now == calls, timeout=30)

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()


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
    assert {each.id for each in status.tasks} == {task.id for task in world.tasks(world.anns)}
    why = world.view(WhyView, OWNER.uid, "/v1/why", job=job, limit=5)
    newest = world.store.decisions(world.anns, limit=5)[::-1]
    assert [each.entry.slot for each in why.decisions] == [entry.slot for entry in newest]
    assert why.tasks == world.tasks(world.anns)
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
            f"JOB: no such job of yours: {text!r} (`dl2d status --all` lists the jobs of the last day; "
            "the output of a job that was refused says why)"
        )
    assert world.get(0, path, job=foreign).status_code == 200


def test_why_a_job_was_refused_is_said_to_its_user_and_to_operators(world: UserWorld):
    refused = world.add_anchor("91", script="#!/bin/sh\n#DL2 model=resnet-50 epochs=many\n")
    assert world.register("91").status_code == 422
    name = world.manager.anchors["91"].name
    for uid, said in ((OWNER.uid, True), (0, True), (BOB.uid, False)):
        for asked in (refused.id, name):
            text = error(world.get(uid, "/v1/why", job=asked))
            assert (f"job {asked} was refused when it registered: " in text and "epochs" in text) is said
    world.add_anchor("91")
    assert world.register("91").status_code == 200
    assert world.get(OWNER.uid, "/v1/why", job="91").status_code == 200


def test_a_name_means_a_refused_job_once_those_before_it_have_ended(world: UserWorld):
    before = world.of(OWNER, "mine")
    world.now += 10
    world.add_anchor("91", script="#!/bin/sh\n#DL2 model=resnet-50 epochs=many\n")
    assert world.register("91").status_code == 422
    assert world.get(OWNER.uid, "/v1/why", job="mine").status_code == 200
    world.store.change_job(before, JobChange(state=JobState.CANCELLED), world.now)
    text = error(world.get(OWNER.uid, "/v1/why", job="mine"))
    assert text.startswith("JOB: job mine was refused when it registered: ")
    assert text.endswith(f"; the job before it is {before.slug}")
    assert world.get(OWNER.uid, "/v1/why", job=before.slug).status_code == 200
    world.now += 10
    again = world.of(OWNER, "mine")
    world.store.change_job(again, JobChange(state=JobState.CANCELLED), world.now)
    assert "2 jobs are called 'mine'" in error(world.get(OWNER.uid, "/v1/why", job="mine"))


@pytest.mark.parametrize(
    ("claimant", "said"),
    [(OWNER.user, "room made for your job 812"), (BOB.user, "room made for a job of the resource manager")],
)
def test_a_waiting_job_for_which_room_is_made_is_named_to_its_own_user(world: UserWorld, claimant: str, said: str):
    node = world.cluster_nodes[0]
    world.manager.claims = [
        Claim(
            handle="812", user=claimant, nodes=1, demand=node.capacity, priority=9000, required=frozenset({node.name})
        )
    ]
    world.settle(2)
    (decision,) = world.view(WhyView, OWNER.uid, "/v1/why", job=world.anns.id).decisions
    texts = [reason.text for reason in (decision.entry.decided.reason, *decision.entry.decided.guarded)]
    assert [text for text in texts if text.startswith("room made")] == [said]


@pytest.mark.parametrize(
    ("claimants", "said"),
    [
        ([Claimant("7", BOB.user, 1, tasks_leave=False)], "free room is kept for a job of the resource manager"),
        ([Claimant("7", OWNER.user, 1, tasks_leave=False)], "free room is kept for your job 7"),
        ([Claimant("7", OWNER.user, 1), Claimant("8", BOB.user, 1)], "room made for your job 7 and others"),
        ([], "free room is kept for a job of the resource manager"),
    ],
)
def test_room_that_is_free_is_not_said_to_be_made(world: UserWorld, claimants: list[Claimant], said: str):
    reason = Reason(Constraint.CLAIM, "job 8 of bob", claimants=tuple(claimants))
    world.settle(2)
    recorded = world.store.slot(world.store.last_slot_number())
    jobs = [replace(entry, guarded=(reason,)) for entry in recorded.decision.jobs]
    world.store.record_slot(
        replace(recorded, number=recorded.number + 1, decision=replace(recorded.decision, jobs=tuple(jobs)))
    )
    (decision,) = world.view(WhyView, OWNER.uid, "/v1/why", job=world.anns.id).decisions
    assert [(each.text, each.claimants) for each in decision.entry.decided.guarded] == [(said, ())]


def test_nothing_of_another_users_job_is_in_an_answer(world: UserWorld):
    everything = b""
    targets = [("/v1/status", {}), ("/v1/status", {"ended_since": 0}), ("/v1/usage", {"job": world.anns.id})]
    targets += [(f"/v1/{name}", {"job": world.anns.id, "limit": 5}) for name in ("status", "why", "history")]
    targets += [("/v1/why", {"job": world.anns.id, "slot": n + 1}) for n in range(world.store.last_slot_number())]
    for path, query in targets:
        everything += world.get(OWNER.uid, path, **query).content
    assert b"anns-job" in everything
    for word in (b"bob", b"project", world.bobs.slug.encode(), SECRET_OF_THE_USER.encode()):
        assert word not in everything
    # The reasons of the jobs do name one another: an operator reads them.
    recorded = world.get(0, "/v1/why", job=world.waiting.id, limit=5).content
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
    monkeypatch.setattr(bearer_authentication, "is_loopback", lambda _: False)
    answer = world.get(OWNER.uid, "/v1/status")
    assert answer.status_code == 403
    assert "over https only" in error(answer)


def test_a_resource_manager_that_knows_no_users_shows_nothing(world: UserWorld):
    world.access.manager = MemoryManager((), lambda: world.now)
    answer = world.get(OWNER.uid, "/v1/status")
    assert answer.status_code == 403
    assert "does not authenticate users" in error(answer)


@pytest.mark.parametrize("query", [{"limit": 6}, {"limit": 0}, {"slot": -1}, {"job": ""}, {"job": "x" * 301}])
def test_requests_are_limited(world: UserWorld, query: dict[str, object]):
    assert world.get(OWNER.uid, "/v1/why", **{"job": world.anns.id, **query}).status_code == 422


def test_jobs_of_an_account_that_had_the_same_id_are_another_users(world: UserWorld):
    before = world.of(replace(OWNER, user="who-had-the-id-before"), "of-former-colleague")
    assert before not in [status.job.key for status in world.view(StatusView, OWNER.uid, "/v1/status").jobs]
    assert world.get(OWNER.uid, "/v1/status", job=before.id).status_code == 422


def test_a_user_whom_the_daemons_machine_does_not_know_sees_nothing(world: UserWorld):
    answer = world.get(6666, "/v1/status")
    assert (answer.status_code, error(answer)) == (403, "the daemon's machine knows no user with the id 6666")


def test_a_users_job_is_found_among_many_of_that_name(world: UserWorld):
    mine = world.of(OWNER, "train")
    world.store.change_job(mine, JobChange(state=JobState.CANCELLED), 1.0)
    for number in range(MAX_NAMESAKES):
        other = world.of(BOB, "train")
        world.store.change_job(other, JobChange(state=JobState.CANCELLED), 2.0 + number)
    assert [status.job.key for status in world.view(StatusView, OWNER.uid, "/v1/status", job="train").jobs] == [mine]


def test_which_nodes_a_job_may_use_is_shown_without_names_of_reservations(world: UserWorld):
    anchor = world.job(world.anns).anchor
    world.manager.eligible[anchor] = EligibleNodes(frozenset({"n1", "n2"}), "not those of reservation bobs-deadline")
    world.settle()
    shown = {uid: world.view(WhyView, uid, "/v1/why", job=world.anns.id).decisions[0].may_use for uid in (0, OWNER.uid)}
    assert shown[0].endswith("nodes (not those of reservation bobs-deadline)")
    assert shown[OWNER.uid] == shown[0].partition(" (")[0]


@pytest.mark.parametrize(("kind", "status"), [(StoreError, 500), (StoreUnavailable, 503)])
def test_what_is_wrong_with_the_store_is_for_the_log(
    world: UserWorld, monkeypatch: pytest.MonkeyPatch, kind: type[StoreError], status: int
):
    def fail(*_: object, **__: object) -> None:
        raise kind("job bobs-secret-project cannot be read: /var/lib/dl2d/dl2d.sqlite")

    monkeypatch.setattr(world.store, "list_jobs", fail)
    answer = world.get(OWNER.uid, "/v1/status")
    assert (answer.status_code, error(answer)) == (status, "the daemon cannot read its database; its log says why")


def test_heartbeats_are_answered_while_users_wait_for_slow_reads(world: UserWorld, monkeypatch: pytest.MonkeyPatch):
    """As many requests as the server has threads, of as many users."""
    slow, readers, read = Gate(), [], world.store.list_jobs

    def read_slowly(owner: User, **more: Any) -> JobList:
        readers.append(owner.uid)
        assert slow.passed()
        return read(owner, **more)

    monkeypatch.setattr(world.store, "list_jobs", read_slowly)
    uids = range(7000, 7000 + _THREADS)
    world.user_names |= {uid: f"user-{uid}" for uid in uids}
    each = iter(uids)
    answers = world.at_once(_THREADS, lambda: world.get(next(each), "/v1/status"))
    slow.wait_for(1)
    assert world.heartbeat(world.anns).status_code == 200
    answer = world.get(readers[0], "/v1/why", job="another request of the same user")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    slow.open()
    assert {answer.status_code for answer in answers()} == {200}
    assert slow.most == 1


def test_heartbeats_and_registrations_are_answered_while_the_resource_manager_verifies_nothing(
    world: UserWorld, monkeypatch: pytest.MonkeyPatch
):
    hung, verify = Gate(), world.manager.authenticate_user
    monkeypatch.setattr(world.manager, "authenticate_user", lambda *args: hung.passed() and verify(*args))
    world.add_anchor()
    answers = world.at_once(_THREADS, lambda: world.ask("MUNGE:made-up:", "/v1/status"))
    hung.wait_for(2)
    assert world.heartbeat(world.anns).status_code == 200
    assert world.register().status_code == 200
    hung.open()
    assert {answer.status_code for answer in answers()} == {403}
    assert hung.most == 2


def test_a_request_waits_for_a_limited_time():
    with closing(UserWorld(turn_seconds=0.0)) as world:
        hung = Gate()
        world.manager.authenticate_user = lambda *_: hung.passed() and OWNER.uid  # type: ignore[method-assign]
        answers = world.at_once(2, lambda: world.ask("MUNGE:x:", "/v1/status"))
        hung.wait_for(2)
        answer = world.get(OWNER.uid, "/v1/status")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        hung.open()
        answers()


def test_requests_whose_clients_have_gone_are_not_verified(world: UserWorld, monkeypatch: pytest.MonkeyPatch):
    hung, verify = Gate(), world.manager.authenticate_user
    monkeypatch.setattr(world.manager, "authenticate_user", lambda *args: hung.passed() and verify(*args))
    answers = world.at_once(2, lambda: world.ask("MUNGE:made-up:", "/v1/status"))
    hung.wait_for(2)
    for _ in range(20):
        with socket.create_connection(world.server.address) as gone:
            gone.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Munge MUNGE:made-up:\r\n\r\n")
    last = world.at_once(1, lambda: world.get(OWNER.uid, "/v1/status"))
    assert world.client.get("/v1/health").status_code == 200  # so the 20 connections are accepted
    while any(each.status == psutil.CONN_CLOSE_WAIT for each in psutil.Process().net_connections("tcp")):
        time.sleep(0.02)  # until the server has closed them, too
    hung.open()
    assert [answer.status_code for answer in (*answers(), *last())] == [403, 403, 200]
    assert hung.calls == 3


def test_each_user_has_a_rate_which_nobody_else_can_use_up():
    with closing(UserWorld(view_burst=2.0, burst=3.0)) as world:
        for shown in ("", "Munge MUNGE:made-up:"):
            for _ in range(10):
                world.client.get("/v1/status", headers={"Authorization": shown})
        answers = [world.get(OWNER.uid, "/v1/status") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[-1].headers["Retry-After"] == "1"
        assert world.get(BOB.uid, "/v1/status").status_code == 200
        world.add_anchor()
        assert world.register().status_code == 200
        world.now += 1.0
        assert world.get(OWNER.uid, "/v1/status").status_code == 200


def test_each_request_gives_back_its_turn(world: UserWorld):
    for _ in range(5):
        assert world.get(OWNER.uid, "/v1/status").status_code == 200
        assert world.get(OWNER.uid, "/v1/why", job="nowhere").status_code == 422
        assert world.get(OWNER.uid, "/v1/why", limit="x").status_code == 422
        assert world.ask("MUNGE:made-up:", "/v1/status").status_code == 403
