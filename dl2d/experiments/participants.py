"""Participants of an experiment: policies, optionally with their own settings, tuning or training."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, TypeAdapter, model_validator

from dl2d.core.errors import WorkloadError, shown
from dl2d.core.input_validation import Flag, Items, Kinds, Record, Text, Whole, bad, read, to_plain
from dl2d.learning.dl2.training import TrainingSettings
from dl2d.learning.dl2_paper.settings import PAPER, Settings
from dl2d.policies.common.checkpoint import FORMER_DESIGNS
from dl2d.simulation.workload.workload_source_by_name import is_drawn

Setting = float | int | bool | str
Number = float | int | bool

#: Seeds of what is drawn to train on, to choose checkpoints by and to tune on begin here; those of tests lie below.
TRAINING_SEEDS, VALIDATION_SEEDS, TUNING_SEEDS = 1_000_000, 2_000_000, 3_000_000
#: A training has seeds of its own from there on, this many.
SEEDS_EACH = 10_000
MAX_TRAININGS = 100
#: Of a tuned participant: the key that names a placement; the others are settings of the policy.
PLACEMENT = "placement"
_MAX_VALUES = 50
PlainNumber = Annotated[Any, Kinds((bool, int, float), "a number or true or false")]
PlainValue = Annotated[Any, Kinds((bool, int, float, str), "a number or a text")]
Draws = Annotated[int, Whole(1, SEEDS_EACH)]


def _one_line(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise bad("", f"expected one line of text, got {shown(text)}")
    return text


def _without_seed(sources: tuple[str, ...]) -> tuple[str, ...]:
    for source in sources:
        if is_drawn(source) and "seed=" in source:
            raise bad(
                "", f"{source} fixes its seed, so it would be trained and tested on the same workload: leave out seed="
            )
    return sources


#: What heads a table or a plot.
Label = Annotated[str, Text(128), AfterValidator(_one_line)]
#: As ``dl2d simulate --workload`` takes it.
Source = Annotated[str, Text(4096)]
Sources = Annotated[tuple[Source, ...], Items(10_000)]


def _current_name(design: object) -> object:
    """The name of a design, which may be that of an earlier version."""
    return FORMER_DESIGNS.get(design, design) if isinstance(design, str) else design


class Design(enum.StrEnum):
    """Design of a learned policy: dl2d's default, the paper's with corrections, or the paper's text as written."""

    DL2 = "dl2"
    DL2_PAPER = "dl2-original"
    PAPER = "paper"

    @property
    def policy(self) -> str:
        """Name of the policy that uses the trained checkpoint."""
        return "dl2" if self is Design.DL2 else "dl2-original"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Record):
    """How a participant is trained: everything that determines the result except the seed."""

    design: Annotated[Design, BeforeValidator(_current_name)] = Design.DL2
    #: As ``dl2d simulate --workload`` takes them; generators are drawn from ``draws`` times.
    sources: Annotated[Sources, AfterValidator(_without_seed)] = ()
    #: What the best checkpoint is chosen by; where it is empty, other draws of the generators.
    validation: Annotated[Sources, AfterValidator(_without_seed)] = ()
    draws: Draws = 32
    #: Learn from jobs of so many types alone, the first by name; 0: of all.
    types: Annotated[int, Whole(0, 1000)] = 0
    #: Learn, and choose checkpoints, on an analytical model of speeds
    #: (``dl2d.learning.dl2_paper.analytical_speed_model``).
    offline: Flag = False
    #: What differs from the design's own settings.
    settings: Mapping[str, PlainValue] = field(default_factory=dict)
    #: Settings of a training that goes before on the same, and its ``types``: what it made is begun with. Empty: none.
    before: Mapping[str, PlainValue] = field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.sources:
            raise bad("sources", "name one or more workloads to learn from")
        if not self.validation and (files := [source for source in self.sources if not is_drawn(source)]):
            raise bad("validation", f"name workloads to choose checkpoints by: {files[0]} is not drawn")
        if self.before and self.design is Design.DL2:
            raise bad("before", "the design dl2 begins with nothing")
        before = dict(self.before)
        types = before.pop("types", 0)
        if not isinstance(types, int) or isinstance(types, bool):
            raise bad("before.types", f"expected a whole number, got {shown(types)}")
        for part, given in (("settings", self.settings), ("before", before)):
            try:
                if self.design is Design.DL2:
                    dl2_settings(given, seed=0)
                else:
                    dl2_paper_settings(self.design, given)
            except WorkloadError as error:
                raise bad(f"{part}.{error.key}".rstrip("."), error.problem) from None
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant(Record):
    """A policy that takes part, with its settings; one row of the report's tables."""

    name: Label
    policy: Label
    #: Of the policy, in place of its own.
    settings: Mapping[str, PlainNumber] = field(default_factory=dict)
    #: In place of the case's; empty: that.
    placement: Annotated[str, Text(128)] = ""
    training: Training | None = None
    #: Values to choose among, by setting; all combinations are tried, for each workload, on draws of their own; after
    #: the training, where there is one.
    tune: Mapping[str, Annotated[tuple[PlainValue, ...], Items(_MAX_VALUES)]] = field(default_factory=dict)

    @classmethod
    def expand(cls, given: object) -> object:
        """Accept a name in place of an object; the policy of a trained participant defaults to its design's policy."""
        if isinstance(given, str):
            return {"name": given, "policy": given}
        if not isinstance(given, Mapping | Participant):
            raise bad("", f"expected the name of a policy or an object {{...}}, got {shown(given)}")
        if isinstance(given, Participant) or "policy" in given or "name" not in given:
            return given
        training = given.get("training")
        design = _current_name(training.get("design", Design.DL2)) if isinstance(training, Mapping) else None
        policies: list[str] = [each.policy for each in Design if each == design]
        return {**given, "policy": policies[0] if policies else given["name"]}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.training is not None and self.policy != self.training.design.policy:
            problem = f"the training makes a checkpoint for {self.training.design.policy}, not {self.policy}"
            raise bad("policy", problem)
        if twice := sorted(self.tune.keys() & {*self.settings, *([PLACEMENT] if self.placement else [])}):
            raise bad("tune", f"{twice[0]} is given and tuned")
        for key, values in self.tune.items():
            if any(isinstance(value, str) != (key == PLACEMENT) for value in values):
                kind = "names of placements" if key == PLACEMENT else "numbers"
                raise bad(f"tune.{key}", f"expected a list of {kind}, got {shown(values)}")
        return self


