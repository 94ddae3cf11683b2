"""The one parser of job requests, whatever they come from.

A request is a mapping of keys to values (YAML for ``dl2d submit``) or ``#DL2 key=value`` lines in a batch script.
Both go through ``parse_request``, so a key means the same everywhere and an error names it.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from dl2d.core.errors import RequestError
from dl2d.core.jobs import Architecture, Consistency, JobRequest
from dl2d.core.resources import Resources, parse_resources
from dl2d.core.wording import did_you_mean, is_meant, shown

E = TypeVar("E", bound=enum.StrEnum)
MOST_EPOCHS = 1e6
MOST_TASKS = 10_000
_DIRECTIVE = re.compile(r"#DL2(?:\s+(.*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+ /:-]{0,127}")


@dataclass(frozen=True, slots=True)
class RequestRules:
    """What a site allows. ``models`` empty means any model type."""

    models: frozenset[str] = frozenset()
    max_workers: int = 16
    max_ps: int = 16


def parse_request(given: Mapping[str, object], *, rules: RequestRules, where: str = "") -> JobRequest:
    """Check a request and fill in what it leaves out.

    | key | meaning | default |
    |---|---|---|
    | ``model`` | type of the model, one of the site's | required |
    | ``epochs`` | passes over the data set, more than 0 | required |
    | ``samples_per_epoch`` or ``steps_per_epoch`` | size of an epoch | one is required |
    | ``batch`` | global batch size in samples | undeclared |
    | ``worker``, ``ps`` | demand of one task: ``{cpu: 2, gpu: 1}`` or ``cpu:2,memory:4G`` | ps: ``cpu:1`` |
    | ``min_workers``, ``max_workers``, ``min_ps``, ``max_ps`` | bounds | 1 and the site's |
    | ``allowed_workers`` | counts it can run with: ``[1, 2, 4]``, ``1,2,4`` or ``powers-of-two`` | any |
    | ``architecture`` | ``ps`` or ``allreduce`` | ``ps`` |
    | ``consistency`` | ``sync`` or ``async`` | ``sync`` |
    | ``name`` | name for people | the model |

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
    fields = _Fields(given, where)
    model = fields.text("model")
    if rules.models and model not in rules.models:
        known = ", ".join(sorted(rules.models))
        raise RequestError(
            "model",
            f"unknown model type {model!r}{did_you_mean(model, rules.models)}; this site knows {known} "
            "(an admin adds more under jobs.models)",
            where=where,
        )
    epochs = fields.number("epochs", above=0, most=MOST_EPOCHS)
    samples = fields.optional_number("samples_per_epoch", above=0, most=1e15)
    steps = fields.optional_number("steps_per_epoch", above=0, most=1e12)
    if samples is None and steps is None:
        near = fields.near_miss("samples_per_epoch") or fields.near_miss("steps_per_epoch")
        raise RequestError("samples_per_epoch", f"missing (or give steps_per_epoch){near}", where=where)
    batch = fields.whole("batch", least=1, most=10**9, default=None)
    architecture = fields.choice("architecture", Architecture, Architecture.PS)
    has_ps = architecture is Architecture.PS
    max_workers = fields.whole("max_workers", least=1, most=MOST_TASKS, default=None)
    min_workers = fields.whole("min_workers", least=1, most=MOST_TASKS, default=1) or 1
    max_ps = fields.whole("max_ps", least=1 if has_ps else 0, most=MOST_TASKS, default=None)
    min_ps = fields.whole("min_ps", least=0, most=MOST_TASKS, default=1 if has_ps else 0) or 0
    if has_ps and min_ps < 1:
        raise RequestError("min_ps", "a job with architecture=ps needs at least 1", where=where)
    for key, least, most, cap in (
        ("workers", min_workers, max_workers, rules.max_workers),
        ("ps", min_ps, max_ps, rules.max_ps),
    ):
        if most is not None and least > most:
            raise RequestError(f"min_{key}", f"{least} is more than max_{key}={most}", where=where)
        if least > cap:
            raise RequestError(f"min_{key}", f"{least} is more than the site's limit of {cap}", where=where)
    top_workers = min(max_workers or rules.max_workers, rules.max_workers)
    top_ps = min(rules.max_ps if max_ps is None else max_ps, rules.max_ps) if has_ps else 0
    worker = fields.resources("worker", None)
    ps = fields.resources("ps", Resources.of(cpu=1))
    request = JobRequest(
        name=fields.text("name", default=model),
        model=model,
        epochs=epochs,
        samples_per_epoch=samples,
        steps_per_epoch=steps,
        batch=batch,
        worker=worker,
        ps=ps if has_ps else Resources(),
        min_workers=min_workers,
        max_workers=top_workers,
        min_ps=min_ps if has_ps else 0,
        max_ps=top_ps,
        allowed_workers=fields.allowed("allowed_workers", top_workers),
        architecture=architecture,
        consistency=fields.choice("consistency", Consistency, Consistency.SYNC),
    )
    fields.refuse_rest()
    if not request.largest_allowed(top_workers):
        raise RequestError(
            "allowed_workers",
            f"none of {_listed(request.allowed_workers)} lies between {min_workers} and {top_workers} workers",
            where=where,
        )
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
_PAIR = re.compile(r"""\s*((?:[^\s"']|"[^"]*"|'[^']*')+)""")


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


