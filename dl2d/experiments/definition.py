"""Definition of an experiment: workloads, policies and seeds, read from YAML (docs/experiments.md has the format)."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml
from pydantic import BeforeValidator, PlainValidator, TypeAdapter, model_validator

from dl2d.core.errors import WorkloadError, did_you_mean, printable, shown
from dl2d.core.input_validation import (
    ONE_LINE,
    Flag,
    Items,
    Name,
    Number,
    Record,
    Text,
    Whole,
    bad,
    not_one_of,
    read,
    to_plain,
)
from dl2d.experiments.participants import (
    MAX_TRAININGS,
    SEEDS_EACH,
    TRAINING_SEEDS,
    Draws,
    Label,
    Participant,
    Sources,
    Training,
    describe_participant,
    inherited,
    plain_digest,
)
from dl2d.simulation.replay import Rules
from dl2d.simulation.simulation_presets import PresetName
from dl2d.simulation.workload.workload_source_by_name import is_drawn, named_file

MAX_CASES = 100
MAX_POLICIES = 50
MAX_SEEDS = 1000
_MAX_SEED = 2**63 - 1
_MAX_BYTES = 1024**2
_MAX_SLOTS = Rules().most_slots
_LIKE_KIND = re.compile(r"[a-z][a-z0-9-]+:")
_BUILTIN = Path(__file__).parent / "builtin"


def _option_text(value: object) -> str:
    """An option the way a command line would give it: ``true``, ``0.5``."""
    if not isinstance(value, str | int | float):
        raise bad("", f"expected a number or a text, got {shown(value)}")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _version(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not str(value):
        raise bad("", f"expected a number or a text, got {shown(value)}")
    return str(value)


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _seeds(value: object) -> tuple[int, ...]:
    return parse_seeds(value, lambda problem: bad("", problem))


def parse_seeds(value: object, error: Callable[[str], Exception]) -> tuple[int, ...]:
    """Seeds from a count (n means 0 to n-1) or a list of different ones; ``error`` makes the error of a problem."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SEEDS:
        return tuple(range(value))
    if isinstance(value, list | tuple) and 1 <= len(value) <= MAX_SEEDS:
        whole = all(isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= _MAX_SEED for seed in value)
        if whole and len(set(value)) == len(value):
            return tuple(value)
    raise error(
        f"expected how many (1 to {MAX_SEEDS}) or a list of different whole numbers from 0 to {_MAX_SEED}, got "
        f"{shown(value)}"
    )


Seeds = Annotated[tuple[int, ...], PlainValidator(_seeds)]
Trainings = Annotated[int, Whole(1, MAX_TRAININGS)]
Minutes = Annotated[float, Number(1e6, above=0.0)]
OptionText = Annotated[str, PlainValidator(_option_text)]


