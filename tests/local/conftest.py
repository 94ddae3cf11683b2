from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rm_harness import LocalHarness


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalHarness]:
    """A local manager with two nodes; afterwards nothing of its tasks may be left."""
    harness = LocalHarness(tmp_path)
    yield harness
    harness.end_all()
