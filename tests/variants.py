"""Parameters of tests of which CI runs some: further seeds, sizes and modes of one property."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Parameters of a variant that only `make test-all` runs."""
    return pytest.param(*values, marks=(pytest.mark.slow, pytest.mark.nightly))


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters of which all after the first `count` are nightly."""
    return [value if number < count else nightly(value) for number, value in enumerate(values)]
