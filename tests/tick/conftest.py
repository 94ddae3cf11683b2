from __future__ import annotations

from collections.abc import Iterator

import pytest
from tick.world import World


@pytest.fixture
def build() -> Iterator:
    worlds = []

    def make(**options: object) -> World:
        worlds.append(World(**options))  # type: ignore[arg-type]
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
