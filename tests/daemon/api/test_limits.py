"""What a client may send, how much of it and how slowly, before and after it has shown a credential."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import ssl
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest
from daemon.api.api_world import ApiWorld, error
from hypothesis import given, settings
from hypothesis import strategies as st
from self_signed import self_signed
from structlog.testing import capture_logs

from dl2d.core.errors import Denied, StoreUnavailable
from dl2d.core.jobs import JobKey, JobState, Owner
from dl2d.core.store import JobChange
from dl2d.daemon.api import http_server as api_server
from dl2d.daemon.api.connection_acceptor import Acceptor
from dl2d.daemon.api.connection_limits import (
    AcceptedSocket,
    ConnectionLimits,
    ConnectionTable,
    client_group,
    is_loopback,
)
from dl2d.daemon.api.request_limits import MAX_HEARTBEATS, MAX_HEARTBEATS_OF_USER, RateLimiter, parsing_cost
from dl2d.testing import OWNER
from pslite.job.job_status import MemberReport, Status
from pslite.job.step_time_and_usage_statistics import GpuUsage, Usage
from pslite.launch.daemon_connection.daemon_http import fetch
from pslite.launch.daemon_connection.membership_from_daemon import DaemonClient


@pytest.fixture
def make_world() -> Iterator[Callable[..., ApiWorld]]:
    worlds: list[ApiWorld] = []

    def make(**changes: object) -> ApiWorld:
        worlds.append(ApiWorld(**changes))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key of 127.0.0.1."""
    return self_signed(tmp_path_factory.mktemp("certificate"))


def head_of(path: str, *headers: str) -> bytes:
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers, "", ""]
    ).encode()


def beat_of(world: ApiWorld, job: JobKey) -> tuple[bytes, bytes]:
    """Head and body of a heartbeat, as they are sent."""
    body = b'{"address": "host:1", "state": "waiting"}'
    credential = f"Authorization: Bearer {world.credentials.for_job(job)}"
    return head_of(f"/v1/jobs/{job.slug}/heartbeat", credential, f"Content-Length: {len(body)}"), body


def send(world: ApiWorld, path: str, *headers: str, body: bytes = b"") -> bytes:
    """The answer to a request whose head and body are sent as they are; the connection is left open after them."""
    with socket.create_connection(world.server.address, timeout=20) as channel:
        channel.sendall(head_of(path, *headers) + body)
        answer = b""
        while b"}" not in answer and (more := channel.recv(65536)):
            answer += more
        return answer


def ended(channel: socket.socket) -> bool:
    """Wait until the server has ended a connection without a word."""
    channel.settimeout(20)
    try:
        return channel.recv(1) == b""
    except ConnectionResetError:
        return True


