"""Replicas of blocks on other servers, and what goes on from them when an owner is gone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from parts import Parts, a_job, a_plan

from pslite.errors import ProtocolError
from pslite.net.data_frames import PARAM, REPLICATE, SEED, SEEDED, Header
from pslite.net.messages import Census, Copies, Promote, Promoted


def deliver(sender, receiver):
    """Have all frames that one server has sent to another one come there, and those in answer come back."""
    for a, b in ((sender, receiver), (receiver, sender)):
        links = (a.connections.peers[b.state.task], a.connections.links[b.state.task])
        for header, payload in [frame for link in links for frame in link.take()]:
            b.take(a.state.task, header, payload)


@pytest.fixture
def two():
    """Two servers that have replicas of each other's block."""
    spec = a_job(durability="durable")
    plan = a_plan(spec, workers=1, servers=2)
    servers = [Parts(spec, f"ps-{i}") for i in range(2)]
    for parts in servers:
        parts.begin(plan, weights=10.0)
    for a, b in (servers, servers[::-1]):
        while a.handoff.can_send:
            a.handoff.send()
            kinds = [header.kind for header, _ in a.connections.peers[b.state.task].sent]
            assert kinds == [SEED]
            deliver(a, b)
    for parts in servers:
        parts.state.settled = 1
        parts.state.clock.passed(1)
        parts.forget_sent()
    return servers


def test_a_worker_is_answered_when_the_replica_has_the_step(two):
    first, second = two
    (number,) = first.state.owned
    first.push(0, 1, 0, 4.0, block=number)
    assert first.answers("worker-0") == []
    assert [header.kind for header, _ in first.connections.peers["ps-1"].sent] == [REPLICATE]
    deliver(first, second)
    assert first.answers("worker-0") == [(PARAM, 1, 9.0)]
    replica = second.replicas.kept[number]
    assert (replica.version, replica.state.tobytes()) == (1, first.state.owned[number].state.tobytes())


def test_a_step_for_another_version_than_the_replicas_is_refused(two):
    first, second = two
    (number,) = first.state.owned
    first.push(0, 1, 0, 4.0, block=number)
    ((header, payload),) = first.connections.peers["ps-1"].take()
    second.take("ps-0", header, payload)
    with pytest.raises(ProtocolError, match=f"sent step 0 of block {number}: its replica is at 1"):
        second.take("ps-0", header, payload)


def test_a_backup_goes_on_in_the_place_of_an_owner_that_is_gone(two):
    first, second = two
    (number,), (own,) = first.state.owned, second.state.owned
    first.push(0, 1, 0, 4.0, block=number)
    deliver(first, second)
    second.push(0, 1, 0, 4.0, block=own)
    assert second.answers("worker-0") == []
    second.failover.count_copies(Census(number=1, gone=("ps-0",), blocks=(number,)), second.frames)
    assert second.told[-1] == Copies(number=1, versions={number: 1})
    # its own block has no replica now, and waits for none
    assert second.answers("worker-0") == [(PARAM, 1, 9.0)]
    heir = second.state.plans[1].plan.servers[1]
    second.failover.promote(Promote(number=1, gone=("ps-0",), owners={number: heir}))
    assert second.told[-1] == Promoted(number=1)
    assert second.answers("worker-0") == [(PARAM, 1, 9.0)]
    second.push(0, 1, 1, 4.0, block=number)
    assert second.answers("worker-0") == [(PARAM, 2, 8.0)]


def test_a_block_that_is_counted_stays_as_it_is_until_its_owner_is_known(two):
    _, second = two
    (own,) = second.state.owned
    second.failover.count_copies(Census(number=1, gone=("ps-0",), blocks=(own,)), second.frames)
    second.push(0, 1, 0, 4.0, block=own)
    assert second.answers("worker-0") == []
    assert second.state.owned[own].version == 0
    heir = second.state.plans[1].plan.servers[1]
    second.failover.promote(Promote(number=1, gone=("ps-0",), owners={0: heir} if own else {}))
    assert second.state.owned[own].version == 1


def test_what_a_server_sends_that_never_owned_a_block_is_a_violation(two):
    _, second = two
    (number,) = second.state.owned
    with pytest.raises(ProtocolError, match=f"block {number} is not ps-0's"):
        second.take("ps-0", Header(SEED, 1, number, 0, 16, 0, 0))


def test_a_damaged_seed_is_refused(two):
    first, second = two
    (number,) = first.state.owned
    second.replicas.expect({number: second.replicas.kept[number]})
    with pytest.raises(ProtocolError, match=f"the replica of block {number} came damaged"):
        second.take("ps-0", Header(SEED, 1, number, 0, 16, 0, 0), bytes(16))
    assert SEEDED not in [header.kind for header, _ in second.connections.links["ps-0"].sent]
