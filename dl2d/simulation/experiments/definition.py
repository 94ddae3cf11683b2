"""What an experiment compares: a record, read from YAML. The format is in docs/experiments.md."""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from dl2d.core.errors import WorkloadError
from dl2d.core.wording import did_you_mean, printable, shown
from dl2d.simulation.experiments.claims import Claim, describe_claim, parse_claim
from dl2d.simulation.experiments.entrants import (
    MOST_TRAININGS,
    SEEDS_EACH,
    TRAINING_SEEDS,
    Design,
    Entrant,
    Training,
    describe_entrant,
    parse_entrant,
    parse_training,
    plain,
)
from dl2d.simulation.fields import Fields
from dl2d.simulation.preset import PresetName
from dl2d.simulation.replay import Rules
from dl2d.simulation.sources import is_drawn, lacks_file, named_file, with_kinds

MOST_CASES: Final = 100
MOST_POLICIES: Final = 50
MOST_SEEDS: Final = 1000
_MOST_SEED = 2**63 - 1
_MOST_SOURCES = 10_000
_MOST_BYTES = 1024**2
_MOST_SLOTS = Rules().most_slots
_LIKE_KIND = re.compile(r"[a-z][a-z0-9-]+:")
_BUILTIN = Path(__file__).parent / "builtin"
#: Added to the version of a definition that was changed on the command line.
CHANGED: Final = "+changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload, and the rules under which it is run."""

    #: Unique in the experiment; heads its table and its plots.
    name: str
    #: As ``dl2d simulate --workload`` takes them: seed s runs number s mod their count.
    sources: tuple[str, ...]
    preset: PresetName | None = None
    #: Options that the preset is changed by, as ``--with`` takes them.
    options: Mapping[str, str] = field(default_factory=dict)
    #: What policies are tuned on; where it is empty, other draws of the generator.
    aside: tuple[str, ...] = ()

    def source(self, seed: int) -> str:
        """What is run for a seed."""
        return self.sources[seed % len(self.sources)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quick:
    """What is less at ``--scale quick``."""

    seeds: tuple[int, ...]
    trainings: int = 1
    #: Share of each training's iterations, and of the intervals between its looks.
    iterations: float = 1.0
    #: Most draws of a generator to train on.
    draws: int = SEEDS_EACH
    #: About how long it takes on two idle cores.
    minutes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Cases x policies x seeds."""

    name: str
    #: To be changed whenever the definition is; ``digest`` tells whether that was forgotten.
    version: str
    description: str
    cases: tuple[Case, ...]
    policies: tuple[str, ...]
    #: The policy that others are compared with.
    baseline: str
    seeds: tuple[int, ...]
    #: Where no preset says so.
    placement: str = "load_balance"
    #: Slots after which one simulation is given up.
    most_slots: int = _MOST_SLOTS
    #: Policies that are more than a name, by their names.
    entrants: Mapping[str, Entrant] = field(default_factory=dict)
    #: How often everything that is trained is trained: seed s is run with what training seed s mod this made.
    trainings: int = 5
    #: What others found, to be set beside the results.
    claims: tuple[Claim, ...] = ()
    #: About how long it takes on two idle cores.
    minutes: float | None = None
    quick: Quick | None = None

    def entrant(self, policy: str) -> Entrant:
        """One of the policies."""
        return self.entrants.get(policy) or plain(policy)


class Scale(enum.StrEnum):
    """``quick``: some minutes; ``full``: what the question needs."""

    QUICK = "quick"
    FULL = "full"


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
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise WorkloadError("", f"cannot be read: {problem}", where=printable(where)) from None
    if len(data) > _MOST_BYTES:
        raise WorkloadError("", "larger than 1 MiB, so no experiment", where=where)
    try:
        content = yaml.load(data.decode("utf-8-sig"), Loader=_OnceLoader)  # noqa: S506 - a SafeLoader by descent
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise WorkloadError("", f"is not YAML: {' '.join(str(error).split())}", where=where) from None
    experiment = _parse(content, where)
    folder = path.resolve().parent
    return with_sources(experiment, lambda source: _beside(source, folder))


def with_sources(experiment: Experiment, change: Callable[[str], str]) -> Experiment:
    """The experiment with every source that it names put through ``change``."""

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
        entrants={
            name: replace(entrant, training=trained(entrant.training)) for name, entrant in experiment.entrants.items()
        },
    )  # fmt: skip


def files_of(experiment: Experiment) -> tuple[str, ...]:
    """Paths of all files that the experiment names, each once."""
    found: list[str] = []

    def see(source: str) -> str:
        if (file := named_file(source)) is not None:
            found.append(file[1])
        return source

    with_sources(experiment, see)
    return tuple(dict.fromkeys(found))


def builtin_names() -> tuple[str, ...]:
    """Experiments that ship with dl2d."""
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
    """The experiment as what a definition file holds; ``read_experiment`` gives an equal one back."""
    prepares = any(entrant.training or entrant.tune for entrant in experiment.entrants.values())
    return {
        "name": experiment.name,
        "version": experiment.version,
        "description": experiment.description,
        "workloads": [
            {
                "name": case.name,
                "source": case.sources[0] if len(case.sources) == 1 else list(case.sources),
                **({"preset": str(case.preset)} if case.preset else {}),
                **({"with": dict(case.options)} if case.options else {}),
                **({"aside": list(case.aside)} if case.aside else {}),
            }
            for case in experiment.cases
        ],
        "policies": [describe_entrant(experiment.entrant(policy)) for policy in experiment.policies],
        "baseline": experiment.baseline,
        "seeds": list(experiment.seeds),
        "placement": experiment.placement,
        "most_slots": experiment.most_slots,
        **({"trainings": experiment.trainings} if prepares else {}),
        **({"claims": [describe_claim(claim) for claim in experiment.claims]} if experiment.claims else {}),
        **({"minutes": experiment.minutes} if experiment.minutes is not None else {}),
        **({"quick": _describe_quick(experiment.quick)} if experiment.quick else {}),
    }


def _describe_quick(quick: Quick) -> dict[str, Any]:
    return {
        "seeds": list(quick.seeds),
        "trainings": quick.trainings,
        "iterations": quick.iterations,
        "draws": quick.draws,
        **({"minutes": quick.minutes} if quick.minutes is not None else {}),
    }


def at_scale(experiment: Experiment, scale: Scale) -> Experiment:
    """The experiment as it is run at a scale. Raises ``WorkloadError`` where it has no such scale."""
    quick = experiment.quick
    if scale is Scale.FULL:
        return replace(experiment, quick=None)
    if quick is None:
        raise WorkloadError("quick", "this experiment has one scale only", where=experiment.name)
    return replace(
        experiment,
        version=f"{experiment.version}+{scale}",
        seeds=quick.seeds,
        trainings=quick.trainings,
        minutes=quick.minutes,
        entrants={name: _shortened(entrant, quick) for name, entrant in experiment.entrants.items()},
        quick=None,
    )


def _shortened(entrant: Entrant, quick: Quick) -> Entrant:
    training = entrant.training
    if training is None:
        return entrant
    # What each design's settings call them, and the values where none are given.
    every = "every" if training.design is Design.JUMPS else "validate_every"
    usual = {"iterations": 150, every: 10 if training.design is Design.JUMPS else 20}

    def less(given: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: given.get(name, value) for name, value in usual.items()}
        return {
            **given,
            **{name: max(1, round(value * quick.iterations)) if value else 0 for name, value in values.items()},
        }

    return replace(
        entrant,
        training=replace(
            training,
            draws=min(training.draws, quick.draws),
            settings=less(training.settings),
            before=less(training.before) if training.before else {},
        ),
    )


def on_files(experiment: Experiment, files: Sequence[str]) -> Experiment:
    """The experiment on other workloads: of every five files one is for tests, one to choose by, three to learn from.

    Where nothing is trained or tuned, all are for tests. Workloads of the experiment that differ in nothing but where
    they come from become one.

    Raises
    ------
    WorkloadError
        There are too few.
    """
    prepares = any(entrant.training or entrant.tune for entrant in experiment.entrants.values())
    if len(files) < (3 if prepares else 1):
        needed = "3 or more files: to learn from, to choose by, and to test on" if prepares else "one or more files"
        raise WorkloadError("", f"needs {needed}; there are {len(files)}", where=experiment.name)
    parts: tuple[list[str], list[str], list[str]] = ([], [], [])
    for number, file in enumerate(files):
        parts[min(number % 5, 2) if prepares else 0].append(file)
    tests, validation, training = (tuple(part) for part in parts)
    kinds: dict[str, Case] = {}
    renamed: dict[str, str] = {}
    for case in experiment.cases:
        words = [str(case.preset or ""), *(f"{key} {value}" for key, value in case.options.items())]
        name = ", ".join(["files", *filter(None, words)])[:100]
        renamed[case.name] = name
        kinds[name] = replace(case, name=name, sources=tests, aside=(*validation, *training) if prepares else ())
    return replace(
        experiment,
        version=experiment.version.removesuffix(CHANGED) + CHANGED,
        cases=tuple(kinds.values()),
        seeds=experiment.seeds if len(experiment.seeds) >= len(tests) else tuple(range(len(tests))),
        entrants={
            name: entrant
            if entrant.training is None
            else replace(entrant, training=replace(entrant.training, sources=training, validation=validation))
            for name, entrant in experiment.entrants.items()
        },
        claims=tuple(replace(claim, workload=renamed.get(claim.workload, "")) for claim in experiment.claims),
    )


def names_kinds(experiment: Experiment) -> bool:
    """Whether it names all files that kinds of jobs are drawn from, and not just that there is to be one."""
    found = True

    def see(source: str) -> str:
        nonlocal found
        found &= not lacks_file(source)
        return source

    with_sources(experiment, see)
    return found


def on_kinds(experiment: Experiment, file: str) -> Experiment:
    """The experiment with this file wherever kinds of jobs are drawn from one (``kinds:FILE``).

    Raises ``WorkloadError`` where nothing is drawn so.
    """
    made = with_sources(experiment, lambda source: with_kinds(source, file))
    if made == experiment:
        raise WorkloadError("", f"draws nothing from the kinds of jobs in a file ({file})", where=experiment.name)
    return made


def write_experiment(experiment: Experiment) -> str:
    """The text of a definition file."""
    return yaml.safe_dump(describe_experiment(experiment), sort_keys=False, allow_unicode=True, width=100)


def digest(experiment: Experiment) -> str:
    """SHA-256 over all that decides on the results: the definition, and the content of the files that it names.

    Words do not count (version, description, claims), nor does where a file lies, nor another scale. Raises
    ``WorkloadError`` for a file that cannot be read.
    """
    described = describe_experiment(with_sources(experiment, with_content))
    for words in ("version", "description", "claims", "minutes", "quick"):
        described.pop(words, None)
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


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
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise WorkloadError("", f"cannot be read: {problem}", where=printable(str(path))) from None


def changed(experiment: Experiment, *, policies: Sequence[str] = (), seeds: Sequence[int] = ()) -> Experiment:
    """The experiment with other policies or seeds; its version says so. The baseline gives way to the first policy."""
    chosen = tuple(dict.fromkeys(policies)) or experiment.policies
    made = replace(
        experiment,
        policies=chosen,
        baseline=experiment.baseline if experiment.baseline in chosen else chosen[0],
        seeds=tuple(dict.fromkeys(seeds)) or experiment.seeds,
        entrants={name: entrant for name, entrant in experiment.entrants.items() if name in chosen},
        claims=tuple(claim for claim in experiment.claims if {claim.policy, claim.against} <= {*chosen}),
    )
    if made == experiment:
        return experiment
    return replace(made, version=experiment.version.removesuffix(CHANGED) + CHANGED)


def parse_seeds(value: object, bad: Callable[[str], Exception]) -> tuple[int, ...]:
    """Seeds from a count (n means 0 to n-1) or a list of different ones; ``bad`` makes the error of a problem."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_SEEDS:
        return tuple(range(value))
    if isinstance(value, list | tuple) and 1 <= len(value) <= MOST_SEEDS:
        whole = all(isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= _MOST_SEED for seed in value)
        if whole and len(set(value)) == len(value):
            return tuple(value)
    raise bad(
        f"expected how many (1 to {MOST_SEEDS}) or a list of different whole numbers of 0 or more, got {shown(value)}"
    )


def _parse(content: object, where: str) -> Experiment:
    fields = Fields(content, where=where)
    name = fields.name("name")
    version = fields.value("version")
    if isinstance(version, bool) or not isinstance(version, int | float | str) or not str(version):
        raise fields.bad("version", f"expected a number or a text, got {shown(version)}")
    description = fields.prose("description", most=10_000)
    placement = fields.name("placement", "load_balance")
    preset = PresetName(fields.choice("preset", [*PresetName])) if fields.has("preset") else None
    options = _options(fields)
    cases = tuple(
        _case(entry, index, preset, options, where)
        for index, entry in enumerate(fields.items("workloads", most=MOST_CASES))
    )
    shared = parse_training(fields.value("training"), where, "training.", None) if fields.has("training") else None
    entrants = [
        _policy(entry, index, shared, fields)
        for index, entry in enumerate(fields.items("policies", most=MOST_POLICIES))
    ]
    policies = tuple(entrant.name for entrant in entrants)
    baseline = fields.choice("baseline", policies, policies[0])
    seeds = parse_seeds(fields.value("seeds"), lambda problem: fields.bad("seeds", problem))
    most_slots = fields.whole("most_slots", least=1, most=10**9, default=_MOST_SLOTS)
    trainings = fields.whole("trainings", least=1, most=MOST_TRAININGS, default=5)
    claims = tuple(
        parse_claim(entry, index, policies, [case.name for case in cases], where)
        for index, entry in enumerate(fields.items("claims", most=100) if fields.has("claims") else ())
    )
    minutes = fields.number("minutes", above=0.0, most=1e6) if fields.has("minutes") else None
    quick = _quick(fields.value("quick"), where) if fields.has("quick") else None
    fields.refuse_rest()
    _refuse_twice([case.name for case in cases], "workloads", "two workloads are called", fields)
    _refuse_twice(policies, "policies", "given twice:", fields)
    if any(entrant.training or entrant.tune for entrant in entrants) and max(seeds) >= TRAINING_SEEDS:
        raise fields.bad("seeds", f"those from {TRAINING_SEEDS} on are kept for training and tuning")
    for index, case in enumerate(cases):
        drawn = all(is_drawn(source) for source in case.sources)
        if not case.aside and not drawn and any(entrant.tune for entrant in entrants):
            raise fields.bad(f"workloads[{index}].aside", "name workloads to tune on: this one is not drawn")
    return Experiment(
        name=name, version=str(version), description=" ".join(description.split()), cases=cases, policies=policies,
        baseline=baseline, seeds=seeds, placement=placement, most_slots=most_slots,
        entrants={entrant.name: entrant for entrant in entrants if entrant != plain(entrant.name)},
        trainings=trainings, claims=claims, minutes=minutes, quick=quick,
    )  # fmt: skip


def _case(entry: object, index: int, preset: PresetName | None, options: Mapping[str, str], where: str) -> Case:
    prefix = f"workloads[{index}]."
    if isinstance(entry, str):
        entry = {"source": entry}
    fields = Fields(entry, where=where, prefix=prefix)
    sources = _texts(fields, "source") if isinstance(fields.value("source"), list) else (
        fields.prose("source", most=4096),
    )  # fmt: skip
    aside = _texts(fields, "aside") if fields.has("aside") else ()
    name = fields.prose("name", most=100, default=_short(sources[0]))
    if not name.isprintable() or name != name.strip():
        raise fields.bad("name", f"expected one line of text, got {shown(name)}")
    own = _options(fields)
    if fields.has("preset"):
        preset = PresetName(fields.choice("preset", [*PresetName]))
    fields.refuse_rest()
    return Case(name=name, sources=sources, preset=preset, options={**options, **own}, aside=aside)


def _texts(fields: Fields, key: str) -> tuple[str, ...]:
    given = fields.items(key, most=_MOST_SOURCES)
    if not all(isinstance(entry, str) and 1 <= len(entry) <= 4096 for entry in given):
        raise fields.bad(key, f"expected texts of up to 4096 characters, got {shown(given)}")
    return tuple(str(entry) for entry in given)


def _quick(given: object, where: str) -> Quick:
    fields = Fields(given, where=where, prefix="quick.")
    made = Quick(
        seeds=parse_seeds(fields.value("seeds"), lambda problem: fields.bad("seeds", problem)),
        trainings=fields.whole("trainings", least=1, most=MOST_TRAININGS, default=1),
        iterations=fields.number("iterations", above=0.0, most=1.0, default=1.0),
        draws=fields.whole("draws", least=1, most=SEEDS_EACH, default=SEEDS_EACH),
        minutes=fields.number("minutes", above=0.0, most=1e6) if fields.has("minutes") else None,
    )
    fields.refuse_rest()
    return made


def _options(fields: Fields) -> dict[str, str]:
    """Options as text, the way a command line would give them: ``true``, ``0.5``."""
    if not fields.has("with"):
        return {}
    given = fields.value("with")
    if not isinstance(given, Mapping):
        raise fields.bad("with", f"expected an object {{...}}, got {shown(given)}")
    options: dict[str, str] = {}
    for key, value in given.items():
        if not isinstance(key, str) or not isinstance(value, str | int | float):
            raise fields.bad(f"with.{printable(str(key))}", f"expected a number or a text, got {shown(value)}")
        options[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return options


def _policy(entry: object, index: int, shared: Training | None, fields: Fields) -> Entrant:
    if isinstance(entry, Mapping):
        return parse_entrant(entry, index, shared, fields.where)
    if not isinstance(entry, str) or not entry or not entry.isprintable():
        raise fields.bad("policies", f"expected names of policies, got {shown(entry)}")
    return plain(entry)


def _refuse_twice(names: Collection[str], key: str, words: str, fields: Fields) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise fields.bad(key, f"{words} {shown(name)}")
        seen.add(name)


def _short(source: str) -> str:
    """What a workload is called where nothing else is said: a generator by its name, a file without its folders."""
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
    """Refuses keys that are given twice."""


def _mapping(loader: _OnceLoader, node: yaml.MappingNode) -> dict[object, object]:
    loader.flatten_mapping(node)
    pairs = loader.construct_pairs(node, deep=True)
    seen: set[object] = set()
    for key, _ in pairs:
        if not isinstance(key, str):
            raise yaml.YAMLError(f"the key {shown(key)} is no text{node.start_mark}")
        if key in seen:
            raise yaml.YAMLError(f"the key {shown(key)} is given twice{node.start_mark}")
        seen.add(key)
    return dict(pairs)


_OnceLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