Sentence = Annotated[str, Text(2000), ONE_LINE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Record):
    """A published change of the average completion time of one policy against another."""

    policy: str
    against: str
    #: Name of the workload; empty for each of the experiment's.
    workload: str = ""
    #: Change of the average completion time in per cent: -44.1 is 44.1 % below. None: a figure without numbers.
    change: Annotated[float, Number(1e6, least=-100.0)] | None = None
    #: In words.
    says: Sentence
    #: Where it stands.
    source: Sentence
    #: Why what is measured here may be another: workload, rules, what others' numbers are of.
    why: Sentence
    #: As it is remembered or quoted: not compared with the publication's text.
    unchecked: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Record):
    """A workload and the simulation rules that apply to it."""

    #: Unique in the experiment; heads its table and its plots.
    name: Label
    #: Seed s runs number s mod their count.
    sources: Annotated[Sources, BeforeValidator(_listed)]
    preset: PresetName | None = None
    #: Options that the preset is changed by, as ``--with`` takes them.
    options: Mapping[str, OptionText] = field(default_factory=dict)
    #: What policies are tuned on; where it is empty, other draws of the generator.
    aside: Sources = ()

    file_keys: ClassVar[Mapping[str, str]] = {"sources": "source", "options": "with"}

    @classmethod
    def expand(cls, given: object) -> object:
        """Accept a source in place of an object; the default name is derived from the first source."""
        if isinstance(given, str):
            given = {"source": given}
        if not isinstance(given, Mapping) or "name" in given:
            return given
        source = given.get("source")
        first = source[0] if isinstance(source, list) and source else source
        return {**given, "name": _short(first)} if isinstance(first, str) and first else given

    def source(self, seed: int) -> str:
        """Source of the workload for a seed."""
        return self.sources[seed % len(self.sources)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quick(Record):
    """Reductions of ``--scale quick``."""

    seeds: Seeds
    trainings: Trainings = 1
    #: Share of each training's iterations, and of the intervals between its looks.
    iterations: Annotated[float, Number(1.0, above=0.0)] = 1.0
    #: Most draws of a generator to train on.
    draws: Draws = SEEDS_EACH
    #: About how long it takes on two idle cores.
    minutes: Minutes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Record):
    """An experiment: every participant runs every case with every seed."""

    name: Name
    #: To be changed whenever the definition is; ``digest`` tells whether that was forgotten.
    version: Annotated[str, PlainValidator(_version)]
    description: Annotated[str, Text(10_000), ONE_LINE]
    cases: Annotated[tuple[Case, ...], Items(MAX_CASES)]
    participants: Annotated[tuple[Participant, ...], Items(MAX_POLICIES)]
    #: The policy that others are compared with; by default the first.
    baseline: str = ""
    seeds: Seeds
    #: Where no preset says so.
    placement: Name = "load_balance"
    #: Slots after which one simulation is given up.
    most_slots: Annotated[int, Whole(1, 10**9)] = _MAX_SLOTS
    #: How often everything that is trained is trained: seed s is run with what training seed s mod this made.
    trainings: Trainings = 5
    #: What others found, to be set beside the results.
    claims: Annotated[tuple[Claim, ...], Items(100)] = ()
    #: About how long it takes on two idle cores.
    minutes: Minutes | None = None
    quick: Quick | None = None

    file_keys: ClassVar[Mapping[str, str]] = {"cases": "workloads", "participants": "policies"}
    #: What all cases and all trainings have that do not say otherwise.
    expanded_keys: ClassVar[frozenset[str]] = frozenset({"preset", "with", "training"})

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of all participants."""
        return tuple(participant.name for participant in self.participants)

    @property
    def prepares(self) -> bool:
        """Whether something is trained or tuned before the runs."""
        return any(participant.training or participant.tune for participant in self.participants)

    def participant(self, policy: str) -> Participant:
        """The participant of this name."""
        return next(participant for participant in self.participants if participant.name == policy)

    @classmethod
    def expand(cls, given: object) -> object:
        """Copy shared presets, options and training into each entry; the baseline defaults to the first policy."""
        if not isinstance(given, Mapping):
            return given
        shared = _SHARED.validate_python({key: given[key] for key in cls.expanded_keys & given.keys()})
        made = {key: value for key, value in given.items() if key not in cls.expanded_keys}
        if isinstance(cases := made.get("workloads"), list):
            made["workloads"] = [shared.of_case(case) for case in cases]
        if isinstance(policies := made.get("policies"), list):
            made["policies"] = [inherited(policy, shared.training) for policy in policies]
            first = policies[0] if policies else None
            made.setdefault("baseline", first.get("name") if isinstance(first, Mapping) else first)
        return made

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [case.name for case in self.cases]
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise bad("workloads", f"two workloads are called {shown(twice[0])}")
        if twice := [name for name, times in Counter(self.policies).items() if times > 1]:
            raise bad("policies", f"given twice: {shown(twice[0])}")
        if self.baseline not in self.policies:
            raise bad("baseline", not_one_of(self.baseline, self.policies))
        for index, claim in enumerate(self.claims):
            for key, value, known in (
                ("policy", claim.policy, self.policies),
                ("against", claim.against, self.policies),
                ("workload", claim.workload or names[0], names),
            ):
                if value not in known:
                    raise bad(f"claims[{index}].{key}", not_one_of(value, known))
        if self.prepares and max(self.seeds) >= TRAINING_SEEDS:
            raise bad("seeds", f"those from {TRAINING_SEEDS} on are kept for training and tuning")
        for index, case in enumerate(self.cases):
            drawn = all(is_drawn(source) for source in case.sources)
            if not case.aside and not drawn and any(participant.tune for participant in self.participants):
                raise bad(f"workloads[{index}].aside", "name workloads to tune on: this one is not drawn")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared(Record):
    """Preset, options and training shared by all entries of a definition."""

    preset: PresetName | None = None
    options: Mapping[str, OptionText] = field(default_factory=dict)
    training: Training | None = None

    file_keys: ClassVar[Mapping[str, str]] = {"options": "with"}

    def of_case(self, given: object) -> object:
        """An entry of ``workloads`` with the preset and the options that it does not give itself."""
        entry = {"source": given} if isinstance(given, str) else given
        if not isinstance(entry, Mapping) or not isinstance(own := entry.get("with", {}), Mapping):
            return given
        return {"preset": self.preset, **entry, "with": {**self.options, **own}}


_SHARED = TypeAdapter(_Shared)
_EXPERIMENT = TypeAdapter(Experiment)


def read_experiment(path: Path) -> Experiment:
    """Read a definition. Files that it names are looked for beside it; their paths are absolute in the record.

    Raises
    ------
    WorkloadError
        It cannot be read or is malformed; names file and key.
    """
    where = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise WorkloadError.unreadable(printable(where), error) from None
    if len(data) > _MAX_BYTES:
        raise WorkloadError("", "larger than 1 MiB, so no experiment", where=where)
    try:
        content = yaml.load(data.decode("utf-8-sig"), Loader=_OnceLoader)  # noqa: S506 - a SafeLoader by descent
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise WorkloadError("", f"is not YAML: {' '.join(str(error).split())}", where=where) from None
    experiment = read(_EXPERIMENT, content, lambda key, problem: WorkloadError(key, problem, where=where))
    folder = path.resolve().parent
    return with_sources(experiment, lambda source: _beside(source, folder))


def with_sources(experiment: Experiment, change: Callable[[str], str]) -> Experiment:
    """A copy of the experiment with ``change`` applied to every workload source."""

    def all_of(sources: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(change(source) for source in sources)

    def trained(training: Training | None) -> Training | None:
        if training is None:
            return None
        return replace(training, sources=all_of(training.sources), validation=all_of(training.validation))

    return replace(
        experiment,
        cases=tuple(
            replace(case, sources=all_of(case.sources), aside=all_of(case.aside)) for case in experiment.cases
        ),
        participants=tuple(
            replace(participant, training=trained(participant.training)) for participant in experiment.participants
        ),
    )  # fmt: skip


def sources_of(experiment: Experiment) -> tuple[str, ...]:
    """All workload sources that the experiment names."""
    of_cases = [source for case in experiment.cases for source in (*case.sources, *case.aside)]
    trainings = [each.training for each in experiment.participants if each.training is not None]
    return (*of_cases, *(source for each in trainings for source in (*each.sources, *each.validation)))


def files_of(experiment: Experiment) -> tuple[str, ...]:
    """Distinct paths of all files that the experiment names."""
    return tuple(dict.fromkeys(file[1] for file in map(named_file, sources_of(experiment)) if file is not None))


def builtin_names() -> tuple[str, ...]:
    """Names of the experiments that ship with dl2d."""
    return tuple(sorted(path.stem for path in _BUILTIN.glob("*.yaml")))


def find_experiment(name_or_file: str) -> Experiment:
    """A built-in experiment by name, or one from a file; a file needs a suffix or a folder in its name.

    Raises
    ------
    WorkloadError
        There is none, or it is malformed.
    """
    known = builtin_names()
    if name_or_file in known:
        return read_experiment(_BUILTIN / f"{name_or_file}.yaml")
    path = Path(name_or_file)
    if not path.suffix and path.name == name_or_file:
        problem = f"there is no such experiment{did_you_mean(name_or_file, known)}; built in are {', '.join(known)}"
        raise WorkloadError("", f"{problem}; a file is given as FILE.yaml or ./FILE", where=printable(name_or_file))
    return read_experiment(path)


def describe_experiment(experiment: Experiment) -> dict[str, Any]:
    """The experiment as plain values of a definition file; ``read_experiment`` of them gives an equal experiment."""
    made = to_plain(experiment)
    for case in made["workloads"]:
        case["source"] = case["source"][0] if len(case["source"]) == 1 else case["source"]
    made["policies"] = [describe_participant(participant) for participant in experiment.participants]
    if not experiment.prepares:
        del made["trainings"]
    return made


def write_experiment(experiment: Experiment) -> str:
    """The text of a definition file."""
    return yaml.safe_dump(describe_experiment(experiment), sort_keys=False, allow_unicode=True, width=100)


def digest(experiment: Experiment) -> str:
    """SHA-256 over everything that determines the results: the definition and the content of the files it names.

    Words do not count (version, description, claims), nor does where a file lies, nor another scale. Raises
    ``WorkloadError`` for a file that cannot be read.
    """
    described = describe_experiment(with_sources(experiment, with_content))
    for words in ("version", "description", "claims", "minutes", "quick"):
        described.pop(words, None)
    return plain_digest(described)


def with_content(source: str) -> str:
    """A source with the digest of its file in place of the file's path. Raises ``WorkloadError``."""
    file = named_file(source)
    if file is None:
        return source
    head, path, rest = file
    return f"{head}sha256:{file_digest(Path(path))}{rest}"


