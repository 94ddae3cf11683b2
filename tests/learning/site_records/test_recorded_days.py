"""Recorded days of a site, from its history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from recorded_site import MONDAY

from dl2d.core.cluster import Node, NodeState
from dl2d.core.jobs import (
    NO_LAUNCH,
    NOTHING,
    Allocation,
    Architecture,
    Consistency,
    Job,
    JobKey,
    JobRequest,
    JobState,
    Owner,
    Progress,
)
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, SpeedPoint, TrainingKind
from dl2d.core.resources import Resources
from dl2d.core.store import ClusterState, History
from dl2d.learning.site_records.recorded_days import DAY_SECONDS, days_of, thinned
from dl2d.testing import make_nodes, make_request

NODE, OTHER = (Node(name, Resources.of(cpu=8, gpu=4)) for name in ("n1", "n2"))


def a_request(**changes: Any) -> JobRequest:
    return make_request(**{"name": "j", "samples_per_epoch": 100.0, **changes})


def a_job(number: int, at: float, *, epoch: float = 10.0, state: JobState = JobState.FINISHED, **fields: Any) -> Job:
    ended = fields.pop("ended", at + 1000.0) if state.ended else None
    return Job(
        key=JobKey("site", str(number), int(MONDAY + at)), request=a_request(**fields), owner=Owner("ann", 1, 1),
        launch=NO_LAUNCH, state=state, progress=Progress(at=1.0, epoch=epoch),
        ended_at=None if ended is None else MONDAY + ended,
    )  # fmt: skip


def measured(*points: tuple[int, int, float], **kind: Any) -> MeasuredSpeeds:
    which = TrainingKind(
        kind.get("model", "resnet-50"), kind.get("architecture", Architecture.PS),
        kind.get("consistency", Consistency.SYNC),
    )  # fmt: skip
    return MeasuredSpeeds(which, tuple(SpeedPoint(Allocation(w, p), speed, 8) for w, p, speed in points))


SEEN = measured((1, 1, 10.0), (2, 2, 18.0), (4, 4, 30.0))


def cluster_states_of(days: int, nodes: tuple[Node, ...] = (NODE,)) -> tuple[ClusterState, ...]:
    """The nodes, seen once an hour of each day."""
    return tuple(ClusterState(MONDAY + hour * 3600.0 + 60, nodes, {}) for hour in range(days * 24))


def a_history(
    *jobs: Job,
    cluster_states: tuple[ClusterState, ...] | None = None,
    speeds: tuple[MeasuredSpeeds, ...] = (SEEN,),
    **more: Any,
) -> History:
    days = 3
    if cluster_states is None:
        cluster_states = cluster_states_of(days)
    return History(
        begin=MONDAY, end=MONDAY + days * DAY_SECONDS, jobs=jobs, cluster_states=cluster_states, speeds=speeds,
        plans=more.get("plans", ()), starts=more.get("starts", ()),
    )  # fmt: skip


class TestDays:
    def test_a_job_comes_when_it_came_with_the_epochs_that_it_really_took(self) -> None:
        early = a_job(1, 100.0, epoch=7.5)
        late = a_job(2, DAY_SECONDS + 5000.0, epoch=10.0, model="resnet-50")
        one, two = days_of(a_history(early, late))
        assert (one.name, one.begin, one.nodes) == ("2025-10-13", MONDAY, (NODE.capacity,))
        assert [(job.at, job.epochs, job.declared) for job in one.jobs] == [(100.0, 7.5, 10.0)]
        assert [(job.at, job.epochs, job.declared) for job in two.jobs] == [(5000.0, 10.0, 10.0)]

    def test_a_job_that_lasts_over_midnight_is_there_next_morning_with_what_it_has_left(self) -> None:
        job = a_job(1, DAY_SECONDS - 100.0, epoch=8.0, ended=DAY_SECONDS + 9000.0)
        other = a_job(2, DAY_SECONDS + 50.0)
        cluster_states = tuple(
            replace(state, epochs={24: {job.key: 3.0}, 25: {job.key: 6.0}}.get(hour, {}))
            for hour, state in enumerate(cluster_states_of(2))
        )
        one, two = days_of(a_history(job, other, cluster_states=cluster_states))
        assert [(each.at, each.epochs) for each in one.jobs] == [(DAY_SECONDS - 100.0, 8.0)]
        assert [(each.at, each.epochs, each.declared) for each in two.jobs] == [(0.0, 5.0, 7.0), (50.0, 10.0, 10.0)]

    def test_how_long_a_job_is_whatever_became_of_it(self) -> None:
        jobs = (
            a_job(1, 1.0, epoch=0.0),  # finished before anybody heard how far it was
            a_job(2, 2.0, epoch=4.0, state=JobState.CANCELLED),
            a_job(3, 3.0, epoch=0.0, state=JobState.FAILED),  # never trained: left out
            a_job(4, 4.0, epoch=2.0, state=JobState.RUNNING),
            a_job(5, 5.0, epoch=20.0, state=JobState.RUNNING),  # beyond what it declared
            # What these declared is their time limit.
            replace(a_job(6, 6.0, epoch=2.0, state=JobState.RUNNING), static=True),
            replace(a_job(7, 7.0, epoch=6.0, state=JobState.RUNNING), static=True),
            replace(a_job(8, 8.0, epoch=0.0), static=True, started_at=MONDAY + 8.0),  # ended as soon as it had begun
            replace(a_job(9, 9.0, epoch=0.0), static=True),  # nobody knows when it began
        )
        (day,) = days_of(a_history(*jobs))
        assert [(job.at, job.epochs) for job in day.jobs] == [(1.0, 10.0), (2.0, 4.0), (4.0, 10.0), (5.0, 22.0),
                                                             (6.0, 4.0), (7.0, 10.0), (8.0, 1e-6)]  # fmt: skip

    @pytest.mark.parametrize("asked", [NOTHING, Allocation(2, 0)])
    def test_jobs_of_fixed_size_ask_for_the_size_that_they_had(self, asked: Allocation) -> None:
        """Earlier versions of dl2d recorded no size in their requests."""
        fixed, elastic = replace(a_job(1, 1.0, asked_size=asked), static=True), a_job(2, 2.0, asked_size=asked)
        waiting = replace(a_job(3, 3.0, asked_size=asked), static=True)
        sizes = {each.key: ((MONDAY + 60.0, Allocation(3, 0)),) for each in (fixed, elastic)}
        (day,) = days_of(replace(a_history(fixed, elastic, waiting), sizes=sizes))
        assert [job.request.asked_size for job in day.jobs] == [(3, 0), asked, asked]

    def test_what_others_hold_and_nodes_that_are_down_are_not_there(self) -> None:
        nodes = (
            Node("a", Resources.of(cpu=8, gpu=4), Resources.of(cpu=3)),
            Node("b", Resources.of(cpu=8, gpu=4), state=NodeState.DOWN),
        )
        (day,) = days_of(a_history(a_job(1, 1.0), cluster_states=cluster_states_of(1, nodes)))
        assert day.nodes == (Resources.of(cpu=5, gpu=4),)

    @pytest.mark.parametrize("away", [{"state": NodeState.DRAINING}, {"used": Resources.of(cpu=8, gpu=4)}, None])
    def test_nodes_are_there_as_at_most_times_of_the_day(self, away: dict[str, Any] | None) -> None:
        """Nodes that are drained, held by others or not listed around midnight were away for the whole day."""
        gone = () if away is None else (msgspec.structs.replace(OTHER, **away),)

        def nodes(hours: int) -> tuple[Resources, ...]:
            cluster_states = tuple(
                replace(state, nodes=(NODE, *gone)) if hour < hours else state
                for hour, state in enumerate(cluster_states_of(1, (NODE, OTHER)))
            )
            (day,) = days_of(a_history(a_job(1, 1.0), cluster_states=cluster_states))
            return day.nodes

        assert nodes(11) == (NODE.capacity, OTHER.capacity)
        assert nodes(13) == (NODE.capacity,)

    def test_jobs_that_nothing_is_known_of_or_that_fit_nowhere_are_left_out(self) -> None:
        jobs = (
            a_job(1, 1.0),
            a_job(2, 2.0, model="never-measured"),
            a_job(3, 3.0, worker=Resources.of(gpu=5)),
            a_job(4, 4.0, min_workers=5, max_workers=8),
            a_job(5, 5.0, allowed_workers=(4,), ps=Resources.of(cpu=1)),  # 8 CPUs for workers alone
        )
        (day,) = days_of(a_history(*jobs))
        assert [job.at for job in day.jobs] == [1.0]
        assert day.too_large == (3.0, 4.0, 5.0)

    def test_a_day_that_is_not_over_is_none_yet(self) -> None:
        history = a_history(a_job(1, 1.0), a_job(2, 2 * DAY_SECONDS + 1.0))
        assert [day.name for day in days_of(history)] == ["2025-10-13", "2025-10-15"]
        until_noon = replace(history, end=MONDAY + 2.5 * DAY_SECONDS)
        assert [day.name for day in days_of(until_noon)] == ["2025-10-13"]

    def test_a_day_of_which_less_than_half_was_recorded_is_none(self) -> None:
        history = a_history(*(a_job(day, (day - 1) * DAY_SECONDS + 1.0) for day in (1, 2, 3)))
        stopped = tuple(state for state in history.cluster_states if not 25 < (state.at - MONDAY) / 3600.0 < 48)
        assert [day.name for day in days_of(replace(history, cluster_states=stopped))] == ["2025-10-13", "2025-10-15"]

    def test_days_count_whose_slots_are_long(self) -> None:
        history = a_history(*(a_job(day, (day - 1) * DAY_SECONDS + 1.0) for day in (1, 2, 3)))
        rare = history.cluster_states[::24]
        assert len(rare) == 3
        assert len(days_of(replace(history, cluster_states=rare))) == 3

    def test_a_day_that_was_not_seen_or_on_which_nothing_came_is_none(self) -> None:
        assert days_of(a_history()) == ()
        assert days_of(a_history(a_job(1, 1.0), cluster_states=())) == ()


def test_a_thinned_day_is_that_of_a_smaller_site() -> None:
    history = a_history(*(a_job(number, number * 20.0) for number in range(1, 401)),
                        cluster_states=cluster_states_of(1, make_nodes(40, cpu=8, gpu=4)))  # fmt: skip
    (day,) = days_of(history)
    small = thinned(day, 100, np.random.default_rng(1))
    assert 70 <= len(small.jobs) <= 130
    assert set(small.jobs) <= set(day.jobs)
    assert [job.at for job in small.jobs] == sorted(job.at for job in small.jobs)
    assert len(small.nodes) == 10
    assert thinned(day, 400, np.random.default_rng(1)) is day
