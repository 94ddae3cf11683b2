"""Rounds of a parameter server: which gradients are added, when they are applied, and which workers are answered."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from parts import Parts, a_job, a_plan

from pslite.errors import ProtocolError
from pslite.job.job_spec import LAMB, Part, Segment
from pslite.net.messages import Factors, Norm
from pslite.net.tensor_frames import FETCH, PARAM, REFUSED, RESEND, SKIP, WHOLE, Header

#: eight weights in two blocks, whose steps need a trust ratio of both
LAMB_SEGMENT = Segment(dtype="float32", optimizer=LAMB(), parts=(Part("a", (8,)),))


def a_server(**changes):
    """Return a server that owns both blocks; two workers push the tree nodes 2 and 3."""
    spec = a_job(**changes)
    parts = Parts(spec)
    parts.begin(a_plan(spec, workers=2, servers=1), weights=10.0)
    return parts


def clip(version, factor):
    """Return what the coordinator says of the gradients' norm."""
    return Factors(version=version, of="gradient", factors={0: factor})


# --- synchronous --------------------------------------------------------------------------------------------------


def test_a_step_is_applied_and_answered_when_all_have_pushed():
    parts = a_server()
    parts.push(0, 2, 0, 4.0)
    assert parts.answers("worker-0") == []
    parts.push(1, 3, 0, 8.0)
    # 10 - (4 + 8) / 4 samples
    for worker in ("worker-0", "worker-1"):
        assert parts.answers(worker) == [(PARAM, 1, 7.0)]
    assert parts.state.owned[0].version == 1
    assert parts.state.owned[1].version == 0


def test_a_gradient_that_is_pushed_twice_or_late_counts_once():
    parts = a_server()
    parts.push(0, 2, 0, 4.0)
    parts.push(0, 2, 0, 4.0)
    parts.push(1, 3, 0, 8.0)
    parts.forget_sent()
    parts.push(1, 3, 0, 8.0)
    assert parts.state.owned[0].arrays[0, 0] == 7.0
    assert parts.connections.accepted["worker-1"].take() == []
    assert not parts.lines


def test_a_push_for_a_block_of_another_server_is_refused():
    spec = a_job()
    parts = Parts(spec)
    plan = a_plan(spec, workers=2, servers=2)
    parts.begin(plan)
    (other,) = plan.blocks_of("ps-1")
    parts.push(0, 2, 0, 1.0, block=other)
    ((header, _),) = parts.connections.accepted["worker-0"].take()
    assert (header.kind, header.block, header.node) == (REFUSED, other, 2)
    assert parts.lines == [
        f"refused the gradient of worker-0 for step 0 of block {other}, plan 1: ps-0 does not own that block"
    ]


def test_a_worker_cannot_push_the_tree_node_of_another_one_that_lives():
    parts = a_server()
    with pytest.raises(
        ProtocolError, match="worker-0 pushed tree node 3 under plan 1, which that plan assigns to another worker"
    ):
        parts.push(0, 3, 0, 1.0)
    parts.rounds.continue_without({1: (3,)})
    parts.push(0, 3, 0, 1.0)


def test_a_clipped_step_waits_for_the_norm_over_all_servers():
    parts = a_server(clip_norm=1.0)
    parts.push(0, 2, 0, 4.0)
    parts.push(1, 3, 0, 4.0)
    parts.step_maker.send_squares()
    # four elements, each a mean gradient of 2
    assert parts.messages[-1] == Norm(version=0, squares={0: (16.0,)}, of="gradient")
    assert parts.answers("worker-0") == []
    parts.rounds.take_factors(clip(0, 0.5))
    parts.rounds.continue_steps()
    assert parts.answers("worker-0") == [(PARAM, 1, 9.0)]
    # a new coordinator may send an old factor
    parts.rounds.take_factors(clip(-1, 0.1))
    parts.rounds.continue_steps()
    assert parts.state.owned[0].version == 1


def test_steps_whose_factor_has_come_are_continued_in_slices(monkeypatch):
    """All of them at once take longer than the lease in a large model."""
    monkeypatch.setattr("pslite.server.training_rounds._SLICE_SECONDS", 0.0)
    parts = a_server(clip_norm=1.0)
    owned = parts.state.owned
    assert len(owned) > 1
    for block in owned:
        parts.push(0, 2, 0, 4.0, block=block)
        parts.push(1, 3, 0, 4.0, block=block)
    parts.rounds.take_factors(clip(0, 0.5))
    for count in range(1, len(owned) + 1):
        assert parts.rounds.continue_steps() is (count < len(owned))
        assert sum(block.version for block in owned.values()) == count
    assert not parts.rounds.continue_steps()


