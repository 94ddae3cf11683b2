"""Which versions of blocks a worker has."""

from __future__ import annotations

from pslite.worker.step_progress import Progress


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
