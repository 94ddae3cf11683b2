"""What several tests of pslite need."""

from __future__ import annotations

import pytest


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """While this file is there jobs become slower towards their end: something is still to be done to them."""
    path = tmp_path / "something-is-still-to-be-done"
    path.touch()
    monkeypatch.setenv("PSLITE_PACE_FILE", str(path))
    return path
