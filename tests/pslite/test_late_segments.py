"""Open jobs to which segments are added in the middle: whatever happens meanwhile, no step is lost or done twice.

Every worker compares its weights before each step, and what it fetches of the optimizer's state, with a run in one
process that added the same segments.
"""

from __future__ import annotations

import pytest
from late_segments import LATE_AT, STEPS, LateSegments, SlowFollowers
from own_loop import KINDS, own_loop
from rehearsal import QUICK, Event, Fault, Rehearsal, kill, static_digest
from test_own_loop import BRIEF, DURABLE
from variants import nightly

from pslite.fault_points import FaultPoint
from pslite.net.messages import Describe
from pslite.net.tensor_frames import INIT


def rehearse(changes=(), *, kind="momentum", model=LateSegments, **how):
    """Go through a job, which must end well and has the weights of an undisturbed one."""
    spec = own_loop(**KINDS[kind], **dict(changes))
    outcome = Rehearsal(spec, model=model, **{"settings": QUICK, **how}).run()
    assert not outcome.idle, (outcome.idle, outcome.story)
    outcome.check(static_digest(own_loop(**KINDS[kind]), model))
    return outcome


class Undisturbed(LateSegments):
    """The loop in a job whose members stay."""

    undisturbed = True


@pytest.mark.parametrize(
    ("transport", "kind"), [("", "momentum"), nightly("tcp", "adam"), nightly("unix", "rows"), nightly("", "one block")]
)
def test_steps_take_turns_and_each_optimizer_counts_its_own(transport, kind, monkeypatch):
    monkeypatch.setenv("DL2_TRANSPORT", transport)
    outcome = rehearse(kind=kind, model=Undisturbed, workers=3, servers=2)
    assert outcome.status.version > STEPS
    assert "goes back" not in outcome.story


RESIZES = {
    "before and after": [
        Event(LATE_AT - 5, workers=4, servers=3), Event(LATE_AT + 10, workers=2, servers=1),
        Event(LATE_AT + 15, workers=3, servers=2),
    ],
    "at that step": [Event(LATE_AT, workers=4, servers=3)],
    "at that step, and the first worker leaves": [Event(LATE_AT, workers=1, servers=1, oldest=True)],
}  # fmt: skip


@pytest.mark.parametrize("when", [next(iter(RESIZES)), *map(nightly, list(RESIZES)[1:])])
@pytest.mark.parametrize("changes", [DURABLE], ids=["replicas"])
def test_a_job_is_resized_when_segments_are_added(when, changes):
    outcome = rehearse(changes, workers=2, servers=2, events=RESIZES[when])
    assert "goes back" not in outcome.story, outcome.story


def adds(moment):
    """Whether it is the plan that adds the segments, of a job that is not resized."""
    return moment.subject.number == 2


DEATHS = {
    "the first worker has asked for them": Fault(
        FaultPoint.COORDINATOR_MESSAGE, kill("worker-0"),
        when=lambda moment: isinstance(moment.about[1], Describe) and moment.rehearsal.version >= LATE_AT - 1
        and moment.subject == "worker-0", nth=1,
    ),
    "a server makes ready for them": Fault(FaultPoint.PREPARE, kill(), task="ps-1", when=adds),
    "the first worker makes ready for them": Fault(FaultPoint.PREPARED, kill(), task="worker-0", when=adds),
    "another worker enters the plan": Fault(FaultPoint.ENTER_PLAN, kill(), task="worker-1", when=adds),
    "the coordinator has committed the plan": Fault(FaultPoint.PLAN_COMMITTED, kill("worker-0"), when=adds),
}  # fmt: skip


@pytest.mark.parametrize(
    "what", [name if name.startswith(("a server", "the coord")) else nightly(name) for name in DEATHS]
)
def test_a_member_dies_just_when_segments_are_added(what):
    outcome = rehearse(DURABLE, workers=3, servers=3, faults=[DEATHS[what]], settings=BRIEF)
    assert "goes back" not in outcome.story, outcome.story


def test_the_next_worker_is_far_from_the_keys_for_which_one_that_died_has_asked():
    """They are taken back with the plan, and added when it gets there."""
    fault = DEATHS["the first worker makes ready for them"]
    outcome = rehearse(DURABLE, model=SlowFollowers, workers=2, servers=2, faults=[fault], settings=BRIEF)
    assert "goes back" not in outcome.story, outcome.story


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "by"), [("ps-0", "worker-1"), ("ps-2", "ps-1"), ("worker-0", "ps-0"), ("ps-1", "ps-1")]
)
@pytest.mark.parametrize("at", [FaultPoint.PLAN_KNOWN, FaultPoint.PLAN_ANNOUNCED, FaultPoint.ENTER_PLAN])
def test_a_member_dies_at_any_point_of_the_plan_that_adds_segments(at, task, by):
    """A server of added blocks that have no replica yet may have the scripts begin again, which end well."""
    faults = [
        Fault(at, kill(task), task=by, when=lambda moment: getattr(moment.subject, "number", moment.subject) == 2)
    ]
    spec = own_loop(**KINDS["momentum"], **DURABLE)
    outcome = Rehearsal(spec, model=LateSegments, settings=BRIEF, workers=3, servers=3, faults=faults).run()
    outcome.check(static_digest(own_loop(**KINDS["momentum"]), LateSegments))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["", "tcp"])
@pytest.mark.parametrize("task", ["worker-0", "ps-0", "ps-1"])
def test_a_member_dies_when_the_first_weights_of_added_segments_arrive(task, transport, monkeypatch):
    """The next worker sends them then; without a server that has no replica of them the scripts begin again."""
    monkeypatch.setenv("DL2_TRANSPORT", transport)
    arrives = Fault(
        FaultPoint.FRAME, kill(task), when=lambda moment: moment.header.kind == INIT and moment.header.plan > 1
    )
    outcome = rehearse(DURABLE, workers=3, servers=3, faults=[arrives], settings=BRIEF)
    assert task.startswith("ps") or "goes back" not in outcome.story, outcome.story


@pytest.mark.parametrize(
    ("role", "at"),
    [
        ("ps", LATE_AT + 8),
        nightly("worker", LATE_AT + 8),
        nightly("coordinator", LATE_AT + 8),
        nightly("coordinator", LATE_AT),
        nightly("worker", LATE_AT),
    ],
)
def test_a_member_dies_at_a_step(role, at):  # fmt: skip
    outcome = rehearse(DURABLE, workers=3, servers=3, events=[Event(at, kill=role)], settings=BRIEF)
    assert "goes back" not in outcome.story, outcome.story


@pytest.mark.parametrize("at", [FaultPoint.ENTER_PLAN, nightly(FaultPoint.PREPARE)])
def test_scripts_begin_again_when_a_server_without_replicas_dies_meanwhile(at):
    """They describe the first segments, and add the others again."""
    outcome = rehearse(workers=2, servers=2, faults=[Fault(at, kill("ps-0"), task="worker-1", when=adds)])
    assert "goes back to its beginning" in outcome.story, outcome.story
