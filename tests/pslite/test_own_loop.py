"""Open jobs, whose workers have loops of their own: whatever happens, each version is that of a run in one process.

Every worker compares its weights in each step, and what it fetches of the optimizer's state, with those of such a run.
Scripts come to barriers in the middle and at their ends.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from own_loop import KINDS, SAMPLES, STEPS, OwnLoop, own_loop
from rehearsal import QUICK, Event, Fault, Rehearsal, kill, random_events, static_digest
from variants import nightly
from weather import rough_weather

from pslite.fault_points import FaultPoint
from pslite.net.messages import AtBarrier, DigestRequest

#: a member that dies unseen while there is no coordinator is given up so many seconds later
BRIEF = replace(QUICK, lease=3.0, verdict=1.0)
DURABLE = {"durability": "durable"}
#: by what happens: replicas or none, deaths, and of which a worker and a server die at the same version
WHAT = {
    "resizes": ({}, (), False),
    "deaths of workers": ({}, ("worker", "worker"), False),
    "deaths of servers": ({}, ("ps", "worker"), False),
    "deaths of servers with replicas": (DURABLE, ("ps", "ps", "worker"), False),
    "a worker and a server with replicas die together": (DURABLE, (), True),
    "deaths of coordinators": ({}, ("coordinator", "coordinator"), False),
    "deaths of coordinators and of a server with replicas": (DURABLE, ("coordinator", "coordinator", "ps"), False),
}


def rehearse(changes, *, kind="momentum", model=OwnLoop, **how):
    """Go through a job, which must end well and has the weights of an undisturbed one."""
    spec = own_loop(**KINDS[kind], **changes)
    rehearsal = Rehearsal(spec, model=model, **how)
    outcome = rehearsal.run()
    assert not outcome.idle, (outcome.idle, outcome.story)
    outcome.check(static_digest(own_loop(**KINDS[kind]), OwnLoop))
    assert outcome.status.version == STEPS, outcome.story
    if not any((line.startswith("worker-") and " died" in line) or "goes back" in line for line in outcome.log):
        # a dead worker's samples are assigned again, and which of them were used before is not known
        trained = rehearsal.model.trained
        doubled = [sample for sample, count in Counter(trained).items() if count > 1]
        assert not doubled, (doubled, outcome.story)
        last = max(order for order, _ in trained)
        missing = {(order, place) for order in range(last - 1) for place in range(SAMPLES)} - set(trained)
        assert not missing, (missing, outcome.story)
    return outcome


@pytest.mark.parametrize(
    ("what", "seed"),
    [(what, seed) if seed == 0 else nightly(what, seed) for what in WHAT for seed in range(5)],
)
def test_every_version_is_that_of_one_process(what, seed, monkeypatch):
    changes, kills, together = WHAT[what]
    rng = random.Random(seed)
    monkeypatch.setenv("DL2_TRANSPORT", ("", "tcp", "unix")[seed % 3])
    least = 3 if changes else 1
    events = random_events(rng, last=45, kills=kills, least_servers=least)
    if together:
        at = rng.randint(1, 45)
        events += [Event(at, kill=role, choice=rng.randrange(12)) for role in ("worker", "ps")]
    kinds = list(KINDS)
    outcome = rehearse(
        changes, kind=kinds[(seed + list(WHAT).index(what)) % len(kinds)], workers=rng.randint(2, 4),
        servers=rng.randint(least, 4), events=events, settings=BRIEF if "coordinator" in kills else QUICK,
        faults=rough_weather(seed) if seed == 4 else [],
    )  # fmt: skip
    assert not changes or "goes back" not in outcome.story, outcome.story


class _BarrierInEachStep(OwnLoop):
    """A script that comes to a barrier after each step."""

    every = 1


def test_workers_at_a_barrier_do_not_wait_for_one_that_a_plan_has_removed():
    """It has taken its last step, and waits for the end of the move, which needs the others' next step."""
    rehearse({}, model=_BarrierInEachStep, workers=3, servers=1, events=[Event(10, workers=2)])


def is_at_barrier(moment):
    return isinstance(moment.about[1], AtBarrier)


class _OneTrainsOn(OwnLoop):
    """A script of which the third worker comes to no barrier before the end."""

    def comes_to_barriers(self, session):
        return session.rank_and_size[0] != 2


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        # three of each before: of the beginning and after seven steps
        (OwnLoop, Fault(FaultPoint.COORDINATOR_MESSAGE, kill("ps-0"), when=is_at_barrier, nth=7)),
        (_OneTrainsOn, Fault("version", kill("ps-0"), when=lambda moment: moment.subject == 30)),
    ],
    ids=["before all have come", "after others have begun to do their part"],
)
def test_a_server_dies_while_workers_wait_at_a_barrier(model, fault):
    outcome = rehearse(DURABLE, model=model, workers=3, servers=3, faults=[fault])
    assert "goes back" not in outcome.story, outcome.story
    assert any("train on without" in line for line in outcome.log) == (model is _OneTrainsOn), outcome.story


@pytest.mark.parametrize("servers", [1, 3])
def test_a_server_dies_when_the_first_workers_script_has_ended(servers):
    """All is done: the job ends well, although the digest of its weights is not known any more."""

    def dies_unheard(moment):
        moment.rehearsal.kill("ps-0", replace=False)
        return True

    fault = Fault(FaultPoint.MESSAGE, dies_unheard, task="ps-0", when=lambda m: isinstance(m.subject, DigestRequest))
    outcome = Rehearsal(own_loop(), model=OwnLoop, workers=2, servers=servers, faults=[fault]).run()
    outcome.check("")
    assert outcome.status.version == STEPS
    assert any("needs no weights any more" in line for line in outcome.log), outcome.story