def chunks(size: int) -> bytes:
    return (f"{65536:x}\r\n".encode() + b" " * 65536 + b"\r\n") * (size // 65536)


def test_a_credential_is_checked_before_the_body_is_read(make_world):
    world = make_world()
    job = world.submit()
    for path, status in (
        (f"/v1/jobs/{job.slug}/heartbeat", b"403"),
        (f"/v1/jobs/{job.slug}/containers", b"403"),
        ("/v1/jobs", b"403"),
        ("/v1/jobs/not-a-slug/heartbeat", b"404"),
    ):
        answer = send(world, path, "Content-Length: 4000000", "Authorization: Bearer wrong")
        assert answer.startswith(b"HTTP/1.1 " + status), answer


@pytest.mark.parametrize("length", ["99999999999", "9" * 5000, "9" * 15, "1e3", "-1"])
def test_a_body_that_is_said_to_be_huge_is_refused_before_it_is_read(make_world, length):
    answer = send(make_world(), "/v1/register", f"Content-Length: {length}")
    assert answer.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 "))


@pytest.mark.parametrize("more", [(), ("Content-Length: 2",)])
def test_a_body_in_chunks_is_counted_whatever_length_it_says(make_world, more):
    world = make_world()
    answer = send(world, "/v1/register", "Transfer-Encoding: chunked", *more, body=chunks(655_360))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"at most 524288 bytes" in answer
    credential = f"Authorization: Bearer {world.credentials.for_submission()}"
    answer = send(world, "/v1/jobs", "Transfer-Encoding: chunked", credential, *more, body=chunks(4_259_840))
    assert b"at most 4194304 bytes" in answer


def test_requests_without_a_credential_have_a_rate_and_those_with_one_do_not_count(make_world):
    world = make_world(burst=3.0)
    job = world.submit()
    answers = [
        world.client.get("/v1/health"),
        world.heartbeat(job, "wrong"),
        world.register(),
        world.client.get("/metrics"),
        world.heartbeat(job, "wrong"),
        world.send_job("wrong"),
        world.post("/v1/jobs/not-a-slug/heartbeat", {}),
    ]
    assert [answer.status_code for answer in answers] == [200, 403, 404, 429, 429, 429, 429]
    assert "too many requests" in error(answers[-1])
    assert [answer.headers.get("Retry-After") for answer in answers[2:4]] == [None, "1"]
    for _ in range(10):
        assert world.heartbeat(job).status_code == 200
    world.now += 1.0
    assert [world.client.get("/v1/health").status_code for _ in range(2)] == [200, 429]


def test_large_heartbeats_count_as_several(make_world):
    """Reading one of 4 MB takes the daemon half a second, in which all other jobs wait."""
    world = make_world(beat_burst=65.0)
    job = world.submit()
    head = f"Authorization: Bearer {world.credentials.for_job(job)}", "Content-Type: application/json"
    body = b'{"address": "host:1", "state": "waiting"}'
    path = f"/v1/jobs/{job.slug}/heartbeat"
    large = body + b" " * (1 << 22)
    assert send(world, path, *head, f"Content-Length: {1 << 22}", body=large[: 1 << 22]).startswith(b"HTTP/1.1 200")
    assert send(world, path, *head, f"Content-Length: {len(body)}", body=body).startswith(b"HTTP/1.1 429")
    world.now += 2.0
    chunked = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    assert send(world, path, *head, "Transfer-Encoding: chunked", body=chunked).startswith(b"HTTP/1.1 429")
    assert send(world, path, *head, f"Content-Length: {len(body)}", body=body).startswith(b"HTTP/1.1 200")


def test_heartbeats_of_very_many_small_objects_count_as_several(make_world):
    """An object of 3 bytes takes the daemon as long as a long text."""
    world = make_world(beat_burst=30.0)
    job = world.submit()
    gpus = {"members": [{"task": "w", "role": "worker", "state": "left", "usage": {"gpus": [{}] * 250}}] * 80}
    assert [world.heartbeat(job, **gpus).status_code for _ in range(2)] == [200, 429]
    world.now += 30.0
    assert world.heartbeat(job, **gpus).status_code == 200


def test_heartbeats_count_as_several_for_the_membership_changes_that_they_report(make_world):
    """Each is a row in the store, which has one writer: 4 jobs that reported 1000 each kept it from all others."""
    world = make_world(beat_burst=30.0)
    job, other = world.submit(), world.submit()
    plans = [{"number": number, "first_version": 7, "workers": 3, "servers": 2} for number in range(200)]
    answers = [world.heartbeat(each, plans=plans) for each in (job, job, other)]
    assert [answer.status_code for answer in answers] == [200, 429, 200]
    world.now += 30.0
    assert world.heartbeat(job, plans=plans).status_code == 200


@pytest.mark.parametrize("junk", [b"{},", b"[],", b"0,0,0,0,0,", b'"[",[],'])
def test_a_body_that_takes_very_long_to_parse_is_refused_before_it_is_parsed(make_world, junk):
    world = make_world()
    body = b'{"address": "host:1", "state": "waiting", "x": [' + junk * 100_001 + b"0]}"
    answer = world.post_beat(world.submit(), body)
    assert answer.status_code == 413
    assert "at most 100000 opening brackets" in error(answer)


@pytest.mark.parametrize("junk", ["[],", "{},", "[[[[]]]],", '"[",[],', "0,0,0,0,0,"])
def test_a_body_without_a_credential_that_takes_long_to_parse_is_refused(make_world, junk):
    world = make_world(burst=10.0)
    answer = world.post("/v1/register", ("[" + junk * 8001 + "0]").encode())
    assert answer.status_code == 413
    assert "at most 8000 opening brackets" in error(answer)
    words = {"argv": ["python", *"x" * 9999], "env": {f"v{number}": "" for number in range(10_000)}}
    world.add_anchor()
    assert world.register(**words).status_code == 200  # as many words as there may be
    assert [world.register(**words).status_code for _ in range(2)] == [429, 429]  # they count as five requests


_STRINGS = st.text(st.sampled_from('[]{},"\\/u0é\x01'), max_size=8)
_LISTS = st.lists(_STRINGS, max_size=8)


@given(st.lists(_LISTS | st.dictionaries(_STRINGS, _LISTS, max_size=4), max_size=4))
@settings(max_examples=50, deadline=None)
def test_brackets_within_strings_cost_nothing(value):
    def counted(found: object) -> tuple[int, int]:
        inner = [] if isinstance(found, str) else list(found.values()) if isinstance(found, dict) else found
        within = [counted(each) for each in inner]
        own = 0 if isinstance(found, str) else 1
        return own + sum(each[0] for each in within), max(0, len(inner) - 1) + sum(each[1] for each in within)

    brackets, commas = counted(value)
    for ascii_only in (False, True):
        text = json.dumps(value, ensure_ascii=ascii_only)
        assert parsing_cost(text.encode()) == brackets + commas // 5
        assert parsing_cost(text.encode("utf-16")) >= brackets + commas // 5


def test_the_parsing_cost_of_a_large_body_is_that_of_its_parts():
    part = b'{"task": "worker-1", "how": "[[[{,\\\\\\"[", "pid": 7},'
    assert parsing_cost(part * 40_000) == 40_000 + 3 * 40_000 // 5
    text = b'["' + b"[" * 200_000 + b'", {}]'
    assert parsing_cost(text) == 2
    assert parsing_cost(b"") == 0


def test_requests_that_are_refused_are_logged_not_each_time(make_world):
    world = make_world(beat_burst=250.0)
    first, second = world.submit(), world.submit()
    with capture_logs() as logs:
        for _ in range(3):
            for job in (first, second):
                assert world.heartbeat(job, state="dancing").status_code == 422
        for _ in range(8):
            assert world.register(unknown=1).status_code == 422
            assert world.register().status_code == 404
    logged = Counter((line["event"], line["path"]) for line in logs if "path" in line)
    assert logged == {
        ("malformed request", f"/v1/jobs/{first.slug}/heartbeat"): 1,
        ("malformed request", f"/v1/jobs/{second.slug}/heartbeat"): 1,
        ("malformed request", "/v1/register"): 5,
        ("request refused", "/v1/register"): 5,
    }


def test_wrong_credentials_are_logged_not_each_time_and_with_a_bounded_name(make_world):
    world = make_world(beat_burst=100.0)
    with capture_logs() as logs:
        for _ in range(5):
            assert world.post(f"/v1/jobs/a.{'b' * 50_000}.1/heartbeat", {}, "wrong").status_code == 403
            assert world.send_job("wrong").status_code == 403
    assert Counter(line["event"] for line in logs) == {"wrong credential": 2, "wrong submission credential": 2}
    assert max(len(line.get("job", "")) for line in logs) == 100


def test_heartbeats_of_jobs_that_have_ended_count_for_their_user_and_are_not_parsed(make_world):
    world = make_world(burst=2.0)
    other = Owner("bob", OWNER.uid + 1, OWNER.gid)
    jobs = [world.submit() for _ in range(4)]
    world.store.change_job(jobs[3], JobChange(owner=other), world.now)
    for job in jobs:
        world.cancel(job.slug)
        assert world.heartbeat(job).json()["stop"] is True
    answers = [world.post_beat(job, b"no JSON") for job in jobs]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
    assert answers[0].json() == answers[3].json() == {"members": [], "stop": True, "heartbeat_seconds": 1.5}


def test_heartbeats_of_jobs_that_have_ended_are_answered_whatever_others_send_without_a_credential(make_world):
    world = make_world(burst=2.0)
    job = world.submit()
    world.cancel(job.slug)
    assert world.heartbeat(job).json()["stop"] is True
    assert [world.client.get("/v1/health").status_code for _ in range(3)] == [200, 200, 429]
    assert world.heartbeat(job).json()["stop"] is True


def test_the_coordinator_of_a_large_job_that_has_ended_reads_that_it_has_to_stop(make_world):
    """Its client closes the connection after each answer, and reads none where the daemon resets the connection."""
    world = make_world()
    job = world.submit()
    world.cancel(job.slug)
    assert world.heartbeat(job).json()["stop"] is True
    body = {"address": "host:1", "state": "running", "reason": "x" * 300_000}
    for _ in range(5):
        answer = fetch(f"{world.api_url}/v1/jobs/{job.slug}/heartbeat", body, credential=world.credentials.for_job(job))
        assert json.loads(answer)["stop"] is True


def test_an_address_that_a_request_names_has_no_effect(make_world):
    world = make_world(burst=3.0)
    answers = [world.client.get("/v1/health", headers={"X-Forwarded-For": f"10.0.0.{each}"}) for each in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]


def test_one_more_connection_of_an_address_closes_its_oldest_one(make_world):
    world = make_world(limits=ConnectionLimits(per_address=2))
    world.client.close()
    address = world.server.address
    other = socket.create_connection(address, source_address=("127.0.0.2", 0))
    with other, socket.create_connection(address) as oldest, socket.create_connection(address) as second:
        assert send(world, "/v1/register", "Content-Length: 2", body=b"{}").startswith(b"HTTP/1.1 422")
        assert ended(oldest)
        for channel in (second, other):
            channel.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert channel.recv(100).startswith(b"HTTP/1.1 200")


def test_heartbeats_are_answered_where_one_address_holds_all_its_connections(make_world):
    """All of them wait for an answer: requests of users, which make way for coordinators on the same node."""
    world = make_world(limits=ConnectionLimits(per_address=8))
    job = world.submit()
    opened, begun = threading.Event(), threading.Semaphore(0)

    def hang(*_: str) -> int:
        begun.release()
        opened.wait(60)
        return 0

    world.manager.authenticate_user = hang
    with ExitStack() as clients:
        for _ in range(20):
            channel = clients.enter_context(socket.create_connection(world.server.address))
            channel.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Munge x\r\n\r\n")
        for _ in range(2):
            assert begun.acquire(timeout=30)
        for number in range(5):
            world.client.close()
            world.client = httpx2.Client(base_url=world.api_url, timeout=30, trust_env=False)
            assert world.heartbeat(job, version=number).status_code == 200
        opened.set()


def test_a_heartbeat_that_is_still_arriving_does_not_make_way_for_requests_that_wait(make_world):
    world = make_world(limits=ConnectionLimits(per_address=4))
    job = world.submit()
    opened = threading.Event()
    world.manager.authenticate_user = lambda *_: opened.wait(60) and 0
    head, body = beat_of(world, job)
    world.client.close()
    with ExitStack() as clients:
        waiting = [clients.enter_context(socket.create_connection(world.server.address)) for _ in range(3)]
        for channel in waiting:
            channel.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Munge x\r\n\r\n")
        coordinator = clients.enter_context(socket.create_connection(world.server.address))
        coordinator.sendall(head)
        clients.enter_context(socket.create_connection(world.server.address))
        assert ended(waiting[0])
        coordinator.sendall(body)
        assert coordinator.recv(100).startswith(b"HTTP/1.1 200")
        opened.set()


def test_heartbeats_that_are_refused_make_way(make_world, monkeypatch):
    """A job may hold no connections of its address by sending more heartbeats than it may."""
    monkeypatch.setattr("dl2d.daemon.api.route_dependencies.PUBLIC_SECONDS", 60.0)
    world = make_world(limits=ConnectionLimits(per_address=3), beat_burst=1)
    job, other = world.submit(), world.submit()
    assert world.heartbeat(job).status_code == 200
    assert world.heartbeat(job).status_code == 429  # has its turn; the next ones wait for theirs
    world.client.close()
    head, body = beat_of(world, job)
    with ExitStack() as clients:
        refused = [clients.enter_context(socket.create_connection(world.server.address)) for _ in range(3)]
        for channel in refused:
            channel.sendall(head + body)
        world.client = httpx2.Client(base_url=world.api_url, timeout=30, trust_env=False)
        assert world.heartbeat(other).status_code == 200
        assert ended(refused[0])


def test_health_does_not_wait_for_refusals_of_jobs_while_the_store_is_away(make_world, monkeypatch):
    monkeypatch.setattr("dl2d.daemon.api.route_dependencies.PUBLIC_SECONDS", 60.0)
    world = make_world()
    first, *others = [world.submit() for _ in range(4)]

    def away(*_: object) -> None:
        raise StoreUnavailable("the database does not answer")

    monkeypatch.setattr(world.store, "job", away)
    assert world.heartbeat(first).status_code == 503
    with ExitStack() as clients:
        for job in others:  # the turn of each comes a minute after the one before
            clients.enter_context(socket.create_connection(world.server.address)).sendall(b"".join(beat_of(world, job)))
        answer = world.client.get("/v1/health")
        assert answer.status_code == 200


def test_no_path_is_answered_with_a_redirect(make_world):
    assert make_world().client.get("/v1/health/").status_code == 404


def test_a_heartbeat_that_is_being_answered_never_makes_way(make_world, monkeypatch):
    world = make_world(limits=ConnectionLimits(per_address=3))
    job = world.submit()
    opened, begun, named = threading.Event(), threading.Event(), world.store.named_tasks

    def hang(*args: object) -> object:
        begun.set()
        opened.wait(60)
        return named(*args)

    monkeypatch.setattr(world.store, "named_tasks", hang)
    answers = world.at_once(1, lambda: world.heartbeat(job))
    assert begun.wait(30)
    for _ in range(20):
        with socket.create_connection(world.server.address) as channel:
            channel.sendall(b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n")
            assert channel.recv(100).startswith(b"HTTP/1.1 404")
    opened.set()
    assert [answer.status_code for answer in answers()] == [200]


def test_heartbeats_of_one_job_that_wait_leave_connections_to_others(make_world, monkeypatch):
    world = make_world(limits=ConnectionLimits(per_address=8))
    job, other = world.submit(), world.submit()
    opened, begun, named = threading.Event(), threading.Event(), world.store.named_tasks

    def hang(key: JobKey, ids: set[str]) -> object:
        if key == job:
            begun.set()
            opened.wait(60)
        return named(key, ids)

    monkeypatch.setattr(world.store, "named_tasks", hang)
    world.client.close()
    beat = b"".join(beat_of(world, job))
    with ExitStack() as clients:
        for _ in range(20):
            clients.enter_context(socket.create_connection(world.server.address)).sendall(beat)
        assert begun.wait(30)
        for number in range(5):
            with httpx2.Client(base_url=world.api_url, timeout=30, trust_env=False) as world.client:
                assert world.heartbeat(other, version=number).status_code == 200
        opened.set()


def test_the_heartbeats_of_other_users_go_between_those_of_a_user_with_many_jobs(make_world, monkeypatch):
    world = make_world()
    jobs, other = [world.submit() for _ in range(MAX_HEARTBEATS + 4)], world.submit()
    world.store.change_job(other, JobChange(owner=Owner("bob", OWNER.uid + 1, OWNER.gid)), world.now)
    for job in (*jobs, other):
        assert world.heartbeat(job).status_code == 200
    opened, begun, named = threading.Event(), Counter[JobKey](), world.store.named_tasks

    def hang(key: JobKey, ids: set[str]) -> object:
        if key in jobs:
            begun[key] += 1
            opened.wait(60)
        return named(key, ids)

    monkeypatch.setattr(world.store, "named_tasks", hang)
    with ExitStack() as clients:
        channels = [clients.enter_context(socket.create_connection(world.server.address)) for _ in jobs]
        for channel, job in zip(channels, jobs, strict=True):
            channel.sendall(b"".join(beat_of(world, job)))
        for number in range(5):
            assert world.heartbeat(other, version=number).status_code == 200
        assert len(begun) <= MAX_HEARTBEATS_OF_USER
        opened.set()
        for channel in channels:  # none of that user's is refused
            assert channel.recv(100).startswith(b"HTTP/1.1 200")


def test_addresses_take_turns_however_many_requests_each_has(make_world):
    world = make_world()
    opened, begun, order = threading.Event(), threading.Semaphore(0), []

    def hang(credential: str, payload: str) -> int:
        del payload
        begun.release()
        opened.wait(60)
        order.append(credential)
        raise Denied("forged")

    def ask(clients: ExitStack, source: str) -> socket.socket:
        channel = socket.create_connection(world.server.address, timeout=30, source_address=(source, 0))
        channel.sendall(f"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Munge {source}\r\n\r\n".encode())
        return clients.enter_context(channel)

    world.manager.authenticate_user = hang
    with ExitStack() as clients:
        for _ in range(30):
            ask(clients, "127.0.0.2")
        assert begun.acquire(timeout=30)
        one = ask(clients, "127.0.0.3")
        # Requests begin one after the other: once this is answered, the two addresses wait for an authentication.
        for _ in range(2):
            assert world.client.get("/v1/health").status_code == 200
        opened.set()
        assert one.recv(100).startswith(b"HTTP/1.1 403")
        assert order.index("127.0.0.3") < 10


def test_of_one_address_so_many_requests_wait_to_be_authenticated(make_world):
    world = make_world()
    opened = threading.Event()

    def hang(*_: str) -> int:
        opened.wait(60)
        raise Denied("forged")

    world.manager.authenticate_user = hang
    head = b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Munge x\r\n\r\n"
    with ExitStack() as clients:
        channels = [clients.enter_context(socket.create_connection(world.server.address)) for _ in range(67)]
        for channel in channels:
            channel.sendall(head)
        refused = select.select(channels, [], [], 30)[0]  # two are being authenticated, 64 wait
        answer = b""
        while b"}" not in answer and (more := refused[0].recv(65536)):  # head and body may come apart
            answer += more
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in answer.lower()
        assert b"too many requests of users of this address" in answer
        with socket.create_connection(world.server.address, timeout=30, source_address=("127.0.0.2", 0)) as other:
            other.sendall(head)
            opened.set()
            assert other.recv(100).startswith(b"HTTP/1.1 403")


def test_a_connection_on_which_no_further_request_begins_is_closed(make_world, monkeypatch):
    monkeypatch.setattr(api_server, "IDLE_SECONDS", 0)
    world = make_world()
    with socket.create_connection(world.server.address, timeout=20) as channel:
        channel.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert channel.recv(15).startswith(b"HTTP/1.1 200")
        while channel.recv(65536):
            pass


def test_a_flood_is_accepted_in_parts_so_that_what_makes_way_is_closed_in_between():
    by_turn: Counter[int] = Counter()

    class CountingTable(ConnectionTable):
        def add(self, accepted: AcceptedSocket) -> bool:
            by_turn[turn] += 1
            return super().add(accepted)

    turn = 0

    async def accept_all(listener: socket.socket) -> None:
        nonlocal turn
        acceptor = Acceptor(listener, CountingTable(ConnectionLimits()))
        acceptor.start(lambda accepted: asyncio.sleep(60))
        while by_turn.total() < 150:
            await asyncio.sleep(0)  # the next turn of the event loop
            turn += 1
        acceptor.stop()

    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener, ExitStack() as clients:
        for _ in range(150):
            clients.enter_context(socket.create_connection(listener.getsockname()))
        asyncio.run(accept_all(listener))
    assert max(by_turn.values()) <= 16


def test_tls_handshakes_of_addresses_take_turns(make_world, certificate, monkeypatch):
    monkeypatch.setattr("dl2d.daemon.api.connection_acceptor.CONNECTION_SECONDS", 0.2)
    world = make_world(certificate=certificate)
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    received, hello = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        trusted.wrap_bio(received, hello, server_hostname="127.0.0.1").do_handshake()
    first = hello.read()
    with ExitStack() as clients:
        flood = [
            clients.enter_context(socket.create_connection(world.server.address, source_address=("127.0.0.2", 0)))
            for _ in range(60)
        ]
        for channel in flood:
            channel.sendall(first)
        for source in ("127.0.0.1", "127.0.0.2"):  # of one address, the newest begins first
            plain = socket.create_connection(world.server.address, source_address=(source, 0))
            with trusted.wrap_socket(plain, server_hostname="127.0.0.1") as other:
                other.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert other.recv(100).startswith(b"HTTP/1.1 200")
        assert len(select.select(flood, [], [], 0)[0]) < 30  # so many have got an answer before


def test_the_oldest_idle_connection_makes_way(make_world):
    world = make_world(limits=ConnectionLimits(total=2))
    with (
        socket.create_connection(world.server.address) as oldest,
        socket.create_connection(world.server.address) as second,
    ):
        second.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert second.recv(100).startswith(b"HTTP/1.1 200")
        assert send(world, "/v1/register", "Content-Length: 2", body=b"{}").startswith(b"HTTP/1.1 422")
        assert ended(oldest)


def test_connections_whose_tls_handshake_has_not_ended_count(make_world, certificate):
    world = make_world(limits=ConnectionLimits(per_address=2), certificate=certificate)
    address = world.server.address
    with (
        socket.create_connection(address) as oldest,
        socket.create_connection(address),
        socket.create_connection(address),
    ):
        assert ended(oldest)


def test_a_tls_handshake_makes_way_and_has_a_deadline(make_world, certificate):
    world = make_world(limits=ConnectionLimits(total=2), certificate=certificate)
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    address = world.server.address
    with (
        socket.create_connection(address) as oldest,
        socket.create_connection(address),
        trusted.wrap_socket(socket.create_connection(address), server_hostname="127.0.0.1") as third,
    ):
        assert ended(oldest)
        third.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert third.recv(100).startswith(b"HTTP/1.1 200")
    world = make_world(limits=ConnectionLimits(request_seconds=0.2), certificate=certificate)
    with socket.create_connection(world.server.address) as silent:
        assert ended(silent)


def test_connections_take_no_more_than_half_of_the_files_that_the_daemon_may_open(make_world, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (4, 8))
    world = make_world()
    monkeypatch.undo()
    world.client.close()
    address = world.server.address
    with (
        socket.create_connection(address) as oldest,
        socket.create_connection(address),
        socket.create_connection(address),
    ):
        assert ended(oldest)


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST /v1/regi",
        b"POST /v1/register HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
        b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/he",
    ],
    ids=["nothing", "half a head", "half a body", "half a second head"],
)
def test_a_request_that_does_not_come_whole_in_time_ends_its_connection(make_world, begun):
    world = make_world(limits=ConnectionLimits(request_seconds=0.2))
    with socket.create_connection(world.server.address) as channel:
        channel.sendall(begun)
        channel.settimeout(20)
        try:
            while channel.recv(65536):
                pass
        except ConnectionResetError:
            pass


