"""The managers that the contract suite runs over. To add one: a harness, and an entry in ``HARNESSES``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rm_harness import Harness, LocalHarness

#: Makes a harness in a fresh folder; slow or privileged managers carry marks.
HARNESSES: dict[str, tuple[Callable[[Path, pytest.FixtureRequest], Harness], tuple[pytest.MarkDecorator, ...]]] = {
    "local": (lambda folder, _request: LocalHarness(folder), ()),
}


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, (_, marks) in HARNESSES.items()])
def rm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """A resource manager with an empty cluster; afterwards no process of the test may be left."""
    make, _ = HARNESSES[request.param]
    harness = make(tmp_path, request)
    yield harness
    harness.end_all()
