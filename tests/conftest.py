"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def fresh_log() -> Iterator[None]:
    """A command run in this process sets the log up for itself; the next test must not inherit that."""
    yield
    structlog.reset_defaults()
