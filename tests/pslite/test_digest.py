"""Resized, killed, cut off: whatever happens to a job, its digest is that of a run in one process.

Random schedules of joins, leaves and deaths of whole jobs in threads.  Every version counts itself in three places of
the model, so that none is lost or done twice.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rehearsal import (
    BEFORE_ITS_FILES,
    KINDS,
    QUICK,
    Event,
    Fault,
    Rehearsal,
    job,
    model_of,
    random_events,
    static_digest,
)
from variants import nightly
from weather import CutData, cut_lines, rough_weather

from pslite.coordinator import Settings
from pslite.errors import SpecError
from pslite.job.load_balancing import Rule

#: of each disturbance and backend; `rehearsals.py` goes through thousands
SCHEDULES = int(os.environ.get("PSLITE_SCHEDULES", "3"))
FIRST = int(os.environ.get("PSLITE_FIRST_SCHEDULE", "0"))

#: a member that dies unseen while there is no coordinator is given up so many seconds later
BRIEF = replace(QUICK, lease=3.0, verdict=1.0)
#: and one whose connection breaks has a second to come back
PATIENT = replace(BRIEF, verdict=10.0)
#: divides the work anew whenever it can, however little that gains
RESTLESS = replace(
    QUICK, rule=Rule(measure=0.1, reports=1, gain=0.01, steady=0.0, worth=0.0, pause=0.1, most_pause=0.1, look=0.0)
)
#: deaths from here on may hit the one that writes files, when the others' scripts have ended
LATE = 57

#: who has the weights, and how often
BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "servers": {},
    "checkpoints": {"checkpoint_every": 7},
    "replicas": {"durability": "durable"},
    "allreduce": {"architecture": "allreduce"},
}


def kinds_for(backend: str) -> list[str]:
    """The kinds of jobs that a backend can train."""
    found = []
    for kind, changes in KINDS.items():
        try:
            job(**changes, **BACKENDS[backend])
        except SpecError:
            continue
        if backend != "allreduce" or kind != "encrypted":
            found.append(kind)
    return found


def deaths(**most: tuple[int, int]) -> Callable[[random.Random, str], list[str]]:
    """Between so many and so many deaths of each role."""
    return lambda rng, _: [role for role, (low, high) in most.items() for _ in range(rng.randint(low, high))]


def deaths_of_servers(rng: random.Random, backend: str) -> list[str]:
    return ["ps"] * rng.randint(1, 2 if backend == "replicas" else 3) + ["worker"] * rng.randint(0, 1)


def deaths_of_coordinators(rng: random.Random, backend: str) -> list[str]:
    kills = ["coordinator"] * rng.randint(1, 4)
    many = backend in ("servers", "allreduce")
    return kills + ["worker"] * rng.randint(0, 2 if many else 1) + ["ps"] * (0 if many else rng.randint(0, 2))


def deaths_with_broken_connections(rng: random.Random, backend: str) -> list[str]:
    return ["worker"] * rng.randint(0, 1)


def bad_network(seed: int) -> list[Fault]:
    return rough_weather(seed) + cut_lines(seed, often=0.01)


def broken_connections(seed: int) -> list[Fault]:
    return CutData(seed, often=0.01).faults + (rough_weather(seed) if seed % 3 == 2 else [])


@dataclass(frozen=True)
class Disturbance:
    """What happens to jobs beside resizes."""

    backends: Sequence[str]
    kills: Callable[[random.Random, str], list[str]] = lambda rng, backend: []
    #: of these backends no step is done twice
    lossless: Sequence[str] = ()
    settings: Settings | None = None
    faults: Callable[[int], list[Fault]] = lambda seed: []
    #: versions between which it happens
    first: int = 1
    last: int = 45
    #: how many workers there may be, and whether the last one may die
    workers: int = 4
    any_worker: bool = False
    #: another death at the version of the last one, half of the time
    also: str = ""
    epochs: int = 10
    #: members differ in speed
    uneven: bool = False


PS = ("servers", "replicas")
DISTURBANCES: Mapping[str, Disturbance] = {
    "resizes": Disturbance((*PS, "allreduce"), lossless=(*PS, "allreduce")),
    "deaths of workers": Disturbance((*PS, "allreduce"), deaths(worker=(1, 2)), lossless=(*PS, "allreduce")),
    "deaths of servers": Disturbance((*PS, "checkpoints"), deaths_of_servers, lossless=["replicas"]),
    "deaths of the last worker": Disturbance(
        ("servers", "replicas"), deaths(worker=(1, 2)), workers=2, any_worker=True
    ),
    "deaths of the last worker and of a server": Disturbance(
        ["replicas"], deaths(worker=(1, 2)), workers=2, any_worker=True, also="ps", settings=BRIEF
    ),
    "deaths of coordinators": Disturbance((*PS, "allreduce"), deaths_of_coordinators, settings=BRIEF),
    "deaths as the job begins": Disturbance(
        PS, deaths(ps=(1, 2), worker=(0, 1), coordinator=(0, 1)), last=1, settings=BRIEF
    ),
    "deaths as the job ends": Disturbance(
        PS, deaths(ps=(0, 2), worker=(0, 1), coordinator=(0, 1)), first=LATE, last=60, settings=BRIEF
    ),
    "frames in pieces, late and twice": Disturbance(
        ["replicas"], deaths(ps=(0, 1), worker=(0, 1)), lossless=["replicas"], faults=rough_weather
    ),
    "data connections that break": Disturbance(
        PS, deaths_with_broken_connections, faults=broken_connections, settings=PATIENT
    ),
    "deaths of coordinators and servers on a bad network": Disturbance(
        ["replicas"],
        deaths(coordinator=(1, 3), ps=(1, 2), worker=(0, 1)),
        faults=bad_network,
        settings=PATIENT,
    ),
    "work divided anew": Disturbance(
        ("servers", "replicas"), deaths(worker=(0, 1)), last=100, epochs=20, uneven=True, settings=RESTLESS
    ),
}
PAIRS = [(name, backend) for name, disturbance in DISTURBANCES.items() for backend in disturbance.backends]


def kind_of(what: str, backend: str, seed: int) -> str:
    """The kind of job of a schedule: with each backend all come in turn."""
    kinds = kinds_for(backend)
    return kinds[(seed + SCHEDULES * PAIRS.index((what, backend))) % len(kinds)]


def go_through(what: str, backend: str, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go through a random schedule that must end well."""
    disturbance = DISTURBANCES[what]
    kind = kind_of(what, backend, seed)
    encrypted = kind == "encrypted"
    monkeypatch.setenv("DL2_TRANSPORT", "tcp" if encrypted else ("", "tcp", "unix")[seed % 3])
    rng = random.Random(seed)
    kills = disturbance.kills(rng, backend)
    # where replicas are needed one may die, and two are left
    least = 3 if "ps" in (*kills, disturbance.also) and backend == "replicas" else 1
    events = random_events(
        rng, first=disturbance.first, last=disturbance.last, kills=kills, least_servers=least,
        most_workers=disturbance.workers,
    )  # fmt: skip
    workers, servers = rng.randint(1, disturbance.workers), rng.randint(least, 4)
    if disturbance.also:
        at = next(event.version for event in reversed(events) if event.kill is not None)
        at = at if rng.random() < 0.5 else rng.randint(disturbance.first, disturbance.last)
        events.append(Event(at, kill=disturbance.also, choice=rng.randrange(12), delay=rng.random() * 0.03))
    if backend == "allreduce":
        servers, events = 0, [replace(event, servers=None) for event in events]
    slow = {f"worker-{i}": rng.choice((0.0, 0.001, 0.004)) for i in range(20)}
    slow |= {f"ps-{i}": rng.choice((0.0, 0.001)) for i in range(20)}
    plain = job(**KINDS[kind], epochs=disturbance.epochs)
    spec = job(**KINDS[kind], epochs=disturbance.epochs, **BACKENDS[backend], **kept(backend, folder))
    faults = disturbance.faults(seed)
    outcome = Rehearsal(
        spec, workers=workers, servers=servers, events=events, faults=faults, settings=disturbance.settings or QUICK,
        model=model_of(spec), any_worker=disturbance.any_worker, slow=slow if disturbance.uneven else None,
        encrypt="all" if encrypted else "control",
    ).run()  # fmt: skip
    story = "\n".join(
        [f"{what}, {backend}, seed {seed}, {kind}: {workers} workers, {servers} servers", *map(str, events),
         outcome.story]
    )  # fmt: skip
    assert outcome.status.version == spec.total_versions, story
    if disturbance.first >= LATE and BEFORE_ITS_FILES in str(outcome.status.reason):
        return
    assert outcome.status.state == "finished", story
    assert not outcome.surprises, story
    assert outcome.status.result.digest == static_digest(plain, model_of(spec)), story
    assert backend not in disturbance.lossless or "goes back" not in story, story


def kept(backend: str, folder: Path) -> dict[str, str]:
    return {"checkpoint": str(folder)} if backend == "checkpoints" else {}


def schedules() -> list[Any]:
    """Disturbance, backend and seed; CI runs one seed of each pair, and with these all kinds of jobs."""
    return [
        ((what, backend, seed) if (number + 1 - seed) % SCHEDULES == 0 else nightly(what, backend, seed))
        for number, (what, backend) in enumerate(PAIRS)
        for seed in range(FIRST, FIRST + SCHEDULES)
    ]


@pytest.mark.parametrize(("what", "backend", "seed"), schedules())
def test_the_digest_is_that_of_a_static_run(what, backend, seed, monkeypatch, tmp_path):
    go_through(what, backend, seed, tmp_path, monkeypatch)


def test_kinds_of_jobs_differ():
    """Else one of them would not have what it is called after; blocks are no matter, and rows travel as they are."""
    same = ("encrypted", "lamb, one block", "rows, bfloat16")
    plain = [job(**changes) for kind, changes in KINDS.items() if kind not in same]
    assert len({static_digest(spec, model_of(spec)) for spec in plain}) == len(plain)
