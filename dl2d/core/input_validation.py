"""Records read from what users write (YAML, JSON): base class, constrained types, and error messages.

A record is a frozen dataclass whose annotations are the schema: pydantic checks it, ``problems_of`` turns pydantic's
errors into pairs of a path (``workloads[0].source``) and one line of text, ``to_plain`` gives the plain values back.
Making a record in code checks nothing and costs nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_type_hints

from pydantic import (
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from dl2d.core.errors import MAX_SHOWN, ConfigError, RequestError, did_you_mean, is_meant, printable, shown
from dl2d.core.resources import Resources, parse_resources

T = TypeVar("T")

#: Keys that hold notes for people; a record ignores those that it has no field for.
NOTES = frozenset({"comment", "description", "license", "name", "note", "source", "tags", "title", "user"})
_MAX_RESOURCES = 1000
#: Error types of this module: a whole sentence, and a description of what was expected.
_RULE, _EXPECTED = "rule", "expected"


def bad(key: str, problem: str) -> PydanticCustomError:
    """The error of a rule over a record or one of its fields; ``key`` is relative to it, empty for itself."""
    return PydanticCustomError(_RULE, "{problem}", {"key": key, "problem": problem})


# Records.


class Record:
    """Base of dataclasses that are read from users' files.

    An unknown or missing key is refused with a hint at the key that may have been meant.
    """

    __slots__ = ()
    #: Keys of the file by field, where they differ.
    file_keys: ClassVar[Mapping[str, str]] = {}
    #: Fields that no file has.
    internal_fields: ClassVar[frozenset[str]] = frozenset()
    #: Keys that are ignored where there is no field for them.
    ignored_keys: ClassVar[frozenset[str]] = NOTES
    #: Keys that ``expand`` takes out; hints name them too.
    expanded_keys: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        config = ConfigDict(extra="forbid", alias_generator=lambda name: cls.file_keys.get(name, name))
        setattr(cls, "__pydantic_config__", config)  # noqa: B010 - where pydantic looks for it
        # pydantic takes validators from the class itself, not from a base that is none of its own.
        checked: Any = classmethod(_checked)
        setattr(cls, "_check_keys", model_validator(mode="before")(checked))  # noqa: B010

    @classmethod
    def expand(cls, given: object) -> object:
        """Write out what a file may abbreviate: shorthand forms, and defaults that depend on other keys."""
        return given


def _checked(cls: Any, given: object) -> object:
    """What a file holds of a record, without ignored keys. Raises where one is unknown or missing."""
    given = cls.expand(given)
    if isinstance(given, cls):
        return given
    if not isinstance(given, Mapping):
        raise bad("", f"expected an object {{...}}, got {shown(given)}")
    known, required = _keys(cls)
    if not known.issuperset(given):
        for key in given:
            if not isinstance(key, str):
                raise bad("", f"the key {shown(key)} is not text")
        given = {key: value for key, value in given.items() if key in known or key not in cls.ignored_keys}
    if not known.issuperset(given) or not all(key in given for key in required):
        raise bad(*_key_problems(given.keys(), known, required)[0])
    return given


def _key_problems(given: Collection[str], known: Collection[str], required: Collection[str]) -> list[tuple[str, str]]:
    """Missing and unknown keys, with hints; an unknown key that may be a missing one is named with that alone."""
    others = set(given).difference(known)
    short = [other for other in others if len(other) <= MAX_SHOWN]
    missing = [(key, f"missing{is_meant(key, short)}") for key in required if key not in given]
    named = {other for other in short if any(f"(is {shown(other)} meant?)" in problem for _, problem in missing)}
    unknown = [(printable(key), f"unknown key{did_you_mean(key, known)}") for key in sorted(others - named)]
    if unknown:
        unknown[0] = unknown[0][0], f"{unknown[0][1]}; known are {', '.join(sorted(known))}"
    return missing + unknown


def read_fields(record: Any, given: Mapping[str, object]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The good values of a record's fields, each checked by itself, and all problems of its keys and values."""
    problems = _key_problems(given.keys(), *_keys(record))
    values: dict[str, Any] = {}
    for name, adapter in _adapters(record).items():
        key = record.file_keys.get(name, name)
        if key not in given:
            continue
        try:
            values[name] = adapter.validate_python(given[key])
        except ValidationError as refused:
            within, problem = problems_of(refused)[0]
            problems.append((f"{key}.{within}".rstrip("."), problem))
    return values, problems


