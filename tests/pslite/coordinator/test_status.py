"""What a coordinator reports of a job's speed."""

from __future__ import annotations

import pytest
from coordinator.jobs import JOINED, job, spec

from pslite.coordinator import status
from pslite.net.messages import Beat


@pytest.fixture
def clock(monkeypatch):
    """A function that sets the time, seconds after the members have joined."""

    def at(seconds):
        monkeypatch.setattr(status.time, "monotonic", lambda: JOINED + seconds)

    return at


@pytest.mark.parametrize("described", [spec(mode="open", epochs=0), spec()], ids=["open", "closed"])
@pytest.mark.parametrize("step", [0.5, 40.0])
def test_the_speed_of_a_job_of_which_nothing_moves_is_zero(clock, step, described):
    a_job, _ = job(["worker-0", "ps-0"], plan=("worker-0", "ps-0"), described=described)
    speeds = []
    for version in range(1, 31):
        clock(version * step)
        status.heartbeat(a_job, a_job.state.members["worker-0"], Beat(version=version))
        speeds.append(status.report(a_job).steps_per_second)
    assert speeds[0] is None
    assert speeds[1:] == pytest.approx([1 / step] * 29)
    for later, speed in ((9.0, 1 / step), (10 * step + 10.1, 0.0)):
        clock(30 * step + later)
        status.heartbeat(a_job, a_job.state.members["worker-0"], Beat(version=30))
        assert status.report(a_job).steps_per_second == pytest.approx(speed)
    assert status.report(a_job).samples_per_second is None  # which is no measurement of a speed
