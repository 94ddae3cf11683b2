"""Strict reading of JSON objects: every error names the file, the job and the key; nothing unknown passes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Final

from dl2d.core.errors import RequestError, WorkloadError
from dl2d.core.resources import Resources, parse_resources
from dl2d.core.wording import LONGEST_SHOWN, did_you_mean, is_meant, printable, shown

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+ /:-]{0,127}")
_MOST_RESOURCES = 1000


#: Keys that hold notes for people, wherever they stand.
NOTES: Final = frozenset({"comment", "description", "license", "name", "note", "source", "tags", "title", "user"})


class Fields:
    """Takes keys out of a JSON object one by one; ``refuse_rest`` then refuses what is left.

    ``prefix`` is put before every key in errors (``speeds.vgg-16.``). All readers raise ``WorkloadError``.
    """

    def __init__(self, given: object, *, where: str, job: str = "", prefix: str = "") -> None:
        self.where = where
        self.job = job
        self._prefix = prefix
        self._known: set[str] = set()
        if not isinstance(given, Mapping):
            raise WorkloadError(
                prefix.rstrip("."), f"expected an object {{...}}, got {shown(given)}", where=where, job=job
            )
        self._given: dict[str, object] = {}
        for key, value in given.items():
            if not isinstance(key, str):
                raise WorkloadError(prefix.rstrip("."), f"the key {shown(key)} is no text", where=where, job=job)
            self._given[key] = value

    def bad(self, key: str, problem: str) -> WorkloadError:
        """The error for one key of this object."""
        return WorkloadError(f"{self._prefix}{key}", problem, where=self.where, job=self.job)

    def has(self, key: str) -> bool:
        """Whether the key is given."""
        self._known.add(key)
        return key in self._given

    def value(self, key: str) -> object:
        """A required value of any kind."""
        self._known.add(key)
        if key not in self._given:
            raise self.bad(key, f"missing{is_meant(key, self._names() - self._known)}")
        return self._given[key]

    def items(self, key: str, *, most: int, least: int = 1) -> list[object]:
        """A required list."""
        value = self.value(key)
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            entries = f"{most}" if least == most else f"{least} to {most}"
            raise self.bad(key, f"expected a list of {entries} entries, got {shown(value)}")
        return list(value)

    def number(
        self, key: str, *, most: float, least: float = 0.0, above: float | None = None, default: float | None = None
    ) -> float:
        """A number from ``least`` (or more than ``above``) to ``most``; required where there is no default."""
        if default is not None and not self.has(key):
            return default
        return self.check_number(key, self.value(key), least=least, above=above, most=most)

    def check_number(
        self, key: str, value: object, *, most: float, least: float = 0.0, above: float | None = None
    ) -> float:
        """The value as a float within bounds."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (least <= value <= most) or (above is not None and value <= above):  # type: ignore[operator]
            low = f"{least:g} or more" if above is None else f"more than {above:g}"
            raise self.bad(key, f"expected a number, {low} and at most {most:g}, got {shown(value)}")
        return float(value)  # type: ignore[arg-type]

    def whole(self, key: str, *, least: int, most: int, default: int | None = None) -> int:
        """A whole number (``3`` or ``3.0``); required where there is no default."""
        if default is not None and not self.has(key):
            return default
        return self.check_whole(key, self.value(key), least=least, most=most)

    def check_whole(self, key: str, value: object, *, least: int, most: int) -> int:
        """The value as an int within bounds."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (least <= value <= most) or value != int(value):  # type: ignore[operator, call-overload]
            raise self.bad(key, f"expected a whole number from {least} to {most}, got {shown(value)}")
        return int(value)  # type: ignore[call-overload, no-any-return]

    def flag(self, key: str) -> bool:
        """``true`` or ``false``; false where it is not given."""
        value = self._given[key] if self.has(key) else False
        if not isinstance(value, bool):
            raise self.bad(key, f"expected true or false, got {shown(value)}")
        return value

    def name(self, key: str, default: str | None = None) -> str:
        """A name of plain characters; required where there is no default."""
        if default is not None and not self.has(key):
            return default
        value = self.value(key)
        if not isinstance(value, str) or not NAME.fullmatch(value):
            raise self.bad(key, f"expected a name of up to 128 plain characters, got {shown(value)}")
        return value

    def prose(self, key: str, *, most: int, default: str | None = None) -> str:
        """A text of one character or more; required where there is no default."""
        if default is not None and not self.has(key):
            return default
        value = self.value(key)
        if not isinstance(value, str) or not 1 <= len(value) <= most:
            raise self.bad(key, f"expected a text of up to {most} characters, got {shown(value)}")
        return value

    def choice(self, key: str, known: Collection[str], default: str | None = None) -> str:
        """One of a few words; required where there is no default."""
        if default is not None and not self.has(key):
            return default
        value = self.value(key)
        if not isinstance(value, str) or value not in known:
            hint = did_you_mean(value, known) if isinstance(value, str) else ""
            raise self.bad(key, f"expected one of {', '.join(sorted(known))}, got {shown(value)}{hint}")
        return value

    def resources(self, key: str) -> Resources:
        """What a task asks for or a node has: ``{"cpu": 2, "gpu": 1}`` or ``"cpu:2,gpu:1,memory:4G"``; not nothing."""
        value = self.value(key)
        if not isinstance(value, str | Mapping) or len(value) > _MOST_RESOURCES:
            raise self.bad(key, f'expected resources such as {{"cpu": 2, "gpu": 1}}, got {shown(value)}')
        if isinstance(value, Mapping):
            for name, amount in value.items():
                if not isinstance(name, str):
                    raise self.bad(key, f"the key {shown(name)} is no text")
                if not isinstance(amount, int | float | str) or isinstance(amount, bool):
                    raise self.bad(f"{key}.{printable(name)}", f"expected a number, got {shown(amount)}")
        try:
            resources = _resources(value if isinstance(value, str) else tuple(value.items()), key)
        except RequestError as error:
            raise self.bad(printable(error.key), error.problem) from None
        if not resources.thousandths:
            raise self.bad(key, "is nothing; give at least one resource an amount above 0")
        return resources

    def refuse_rest(self) -> None:
        """Refuse keys that nobody asked for; notes for people are passed over."""
        for key in self._given:
            if key not in self._known and key not in NOTES:
                known = ", ".join(sorted(self._known))
                raise self.bad(printable(key), f"unknown key{did_you_mean(key, self._known)}; known are {known}")

    def nearest(self, known: Collection[str]) -> str:
        """A hint where a given key looks like one of the known ones."""
        return next((hint for key in sorted(self._names()) if (hint := did_you_mean(key, known))), "")

    def _names(self) -> set[str]:
        return {key for key in self._given if len(key) <= LONGEST_SHOWN}


@lru_cache(maxsize=1024)
def _resources(value: str | tuple[tuple[str, float | str], ...], key: str) -> Resources:
    """Most tasks of a workload ask for the same, so answers are kept."""
    return parse_resources(value if isinstance(value, str) else dict(value), key)
