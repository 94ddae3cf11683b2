"""Which way data goes: Unix sockets on one machine, TCP otherwise, and the same bits either way."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from pslite_jobs import command, static_digest

from pslite.auth import Acceptor, Identity, connect
from pslite.errors import AuthenticationError, Unreachable
from pslite.plan import Member
from pslite.testing import Resize, run_local
from pslite.transport import machine, open_listeners, reach

TOKEN = b"t" * 32
ME = Identity("worker", "worker-0", "i", TOKEN)


class Look:
    """How many Unix connections of the runtime's a server has, at the most."""

    most = 0

    def __call__(self, status, director):
        for member in status.members:
            if member.role == "ps" and member.state == "active":
                found = [
                    each
                    for each in psutil.Process(member.pid).net_connections("unix")
                    if str(each.laddr).strip("\0@").startswith("pslite-")
                ]
                self.most = max(self.most, len(found) - 1)  # one of them listens


@pytest.mark.parametrize(("transport", "connections"), [("", 3), ("tcp", 0)])
def test_processes_of_one_machine_use_unix_sockets(transport, connections):
    look = Look()
    environ = {**os.environ, "DL2_TRANSPORT": transport}
    result = run_local(
        command("--step-seconds", "0.01"), workers=2, servers=1, schedule=[Resize(20, 3, 2)], environ=environ,
        on_status=look,
    )  # fmt: skip
    assert result.state == "finished", result.log
    assert result.digest == static_digest()
    assert max(look.most, 0) >= connections if connections else look.most <= 0


class Host:
    """Takes one connection on each socket that a server would open."""

    def __init__(self):
        self.sockets, self.local = open_listeners({})
        self.address = f"127.0.0.1:{self.sockets[0].getsockname()[1]}"
        self.taken = []
        self.threads = [threading.Thread(target=self.serve, args=(sock,), daemon=True) for sock in self.sockets]
        for thread in self.threads:
            thread.start()

    def serve(self, listener):
        listener.setblocking(True)
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            acceptor = Acceptor(job="j", task="ps-0", incarnation="s", token=TOKEN, verdict=lambda hello: "")
            while not acceptor.accepted and not acceptor.refusal:
                data = sock.recv(acceptor.wanted)
                if not data:
                    break
                sock.sendall(acceptor.feed(data))
            self.taken.append(listener.family.name)
            sock.close()

    def member(self, **changes):
        given = {"local": self.local, "machine": machine(), "address": self.address, **changes}
        return Member(task="ps-0", incarnation="s", host="h", pid=1, **given)

    def close(self):
        for sock in self.sockets:
            sock.shutdown(2)
            sock.close()


@pytest.fixture
def host():
    host = Host()
    yield host
    host.close()


@pytest.mark.parametrize(
    ("changes", "environ", "family"),
    [
        ({}, {}, "AF_UNIX"),
        ({}, {"DL2_TRANSPORT": "tcp"}, "AF_INET"),
        ({"machine": "another"}, {}, "AF_INET"),
        ({"local": ""}, {}, "AF_INET"),
        ({"local": "pslite-gone"}, {}, "AF_INET"),
    ],
)
def test_the_best_way_that_there_is(host, changes, environ, family):
    with reach(host.member(**changes), ME, environ) as sock:
        assert sock.family.name == family


def test_who_is_not_who_it_should_be_is_not_reached(host):
    member = Member(
        task="ps-0", incarnation="other", host="h", pid=1, address=host.address, local=host.local, machine=machine()
    )
    with pytest.raises(Unreachable, match=r"cannot reach ps-0: .* is incarnation s, expected other"):
        reach(member, ME, {})


def test_a_unix_socket_asks_for_the_token_too(host):
    with pytest.raises(AuthenticationError, match="wrong token"):
        connect(f"\0{host.local}", Identity("worker", "worker-0", "i", b"x" * 32), "data", timeout=10)