def test_what_is_sent_of_a_refused_body_is_dropped_until_the_deadline(make_world):
    world = make_world(limits=ConnectionLimits(request_seconds=0.5))
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(world.server.address, timeout=20) as channel:
        channel.sendall(head)
        assert channel.recv(100).startswith(b"HTTP/1.1 403")
        pieces = iter(lambda: channel.sendall(chunks(65536)), "never")
        with pytest.raises(OSError, match=r"reset|pipe"):
            deque(pieces, maxlen=0)


def test_a_request_that_waits_for_the_daemon_is_not_ended(make_world):
    world = make_world(limits=ConnectionLimits(request_seconds=0.05))
    world.add_anchor()
    answers = []
    with world.access.lock:
        pending = world.at_once(1, world.register)
        with socket.create_connection(world.server.address) as idle:
            assert ended(idle)  # the deadline has passed for what came after it
    answers = pending()
    assert [answer.status_code for answer in answers] == [200]


def test_heartbeats_of_a_very_large_job_fit(make_world):
    """All of whose tasks fail at once, each with much to say."""
    world = make_world()
    job = world.submit()
    gpu = GpuUsage(name="NVIDIA H100 80GB HBM3", percent=99.5, memory_bytes=1 << 36, memory_total=1 << 37)
    usage = Usage(seconds=5.0, cpu_seconds=1e5, cpu_percent=99.5, memory_bytes=1 << 36, memory_peak=1 << 36,
                  processes=9, gpus=(gpu,) * 8)  # fmt: skip
    members = [
        MemberReport(
            task=f"worker-{number}", role="worker", state="left", host="n" * 60, pid=4_000_000, cause="failed",
            how="x" * 3500, usage=usage,
        )
        for number in range(10_000)
    ]  # fmt: skip
    status = Status(
        address="host:1", incarnation="i", state="failed", reason="all workers failed", version=1, total_versions=9,
        epoch=0.1, epochs=9.0, loss=None, steps_per_second=None, samples_per_second=None, members=members, plan=1,
        plans=[], result=None,
    )  # fmt: skip
    said: list[str] = []
    url = str(world.client.base_url)
    client = DaemonClient(url, job.slug, world.credentials.for_job(job), say=said.append)
    client.start("", b"", lambda: None)
    client.close(status)
    assert said == []
    found = world.store.job(job)
    assert (found.state, found.end_reason) == (JobState.FAILED, "all workers failed")


