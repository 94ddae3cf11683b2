from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from yarn.fake_yarn import FakeYarn


@pytest.fixture
def yarn() -> Iterator[FakeYarn]:
    with closing(FakeYarn()) as yarn:
        yield yarn
