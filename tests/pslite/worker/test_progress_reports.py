"""What a worker reports of its training, and which versions of blocks it has."""

from __future__ import annotations

import pytest

from pslite.net.messages import Beat, Drained, Finished, Pushed
from pslite.worker.progress_reports import Progress, ProgressReports


@pytest.fixture
def sent():
    return []


@pytest.fixture
def reports(sent):
    progress = Progress()
    progress.version = 7
    return ProgressReports(progress, sent.append)


def test_losses_are_summed_until_a_report_and_a_fast_loop_reports_now_and_then(reports, sent):
    for loss in (1.0, 2.0, 4.0):
        reports.add_loss(loss, 10)
        reports.step_ended()
    reports.report(force=True)
    assert [(beat.version, beat.loss, beat.samples) for beat in sent] == [(7, 1.0, 10), (7, 6.0, 20)]
    assert [beat.steps and beat.steps.steps for beat in sent] == [None, 2]


def test_a_step_after_a_resize_is_reported_at_once(reports, sent):
    for _ in range(3):
        reports.step_ended()
    reports.resize_began()
    reports.resize_done(4)
    reports.step_ended()
    assert [beat.resize and beat.resize.plan for beat in sent] == [None, 4]


def test_only_a_member_of_the_plan_before_has_waited_for_the_next(reports, sent):
    reports.suspension.total_ms = 20.0
    reports.first_push(1)
    reports.was_member = True
    reports.first_push(2)
    reports.finished(chief=True)
    assert sent == [
        Pushed(plan=1, suspension_ms=None),
        Pushed(plan=2, suspension_ms=20.0),
        Finished(version=7, chief=True),
    ]


def test_a_worker_that_leaves_reports_its_last_losses_first(reports, sent):
    reports.report()
    reports.add_loss(3.0, 5)
    reports.drained(2)
    assert sent[1:] == [Beat(version=7, loss=3.0, samples=5), Drained(plan=2)]


def test_a_block_is_at_the_version_before_until_the_awaited_one_comes():
    progress = Progress()
    progress.version, progress.entered = 4, True
    progress.expect(progress.version + 1, 3)
    assert progress.wants(1, 5)
    assert not progress.wants(1, 4)
    progress.missing.discard(1)
    assert not progress.wants(1, 5)
    assert [progress.newest(block) for block in range(3)] == [4, 5, 4]
    assert progress.unanswered([0, 1, 2]) == [0, 2]


def test_before_the_first_weights_only_the_worker_that_sends_them_has_any():
    progress = Progress()
    progress.awaited, progress.missing = 0, {0, 1}
    assert progress.newest(0) == -1
    progress.began = True
    assert progress.newest(0) == 0


def test_a_worker_leaves_an_open_job_after_its_last_version_unless_it_waits_for_what_can_still_be_done():
    progress = Progress()
    progress.awaited = 5
    assert progress.may_leave_after(-1)
    assert progress.may_leave_after(4)
    assert not progress.may_leave_after(5)
    progress.patient = True
    assert progress.may_leave_after(-1)
    assert not progress.may_leave_after(4)