def file_digest(path: Path) -> str:
    """SHA-256 of a file. Raises ``WorkloadError``."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        raise WorkloadError.unreadable(printable(str(path)), error) from None


def _short(source: str) -> str:
    """Default name of a workload: the generator's name, or the file name without its folders."""
    file = named_file(source)
    if file is None:
        return source.removeprefix("generator:")
    head, path, rest = file
    return f"{head}{Path(path).name}{rest}"[:100] or source


def _beside(source: str, folder: Path) -> str:
    file = named_file(source)
    if file is None:
        return source
    head, path, rest = file
    if not head and _LIKE_KIND.match(path) and not (folder / path).exists():
        return source  # a slip in the kind of source, which ``load_source`` tells better
    return f"{head}{folder / path}{rest}"


class _OnceLoader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys."""


def _mapping(loader: _OnceLoader, node: yaml.MappingNode) -> dict[object, object]:
    loader.flatten_mapping(node)
    pairs = loader.construct_pairs(node, deep=True)
    seen: set[object] = set()
    for key, _ in pairs:
        if not isinstance(key, str):
            raise yaml.YAMLError(f"the key {shown(key)} is not text{node.start_mark}")
        if key in seen:
            raise yaml.YAMLError(f"the key {shown(key)} is given twice{node.start_mark}")
        seen.add(key)
    return dict(pairs)


_OnceLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
