"""Weights of dl2's scorer, fitted to slots that another scheduler decided."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from policies.snapshots import a_job, a_snapshot, ask, cluster

from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import TooFewSamples
from dl2d.core.jobs import NOTHING, Allocation
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.policy import Policy
from dl2d.learning.dl2.supervised import ScorerImitation, imitate_with_scorer
from dl2d.learning.site_records.recorded_decisions import Recording
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.common.training_input_ranges import INPUT_RANGES
from dl2d.policies.dl2.policy import Dl2, with_checkpoint
from dl2d.policies.dl2.scoring import FEATURES
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo

OWN = with_checkpoint().checkpoint


def with_weights(**weights: float) -> Dl2:
    """A scorer with other weights than dl2d's own."""
    return Dl2(replace(OWN, weights={**OWN.weights, "scorer": np.array([weights.get(name, 0.0) for name in FEATURES])}))


def recordings(teacher: Policy, count: int = 30) -> list[Recording]:
    """Slots of an overloaded cluster, in which a teacher decides anew on jobs of different length."""
    rng, found = np.random.default_rng(1), []
    for number in range(count):
        jobs = [
            a_job(5 * number + place, model="resnet-50", epochs=float(rng.integers(10, 2000)), samples_per_epoch=1000)
            for place in range(5)
        ]
        snapshot = structs.replace(a_snapshot(jobs, cluster(2, cpu=16, gpu=4)), slot=number)
        found.append(Recording(snapshot, ask(teacher, snapshot), LoadBalance()))
    return found


def imitated(given: list[Recording], measured: tuple[MeasuredSpeeds, ...] = ()) -> ScorerImitation:
    return imitate_with_scorer(given, OWN, measured, slot_seconds=300.0, seed=0)


@pytest.mark.parametrize("relative", [6.0, -6.0])
def test_the_order_of_a_scheduler_is_learned(relative: float) -> None:
    """The longest jobs first, or the shortest: dl2d's own weights do only one of these."""
    found = imitated(recordings(with_weights(start=8.0, relative=relative, cost=-0.5, gain=0.5)))
    assert found.agreement > 0.9
    assert found.comparison.same > 0.85
    assert found.comparison.differing < min(found.comparison_begun_with.differing, found.yardstick.drf.differing)
    assert found.losses[-1] < 0.1 * found.losses[0]
    assert found.fitted.training["supervised"]["held_out"]["same"] == found.comparison.same
    assert found.fitted.training[INPUT_RANGES] == {"jobs": [1, 5], "nodes": [2, 2], "jobs_per_node": [0.5, 2.5]}
    assert found.begun_with.training[INPUT_RANGES] == OWN.training[INPUT_RANGES]


@pytest.mark.parametrize("teacher", [Drf(), Fifo()])
def test_steps_towards_the_sizes_of_other_schedulers_score_highest(teacher: Policy) -> None:
    """dl2 never leaves resources unused, and does not see who came first: it cannot do quite the same."""
    found = imitated(recordings(teacher, count=30))
    assert found.agreement > 0.7
    assert found.losses[-1] < 0.5 * found.losses[0]


def test_the_stores_speeds_are_in_both_checkpoints() -> None:
    kind = TrainingKind.of(a_job(0, model="ours").request)
    measured = MeasuredSpeeds(kind, (SpeedPoint(Allocation(2, 2), 77.0, 5),))
    told: list[tuple[int, int]] = []

    def tell(what: str, done: int, total: int, note: str = "") -> None:
        if what == "recorded slots gone through":
            told.append((done, total))

    given = recordings(Drf(), count=10)
    found = imitate_with_scorer(given, OWN, (measured,), slot_seconds=300.0, seed=0, tell=tell)
    assert all(done < total < len(given) for done, total in told)
    for checkpoint in (found.fitted, found.begun_with):
        assert np.isclose(checkpoint.weights["measured_speeds"], 77.0, rtol=0.01).any()
        assert checkpoint.settings["slot_seconds"] == 300.0
        Dl2(checkpoint)
    assert imitated(recordings(Drf(), count=10), (measured,)).fitted.digest == found.fitted.digest
    assert (found.begun_with.weights["scorer"] == OWN.weights["scorer"]).all()


def test_slots_in_which_no_job_was_given_anything_are_told() -> None:
    nothing = []
    for number, recording in enumerate(recordings(Drf(), count=10)):
        reason = Reason(Constraint.OBSERVED, "waits")
        jobs = tuple(JobDecision(job=job.key, allocation=NOTHING, reason=reason) for job in recording.snapshot.jobs)
        nothing.append(replace(recording, decision=Decision("observed", str(number), jobs)))
    with pytest.raises(TooFewSamples, match="no job was given anything"):
        imitated(nothing)


def test_what_was_given_on_busy_days_is_learned_where_the_last_ones_left_no_choice() -> None:
    """As at a weekend on which each job has all that it may have."""
    busy, quiet = recordings(Drf(), count=30), []
    for number in range(20):
        snapshot = structs.replace(
            a_snapshot([a_job(number, max_workers=1, max_ps=1)], cluster(2, cpu=16)), slot=100 + number
        )
        quiet.append(Recording(snapshot, ask(Drf(), snapshot), LoadBalance()))
    found = imitated([*busy, *quiet])
    assert found.states > 0
    assert found.losses[-1] < found.losses[0]


def test_the_weights_stay_where_each_job_had_its_only_size() -> None:
    """A site with room for all of its jobs, which have fixed sizes: the speeds are worth having all the same."""
    given = []
    for number in range(10):
        jobs = [a_job(5 * number + place, min_workers=1, max_workers=1, min_ps=1, max_ps=1) for place in range(5)]
        snapshot = structs.replace(a_snapshot(jobs, cluster(9, cpu=16, gpu=4)), slot=number)
        given.append(Recording(snapshot, ask(Drf(), snapshot), LoadBalance()))
    found = imitated(given)
    assert found.states == 0
    assert found.losses == ()
    assert (found.fitted.weights["scorer"] == OWN.weights["scorer"]).all()
    assert found.comparison.same == 1.0
