"""Texts of messages: values and names from outside on one short line, and hints at what may be meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

#: Characters of a value that a message shows, and items of a list or object that it shows in full.
MAX_SHOWN = 100
MAX_ITEMS_SHOWN = 4
#: Names that a message lists.
MAX_NAMES = 8


def shown(value: object) -> str:
    """The value as a message shows it, cut where it is long; long lists and objects by their size."""
    if isinstance(value, list | tuple | Mapping) and len(value) > MAX_ITEMS_SHOWN:
        kind = "an object" if isinstance(value, Mapping) else "a list"
        return f"{kind} of {len(value)}"
    try:
        text = repr(value[: MAX_SHOWN + 1] if isinstance(value, str) else value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def counted(number: int, noun: str) -> str:
    """``1 job``, ``2 jobs``: a number and a noun with a regular plural."""
    return f"{number} {noun}{'s' * (number != 1)}"


def some_of(names: Sequence[str], most: int = MAX_NAMES) -> str:
    """``n1, n2``, or the first ``most`` of them ``and 3 more``; empty for none."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def printable(key: str) -> str:
    """A key as errors name it: as it is, or quoted and cut where that could spoil a line of a log."""
    return key if key.isprintable() and len(key) <= MAX_SHOWN else shown(key)


def is_meant(missing: str, given: Collection[str]) -> str:
    """A hint at the given word that may have been meant for a missing one, or nothing."""
    near = difflib.get_close_matches(missing, sorted(given), n=1)
    return f" (is {shown(near[0])} meant?)" if near else ""


def did_you_mean(word: str, known: Collection[str]) -> str:
    """A hint at the known word most like the given one, or nothing."""
    near = difflib.get_close_matches(word[:MAX_SHOWN], sorted(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def printable_line(text: str) -> str:
    """What another program said, as one line without control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
