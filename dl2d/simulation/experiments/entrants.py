"""Who takes part in an experiment: policies as they are, with settings of their own, tuned first, or trained first."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from dl2d.core.errors import Dl2dError, WorkloadError
from dl2d.core.wording import did_you_mean, shown
from dl2d.learning.original.settings import PAPER, Settings
from dl2d.learning.training import TrainingSettings
from dl2d.simulation.fields import Fields
from dl2d.simulation.sources import is_drawn

Setting = float | int | bool | str
Number = float | int | bool

#: Seeds of what is drawn to train on, to choose checkpoints by and to tune on begin here; those of tests lie below.
TRAINING_SEEDS, VALIDATION_SEEDS, TUNING_SEEDS = 1_000_000, 2_000_000, 3_000_000
#: A training has seeds of its own from there on, this many.
SEEDS_EACH: Final = 10_000
MOST_TRAININGS: Final = 100
#: Of a tuned entrant: the key that names a placement; the others are settings of the policy.
PLACEMENT: Final = "placement"
_MOST_VALUES = 50
_MOST_SOURCES = 10_000


class Design(enum.StrEnum):
    """What is trained: the default design, the paper's made to work, or the paper's text to the letter."""

    JUMPS = "jumps"
    ORIGINAL = "original"
    PAPER = "paper"

    @property
    def policy(self) -> str:
        """The policy that decides with what was learned."""
        return "dl2" if self is Design.JUMPS else "dl2-original"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How an entrant is trained: all that decides on it but the seed."""

    design: Design
    #: As ``dl2d simulate --workload`` takes them; generators are drawn from ``draws`` times.
    sources: tuple[str, ...]
    #: What the best checkpoint is chosen by; where it is empty, other draws of the generators.
    validation: tuple[str, ...] = ()
    draws: int = 32
    #: Learn from jobs of so many types alone, the first by name; 0: of all.
    types: int = 0
    #: Learn, and choose checkpoints, on an analytical model of speeds (``dl2d.learning.original.offline``).
    offline: bool = False
    #: What differs from the design's own settings.
    settings: Mapping[str, Setting] = field(default_factory=dict)
    #: Settings of a training that goes before on the same, and its ``types``: what it made is begun with. Empty: none.
    before: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One row of the tables."""

    name: str
    policy: str
    #: Of the policy, in place of its own.
    settings: Mapping[str, Number] = field(default_factory=dict)
    #: In place of the case's; empty: that.
    placement: str = ""
    training: Training | None = None
    #: Values to choose among, by setting; all combinations are tried, for each workload, on draws of their own; after
    #: the training, where there is one.
    tune: Mapping[str, tuple[Number | str, ...]] = field(default_factory=dict)


def plain(name: str) -> Entrant:
    """A policy as it is."""
    return Entrant(name=name, policy=name)


def original_settings(design: Design, given: Mapping[str, Setting]) -> Settings:
    """The settings of the paper's design. Raises ``WorkloadError`` (where unknown or of the wrong kind)."""
    start = PAPER if design is Design.PAPER else Settings()
    try:
        return replace(start, **_converted(start, given))
    except WorkloadError:
        raise
    except Dl2dError as error:
        raise WorkloadError("", str(error)) from None


def jumps_settings(given: Mapping[str, Setting], *, seed: int) -> TrainingSettings:
    """The settings of the default design. Raises ``WorkloadError``."""
    start = TrainingSettings(seed=seed)
    if "seed" in given:
        raise WorkloadError("seed", "is the experiment's to choose")
    try:
        return replace(start, **_converted(start, given))
    except ValueError as error:
        raise WorkloadError("", str(error)) from None


def _converted(record: Any, given: Mapping[str, Setting]) -> dict[str, Any]:
    """Values of the kinds that the record has, which must be plain ones."""
    known = {
        entry.name: getattr(record, entry.name)
        for entry in fields(record)
        if isinstance(getattr(record, entry.name), bool | int | float | str)
    }
    made: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise WorkloadError(key, f"there is no such setting{did_you_mean(key, known)}")
        kind = type(known[key])
        if isinstance(value, bool) != (kind is bool) or isinstance(value, str) != issubclass(kind, str):
            raise WorkloadError(key, f"expected a value such as {known[key]}, got {shown(value)}")
        try:
            converted = kind(value)
        except ValueError:
            values = ", ".join(kind) if issubclass(kind, enum.StrEnum) else ""
            raise WorkloadError(key, f"expected one of {values}, got {shown(value)}") from None
        if kind is int and converted != value:
            raise WorkloadError(key, f"expected a whole number, got {shown(value)}")
        made[key] = converted
    return made


def parse_entrant(given: object, index: int, shared: Training | None, where: str) -> Entrant:
    """An entry of ``policies``; what it does not say of its training, ``shared`` does. Raises ``WorkloadError``."""
    prefix = f"policies[{index}]."
    entry = Fields(given, where=where, prefix=prefix)
    name = entry.prose("name", most=60)
    if not name.isprintable() or name != name.strip():
        raise entry.bad("name", f"expected one line of text, got {shown(name)}")
    training = None
    if entry.has("training"):
        training = parse_training(entry.value("training"), where, f"{prefix}training.", shared)
    policy = entry.name("policy", training.design.policy if training is not None else name)
    settings = parse_settings(entry, "settings", (bool, int, float))
    placement = entry.name("placement", "") if entry.has("placement") else ""
    tune = _tune(entry)
    entry.refuse_rest()
    if training is not None and policy != training.design.policy:
        raise entry.bad("policy", f"what is trained is decided with by {training.design.policy}, not {policy}")
    if twice := sorted(tune.keys() & {*settings, *([PLACEMENT] if placement else [])}):
        raise entry.bad("tune", f"{twice[0]} is given and tuned")
    return Entrant(
        name=name, policy=policy, settings=settings, placement=placement, training=training, tune=tune
    )  # fmt: skip