def test_a_factor_that_a_second_coordinator_sends_again_counts_once():
    """Otherwise sums of squares of a completed step would be reported for the next one."""
    parts = a_server(segments=(LAMB_SEGMENT,), clip_norm=1.0)
    for block in (0, 1):
        parts.push(0, 2, 0, 4.0, block=block)
        parts.push(1, 3, 0, 4.0, block=block)
    parts.step_maker.send_squares()
    parts.rounds.take_factors(clip(0, 0.5))
    parts.rounds.continue_steps()
    parts.step_maker.send_squares()
    reported = [(norm.version, norm.of, set(norm.squares)) for norm in parts.messages if isinstance(norm, Norm)]
    assert reported == [(0, "gradient", {0, 1}), (0, "update", {0, 1})]
    parts.messages.clear()
    parts.rounds.take_factors(clip(0, 0.5))
    parts.rounds.continue_steps()
    parts.rounds.take_factors(Factors(version=0, of="update", factors={0: 0.5}))
    parts.rounds.continue_steps()
    parts.step_maker.send_squares()
    assert [block.version for block in parts.state.owned.values()] == [1, 1]
    assert not any(isinstance(message, Norm) for message in parts.messages)


def test_steps_without_a_gradient_do_not_count_in_the_squares_of_lamb():
    """The optimizer does not count them either."""

    def squares(skipped):
        parts = a_server(segments=(LAMB_SEGMENT,))
        for version in range(skipped):
            for block in (0, 1):
                parts.take("worker-0", Header(SKIP, 1, block, 2, 0, version, 0))
                parts.take("worker-1", Header(SKIP, 1, block, 3, 0, version, 0))
        for block in (0, 1):
            parts.push(0, 2, skipped, 4.0, block=block)
            parts.push(1, 3, skipped, 4.0, block=block)
        parts.step_maker.send_squares()
        assert parts.messages[-1].version == skipped
        return parts.messages[-1].squares

    assert squares(3) == squares(0)


def test_a_clip_factor_that_comes_together_with_an_older_trust_ratio_continues_its_step():
    """A second coordinator sends both again, in one message after the other."""
    parts = a_server(segments=(LAMB_SEGMENT,), clip_norm=1.0)
    for version in (0, 1):
        for block in (0, 1):
            parts.push(0, 2, version, 4.0, block=block)
            parts.push(1, 3, version, 4.0, block=block)
        parts.step_maker.send_squares()
        parts.rounds.take_factors(clip(version, 0.5))
        parts.rounds.take_factors(Factors(version=0, of="update", factors={0: 0.5}))
        parts.rounds.continue_steps()
    assert [block.version for block in parts.state.owned.values()] == [1, 1]
    parts.step_maker.send_squares()
    assert (parts.messages[-1].version, parts.messages[-1].of) == (1, "update")
    assert set(parts.messages[-1].squares) == {0, 1}
    parts.rounds.take_factors(Factors(version=1, of="update", factors={0: 0.5}))
    parts.rounds.continue_steps()
    assert [block.version for block in parts.state.owned.values()] == [2, 2]


def test_weights_are_sent_again_on_request_unless_the_answer_is_still_to_come():
    parts = a_server()
    parts.take("worker-0", Header(RESEND, 1, 0, 0, 0, 1, 0))
    assert parts.answers("worker-0") == []
    parts.take("worker-0", Header(RESEND, 1, 0, 0, 0, 0, 0))
    assert parts.answers("worker-0") == [(PARAM, 0, 10.0)]


def test_a_whole_block_is_sent_when_it_has_the_requested_version():
    parts = a_server()
    parts.take("worker-1", Header(FETCH, 1, 0, 0, 0, 0, 0))
    assert parts.answers("worker-1") == [(WHOLE, 0, 10.0)]
    parts.take("worker-1", Header(FETCH, 1, 0, 0, 0, 5, 0))
    assert parts.answers("worker-1") == []


# --- asynchronous -------------------------------------------------------------------------------------------------


def test_an_asynchronous_job_applies_each_gradient_alone():
    parts = a_server(mode="async", shards=2, staleness=1)
    parts.push(0, 2, 0, 4.0)
    assert parts.answers("worker-0") == [(PARAM, 1, 9.0)]
    assert parts.answers("worker-1") == []
    # one version ahead of the slowest is allowed, two are not
    parts.push(0, 2, 1, 4.0)
    assert parts.answers("worker-0") == []
    parts.push(1, 3, 0, 4.0)
    assert parts.answers("worker-1") == [(PARAM, 1, 7.0)]
    assert parts.answers("worker-0") == [(PARAM, 2, 7.0)]
    with pytest.raises(
        ProtocolError, match="worker-0 pushed a gradient for step 3 of block 0, but step 1 is not complete"
    ):
        parts.push(0, 2, 3, 4.0)


def test_an_asynchronous_job_does_not_wait_for_dead_workers():
    parts = a_server(mode="async", shards=2)
    parts.push(0, 2, 0, 4.0)
    assert parts.answers("worker-0") == []
    parts.rounds.continue_without({1: (3,), 7: (1,)})
    assert parts.answers("worker-0") == [(PARAM, 1, 9.0)]


def test_a_gradient_that_is_pushed_again_is_answered_and_not_applied():
    parts = a_server(mode="async", shards=2, staleness=1)
    parts.push(0, 2, 0, 4.0)
    parts.forget_sent()
    parts.push(0, 2, 0, 4.0)
    assert parts.answers("worker-0") == [(PARAM, 1, 9.0)]