_HEADS = st.tuples(
    st.sampled_from(["GET", "POST", "DELETE", "PRI", "G\x00T"]),
    st.sampled_from(["/v1/register", "/v1/jobs", "/v1/jobs/a.1.1/heartbeat", "/v1/jobs/%00/containers", "*", "//"]),
    st.lists(
        st.sampled_from(
            ["Content-Length: 5", "Content-Length: 0", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked",
             "Expect: 100-continue", "Upgrade: websocket", "Connection: upgrade", "Authorization: Bearer \xff",
             "Authorization: " + "x" * 70_000, "X: \r\n y", ": none"]
        ),
        max_size=4,
    ),
)  # fmt: skip


def test_heartbeats_of_a_job_whose_tasks_printed_brackets_fit(make_world):
    world = make_world()
    job = world.submit()
    members = [
        MemberReport(task=f"worker-{number}", role="worker", state="left", host="n", pid=1, how="[{," * 1000)
        for number in range(200)
    ]
    status = Status(
        address="host:1", incarnation="i", state="failed", reason="[" * 3000, version=1, total_versions=9,
        epoch=0.1, epochs=9.0, loss=None, steps_per_second=None, samples_per_second=None, members=members, plan=1,
        plans=[], result=None,
    )  # fmt: skip
    said: list[str] = []
    client = DaemonClient(world.api_url, job.slug, world.credentials.for_job(job), say=said.append)
    client.start("", b"", lambda: None)
    client.close(status)
    assert said == []
    assert world.store.job(job).state is JobState.FAILED


