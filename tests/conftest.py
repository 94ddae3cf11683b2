"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

# The machine may be busy: how long an example takes, or its making, says nothing.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def fresh_log() -> Iterator[None]:
    """A command run in this process sets the log up for itself; the next test must not inherit that."""
    yield
    structlog.reset_defaults()