@cache
def _adapters(record: type[Any]) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(record, include_extras=True)
    return {each.name: TypeAdapter(hints[each.name]) for each in dataclasses.fields(record)}


@cache
def _keys(cls: type[Any]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The keys that a file may have for a record, and those that it must have."""
    fields = [each for each in dataclasses.fields(cls) if each.name not in cls.internal_fields]
    keys = {each.name: cls.file_keys.get(each.name, each.name) for each in fields}
    required = tuple(keys[each.name] for each in fields if _default(each) is dataclasses.MISSING)
    return frozenset(keys.values()) | cls.expanded_keys, required


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def to_plain(record: Any) -> dict[str, Any]:
    """The record as plain values by file key, without internal fields and those that are empty by default."""
    made: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        if field.name in record.internal_fields:
            continue
        value = getattr(record, field.name)
        if value or value != _default(field):
            made[record.file_keys.get(field.name, field.name)] = _plain(value)
    return made


def _plain(value: object) -> object:
    if isinstance(value, Record):
        return to_plain(value)
    if isinstance(value, Resources):
        return value.as_dict()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def read(adapter: TypeAdapter[T], given: object, error: Callable[[str, str], Exception]) -> T:
    """Check a value. Raises what ``error`` makes of the first problem: path, and one line of text."""
    try:
        return adapter.validate_python(given)
    except ValidationError as refused:
        raise error(*problems_of(refused)[0]) from None


class ManagerSettings(Record):
    """Base of the settings of a resource manager: a section of the config file, in which no key is ignored."""

    __slots__ = ()
    #: Path of the section, such as ``resource_manager.local``.
    section: ClassVar[str]
    ignored_keys: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> Self:
        """Check the section; empty values count as not given. Raises ``ConfigError``, which names a bad key in full."""
        there = {key: value for key, value in given.items() if value is not None and value != ""}
        return read(TypeAdapter(cls), there, lambda key, problem: ConfigError(f"{cls.section}.{key}: {problem}"))


# Constrained types, for use in ``Annotated``. JSON's numbers only: no text, and no true or false.


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number (``3`` or ``3.0``) from ``least`` to ``most``."""

    least: int
    most: int

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        del source, handler
        number = core_schema.float_schema(strict=True, allow_inf_nan=False)
        whole = core_schema.int_schema(ge=self.least, le=self.most)
        return _expecting(core_schema.chain_schema([number, whole]), f"a whole number from {self.least} to {self.most}")


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from ``least`` (or more than ``above``) to ``most``."""

    most: float
    least: float = 0.0
    above: float | None = None

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        del source, handler
        lower: dict[str, Any] = {"ge": self.least} if self.above is None else {"gt": self.above}
        low = f"{self.least:g} or more" if self.above is None else f"more than {self.above:g}"
        schema = core_schema.float_schema(strict=True, allow_inf_nan=False, le=self.most, **lower)
        return _expecting(schema, f"a number, {low} and at most {self.most:g}")


@dataclass(frozen=True, slots=True)
class Text:
    """A text of 1 to ``most`` characters; with ``pattern``, one that it matches as a whole; ``expected`` says so."""

    most: int
    pattern: str = r"(?s:.*)"
    expected: str = ""

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        del source, handler
        schema = core_schema.str_schema(
            strict=True, min_length=1, max_length=self.most, pattern=rf"^(?:{self.pattern})$"
        )
        return _expecting(schema, self.expected or f"a text of 1 to {self.most} characters")


@dataclass(frozen=True, slots=True)
class Kinds:
    """A value of one of some types, as it is."""

    types: tuple[type, ...]
    expected: str

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        del source, handler
        return _expecting(core_schema.is_instance_schema(self.types), self.expected)


@dataclass(frozen=True, slots=True)
class Items:
    """Bounds on the length of a list; reading stops at its first bad entry."""

    most: int
    least: int = 1

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        return core_schema.no_info_before_validator_function(self._check, {**schema, "fail_fast": True})

    def _check(self, given: object) -> object:
        if not isinstance(given, list | tuple) or not self.least <= len(given) <= self.most:
            entries = f"{self.most}" if self.least == self.most else f"{self.least} to {self.most}"
            raise bad("", f"expected a list of {entries} entries, got {shown(given)}")
        return given


def _expecting(schema: CoreSchema, expected: str) -> CoreSchema:
    return core_schema.custom_error_schema(schema, _EXPECTED, custom_error_message=expected)


def _resources(value: object) -> Resources:
    if not isinstance(value, str | Mapping) or len(value) > _MAX_RESOURCES:
        raise bad("", f'expected resources such as {{"cpu": 2, "gpu": 1}}, got {shown(value)}')
    if isinstance(value, Mapping):
        for name, amount in value.items():
            if not isinstance(name, str):
                raise bad("", f"the key {shown(name)} is not text")
            if not isinstance(amount, int | float | str) or isinstance(amount, bool):
                raise bad(printable(name), f"expected a number, got {shown(amount)}")
    try:
        resources = _parsed(value if isinstance(value, str) else tuple(value.items()))
    except RequestError as error:
        raise bad(printable(error.key.removeprefix(".")), error.problem) from None
    if not resources.thousandths:
        raise bad("", "is nothing; give at least one resource an amount above 0")
    return resources


@lru_cache(maxsize=1024)
def _parsed(value: str | tuple[tuple[str, float | str], ...]) -> Resources:
    """Most tasks of a workload ask for the same, so answers are kept."""
    return parse_resources(value if isinstance(value, str) else dict(value), "")


def _sentence(value: object) -> object:
    return " ".join(value.split()) if isinstance(value, str) else value


#: A name of plain characters, in URLs, file names and tables alike.
NAME = r"[A-Za-z0-9][A-Za-z0-9_.+ /:-]{0,127}"
#: What a message says of such names.
NAME_RULE = "a name of 1 to 128 characters (A-Z a-z 0-9 space _ . + / : -) that begins with a letter or digit"
Name = Annotated[str, Text(128, NAME, NAME_RULE)]
AbsolutePath = Annotated[str, Text(4096, r"/[^\x00]*", "an absolute path")]
#: The first part of the keys of a cluster's jobs.
ClusterName = Annotated[str, Text(64, "[A-Za-z0-9_-]+", "up to 64 letters, digits, _ or -")]
#: What a task asks for or a node has: ``{"cpu": 2, "gpu": 1}`` or ``"cpu:2,gpu:1,memory:4G"``; not nothing.
Demand = Annotated[Resources, PlainValidator(_resources)]
#: Put before ``Text``: line breaks and runs of spaces become one space.
ONE_LINE = BeforeValidator(_sentence)
Flag = Annotated[bool, Kinds((bool,), "true or false")]


# Errors.


def problems_of(error: ValidationError) -> list[tuple[str, str]]:
    """All problems: path of the value at fault and one line that says what is wrong with it."""
    return [(_path(details), _problem(details)) for details in error.errors(include_url=False)]


def _path(details: ErrorDetails) -> str:
    path = ""
    for part in details["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{printable(part)}"
    if details["type"] == _RULE and details["ctx"]["key"]:
        path += f".{details['ctx']['key']}"
    return path.removeprefix(".")


def _problem(details: ErrorDetails) -> str:
    given, context = details["input"], details.get("ctx", {})
    match details["type"]:
        case "rule":
            return str(context["problem"])
        case "expected":
            return f"expected {details['msg']}, got {shown(given)}"
        case "enum" | "literal_error":
            return not_one_of(given, re.findall(r"'([^']*)'", context["expected"]))
        case "extra_forbidden":
            return "unknown key"
        case "dict_type" | "mapping_type":
            return f"expected an object {{...}}, got {shown(given)}"
        case "value_error":
            rule = details["msg"].removeprefix("Value error, ")
            return rule if isinstance(given, Mapping) else f"{rule}, got {shown(given)}"
    return f"{details['msg'].removeprefix('Input ')}, got {shown(given)}"


def not_one_of(given: object, known: Collection[str]) -> str:
    """The problem of a value that is none of some words."""
    hint = did_you_mean(given, known) if isinstance(given, str) else ""
    return f"expected one of {', '.join(sorted(known))}, got {shown(given)}{hint}"
