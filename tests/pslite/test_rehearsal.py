"""Random schedules of joins, leaves and deaths, in one process: nothing is lost or applied twice, no bit differs."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from rehearsal import Rehearsal, job, random_events, static_digest

#: of each kind; 10,000 in all are gone through by setting it so
SCHEDULES = int(os.environ.get("PSLITE_SCHEDULES", "20"))


@pytest.fixture(scope="module")
def expected():
    return static_digest(job())


def go_through(seed, spec, expected, kills):
    rng = random.Random(seed)
    events = random_events(rng, last=45, kills=kills)
    workers, servers = rng.randint(1, 4), rng.randint(1, 4)
    outcome = Rehearsal(spec, workers=workers, servers=servers, events=events).run()
    story = "\n".join([f"seed {seed}: {workers} workers, {servers} servers", *map(str, events), *outcome.log])
    assert outcome.status.state == "finished", story
    assert outcome.status.result.digest == expected, story
    assert not outcome.surprises, f"{outcome.surprises}\n{story}"
    return outcome


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_resizes_and_deaths_of_workers(seed, expected):
    go_through(seed, job(), expected, kills=["worker"] * random.Random(seed).randint(0, 2))
