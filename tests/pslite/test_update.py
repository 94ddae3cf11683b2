"""Servers that only add up, and workers that have the optimizer: the same bits as if the servers had it."""

from __future__ import annotations

import pytest
from pslite_jobs import KillAt, command, run_job, static_digest
from regression import table_segments
from rehearsal import Event, Rehearsal, job
from rehearsal import static_digest as rehearsed_digest

from pslite.errors import SpecError
from pslite.job.job_spec import SGD
from pslite.storage.checkpoint_files import latest
from pslite.testing import Resize


def test_a_resize_moves_nothing():
    events = [Event(10, servers=3), Event(25, servers=1, oldest=True)]
    outcome = Rehearsal(job(update="worker"), workers=2, servers=1, events=events).run()
    outcome.check(rehearsed_digest(job()))
    assert len(outcome.status.plans) >= 3
    assert all(plan.moved_bytes == 0 for plan in outcome.status.plans)


def test_when_all_workers_are_replaced_one_stays_until_the_others_have_the_weights():
    events = [Event(10, workers=1, servers=2), Event(20, workers=3), Event(30, workers=1, oldest=True)]
    outcome = Rehearsal(job(update="worker"), workers=2, servers=1, events=events).run()
    outcome.check(rehearsed_digest(job()))


@pytest.mark.slow
def test_a_checkpoint_is_the_first_workers_and_fits_any_number(tmp_path):
    options = ("--update", "worker", "--optimizer", "adam", "--checkpoint", str(tmp_path), "--every", "20", "--epochs")
    kill = KillAt("worker-0", 30)

    def until_the_next_one(status, director):
        """The first one wrote the checkpoint of version 20, if any; another one goes on with that."""
        pending = kill(status, director)
        place = latest(tmp_path)
        return pending or place is None or int(place.name) < 40

    result = run_job(
        command(*options, "6", "--step-seconds", "0.01"), workers=2, servers=2, schedule=[Resize(25, 3, 1)],
        on_status=until_the_next_one,
    )  # fmt: skip
    assert result.digest == static_digest("--optimizer", "adam", "--epochs", "6")
    version = int(latest(tmp_path).name)
    assert version in (40, 60)
    # it goes on from there
    result = run_job(command(*options, "8"), workers=1, servers=1)
    assert any(f"the job goes on from its checkpoint of version {version}" in line for line in result.log)
    assert result.digest == static_digest("--optimizer", "adam", "--epochs", "8")


def test_the_death_of_the_only_worker_that_has_the_weights_ends_the_job():
    result = run_job(
        command("--update", "worker", "--step-seconds", "0.02", "--epochs", "20"), workers=1, servers=1,
        on_status=KillAt("worker-0", 20),
        state="failed",
    )  # fmt: skip
    assert "worker-0" in result.reason


def test_tables_stay_with_servers():
    with pytest.raises(SpecError, match='table is sparse: update="worker"'):
        job(segments=table_segments(30, 2, SGD(lr=0.1)), update="worker")
