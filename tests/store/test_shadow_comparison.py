"""Shadow decisions compared with what the site's scheduler gave, on each database."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from store.samples import a_job, a_slot

from dl2d.core.decision import Decision
from dl2d.core.jobs import NOTHING, Allocation, Job
from dl2d.core.store import Slot
from dl2d.store.connections_and_transactions import StoreLocation
from dl2d.store.shadow_comparison import shadow_comparison
from dl2d.store.sql_store import SqlStore

_ALWAYS = 100_000.0


def decided(slot: Slot, size: Allocation, version: str) -> Decision:
    jobs = tuple(replace(entry, previous=NOTHING, allocation=size) for entry in slot.decision.jobs)
    return replace(slot.decision, policy_version=version, jobs=jobs)


def in_shadow(job: Job, number: int, seconds: float, given: Allocation, version: str = "1") -> Slot:
    """A slot in which dl2d would have given a job (2, 1)."""
    slot = a_slot(number, (job,))
    observed = decided(slot, given, "slurm 1")
    shadow = decided(slot, Allocation(2, 1), version)
    return replace(slot, at=1_700_000_000.0 + seconds, proposed=observed, decision=observed, shadow=shadow)


@pytest.mark.parametrize(
    ("seconds", "size", "soon"),
    [
        pytest.param([0.0, 8.0, 16.0], Allocation(2, 1), 2, id="an answer to both slots"),
        pytest.param([0.0, 8.0, 62.0], Allocation(2, 1), 1, id="too late for the first"),
        pytest.param([0.0, 100.0, 200.0], Allocation(2, 1), 0, id="too late"),
        pytest.param([0.0, 8.0, 16.0], Allocation(1, 1), 0, id="another size"),
    ],
)
def test_starts_that_the_sites_scheduler_makes_soon_after_a_slot(
    kept_url: str, seconds: list[float], size: Allocation, soon: int
) -> None:
    job = a_job(12)
    with closing(SqlStore(kept_url)) as store:
        store.add_job(job)
        for number, (at, given) in enumerate(zip(seconds, (NOTHING, NOTHING, size), strict=True), start=1):
            store.record_slot(in_shadow(job, number, at, given))
        store.record_slot(in_shadow(job, 4, 1000.0, size, version="2"))
    first, second = shadow_comparison(StoreLocation.parse(kept_url), _ALWAYS, 5)[0]
    assert (first["policy_version"], first["started_earlier"], first["started_soon"]) == ("1", 2, soon)
    assert (second["policy_version"], second["started_earlier"], second["started_soon"]) == ("2", 0, 0)
