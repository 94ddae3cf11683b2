"""Options that users write as ``key=value``: records of bounded numbers and of words, checked when they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from dl2d.core.errors import WorkloadError, did_you_mean, printable, shown
from dl2d.core.input_validation import not_one_of

_MAX_TEXT = 1000


def key_values(parts: Iterable[str], form: str, *, where: str) -> dict[str, str]:
    """Texts ``key=value`` by key. Raises ``WorkloadError`` for one of another form, or a key that is given twice."""
    given: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key in given:
            raise WorkloadError(printable(key), "is given twice" if equals else f"expected {form}", where=where)
        given[key] = value
    return given


def within(default: float, least: float, most: float) -> Any:
    """Field of a number from ``least`` to ``most``."""
    return dataclasses.field(default=default, metadata={"bounds": (least, most)})


def one_of(default: str, words: Sequence[str]) -> Any:
    """Field of one of some words."""
    return dataclasses.field(default=default, metadata={"words": tuple(words)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of records of options; every field has a default. A value out of bounds is a ``WorkloadError``."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if words := field.metadata.get("words"):
                if value not in words:
                    raise WorkloadError(field.name, not_one_of(value, words))
            elif bounds := field.metadata.get("bounds"):
                least, most = bounds
                if not least <= value <= most:
                    raise WorkloadError(field.name, f"expected a number from {least:g} to {most:g}, got {shown(value)}")

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """The options as users write them: texts by key, the others as by default.

        Raises ``WorkloadError`` if a key is unknown, or a value is no number or out of bounds; names the key.
        """
        return cls().with_options(given)

    def with_options(self, given: Mapping[str, str]) -> Self:
        """This record with some options as users write them; raises as ``parse``."""
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values: dict[str, Any] = {}
        for key, text in given.items():
            if key not in known:
                hint = did_you_mean(key, known)
                raise WorkloadError(key, f"there is no such option{hint}; there are {', '.join(sorted(known))}")
            if len(text) > _MAX_TEXT:
                raise WorkloadError(key, f"longer than {_MAX_TEXT} characters")
            try:
                values[key] = type(known[key])(text)
            except ValueError:
                kind = "a whole number" if isinstance(known[key], int) else "a number"
                raise WorkloadError(key, f"expected {kind}, got {shown(text)}") from None
        return dataclasses.replace(self, **values)