_REQUIRED = object()
_KEYS = frozenset(
    {
        "model", "epochs", "samples_per_epoch", "steps_per_epoch", "batch", "worker", "ps", "min_workers",
        "max_workers", "min_ps", "max_ps", "allowed_workers", "architecture", "consistency", "name",
    }
)  # fmt: skip


class _Fields:
    """Takes keys out of a mapping one by one; what is left at the end is unknown."""

    def __init__(self, given: Mapping[str, object], where: str) -> None:
        self._given = {str(key): value for key, value in given.items()}
        self._where = where
        self._known: set[str] = set()

    def _take(self, key: str, default: object) -> object:
        self._known.add(key)
        value = self._given.get(key)
        if value is None or value == "":
            if default is _REQUIRED:
                raise RequestError(key, f"missing{self.near_miss(key)}", where=self._where)
            return default
        return value

    def near_miss(self, key: str) -> str:
        """The given key that is most like a missing one and is none itself: a slip of the pen."""
        return is_meant(key, self._given.keys() - _KEYS)

    def _bad(self, key: str, problem: str) -> RequestError:
        return RequestError(key, problem, where=self._where)

    def text(self, key: str, default: object = _REQUIRED) -> str:
        value = self._take(key, default)
        try:
            text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
        except ValueError:  # a whole number of thousands of digits
            text = ""
        if not _NAME.fullmatch(text):
            raise self._bad(key, f"expected a name of up to 128 plain characters, got {shown(value)}")
        return text

    def number(self, key: str, *, above: float, most: float) -> float:
        return self._number(key, self._take(key, _REQUIRED), above, most)

    def optional_number(self, key: str, *, above: float, most: float) -> float | None:
        value = self._take(key, None)
        return None if value is None else self._number(key, value, above, most)

    def _number(self, key: str, value: object, above: float, most: float) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not above < number <= most:
            raise self._bad(key, f"must be a number above {above:g} and at most {most:g}, got {shown(value)}")
        return number

    def whole(self, key: str, *, least: int, most: int, default: int | None) -> int | None:
        value = self._take(key, default)
        if value is None:
            return None
        try:
            number = int(str(value)) if not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise self._bad(key, f"must be a whole number from {least} to {most}, got {shown(value)}")
        return number

    def choice(self, key: str, kind: type[E], default: E) -> E:
        value = self._take(key, default)
        try:
            return kind(str(value))
        except ValueError:
            raise self._bad(key, f"must be one of {', '.join(kind)}, got {shown(value)}") from None

    def resources(self, key: str, default: Resources | None) -> Resources:
        value = self._take(key, _REQUIRED if default is None else default)
        if isinstance(value, Resources):
            return value
        try:
            resources = parse_resources(value, key)
        except RequestError as error:
            raise self._bad(error.key, error.problem) from None
        if not resources.thousandths:
            raise self._bad(key, "a task must ask for something")
        return resources

    def allowed(self, key: str, most: int) -> tuple[int, ...]:
        value = self._take(key, ())
        if value == "powers-of-two":
            return tuple(1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most)
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        counts = []
        for part in parts:
            try:
                count = int(str(part))
            except ValueError:
                count = 0
            if not 1 <= count <= MOST_TASKS:
                raise self._bad(key, f"expected worker counts such as 1,2,4 or powers-of-two, got {shown(part)}")
            counts.append(count)
        return tuple(sorted(set(counts)))

    def refuse_rest(self) -> None:
        for key in self._given:
            if key not in self._known:
                raise self._bad(key, f"unknown key{did_you_mean(key, self._known)}")


def _listed(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, counts)) or "any"
