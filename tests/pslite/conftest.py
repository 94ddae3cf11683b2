"""What several tests of pslite need."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import psutil
import pytest

#: Far below the limit that an ordinary user's processes have (1,024).
_MANY_DESCRIPTORS = 100


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """While this file is there jobs become slower towards their end: something is still to be done to them."""
    path = tmp_path / "hold-job"
    path.touch()
    monkeypatch.setenv("PSLITE_PACE_FILE", str(path))
    return path


@pytest.fixture(autouse=True)
def few_descriptors() -> Iterator[None]:
    """Close what members of a rehearsal left open: they are threads, so no end of a process does it for them."""
    yield
    if psutil.Process().num_fds() > _MANY_DESCRIPTORS:
        gc.collect()
