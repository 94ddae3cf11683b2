"""The one parser of job requests, whatever they come from.

A request is a mapping of keys to values (YAML for ``dl2d submit``) or ``#DL2 key=value`` lines in a batch script.
Both go through ``parse_request``, so a key means the same everywhere and an error names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator, PlainValidator, TypeAdapter

from dl2d.core.error_wording import did_you_mean, is_meant, shown
from dl2d.core.errors import RequestError
from dl2d.core.input_validation import NAME, NAME_RULE, Demand, Number, Record, Text, Whole, bad, read
from dl2d.core.jobs import Architecture, Consistency, Durability, JobRequest
from dl2d.core.resources import NO_RESOURCES, Resources

MAX_EPOCHS = 1e6
MAX_TASKS = 10_000
_DIRECTIVE = re.compile(r"#DL2(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RequestRules:
    """What a site allows. ``models`` empty means any model type."""

    models: frozenset[str] = frozenset()
    max_workers: int = 16
    max_ps: int = 16


def _number(given: object) -> object:
    """A number that stands as text, as in a batch script's ``#DL2`` line."""
    try:
        number = float(given) if isinstance(given, str) else math.nan
    except ValueError:
        return given
    return number if math.isfinite(number) else given


def _text(given: object) -> object:
    """YAML reads some names as numbers."""
    try:
        return str(given) if isinstance(given, int | float) and not isinstance(given, bool) else given
    except ValueError:  # a whole number of thousands of digits
        return given


def _counts(given: object) -> tuple[int, ...] | str:
    """Worker counts: ``[1, 2, 4]``, ``1,2,4`` or ``powers-of-two``."""
    if given == _POWERS:
        return _POWERS
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    counts: set[int] = set()
    for part in parts:
        try:
            count = int(str(part))
        except ValueError:
            count = 0
        if not 1 <= count <= MAX_TASKS:
            raise bad("", f"expected worker counts such as 1,2,4 or {_POWERS}, got {shown(part)}")
        counts.add(count)
    return tuple(sorted(counts))