def plain(name: str) -> Participant:
    """A participant that runs a policy with its defaults."""
    return Participant(name=name, policy=name)


def dl2_paper_settings(design: Design, given: Mapping[str, Setting]) -> Settings:
    """The settings of the paper's design. Raises ``WorkloadError``."""
    start = PAPER if design is Design.PAPER else Settings()
    return read(_DL2_PAPER_SETTINGS, {**to_plain(start), **given}, WorkloadError)


def dl2_settings(given: Mapping[str, Setting], *, seed: int) -> TrainingSettings:
    """The settings of the default design. Raises ``WorkloadError``."""
    if "seed" in given:
        raise WorkloadError("seed", "cannot be set: the experiment trains with seeds of its own")
    return replace(read(_DL2_SETTINGS, given, WorkloadError), seed=seed)


_DL2_PAPER_SETTINGS = TypeAdapter(Settings)
_DL2_SETTINGS = TypeAdapter(TrainingSettings)


def inherited(given: object, shared: Training | None) -> object:
    """An entry of ``policies`` with missing training keys filled in from the shared training."""
    own = given.get("training") if isinstance(given, Mapping) else None
    if shared is None or not isinstance(given, Mapping) or not isinstance(own, Mapping):
        return given
    base = to_plain(shared)
    base.pop("before", None)
    settings = own.get("settings", {})
    # Settings of one design say nothing to another.
    if _current_name(own.get("design", shared.design)) != shared.design:
        base.pop("settings", None)
    elif isinstance(settings, Mapping):
        settings = {**base.get("settings", {}), **settings}
    return {**given, "training": {**base, **own, "settings": settings}}


def plain_digest(described: Mapping[str, Any]) -> str:
    """SHA-256 of plain values; with former names of designs, so that it is what earlier versions computed."""
    text = json.dumps(described, sort_keys=True)
    for former, name in FORMER_DESIGNS.items():
        text = text.replace(f'"design": "{name}"', f'"design": "{former}"')
    return hashlib.sha256(text.encode()).hexdigest()


def describe_participant(participant: Participant) -> str | dict[str, Any]:
    """Plain values for a definition file; a participant without settings is its name."""
    return participant.name if participant == plain(participant.name) else to_plain(participant)
