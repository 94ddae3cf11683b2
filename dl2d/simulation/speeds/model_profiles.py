"""Profiles of common models: sizes, usual batches, demands and speeds, from published figures and free measurements.

Each is a JSON file in ``dl2d/simulation/speeds/profiles/`` that names its sources and how its numbers came about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Final, Literal, Self

from pydantic import PlainValidator, TypeAdapter, model_validator

from dl2d.core.error_wording import did_you_mean, shown
from dl2d.core.errors import WorkloadError
from dl2d.core.input_validation import Demand, Items, Name, Number, Record, Text, Whole, bad, not_one_of, read
from dl2d.core.jobs import Architecture
from dl2d.simulation.speeds.speed_models import Bandwidth, Seconds, SpeedModel, WorkerCount, parse_speed

#: ``ps-sync``: Optimus' function. ``physical``: from hardware. ``allreduce``: ring. ``measured``: an all-reduce table.
SPEED_KINDS: Final = ("ps-sync", "physical", "allreduce", "measured")
_ALWAYS = ("ps-sync", "physical", "allreduce")
_FOLDER: Final = resources.files("dl2d.simulation.speeds") / "profiles"
_BYTES_PER_PARAMETER = 4
_PASSES = 3  # a backward pass costs about two forward passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(Record):
    """The machines that a profile's derived speeds hold for; speeds in bytes per second, times in seconds."""

    worker: Annotated[str, Text(200)]
    worker_bandwidth_bytes_per_second: Bandwidth
    ps_bandwidth_bytes_per_second: Bandwidth
    #: How fast one server adds gradients and applies them, in bytes of gradient.
    ps_update_bytes_per_second: Bandwidth
    #: Per step: fixed, per worker (ps-sync d), per server (ps-sync e), per further worker of a ring.
    overhead_seconds: Seconds
    per_worker_seconds: Seconds
    per_ps_seconds: Seconds
    ring_latency_seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Record):
    """How long a worker computes per sample, by measurement or by counting.

    Measured: ``samples_per_second`` of one worker. Counted: ``forward_flops`` of one sample (2 per multiply-add) and
    ``achieved_flops_per_second``; training costs three times the forward pass.
    """

    basis: Literal["measured", "counted"]
    note: Annotated[str, Text(2000)]
    samples_per_second: Annotated[float, Number(1e9)] = 0.0
    forward_flops: Annotated[float, Number(1e18)] = 0.0
    achieved_flops_per_second: Annotated[float, Number(1e18)] = 0.0

    @model_validator(mode="after")
    def _has_its_figures(self) -> Self:
        for key in (
            ("samples_per_second",) if self.basis == "measured" else ("forward_flops", "achieved_flops_per_second")
        ):
            if not getattr(self, key):
                raise bad(key, f"missing: basis is {self.basis}")
        return self

    @property
    def seconds_per_sample(self) -> float:
        """Forward and backward pass of one sample on one worker."""
        if self.basis == "measured":
            return 1.0 / self.samples_per_second
        return _PASSES * self.forward_flops / self.achieved_flops_per_second


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
    """What is known of one type of model."""

    name: Name
    aliases: Annotated[tuple[str, ...], Items(10, least=0)]
    title: Annotated[str, Text(200)]
    task: Annotated[str, Text(200)]
    parameters: Annotated[int, Whole(1, 10**12)]
    #: Global batch size in samples.
    batch: Annotated[int, Whole(1, 10**9)]
    #: Samples of the data set that the task is named for.
    samples_per_epoch: Annotated[int, Whole(1, 10**12)]
    worker: Demand
    ps: Demand
    max_workers: WorkerCount
    max_ps: WorkerCount
    compute: Compute
    hardware: Hardware
    #: By kind, see ``SPEED_KINDS``; ``measured`` only where there are measurements.
    speeds: Annotated[Mapping[str, SpeedModel], PlainValidator(_speeds)]
    derivation: Annotated[str, Text(4000)]
    sources: Annotated[tuple[str, ...], Items(20)]

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameters, 4 bytes each."""
        return _BYTES_PER_PARAMETER * self.parameters

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
    """Read a profile.

    Raises
    ------
    WorkloadError
        A key is missing, unknown or bad.
    """
    return read(_PROFILE, given, lambda key, problem: WorkloadError(key, problem, where=where))


_PROFILE: Final = TypeAdapter(Profile)
