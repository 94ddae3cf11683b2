"""Which way data goes: shared memory and Unix sockets on one machine, TCP otherwise, and the same bits either way."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from pslite_jobs import command, run_job, static_digest
from rehearsal import job
from variants import nightly

from pslite.errors import AuthenticationError, ProtocolError, Unreachable
from pslite.job.job_spec import SGD
from pslite.job.membership_plan import Member
from pslite.job.weight_blocks import Block, cut
from pslite.net.authentication import Acceptor, Identity, connect
from pslite.net.shared_memory import Arena, MappedMemory, SharedMemory
from pslite.net.tcp_or_unix_socket import machine, open_listeners, reach
from pslite.net.tensor_frames import PUSH, REGION, Header, Link, region_header
from pslite.numeric.gradient_sums import GradientSums, Supply
from pslite.testing import Resize

TOKEN = b"t" * 32
ME = Identity("worker", "worker-0", "i", TOKEN)


class Look:
    """How many Unix connections of the runtime's and pieces of workers' memory a server has, at the most.

    It is not done before it has seen as many as there should be.
    """

    most = regions = 0

    def __init__(self, connections, regions):
        self.wanted = connections, regions

    def __call__(self, status, director):
        for member in status.members:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):  # it has just ended
                if member.role != "ps" or member.state != "active":
                    continue
                found = [
                    each
                    for each in psutil.Process(member.pid).net_connections("unix")
                    if str(each.laddr).strip("\0@").startswith("pslite-")
                ]
                self.most = max(self.most, len(found) - 1)  # one of them listens
                mapped = Path(f"/proc/{member.pid}/maps").read_text(encoding="utf-8").splitlines()
                self.regions = max(self.regions, sum("memfd:pslite" in line for line in mapped))
        return self.most < self.wanted[0] or self.regions < self.wanted[1]


@pytest.mark.parametrize(
    ("transport", "connections", "regions"),
    [("", 3, 4), nightly("unix", 3, 0), nightly("tcp", 0, 0)],
    ids=["shared", "unix", "tcp"],
)
def test_processes_of_one_machine_share_memory_or_use_unix_sockets(transport, connections, regions):
    look = Look(connections, regions)
    environ = {**os.environ, "DL2_TRANSPORT": transport}
    result = run_job(
        command("--step-seconds", "0.01"), workers=2, servers=1, schedule=[Resize(20, 3, 2)], environ=environ,
        on_status=look,
    )  # fmt: skip
    assert result.digest == static_digest()
    assert max(look.most, 0) >= connections if connections else look.most <= 0
    assert look.regions >= regions if regions else not look.regions


def test_gradients_that_servers_may_look_at_are_left_alone():
    """A worker that does the part of one that is gone computes again while servers still hold what it pushed before."""
    spec = job(shards=4)
    sums = GradientSums(spec, Supply(spec, cut(spec)))
    sums.begin(4, (2,))
    for leaf in (0, 1):
        bundle = sums.take()
        bundle.arrays[0][:] = 1.0
        sums.add(leaf, bundle)
    (pushed,) = sums.contributions
    sums.begin(4, (3,), again=True)
    taken = [sums.take() for _ in range(3)]
    assert all(bundle is not pushed.bundle for bundle in taken)
    assert pushed.bundle.arrays[0].tolist() == [2.0] * 41
    sums.begin(4, (2,))
    assert sums.take() is pushed.bundle


class Peer:
    """Takes memory as a server does."""

    def __init__(self):
        self.seen = []

    def payload(self, link, header):
        return memoryview(bytearray(header.length))

    def arrived(self, link, header):
        self.seen.append(header)

    def shared(self, link, header):
        self.seen.append(header)
        if header.kind == REGION:
            link.regions[header.region] = MappedMemory(link.descriptor())


def test_a_block_is_seen_where_the_worker_has_it_and_cannot_be_written_to():
    a, b = socket.socketpair()
    here, there, peer = Link(a, "ps-0", "", "ps"), Link(b, "worker-0", "", "worker"), Peer()
    region = SharedMemory(4096)
    block = Block(0, 0, 16, 8, "float32", SGD(lr=0.1))
    here.send(Header(PUSH, 1, 0, 1, 8, 0, 0), memoryview(b"12345678"))
    here.hand(region_header(1), region.fd)
    here.hand(region_header(3), region.fd)
    here.send(Header(PUSH, 1, 0, 1, 32, 0, 0, region=3))
    assert here.flush()
    there.receive(peer)
    assert [(h.kind, h.region) for h in peer.seen] == [(PUSH, 0), (REGION, 1), (REGION, 3), (PUSH, 3)]
    np.frombuffer(region.memory, dtype="float32")[16:24] = np.arange(8)
    seen = there.regions[3].array(block, 64)
    assert seen.tolist() == list(range(8))
    assert not seen.flags.writeable
    np.frombuffer(region.memory, dtype="float32")[16:24] = 5.0
    assert there.regions[1].array(block, 64).tolist() == seen.tolist() == [5.0] * 8
    with pytest.raises(ProtocolError, match="block 0 does not lie within shared memory"):
        there.regions[3].array(block, 4096 - 28)
    with pytest.raises(ProtocolError, match="announced shared memory, but sent no descriptor"):
        there.descriptor()
    # its size is for ever
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    # it outlives who made it
    region.close()
    here.close()
    del region
    assert seen.tolist() == [5.0] * 8
    there.close()


def test_the_state_of_a_block_goes_back_to_the_system_with_its_last_array():
    blocks = [Block(number, 0, 0, size, "float32", SGD(lr=0.1, momentum=0.9)) for number, size in ((4, 3000), (7, 500))]
    arena = Arena(3, {block.number: 2 * block.nbytes for block in blocks})
    first, second = (arena.state(block) for block in blocks)
    assert [first.shape, second.shape] == [(2, 3000), (2, 500)]
    assert arena.page_offsets == {4: 0, 7: 6}
    first[:], second[:] = 1.0, 2.0
    weights = first[0]
    there = MappedMemory(os.dup(arena.region.fd))
    seen = [there.array(block, 4096 * arena.page_offsets[block.number]) for block in blocks]
    del first
    assert seen[0].tolist() == [1.0] * 3000
    del weights
    assert not seen[0].any()
    arena.keep()
    del second
    assert seen[1].tolist() == [2.0] * 500  # of a server that has ended
    arena.region.close()


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_memory_is_plain_where_none_may_be_shared(transport, monkeypatch):
    monkeypatch.setenv("DL2_TRANSPORT", transport)
    region = SharedMemory(100)
    assert region.fd < 0
    assert len(region.memory) == 100


def test_memory_of_a_worker_without_servers_is_its_own():
    region = SharedMemory(5000, shared=False)
    assert region.fd < 0
    assert bytes(region.memory) == bytes(5000)
    np.frombuffer(region.memory, dtype=np.uint8)[:] = 7
    assert bytes(region.memory) == b"\7" * 5000


def test_open_files_that_belong_to_no_header_are_closed():
    before = set(Path("/proc/self/fd").iterdir())
    a, b = socket.socketpair()
    there, peer = Link(b, "worker-0", "", "worker"), Peer()
    with a:
        data = Header(PUSH, 1, 0, 1, 8, 0, 0).pack() + b"12345678"
        for at in range(len(data)):  # one with each byte
            socket.send_fds(a, [data[at : at + 1]], [0])
        there.receive(peer)
        assert len(peer.seen) == 1
        socket.send_fds(a, [b"x"], [0, 0])
        there.receive(peer)
        there.close()
    assert set(Path("/proc/self/fd").iterdir()) <= before


class Host:
    """Takes one connection on each socket that a server would open."""

    def __init__(self):
        self.sockets, self.local = open_listeners("127.0.0.1")
        self.address = f"127.0.0.1:{self.sockets[0].getsockname()[1]}"
        self.taken = []
        self.threads = [threading.Thread(target=self.serve, args=(sock,), daemon=True) for sock in self.sockets]
        for thread in self.threads:
            thread.start()

    def serve(self, listener):
        while True:
            try:
                listener.setblocking(True)
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
    ("changes", "transport", "family"),
    [
        ({}, "", "AF_UNIX"),
        ({}, "tcp", "AF_INET"),
        ({"machine": "another"}, "", "AF_INET"),
        ({"local": ""}, "", "AF_INET"),
        ({"local": "pslite-gone"}, "", "AF_INET"),
    ],
)
def test_the_best_way_that_there_is(host, changes, transport, family, monkeypatch):
    monkeypatch.setenv("DL2_TRANSPORT", transport)
    with reach(host.member(**changes), ME) as sock:
        assert sock.family.name == family


def test_who_is_not_who_it_should_be_is_not_reached(host):
    member = Member(
        task="ps-0", incarnation="other", host="h", pid=1, address=host.address, local=host.local, machine=machine()
    )
    with pytest.raises(Unreachable, match=r"cannot reach ps-0: .* is incarnation s of ps-0, not other"):
        reach(member, ME)


def test_a_unix_socket_asks_for_the_token_too(host):
    with pytest.raises(AuthenticationError, match="wrong token"):
        connect(f"\0{host.local}", Identity("worker", "worker-0", "i", b"x" * 32), "data", timeout=10)
