"""Profiles of common models: sizes, usual batches, demands and speeds, from published figures and free measurements.

Each is a JSON file in ``dl2d/simulation/speeds/profiles/`` that names its sources and how its numbers came about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, ClassVar

from pydantic import PlainValidator, TypeAdapter

from dl2d.core.errors import WorkloadError, did_you_mean, shown
from dl2d.core.input_validation import Demand, Items, Name, Record, Whole, bad, not_one_of, read
from dl2d.core.jobs import Architecture
from dl2d.simulation.speeds.speed_models import SpeedModel, WorkerCount, parse_speed

#: ``ps-sync``: Optimus' function. ``physical``: from hardware. ``allreduce``: ring. ``measured``: an all-reduce table.
SPEED_KINDS = ("ps-sync", "physical", "allreduce", "measured")
_ALWAYS = ("ps-sync", "physical", "allreduce")
_FOLDER = resources.files("dl2d.simulation.speeds") / "profiles"
#: Keys of a file with the facts that its speeds follow from, as docs/workloads.md says, and with where those are from.
_FACTS = frozenset(
    {"title", "task", "parameters", "batch", "compute", "hardware", "derivation", "sources"}
)  # fmt: skip


def _speeds(given: object) -> Mapping[str, SpeedModel]:
    if not isinstance(given, Mapping):
        raise bad("", f"expected an object {{...}}, got {shown(given)}")
    for kind in given.keys() - {*SPEED_KINDS}:
        raise bad(kind, not_one_of(kind, SPEED_KINDS))
    for kind in {*_ALWAYS} - given.keys():
        raise bad(kind, "missing")
    speeds: dict[str, SpeedModel] = {}
    for kind in SPEED_KINDS:
        if kind in given:
            try:
                speeds[kind] = parse_speed(given[kind])
            except WorkloadError as error:
                raise bad(f"{kind}.{error.key}".rstrip("."), error.problem) from None
            expected = Architecture.PS if kind in ("ps-sync", "physical") else Architecture.ALLREDUCE
            if speeds[kind].architecture is not expected:
                raise bad(kind, f"is of {speeds[kind].architecture}, not of {expected}")
    return speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Record):
    """One type of model: what its jobs usually ask for, and how fast they are."""

    name: Name
    aliases: Annotated[tuple[str, ...], Items(10, least=0)]
    #: Samples of the data set that is usual for it.
    samples_per_epoch: Annotated[int, Whole(1, 10**12)]
    worker: Demand
    ps: Demand
    max_workers: WorkerCount
    max_ps: WorkerCount
    #: By kind, see ``SPEED_KINDS``; ``measured`` only where there are measurements.
    speeds: Annotated[Mapping[str, SpeedModel], PlainValidator(_speeds)]

    ignored_keys: ClassVar[frozenset[str]] = _FACTS

    def speed(self, architecture: Architecture) -> SpeedModel:
        """The usual speed of an architecture: ``ps-sync`` or ``allreduce``."""
        return self.speeds["ps-sync" if architecture is Architecture.PS else "allreduce"]


@cache
def profile_names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted; aliases are not listed."""
    return tuple(
        sorted(entry.name.removesuffix(".json") for entry in _FOLDER.iterdir() if entry.name.endswith(".json"))
    )


@cache
def load_profile(name: str) -> Profile:
    """A shipped profile by name or alias.

    Raises
    ------
    WorkloadError
        There is none of this name.
    """
    names = profile_names()
    if name in names:
        return _read(name)
    for candidate in names:
        profile = _read(candidate)
        if name in profile.aliases:
            return profile
    hint = did_you_mean(name, names)
    raise WorkloadError("profile", f"there is no profile {name!r}{hint}; shipped are {', '.join(names)}")


@cache
def _read(name: str) -> Profile:
    text = (_FOLDER / f"{name}.json").read_text(encoding="utf-8")
    profile = parse_profile(json.loads(text), where=f"profile {name}")
    if profile.name != name:
        raise WorkloadError("name", f"is {profile.name!r} in the file of {name!r}", where=f"profile {name}")
    return profile


def parse_profile(given: object, *, where: str) -> Profile:
    """Read a profile. Raises ``WorkloadError`` if a key is missing, unknown or bad."""
    return read(_PROFILE, given, lambda key, problem: WorkloadError(key, problem, where=where))


_PROFILE = TypeAdapter(Profile)
