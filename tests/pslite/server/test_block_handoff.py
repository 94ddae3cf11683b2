"""Hand-off of blocks to the owners of a new plan, at the version at which it takes effect."""

from __future__ import annotations

import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from parts import FakeLink, Parts, a_job, a_plan

from pslite.errors import ProtocolError
from pslite.net.messages import Announced, Failed, Moved
from pslite.net.tensor_frames import PARAM, STATE, STATE_ACK


def step(parts, version, plan=1):
    """Have the only worker push gradients for all blocks that the server owns."""
    for block in list(parts.state.owned):
        parts.push(0, 1, version, 4.0, block=block, plan=plan)


def growing(**changes):
    """Return a server that owns both blocks, its plan, and the next plan, which gives one block to a second server."""
    spec = a_job(**changes)
    first = a_plan(spec, workers=1, servers=1)
    parts = Parts(spec)
    parts.begin(first, weights=10.0)
    second = a_plan(spec, workers=1, servers=2, previous=first)
    parts.prepare(second, first)
    return parts, first, second


def test_a_plan_is_announced_with_weights_of_block_0_and_takes_effect_with_the_next_version():
    parts, _, second = growing()
    step(parts, 0)
    parts.state.activation.commit(2)
    parts.forget_sent()
    step(parts, 1)
    assert [message for message in parts.messages if isinstance(message, Announced)] == [Announced(plan=2, first=3)]
    announced = {
        header.block: (header.next_plan, header.next_first) for header, _ in parts.connections.accepted["worker-0"].sent
    }
    assert announced == {0: (2, 3), 1: (0, 0)}
    step(parts, 2)
    assert set(parts.state.owned) == set(second.blocks_of("ps-0"))
    assert {block.plan_number for block in parts.state.owned.values()} == {2}


def test_a_plan_that_is_committed_too_late_gets_no_first_version():
    parts, *_ = growing()
    parts.state.activation.commit(2)
    parts.state.activation.announce(parts.state.spec.total_versions)
    assert parts.messages[-1] == Announced(plan=2, first=-1)
    assert parts.state.activation.announced is None


def test_the_announcement_of_a_plan_that_was_never_prepared_is_a_violation():
    parts, *_ = growing()
    with pytest.raises(ProtocolError, match="a push announces plan 9"):
        parts.state.activation.take(9, 3, prepared=False)


def moved():
    """Return a server that has reached the first version of the second plan, and the block that leaves it."""
    parts, _, second = growing()
    parts.state.activation.commit(2)
    for version in range(2):
        step(parts, version)
    (leaves,) = second.blocks_of("ps-1")
    return parts, leaves


def test_a_block_is_sent_after_the_answers_to_workers_and_reported_when_it_is_acknowledged():
    parts, leaves = moved()
    worker, peer = parts.connections.accepted["worker-0"], parts.connections.opened["ps-1"]
    worker.unsent = True
    assert not parts.handoff.can_send()
    worker.unsent = False
    assert parts.handoff.can_send()
    parts.handoff.send()
    ((header, payload),) = peer.take()
    assert (header.kind, header.block, header.version, header.crc) == (STATE, leaves, 2, zlib.crc32(payload))
    assert np.frombuffer(payload, "float32")[0] == 8.0
    assert not [message for message in parts.messages if isinstance(message, Moved) and message.plan == 2]
    parts.take("ps-1", replace(header, kind=STATE_ACK, length=0))
    (report,) = [message for message in parts.messages if isinstance(message, Moved) and message.plan == 2]
    assert report.sent_bytes == len(payload)
    assert not parts.handoff.moving


def test_a_missing_connection_to_the_next_owner_is_noted():
    parts, _ = moved()
    del parts.connections.opened["ps-1"]
    parts.handoff.send()
    assert parts.connections.missed == ["ps-1"]


def test_gradients_that_arrive_before_the_state_are_applied_after_it():
    parts, leaves = moved()
    parts.handoff.send()
    ((header, payload),) = parts.connections.opened["ps-1"].take()
    plans = [parts.state.plans[number].plan for number in (1, 2)]
    other = Parts(parts.state.spec, "ps-1")
    other.prepare(plans[1], plans[0])
    other.connections.accepted["ps-0"] = FakeLink("ps-0")
    other.push(0, 1, 2, 4.0, block=leaves, plan=2, first=2)
    assert other.answers("worker-0") == []
    other.take("ps-0", header, payload)
    assert other.answers("worker-0") == [(PARAM, 3, 7.0)]
    ((acknowledged, _),) = other.connections.accepted["ps-0"].take()
    assert (acknowledged.kind, acknowledged.block) == (STATE_ACK, leaves)


def test_a_worker_that_is_in_no_plan_does_not_set_the_version_of_an_expected_block():
    parts, leaves = moved()
    parts.handoff.send()
    ((header, payload),) = parts.connections.opened["ps-1"].take()
    receiver = Parts(parts.state.spec, "ps-1")
    receiver.prepare(parts.state.plans[2].plan, parts.state.plans[1].plan)
    receiver.connections.accepted["worker-9"] = FakeLink("worker-9")
    with pytest.raises(ProtocolError, match=r"worker-9 pushed a gradient of block .* under plan 2, of which it is no"):
        receiver.push(9, 1, 7, 4.0, block=leaves, plan=2, first=7)
    receiver.take("ps-0", header, payload)
    assert receiver.state.owned[leaves].version == 2
    assert not [message for message in receiver.messages if isinstance(message, Failed)]


def test_a_state_of_another_version_than_the_pushed_gradients_ends_the_job_and_is_not_acknowledged():
    parts, leaves = moved()
    parts.handoff.send()
    ((header, payload),) = parts.connections.opened["ps-1"].take()
    receiver = Parts(parts.state.spec, "ps-1")
    receiver.prepare(parts.state.plans[2].plan, parts.state.plans[1].plan)
    receiver.connections.accepted["ps-0"] = FakeLink("ps-0")
    receiver.push(0, 1, 3, 4.0, block=leaves, plan=2, first=3)
    receiver.take("ps-0", header, payload)
    (failed,) = receiver.messages
    assert failed == Failed(
        reason=f"the state of block {leaves} arrived at version 2, but workers push gradients for version 3"
    )
    assert not receiver.state.owned
    assert receiver.connections.accepted["ps-0"].sent == []
    assert receiver.answers("worker-0") == []


def test_a_state_with_a_wrong_checksum_ends_the_job():
    parts, leaves = moved()
    parts.handoff.send()
    ((header, payload),) = parts.connections.opened["ps-1"].take()
    other = Parts(parts.state.spec, "ps-1")
    other.prepare(parts.state.plans[2].plan, parts.state.plans[1].plan)
    other.take("ps-0", header, bytes(len(payload)))
    (failed,) = [message for message in other.messages if isinstance(message, Failed)]
    assert f"the state of block {leaves} was damaged on its way from ps-0" in failed.reason
