"""Calls over HTTP whose host has a name: how long its lookup may take, and which of its addresses are tried."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx2
import pytest
from yarn.rm_answers import raw_server

from dl2d.http_call_deadline import Deadline, DeadlineTransport

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], list[str]]], None]:
    """Makes a function find the addresses of ``rm.test``, as the system's resolver does."""

    def use(find: Callable[[], list[str]]) -> None:
        def getaddrinfo(host: str, *args: object, **options: object) -> list[object]:
            addresses = find() if host == "rm.test" else [host]
            return [each for address in addresses for each in system(address, *args, **options)]

        system = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return use


@pytest.fixture
def call() -> Iterator[Callable[..., str]]:
    """Calls ``rm.test`` at a port."""
    deadline = Deadline(time.monotonic)
    with httpx2.Client(transport=DeadlineTransport(deadline, verify=True)) as client:

        def get(port: str, seconds: float = 30.0) -> str:
            with deadline.within(seconds):
                return client.get(f"http://rm.test:{port}/").text

        yield get


def test_a_lookup_that_hangs_ends_with_the_deadline_and_is_not_repeated_meanwhile(call, resolve):
    begun, ended = threading.Semaphore(0), threading.Event()

    def hang() -> list[str]:
        begun.release()
        ended.wait(60)
        return ["127.0.0.1"]

    resolve(hang)
    with raw_server(ANSWER) as address:
        port = address.rpartition(":")[2]
        for _ in range(3):
            with pytest.raises(httpx2.ConnectTimeout, match=r"addresses of rm\.test were not found in time"):
                call(port, seconds=0.05)
        assert begun.acquire(timeout=30)
        assert not begun.acquire(blocking=False)
        ended.set()
        assert call(port) == "ok"


def test_all_addresses_of_a_host_are_tried(call, resolve):
    resolve(lambda: ["127.0.0.2", "127.0.0.1"])
    with raw_server(ANSWER) as address:
        port = address.rpartition(":")[2]
        assert call(port) == "ok"
    with pytest.raises(httpx2.ConnectError, match="refused"):
        call(port)


def test_after_a_lookup_for_which_there_was_no_thread_the_next_one_finds_the_host(call, resolve, monkeypatch):
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolve(lambda: ["127.0.0.1"])
    with raw_server(ANSWER) as address:
        port = address.rpartition(":")[2]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(httpx2.ConnectError, match=r"addresses of rm\.test: can't start new thread"):
                call(port)
        assert call(port) == "ok"


def test_a_host_without_an_address_is_told(call, resolve):
    def fail() -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    resolve(fail)
    with pytest.raises(httpx2.ConnectError, match=r"cannot find the addresses of rm\.test: .*not known"):
        call("1")
