from __future__ import annotations

from collections.abc import Iterator

import pytest
from tick.world import World


@pytest.fixture
def build() -> Iterator:
    """Makes worlds on the simulator's store; one whose test reads back what has ended or was decided has a ``url``."""
    worlds = []

    def make(**options: object) -> World:
        worlds.append(World(**{"url": "", **options}))  # type: ignore[arg-type]
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