def parse_training(given: object, where: str, prefix: str, shared: Training | None) -> Training:
    """What ``training`` holds. Raises ``WorkloadError``."""
    entry = Fields(given, where=where, prefix=prefix)
    base = shared or Training(design=Design.JUMPS, sources=())
    design = Design(entry.choice("design", [*Design], base.design))
    sources = _sources(entry, "sources", base.sources)
    validation = _sources(entry, "validation", base.validation)
    draws = entry.whole("draws", least=1, most=SEEDS_EACH, default=base.draws)
    types = entry.whole("types", least=0, most=1000, default=base.types)
    offline = entry.flag("offline") if entry.has("offline") else base.offline
    # Settings of one design say nothing to another.
    settings = {**(base.settings if design is base.design else {}), **parse_settings(entry, "settings")}
    before = parse_settings(entry, "before")
    entry.refuse_rest()
    if not sources:
        raise entry.bad("sources", "name one or more workloads to learn from")
    if not validation and (files := [source for source in sources if not is_drawn(source)]):
        raise entry.bad("validation", f"name workloads to choose checkpoints by: {files[0]} is not drawn")
    made = Training(
        design=design, sources=sources, validation=validation, draws=draws, types=types, offline=offline,
        settings=settings, before=before,
    )  # fmt: skip
    check_training(made, entry.bad)
    return made


def check_training(training: Training, bad: Callable[[str, str], WorkloadError]) -> None:
    """Make the settings of a training. Raises what ``bad`` makes of a key and a problem."""
    for part, given in (("settings", dict(training.settings)), ("before", dict(training.before))):
        try:
            if training.design is Design.JUMPS:
                if part == "before" and given:
                    raise bad("before", "the design jumps begins with nothing")
                jumps_settings(given, seed=0)
                continue
            types = given.pop("types", 0) if part == "before" else 0
            if not isinstance(types, int) or isinstance(types, bool):
                raise bad("before.types", f"expected a whole number, got {shown(types)}")
            original_settings(training.design, given)
        except WorkloadError as error:
            if error.where:
                raise
            raise bad(f"{part}.{error.key}" if error.key else part, error.problem) from None


def parse_settings(
    entry: Fields, key: str, kinds: tuple[type, ...] = (bool, int, float, str)
) -> dict[str, Any]:  # fmt: skip
    """An object of plain values; empty where it is not given. Raises ``WorkloadError``."""
    if not entry.has(key):
        return {}
    given = entry.value(key)
    if not isinstance(given, Mapping):
        raise entry.bad(key, f"expected an object {{...}}, got {shown(given)}")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, kinds):
            raise entry.bad(f"{key}.{name}", f"expected a number or a text, got {shown(value)}")
    return dict(given)


def _tune(entry: Fields) -> dict[str, tuple[Number | str, ...]]:
    if not entry.has("tune"):
        return {}
    given = entry.value("tune")
    if not isinstance(given, Mapping):
        raise entry.bad("tune", f"expected an object {{...}}, got {shown(given)}")
    made: dict[str, tuple[Number | str, ...]] = {}
    for name, values in given.items():
        kinds = (str,) if name == PLACEMENT else (bool, int, float)
        fine = isinstance(values, list | tuple) and 1 <= len(values) <= _MOST_VALUES
        if not isinstance(name, str) or not fine or not all(isinstance(value, kinds) for value in values):
            raise entry.bad(f"tune.{name}", f"expected a list of 1 to {_MOST_VALUES} values, got {shown(values)}")
        made[name] = tuple(values)
    return made


def _sources(entry: Fields, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    if not entry.has(key):
        return default
    given = entry.items(key, most=_MOST_SOURCES)
    for source in given:
        if not isinstance(source, str) or not source:
            raise entry.bad(key, f"expected texts, got {shown(source)}")
        if is_drawn(source) and "seed=" in source:
            raise entry.bad(key, f"{source} fixes its seed, so that tests would be what was learned from")
    return tuple(str(source) for source in given)


def describe_training(training: Training) -> dict[str, Any]:
    """What ``parse_training`` reads."""
    return {
        "design": str(training.design),
        "sources": list(training.sources),
        **({"validation": list(training.validation)} if training.validation else {}),
        "draws": training.draws,
        **({"types": training.types} if training.types else {}),
        **({"offline": True} if training.offline else {}),
        **({"settings": dict(training.settings)} if training.settings else {}),
        **({"before": dict(training.before)} if training.before else {}),
    }


def describe_entrant(entrant: Entrant) -> str | dict[str, Any]:
    """What ``parse_entrant`` reads, or the name alone of a policy as it is."""
    if entrant == plain(entrant.name):
        return entrant.name
    return {
        "name": entrant.name,
        "policy": entrant.policy,
        **({"settings": dict(entrant.settings)} if entrant.settings else {}),
        **({"placement": entrant.placement} if entrant.placement else {}),
        **({"training": describe_training(entrant.training)} if entrant.training else {}),
        **({"tune": {key: list(values) for key, values in entrant.tune.items()}} if entrant.tune else {}),
    }
