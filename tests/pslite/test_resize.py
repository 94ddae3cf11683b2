"""Resizes: a job of real processes has the weights of the static run; and what plans are made of several changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from pslite_jobs import PATIENT, command, run_job, static_digest
from regression import Regression
from rehearsal import QUICK, Event, Rehearsal, job
from rehearsal import static_digest as rehearsed_digest

from pslite.testing import Resize
from pslite.worker.single_process_session import SingleSession


def test_same_bits_as_the_static_run(tmp_path):
    options = ("--optimizer", "scheduled", "--clip", "0.3")
    schedule = [
        Resize(5, workers=2, servers=3),
        Resize(10, workers=2, servers=2),
        Resize(15, workers=5, servers=2),
        Resize(20, workers=1, servers=2, oldest=True),
    ]
    log = tmp_path / "samples"
    result = run_job(command(*options, "--log", str(log)), workers=2, servers=1, schedule=schedule, settings=PATIENT)
    assert [(p.workers, p.servers) for p in result.plans] == [(2, 1), (2, 3), (2, 2), (5, 2), (1, 2)]
    assert result.digest == static_digest(*options)
    assert set(result.exit_codes.values()) == {0}
    firsts = [p.first_version for p in result.plans]
    assert firsts == sorted(set(firsts))
    assert result.plans[1].moved_bytes > 0
    assert result.plans[3].moved_bytes == 0  # only workers came
    assert result.plans[0].longest_step_ms is None  # nobody had trained before
    assert any("the longest step around the resize took" in line for line in result.log)
    for plan in result.plans[1:]:
        assert plan.longest_step_ms is None or plan.median_step_ms > 0, plan
    # ten epochs of 203 samples, over eight workers that came and went: each sample once in each
    used = Counter(
        (line.split()[0], index)
        for path in tmp_path.iterdir()
        for line in path.read_text().splitlines()
        for index in line.split()[1:]
    )
    assert used == Counter((str(e), str(i)) for e in range(10) for i in range(203))


def test_several_changes_in_one_plan_and_changes_during_a_plan():
    events = [
        Event(5, workers=3, servers=3, oldest=True),
        Event(6, workers=1, servers=3, oldest=True),
        Event(6, workers=4, servers=1, oldest=True),
        Event(40, workers=2, servers=2, oldest=True),
    ]
    # changes that come almost at once merge
    settings = replace(QUICK, settle=0.1)
    outcome = Rehearsal(job(), workers=2, servers=2, events=events, settings=settings, step_seconds=0.01).run()
    outcome.check(rehearsed_digest(job()))
    plans = outcome.status.plans
    assert 2 <= len(plans) - 1 <= 4, outcome.story
    assert (plans[-1].workers, plans[-1].servers) == (2, 2)
    assert {t.split("-")[0] for t in plans[-1].removed} == {"worker"}
    assert {t.split("-")[0] for t in plans[-1].added} == {"ps"}


class Keeping(Regression):
    """Keeps the weights with which workers end."""

    def train(self, session, **how):
        super().train(session, **how)
        self.weights = session.weights.arrays[0].copy()


def test_fast_mode_equals_the_static_run_to_a_hundred_thousandth():
    spec = job(mode="fast")
    static = Keeping(spec)
    static.train(SingleSession(spec))
    rehearsal = Rehearsal(
        spec, workers=2, servers=1, events=[Event(5, workers=5, servers=3), Event(20, workers=1, servers=2)],
        model=Keeping,
    )  # fmt: skip
    outcome = rehearsal.run()
    outcome.check()
    a, b = static.weights, rehearsal.model.weights
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)


def test_more_tasks_than_can_be_used_wait():
    spec = job(shards=2)
    outcome = Rehearsal(spec, workers=3, servers=1).run()
    outcome.check(rehearsed_digest(spec))
    assert outcome.status.plans[0].workers == 2
    assert any("can use no more" in line for line in outcome.log)


def test_a_job_lives_on_long_after_a_resize(monkeypatch):
    """Connections between servers end with a plan; that must not be taken for a death."""
    monkeypatch.setattr("pslite.server.data_connections.BROKEN_SECONDS", 0.1)
    events = [Event(3, servers=3), Event(6, workers=2, servers=1)]
    outcome = Rehearsal(job(), workers=1, servers=1, events=events, step_seconds=0.02).run()
    outcome.check(rehearsed_digest(job()))
    assert any(plan.removed for plan in outcome.status.plans), outcome.story