def test_whatever_bytes_come_the_daemon_keeps_nothing_and_serves_on(make_world):
    world = make_world(limits=ConnectionLimits(request_seconds=0.05))

    @settings(max_examples=40, deadline=None)
    @given(head=st.none() | _HEADS, rest=st.binary(max_size=300))
    def attack(head: tuple[str, str, list[str]] | None, rest: bytes) -> None:
        lines = [] if head is None else [f"{head[0]} {head[1]} HTTP/1.1", "Host: x", *head[2]]
        with socket.create_connection(world.server.address, timeout=20) as channel:
            try:
                channel.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + rest)
                with suppress(OSError):  # it has ended already
                    channel.shutdown(socket.SHUT_WR)
                while answer := channel.recv(65536):
                    assert b" 200 " not in answer
                    assert b"Traceback" not in answer
            except ConnectionError:
                pass

    attack()
    assert world.store.jobs(live=False) == ()
    assert world.client.get("/v1/health").status_code == 200


def test_what_one_request_takes_counts_as_the_burst_at_most():
    """Otherwise a large registration would be refused for ever where ``api.requests_per_second`` is 1."""
    now = 0.0
    rate = RateLimiter(1.0, 5.0, lambda: now)
    assert [rate.take("a"), rate.take("a", 8.0, taken=1.0), rate.take("a")] == [True, True, False]
    now = 5.0
    assert [rate.take("a", 65.0), rate.take("a", 250.0, taken=65.0), rate.take("a")] == [True, True, False]
    now = 9.0
    assert [rate.take("a", 65.0), rate.take("a", 4.0)] == [False, True]


