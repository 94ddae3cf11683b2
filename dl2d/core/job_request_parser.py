"""The one parser of job requests, whatever they come from.

A request is a mapping of keys to values (YAML for ``dl2d submit``) or ``#DL2 key=value`` lines in a batch script.
Both go through ``parse_request``, so a key means the same everywhere and an error names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, PlainValidator

from dl2d.core.errors import RequestError, did_you_mean, shown
from dl2d.core.input_validation import NAME, NAME_RULE, Demand, Number, Record, Text, Whole, bad, read_fields
from dl2d.core.jobs import Allocation, Architecture, Consistency, Durability, JobRequest
from dl2d.core.resources import NO_RESOURCES, Resources

MAX_EPOCHS = 1e6
MAX_TASKS = 10_000
#: Maximum size of command and environment together, in bytes.
MAX_LAUNCH_BYTES = 256 * 1024
#: Maximum length of the working folder's path, in bytes: PATH_MAX of Linux.
MAX_FOLDER_BYTES = 4096
#: Maximum length of the ``#DL2`` lines of a script together.
_MAX_DIRECTIVES = 16_384
_DIRECTIVE = re.compile(r"^[^\S\n]*#DL2(?!\S)(.*)", re.MULTILINE)


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


_POWERS = "powers-of-two"
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
        Keys are unknown, missing, or have bad values; names them all.
    """
    # A key without a value counts as left out.
    there = {str(key): value for key, value in given.items() if value is not None and value != ""}
    values, problems = read_fields(_Given, there)
    if "samples_per_epoch" not in there and "steps_per_epoch" not in there:
        problems.insert(0, ("samples_per_epoch", "missing (or give steps_per_epoch)"))
    if found := [*problems, *_model_problems(values.get("model"), rules)]:
        raise RequestError(*found[0], where=where, others=found[1:])
    asked = _Given(**values)
    if found := [*_worker_problems(asked, rules), *_ps_problems(asked, rules)]:
        raise RequestError(*found[0], where=where, others=found[1:])
    top_workers, allowed = _worker_counts(asked, rules)
    has_ps = asked.architecture is Architecture.PS
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
        min_ps=_min_ps(asked),
        max_ps=_max_ps(asked, rules) if has_ps else 0,
        allowed_workers=allowed,
        architecture=asked.architecture,
        consistency=asked.consistency,
        durability=asked.durability,
    )
    if asked.max_workers is None:
        return request
    workers = request.largest_allowed(request.max_workers)
    ps = request.max_ps if asked.max_ps is not None else max(min(workers, request.max_ps), request.min_ps)
    return replace(request, asked_size=Allocation(workers, ps))


_Problems = Iterator[tuple[str, str]]


def _model_problems(model: str | None, rules: RequestRules) -> _Problems:
    """That the site does not know the type of the model."""
    if model is not None and rules.models and model not in rules.models:
        known = ", ".join(sorted(rules.models))
        hint = did_you_mean(model, rules.models)
        problem = f"unknown model type {model!r}{hint}; this site knows {known} (an admin adds more under jobs.models)"
        yield "model", problem


def _worker_problems(asked: _Given, rules: RequestRules) -> _Problems:
    """The first problem of the numbers of workers together."""
    top, allowed = _worker_counts(asked, rules)
    if (problem := _range_problem("workers", asked.min_workers, asked.max_workers, rules.max_workers)) is not None:
        yield problem
    elif allowed and not any(asked.min_workers <= count <= top for count in allowed):
        counts = ", ".join(map(str, allowed))
        yield "allowed_workers", f"none of {counts} lies between {asked.min_workers} and {top} workers"


def _ps_problems(asked: _Given, rules: RequestRules) -> _Problems:
    """The first problem of the numbers of parameter servers together, and of what the servers are to do."""
    has_ps, durable = asked.architecture is Architecture.PS, asked.durability is Durability.DURABLE
    most = _max_ps(asked, rules)
    if durable and not has_ps:
        yield "durability", "replicas are on parameter servers, and a job with architecture=allreduce has none"
    elif durable and asked.consistency is Consistency.ASYNC:
        yield (
            "durability",
            "replicas are not possible with consistency=async, where workers do not take their steps together",
        )
    elif durable and most < 2:
        yield "durability", f"replicas need a second parameter server, and the job has {most} at most"
    elif has_ps and _min_ps(asked) < 1:
        yield "min_ps", "a job with architecture=ps needs at least 1"
    elif has_ps and asked.max_ps == 0:
        yield "max_ps", f"expected a whole number from 1 to {MAX_TASKS}, got 0"
    elif (problem := _range_problem("ps", _min_ps(asked), asked.max_ps, rules.max_ps)) is not None:
        yield problem


def _range_problem(key: str, least: int, most: int | None, cap: int) -> tuple[str, str] | None:
    if most is not None and least > most:
        return f"min_{key}", f"{least} is more than max_{key}={most}"
    return (f"min_{key}", f"{least} is more than the site's limit of {cap}") if least > cap else None


def _worker_counts(asked: _Given, rules: RequestRules) -> tuple[int, tuple[int, ...]]:
    """Maximum number of workers, and the allowed numbers; none for any."""
    top = min(asked.max_workers or rules.max_workers, rules.max_workers)
    allowed = asked.allowed_workers
    return top, tuple(1 << exponent for exponent in range(top.bit_length())) if isinstance(allowed, str) else allowed


def _max_ps(asked: _Given, rules: RequestRules) -> int:
    return min(rules.max_ps if asked.max_ps is None else asked.max_ps, rules.max_ps)


def _min_ps(asked: _Given) -> int:
    if asked.architecture is not Architecture.PS:
        return 0
    least = 2 if asked.durability is Durability.DURABLE else 1
    return least if asked.min_ps is None else asked.min_ps


def read_directives(script: str, *, where: str = "script") -> dict[str, object]:
    """Collect the ``#DL2 key=value [key=value ...]`` lines of a batch script, in any place of it.

    A value ends at white space; quotes keep white space: ``#DL2 name="my job"``.

    Raises
    ------
    RequestError
        A line has no ``key=value``, a key stands twice, or the lines are too long; names the line.
    """
    found: dict[str, object] = {}
    length, number, counted = 0, 1, 0
    for match in _DIRECTIVE.finditer(script):
        number += script.count("\n", counted, match.start())
        counted = match.start()
        place = f"{where}, line {number}"
        length += len(match[0])
        if length > _MAX_DIRECTIVES:
            raise RequestError("#DL2", f"the lines are longer than {_MAX_DIRECTIVES} characters", where=place)
        pairs = _split(match[1], place)
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