_POWERS: Final = "powers-of-two"
OwnName = Annotated[str, Text(128, NAME, NAME_RULE), BeforeValidator(_text)]
Count = Annotated[int, Whole(1, MAX_TASKS), BeforeValidator(_number)]
CountOrNone = Annotated[int, Whole(0, MAX_TASKS), BeforeValidator(_number)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given(Record):
    """A request as a user writes it."""

    #: Type of the model, one of the site's.
    model: OwnName
    #: Passes over the data set.
    epochs: Annotated[float, Number(MAX_EPOCHS, above=0), BeforeValidator(_number)]
    #: Size of an epoch: one of the two is required.
    samples_per_epoch: Annotated[float, Number(1e15, above=0), BeforeValidator(_number)] | None = None
    steps_per_epoch: Annotated[float, Number(1e12, above=0), BeforeValidator(_number)] | None = None
    #: Global batch size in samples; that of one worker if the script has a loop of its own. Undeclared by default.
    batch: Annotated[int, Whole(1, 10**9), BeforeValidator(_number)] | None = None
    #: Demand of one task: ``{cpu: 2, gpu: 1}`` or ``cpu:2,memory:4G``.
    worker: Demand
    ps: Demand = field(default_factory=lambda: Resources.of(cpu=1))
    #: Bounds; by default 1 (2 for parameter servers with replicas) and the site's limits.
    min_workers: Count = 1
    max_workers: Count | None = None
    min_ps: CountOrNone | None = None
    max_ps: CountOrNone | None = None
    #: Worker counts that it can run with: ``[1, 2, 4]``, ``1,2,4`` or ``powers-of-two``; empty for any.
    allowed_workers: Annotated[tuple[int, ...] | str, PlainValidator(_counts)] = ()
    architecture: Architecture = Architecture.PS
    consistency: Consistency = Consistency.SYNC
    #: ``durable``: replicas, so that the job goes on when a parameter server dies.
    durability: Durability = Durability.NONE
    #: Name for people; the model by default.
    name: OwnName = ""

    ignored_keys: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def expand(cls, given: object) -> object:
        """A key without a value counts as left out."""
        if not isinstance(given, Mapping):
            return given
        there = {str(key): value for key, value in given.items() if value is not None and value != ""}
        if "samples_per_epoch" not in there and "steps_per_epoch" not in there:
            others = there.keys() - {each.name for each in fields(cls)}
            hint = is_meant("samples_per_epoch", others) or is_meant("steps_per_epoch", others)
            raise bad("samples_per_epoch", f"missing (or give steps_per_epoch){hint}")
        return there


_GIVEN: Final = TypeAdapter(_Given)


def parse_request(given: Mapping[str, object], *, rules: RequestRules, where: str = "") -> JobRequest:
    """Check a request and fill in what it leaves out; the keys are those of ``_Given``.

    Parameters
    ----------
    given
        Keys and values as the user wrote them; values may be text.
    rules
        The site's limits.
    where
        File and line, or what else tells the user where to look; stands first in every error.

    Raises
    ------
    RequestError
        A key is unknown, missing, or has a bad value.
    """

    def refused(key: str, problem: str) -> RequestError:
        return RequestError(key, problem, where=where)

    asked: _Given = read(_GIVEN, given, refused)
    if rules.models and asked.model not in rules.models:
        known = ", ".join(sorted(rules.models))
        raise refused(
            "model",
            f"unknown model type {asked.model!r}{did_you_mean(asked.model, rules.models)}; this site knows {known} "
            "(an admin adds more under jobs.models)",
        )
    has_ps, durable = asked.architecture is Architecture.PS, asked.durability is Durability.DURABLE
    top_ps = min(rules.max_ps if asked.max_ps is None else asked.max_ps, rules.max_ps) if has_ps else 0
    least_ps = 2 if durable else 1
    min_ps = (least_ps if asked.min_ps is None else asked.min_ps) if has_ps else 0
    if durable and not has_ps:
        raise refused("durability", "replicas are on parameter servers, and a job with architecture=allreduce has none")
    if durable and asked.consistency is Consistency.ASYNC:
        raise refused("durability", "replicas are not possible with consistency=async, which has no common step")
    if durable and top_ps < 2:
        raise refused("durability", f"replicas need a second parameter server, and the job has {top_ps} at most")
    if has_ps and min_ps < 1:
        raise refused("min_ps", "a job with architecture=ps needs at least 1")
    if has_ps and asked.max_ps == 0:
        raise refused("max_ps", f"expected a whole number from 1 to {MAX_TASKS}, got 0")
    for key, least, most, cap in (
        ("workers", asked.min_workers, asked.max_workers, rules.max_workers),
        ("ps", min_ps, asked.max_ps, rules.max_ps),
    ):
        if most is not None and least > most:
            raise refused(f"min_{key}", f"{least} is more than max_{key}={most}")
        if least > cap:
            raise refused(f"min_{key}", f"{least} is more than the site's limit of {cap}")
    top_workers = min(asked.max_workers or rules.max_workers, rules.max_workers)
    allowed = asked.allowed_workers
    if isinstance(allowed, str):
        allowed = tuple(1 << exponent for exponent in range(top_workers.bit_length()))
    request = JobRequest(
        name=asked.name or asked.model,
        model=asked.model,
        epochs=asked.epochs,
        samples_per_epoch=asked.samples_per_epoch,
        steps_per_epoch=asked.steps_per_epoch,
        batch=asked.batch,
        worker=asked.worker,
        ps=asked.ps if has_ps else NO_RESOURCES,
        min_workers=asked.min_workers,
        max_workers=top_workers,
        min_ps=min_ps,
        max_ps=top_ps,
        allowed_workers=allowed,
        architecture=asked.architecture,
        consistency=asked.consistency,
        durability=asked.durability,
    )
    if not request.largest_allowed(top_workers):
        counts = ", ".join(map(str, request.allowed_workers)) or "any"
        raise refused("allowed_workers", f"none of {counts} lies between {asked.min_workers} and {top_workers} workers")
    return request


def read_directives(script: str, *, where: str = "script") -> dict[str, object]:
    """Collect the ``#DL2 key=value [key=value ...]`` lines of a batch script, in any place of it.

    A value ends at white space; quotes keep white space: ``#DL2 name="my job"``.

    Raises
    ------
    RequestError
        A line has no ``key=value``, or a key stands twice; names the line.
    """
    found: dict[str, object] = {}
    for number, line in enumerate(script.splitlines(), start=1):
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None:
            continue
        place = f"{where}, line {number}"
        pairs = _split(match[1] or "", place)
        if not pairs:
            raise RequestError("#DL2", "the line has no key=value", where=place)
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise RequestError("#DL2", f"{pair!r} is not key=value", where=place)
            if not value:
                raise RequestError(key, "has no value", where=place)
            name = key.replace("-", "_")
            if name in found:
                raise RequestError(key, "is given twice", where=place)
            found[name] = value
    return found


_QUOTED = re.compile(r"""\"([^"]*)"|'([^']*)'""")
_PAIR = re.compile(r"""\s*((?:[^\s"']+|"[^"]*"|'[^']*')+)""")


def _split(text: str, where: str) -> list[str]:
    pairs: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _PAIR.match(text, position)
        if match is None:
            raise RequestError("#DL2", f"a quote is not closed in {text!r}", where=where)
        pairs.append(_QUOTED.sub(r"\1\2", match[1]))
        position = match.end()
    return pairs
