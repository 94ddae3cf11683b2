"""Replicas of blocks on other servers, and failover to them when the owner has died."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from parts import Parts, a_job, a_plan

from pslite.errors import ProtocolError
from pslite.net.messages import Census, Copies, Promote, Promoted
from pslite.net.tensor_frames import PARAM, REPLICATE, SEED, SEEDED, Header


def deliver(sender, receiver):
    """Deliver all frames that one server has sent to another one, and then those in the other direction."""
    for a, b in ((sender, receiver), (receiver, sender)):
        links = (a.connections.opened[b.state.task], a.connections.accepted[b.state.task])
        for header, payload in [frame for link in links for frame in link.take()]:
            b.take(a.state.task, header, payload)


@pytest.fixture
def two():
    """Return two servers that keep the replica of each other's block."""
    spec = a_job(durability="durable")
    plan = a_plan(spec, workers=1, servers=2)
    servers = [Parts(spec, f"ps-{i}") for i in range(2)]
    for parts in servers:
        parts.begin(plan, weights=10.0)
    for a, b in (servers, servers[::-1]):
        while a.handoff.can_send():
            a.handoff.send()
            kinds = [header.kind for header, _ in a.connections.opened[b.state.task].sent]
            assert kinds == [SEED]
            deliver(a, b)
    for parts in servers:
        parts.state.completed_plan_number = 1
        parts.state.activation.forget_announcement(1)
        parts.forget_sent()
    return servers


def test_a_worker_is_answered_when_the_replica_has_the_step(two):
    first, second = two
    (number,) = first.state.owned
    first.push(0, 1, 0, 4.0, block=number)
    assert first.answers("worker-0") == []
    assert [header.kind for header, _ in first.connections.opened["ps-1"].sent] == [REPLICATE]
    deliver(first, second)
    assert first.answers("worker-0") == [(PARAM, 1, 9.0)]
    replica = second.replica_store.kept[number]
    assert (replica.version, replica.arrays.tobytes()) == (1, first.state.owned[number].arrays.tobytes())


def test_a_step_for_another_version_than_the_replicas_is_refused(two):
    first, second = two
    (number,) = first.state.owned
    first.push(0, 1, 0, 4.0, block=number)
    ((header, payload),) = first.connections.opened["ps-1"].take()
    second.take("ps-0", header, payload)
    with pytest.raises(ProtocolError, match=f"sent step 0 of block {number}, but the replica is at version 1"):
        second.take("ps-0", header, payload)


def test_a_backup_takes_over_from_an_owner_that_has_died(two):
    first, second = two
    (number,), (own_block,) = first.state.owned, second.state.owned
    first.push(0, 1, 0, 4.0, block=number)
    deliver(first, second)
    second.push(0, 1, 0, 4.0, block=own_block)
    assert second.answers("worker-0") == []
    second.failover.report_copies(Census(number=1, gone=("ps-0",), blocks=(number,)), second.frames)
    assert second.messages[-1] == Copies(number=1, versions={number: 1})
    # its own block has no replica now, and waits for none
    assert second.answers("worker-0") == [(PARAM, 1, 9.0)]
    second_member = second.state.plans[1].plan.servers[1]
    second.failover.promote(Promote.by_block(1, ("ps-0",), {number: second_member}))
    assert second.messages[-1] == Promoted(number=1)
    assert second.answers("worker-0") == [(PARAM, 1, 9.0)]
    second.push(0, 1, 1, 4.0, block=number)
    assert second.answers("worker-0") == [(PARAM, 2, 8.0)]


def test_a_block_whose_version_was_reported_does_not_change_until_its_owner_is_known(two):
    _, second = two
    (own_block,) = second.state.owned
    second.failover.report_copies(Census(number=1, gone=("ps-0",), blocks=(own_block,)), second.frames)
    second.push(0, 1, 0, 4.0, block=own_block)
    assert second.answers("worker-0") == []
    assert second.state.owned[own_block].version == 0
    second_member = second.state.plans[1].plan.servers[1]
    second.failover.promote(Promote.by_block(1, ("ps-0",), {0: second_member} if own_block else {}))
    assert second.state.owned[own_block].version == 1


def test_a_seed_of_a_server_that_never_owned_the_block_is_a_violation(two):
    _, second = two
    (number,) = second.state.owned
    with pytest.raises(ProtocolError, match=f"ps-0 sent the state or a step of block {number}, which it does not own"):
        second.take("ps-0", Header(SEED, 1, number, 0, 16, 0, 0))


def test_a_damaged_seed_is_refused(two):
    first, second = two
    (number,) = first.state.owned
    second.replica_store.expect({number: second.replica_store.kept[number]})
    with pytest.raises(ProtocolError, match=f"the state of block {number} was damaged on its way from ps-0"):
        second.take("ps-0", Header(SEED, 1, number, 0, 16, 0, 0), bytes(16))
    assert SEEDED not in [header.kind for header, _ in second.connections.accepted["ps-0"].sent]
