"""Settings of the tests of pslite, and what several of them need."""

from __future__ import annotations

import pytest
from hypothesis import settings

# the machine may be busy: how long an example takes says nothing
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """While this file is there jobs become slower towards their end: something is still to be done to them."""
    path = tmp_path / "something-is-still-to-be-done"
    path.touch()
    monkeypatch.setenv("PSLITE_PACE_FILE", str(path))
    return path
