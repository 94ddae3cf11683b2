"""Answers of a ResourceManager that are not as they should be, for properties."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in paths(inner, (*path, key)))]


@st.composite
def spoiled(draw: st.DrawFn, answer: Any) -> Any:
    """A JSON answer in which one value is missing or replaced."""
    answer = json.loads(json.dumps(answer))
    path = draw(st.sampled_from(paths(answer)))
    if not path:
        return draw(JSON)
    inner = answer
    for key in path[:-1]:
        inner = inner[key]
    if draw(st.booleans()):
        del inner[path[-1]]
    else:
        inner[path[-1]] = draw(JSON)
    return answer
