"""Times of steps, and how long they took around a resize."""

from __future__ import annotations

from pslite.job.step_time_and_usage_statistics import MAX_STEPS, ResizeSteps, StepTimer, StepTimes


def test_steps_are_reported_once():
    timer = StepTimer()
    for end in (10.0, 11.0, 13.0):
        assert timer.step_ended(end) is None
    assert timer.take() == StepTimes(steps=2, mean_ms=1500.0, p95_ms=2000.0)
    assert timer.take() is None
    timer.step_ended(14.0)
    assert timer.take() == StepTimes(steps=1, mean_ms=1000.0, p95_ms=1000.0)
    for number in range(2 * MAX_STEPS):
        timer.step_ended(15.0 + number)
    assert timer.take().steps == MAX_STEPS


def test_the_longest_step_from_when_a_plan_is_prepared_to_the_first_end_of_a_step_after_it_is_done():
    timer = StepTimer()
    for end in (1.0, 2.0, 7.0, 8.0):
        timer.step_ended(end)
    timer.resize_began(8.5)
    timer.resize_began(10.0)  # the plan was made anew
    assert timer.step_ended(11.0) is None
    assert timer.step_ended(13.0) is None
    timer.resize_done(4)
    assert timer.step_ended(15.5) == ResizeSteps(plan=4, longest_ms=3000.0, median_ms=1000.0)
    assert timer.step_ended(30.0) is None


def test_a_worker_that_has_just_come_reports_nothing_of_a_resize():
    timer = StepTimer()
    timer.resize_began(1.0)
    timer.resize_done(2)
    assert timer.step_ended(5.0) is None
    assert timer.step_ended(6.0) is None
