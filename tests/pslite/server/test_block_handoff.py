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
from pslite.net.data_frames import PARAM, STATE, STATE_ACK
from pslite.net.messages import Failed, Moved, Stamped


def step(parts, version, plan=1):
    """All workers push for all blocks that are here."""
    for block in list(parts.state.owned):
        parts.push(0, 1, version, 4.0, block=block, plan=plan)


def growing(**changes):
    """A server, and the plan that gives one of its blocks to another one."""
    spec = a_job(**changes)
    first = a_plan(spec, workers=1, servers=1)
    parts = Parts(spec)
    parts.begin(first, weights=10.0)
    second = a_plan(spec, workers=1, servers=2, previous=first)
    parts.prepare(second, first)
    return parts, first, second


def test_a_plan_is_announced_with_a_version_of_block_0_and_rules_from_the_next_one_on():
    parts, _, second = growing()
    step(parts, 0)
    parts.state.clock.commit(2)
    parts.forget_sent()
    step(parts, 1)
    assert [told for told in parts.told if isinstance(told, Stamped)] == [Stamped(plan=2, first=3)]
    stamps = {
        header.block: (header.next_plan, header.next_first) for header, _ in parts.connections.links["worker-0"].sent
    }
    assert stamps == {0: (2, 3), 1: (0, 0)}
    step(parts, 2)
    assert set(parts.state.owned) == set(second.blocks_of("ps-0"))
    assert {block.plan for block in parts.state.owned.values()} == {2}


def test_a_plan_that_comes_too_late_is_said_to_have_no_first_version():
    parts, *_ = growing()
    parts.state.clock.commit(2)
    parts.state.clock.choose(parts.state.spec.total_versions)
    assert parts.told[-1] == Stamped(plan=2, first=-1)
    assert parts.state.clock.stamp is None


def test_a_stamp_of_a_plan_that_was_never_prepared_is_a_violation():
    parts, *_ = growing()
    with pytest.raises(ProtocolError, match="plan 9 is announced"):
        parts.state.clock.learn_stamp(9, 3, prepared=False)


def moved():
    """A server that has reached the first version of the second plan."""
    parts, _, second = growing()
    parts.state.clock.commit(2)
    for version in range(2):
        step(parts, version)
    (leaves,) = second.blocks_of("ps-1")
    return parts, leaves


def test_a_block_leaves_when_workers_have_their_answers_and_is_reported_when_it_is_there():
    parts, leaves = moved()
    worker, peer = parts.connections.links["worker-0"], parts.connections.peers["ps-1"]
    worker.unsent = True
    assert not parts.handoff.can_send
    worker.unsent = False
    assert parts.handoff.can_send
    parts.handoff.send()
    ((header, payload),) = peer.take()
    assert (header.kind, header.block, header.version, header.crc) == (STATE, leaves, 2, zlib.crc32(payload))
    assert np.frombuffer(payload, "float32")[0] == 8.0
    assert not [told for told in parts.told if isinstance(told, Moved) and told.plan == 2]
    parts.take("ps-1", replace(header, kind=STATE_ACK, length=0))
    (report,) = [told for told in parts.told if isinstance(told, Moved) and told.plan == 2]
    assert report.sent_bytes == len(payload)
    assert not parts.handoff.moving


def test_a_server_that_cannot_be_reached_is_missed():
    parts, _ = moved()
    del parts.connections.peers["ps-1"]
    parts.handoff.send()
    assert parts.connections.missed == ["ps-1"]


def test_what_is_pushed_before_a_block_comes_is_applied_when_it_is_there():
    parts, leaves = moved()
    parts.handoff.send()
    ((header, payload),) = parts.connections.peers["ps-1"].take()
    plans = [parts.state.plans[number].plan for number in (1, 2)]
    other = Parts(parts.state.spec, "ps-1")
    other.prepare(plans[1], plans[0])
    other.connections.links["ps-0"] = FakeLink("ps-0")
    other.push(0, 1, 2, 4.0, block=leaves, plan=2, first=2)
    assert other.answers("worker-0") == []
    other.take("ps-0", header, payload)
    assert other.answers("worker-0") == [(PARAM, 3, 7.0)]
    ((acknowledged, _),) = other.connections.links["ps-0"].take()
    assert (acknowledged.kind, acknowledged.block) == (STATE_ACK, leaves)


def test_damage_on_the_way_ends_the_job():
    parts, leaves = moved()
    parts.handoff.send()
    ((header, payload),) = parts.connections.peers["ps-1"].take()
    other = Parts(parts.state.spec, "ps-1")
    other.prepare(parts.state.plans[2].plan, parts.state.plans[1].plan)
    other.take("ps-0", header, bytes(len(payload)))
    (failed,) = [told for told in other.told if isinstance(told, Failed)]
    assert f"block {leaves} came damaged from ps-0" in failed.reason
