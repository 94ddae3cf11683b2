"""One table of inputs and messages for all that users write; files of each kind have tests of their own rules."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import TypeAdapter

from dl2d.core.input_validation import (
    NAME_RULE,
    Demand,
    Flag,
    Items,
    Kinds,
    Name,
    Number,
    Record,
    Whole,
    bad,
    read,
    to_plain,
)
from dl2d.core.resources import Resources


class Colour(enum.StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Record):
    share: Annotated[float, Number(10, above=0)]
    colour: Colour = Colour.RED


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Record):
    count: Annotated[int, Whole(0, 5)]
    parts: Annotated[tuple[Part, ...], Items(3)]
    options: Mapping[str, Annotated[Any, Kinds((int, float), "a number")]] = field(default_factory=dict)
    demand: Demand | None = None
    one: Part | None = None
    name: Name = "a"
    sure: Flag = False
    inner: int = 0

    file_keys: ClassVar[Mapping[str, str]] = {"options": "with"}
    internal_fields: ClassVar[frozenset[str]] = frozenset({"inner"})

    @classmethod
    def expand(cls, given: object) -> object:
        return {"count": 1, "parts": [{"share": given}]} if isinstance(given, int) else given


SCHEMA = TypeAdapter(Sample)
GOOD = {"count": 3.0, "parts": [{"share": 1}], "with": {"x": 0}, "demand": "cpu:2", "one": {"share": 3, "note": "n"}}


class Refused(Exception):
    pass


def refused(key: str, problem: str) -> Refused:
    return Refused(key, problem)


def test_a_record_is_what_the_file_says() -> None:
    made = read(SCHEMA, GOOD, refused)
    assert made == Sample(
        count=3,
        parts=(Part(share=1.0),),
        options={"x": 0},
        demand=Resources.of(cpu=2),
        one=Part(share=3.0),
    )
    assert type(made.count) is int
    assert read(SCHEMA, 7, refused) == Sample(count=1, parts=(Part(share=7.0),))


def test_a_record_described_is_read_again() -> None:
    made = Sample(count=0, parts=(Part(share=1.0, colour=Colour.GREEN),), options={"x": False}, sure=True)
    described = to_plain(made)
    assert described == {
        "count": 0, "parts": [{"share": 1.0, "colour": "green"}], "with": {"x": False}, "name": "a", "sure": True
    }  # fmt: skip
    assert read(SCHEMA, described, refused) == made


WHOLE = "expected a whole number from 0 to 5, got "
SHARE = "expected a number, more than 0 and at most 10, got "
NAME = f"expected {NAME_RULE}, got "


@pytest.mark.parametrize(
    ("change", "key", "problem"),
    [
        ({"count": True}, "count", f"{WHOLE}True"),
        ({"count": "3"}, "count", f"{WHOLE}'3'"),
        ({"count": 2.5}, "count", f"{WHOLE}2.5"),
        ({"count": 6}, "count", f"{WHOLE}6"),
        ({"count": math.nan}, "count", f"{WHOLE}nan"),
        ({"count": 10**400}, "count", f"{WHOLE}1{'0' * 99}..."),
        ({"count": 10**5000}, "count", f"{WHOLE}a huge int"),
        ({"parts": []}, "parts", "expected a list of 1 to 3 entries, got []"),
        ({"parts": {"share": 1}}, "parts", "expected a list of 1 to 3 entries, got {'share': 1}"),
        ({"parts": [1] * 9}, "parts", "expected a list of 1 to 3 entries, got a list of 9"),
        ({"parts": [3]}, "parts[0]", "expected an object {...}, got 3"),
        ({"parts": [{"share": 1}, {"share": 0}]}, "parts[1].share", f"{SHARE}0"),
        ({"parts": [{"share": math.inf}]}, "parts[0].share", f"{SHARE}inf"),
        ({"parts": [{"share": 10**5000}]}, "parts[0].share", f"{SHARE}a huge int"),
        ({"parts": [{"shore": 1}]}, "parts[0].share", "missing (is 'shore' meant?)"),
        ({"parts": [{"share": 1, "color": 2}]}, "parts[0].color",
         "unknown key (did you mean colour?); known are colour, share"),
        ({"one": {"share": 1, "colour": "gren"}}, "one.colour",
         "expected one of green, red, got 'gren' (did you mean green?)"),
        ({"one": {"share": 1, 2: 3}}, "one", "the key 2 is not text"),
        ({"one": {"share": 1, "a\nb": 3}}, "one.'a\\nb'", "unknown key; known are colour, share"),
        ({"inner": 3}, "inner", "unknown key; known are count, demand, name, one, parts, sure, with"),
        ({"options": {}}, "options", "unknown key; known are count, demand, name, one, parts, sure, with"),
        ({"with": 3}, "with", "expected an object {...}, got 3"),
        ({"with": {"x": "y"}}, "with.x", "expected a number, got 'y'"),
        ({"demand": {}}, "demand", "is nothing; give at least one resource an amount above 0"),
        ({"demand": {"cpu": [1]}}, "demand.cpu", "expected a number, got [1]"),
        ({"demand": "cpu"}, "demand", "'cpu' is not name:amount (write e.g. cpu:2,gpu:1,memory:4G)"),
        ({"demand": 3}, "demand", 'expected resources such as {"cpu": 2, "gpu": 1}, got 3'),
        ({"name": "a\n"}, "name", f"{NAME}'a\\n'"),
        ({"name": "\ud800"}, "name", f"{NAME}'\\ud800'"),
        ({"name": 3}, "name", f"{NAME}3"),
        ({"sure": 1}, "sure", "expected true or false, got 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_its_path(change: dict[object, object], key: str, problem: str) -> None:
    with pytest.raises(Refused) as caught:
        read(SCHEMA, GOOD | change, refused)
    assert caught.value.args == (key, problem)


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("value", [deep(500), deep(5000), {"x": deep(5000)}])
def test_nesting_is_refused_however_deep(value: object) -> None:
    for key in GOOD:
        with pytest.raises(Refused) as caught:
            read(SCHEMA, GOOD | {key: value}, refused)
        assert len(caught.value.args[1]) < 400


def test_a_rule_names_a_key_below_its_record() -> None:
    assert bad("x", "is wrong").context == {"key": "x", "problem": "is wrong"}
