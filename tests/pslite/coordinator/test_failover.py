"""Which losses of workers end a job: not those of one host at one time, and not those of long ago."""

from __future__ import annotations

import pytest

from pslite.coordinator.failover import count_loss
from pslite.coordinator.job_state import Incident

#: seconds within which losses on one host are one
WINDOW = 12.0


@pytest.mark.parametrize(
    ("losses", "fatal"),
    [
        pytest.param([(0, 5, "a")] * 8, False, id="a host with eight workers dies"),
        pytest.param([(0, 5, "a"), (2, 5, "a"), (11, 5, "a")], False, id="one host, noticed one after the other"),
        pytest.param([(0, 5, "a"), (0, 5, "b"), (0, 5, "c")], True, id="three hosts at one version"),
        pytest.param([(0, 5, "a"), (20, 5, "a"), (40, 5, "a")], True, id="one host, again and again"),
        pytest.param([(0, 5, "a"), (20, 6, "a"), (40, 7, "a")], False, id="the job goes on between them"),
        pytest.param([(0, 5, "a"), (0, 5, "b"), (3600, 5, "c")], False, id="the first ones are an hour ago"),
    ],
)
def test_which_losses_are_too_many(losses, fatal):
    counted, too_many = [], False
    for at, version, host in losses:
        assert not too_many
        counted, too_many = count_loss(counted, Incident(1000.0 + at, version, host), WINDOW)
    assert too_many is fatal
