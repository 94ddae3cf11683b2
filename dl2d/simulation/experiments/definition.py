"""What an experiment compares: a record, read from YAML. The format is in docs/experiments.md."""

from __future__ import annotations

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
from dl2d.simulation.fields import Fields
from dl2d.simulation.preset import PresetName
from dl2d.simulation.replay import Rules
from dl2d.simulation.sources import named_file

MOST_CASES: Final = 100
MOST_POLICIES: Final = 50
MOST_SEEDS: Final = 1000
_MOST_SEED = 2**63 - 1
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
    #: As ``dl2d simulate --workload`` takes it.
    source: str
    preset: PresetName | None = None
    #: Options that the preset is changed by, as ``--with`` takes them.
    options: Mapping[str, str] = field(default_factory=dict)


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
    return replace(
        experiment, cases=tuple(replace(case, source=_beside(case.source, folder)) for case in experiment.cases)
    )


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
    return {
        "name": experiment.name,
        "version": experiment.version,
        "description": experiment.description,
        "workloads": [
            {
                "name": case.name,
                "source": case.source,
                **({"preset": str(case.preset)} if case.preset else {}),
                **({"with": dict(case.options)} if case.options else {}),
            }
            for case in experiment.cases
        ],
        "policies": list(experiment.policies),
        "baseline": experiment.baseline,
        "seeds": list(experiment.seeds),
        "placement": experiment.placement,
        "most_slots": experiment.most_slots,
    }


def write_experiment(experiment: Experiment) -> str:
    """The text of a definition file."""
    return yaml.safe_dump(describe_experiment(experiment), sort_keys=False, allow_unicode=True, width=100)


def digest(experiment: Experiment) -> str:
    """SHA-256 over all that decides on the results: the definition, and the content of the files that it names.

    The version and the description do not count, nor does where a file lies. Raises ``WorkloadError`` for a file that
    cannot be read.
    """
    described = describe_experiment(experiment)
    del described["version"], described["description"]
    for entry in described["workloads"]:
        if (file := named_file(entry["source"])) is not None:
            head, path, rest = file
            entry["source"] = f"{head}sha256:{file_digest(Path(path))}{rest}"
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


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
    policies = tuple(_policy(entry, fields) for entry in fields.items("policies", most=MOST_POLICIES))
    baseline = fields.choice("baseline", policies, policies[0])
    seeds = parse_seeds(fields.value("seeds"), lambda problem: fields.bad("seeds", problem))
    most_slots = fields.whole("most_slots", least=1, most=10**9, default=_MOST_SLOTS)
    fields.refuse_rest()
    _refuse_twice([case.name for case in cases], "workloads", "two workloads are called", fields)
    _refuse_twice(policies, "policies", "given twice:", fields)
    return Experiment(
        name=name, version=str(version), description=" ".join(description.split()), cases=cases, policies=policies,
        baseline=baseline, seeds=seeds, placement=placement, most_slots=most_slots,
    )  # fmt: skip


def _case(entry: object, index: int, preset: PresetName | None, options: Mapping[str, str], where: str) -> Case:
    prefix = f"workloads[{index}]."
    if isinstance(entry, str):
        entry = {"source": entry}
    fields = Fields(entry, where=where, prefix=prefix)
    source = fields.prose("source", most=4096)
    name = fields.prose("name", most=100, default=_short(source))
    if not name.isprintable() or name != name.strip():
        raise fields.bad("name", f"expected one line of text, got {shown(name)}")
    own = _options(fields)
    if fields.has("preset"):
        preset = PresetName(fields.choice("preset", [*PresetName]))
    fields.refuse_rest()
    return Case(name=name, source=source, preset=preset, options={**options, **own})


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


def _policy(entry: object, fields: Fields) -> str:
    if not isinstance(entry, str) or not entry or not entry.isprintable():
        raise fields.bad("policies", f"expected names of policies, got {shown(entry)}")
    return entry


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