def test_a_large_registration_passes_where_the_rate_is_low(make_world):
    world = make_world(burst=3.0)
    world.add_anchor()
    lists = {"argv": ["python", *"x" * 9999], "env": {f"v{number}": "[" for number in range(10_000)}}
    answer = world.register(**lists)
    assert answer.status_code == 200, answer.text[:300]
    assert world.client.get("/v1/health").status_code == 429
    world.now += 5.0
    assert world.register(**lists).status_code == 200


def test_rates_are_kept_for_a_bounded_number_of_addresses_and_for_networks_of_ipv6():
    now = 0.0
    rate = RateLimiter(1.0, 1.0, lambda: now, max_addresses=2)
    assert [rate.take("10.0.0.1"), rate.take("10.0.0.1"), rate.take("10.0.0.2")] == [True, False, True]
    assert [rate.take("10.0.0.3"), rate.take("10.0.0.1")] == [True, True]  # the third address displaced the first
    assert client_group("2001:db8:1:2::5") == client_group("2001:db8:1:2:ffff::9") != client_group("2001:db8:1:3::5")
    assert client_group("::ffff:10.0.0.1") == client_group("10.0.0.1")


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True),
                      ("10.0.0.1", False), ("localhost", False), ("", False)],
)  # fmt: skip
def test_what_is_loopback(host, own):
    assert is_loopback(host) is own
