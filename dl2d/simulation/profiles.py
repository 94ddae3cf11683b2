"""Profiles of common models: sizes, usual batches, demands and speeds, from published figures and free measurements.

Each is a JSON file in ``dl2d/simulation/profiles/`` that names its sources and how its numbers came about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from dl2d.core.errors import WorkloadError
from dl2d.core.jobs import Architecture
from dl2d.core.resources import Resources
from dl2d.core.wording import did_you_mean
from dl2d.simulation.fields import Fields
from dl2d.simulation.speeds import MOST_TASKS, SpeedModel, parse_speed

#: ``ps-sync``: Optimus' function. ``physical``: from hardware. ``allreduce``: ring. ``measured``: an all-reduce table.
SPEED_KINDS: Final = ("ps-sync", "physical", "allreduce", "measured")
_ALWAYS = ("ps-sync", "physical", "allreduce")
_BYTES_PER_PARAMETER = 4
_PASSES = 3  # a backward pass costs about two forward passes
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machines that a profile's derived speeds hold for; speeds in bytes per second, times in seconds."""

    worker: str
    worker_bandwidth: float
    ps_bandwidth: float
    #: How fast one server adds gradients and applies them, in bytes of gradient.
    ps_update_rate: float
    #: Per step: fixed, per worker (ps-sync d), per server (ps-sync e), per further worker of a ring.
    overhead: float
    per_worker: float
    per_ps: float
    ring_latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """How long a worker computes per sample, by measurement or by counting.

    Measured: ``samples_per_second`` of one worker. Counted: ``forward_flops`` of one sample (2 per multiply-add) and
    ``achieved_flops_per_second``; training costs three times the forward pass.
    """

    basis: str
    note: str
    samples_per_second: float = 0.0
    forward_flops: float = 0.0
    achieved_flops: float = 0.0

    @property
    def seconds_per_sample(self) -> float:
        """Forward and backward pass of one sample on one worker."""
        if self.basis == "measured":
            return 1.0 / self.samples_per_second
        return _PASSES * self.forward_flops / self.achieved_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What is known of one type of model."""

    name: str
    aliases: tuple[str, ...]
    title: str
    task: str
    parameters: int
    #: Global batch size in samples.
    batch: int
    #: Samples of the data set that the task is named for.
    samples_per_epoch: int
    worker: Resources
    ps: Resources
    max_workers: int
    max_ps: int
    compute: Compute
    hardware: Hardware
    #: By kind, see ``SPEED_KINDS``; ``measured`` only where there are measurements.
    speeds: Mapping[str, SpeedModel]
    derivation: str
    sources: tuple[str, ...]

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameters, 4 bytes each."""
        return _BYTES_PER_PARAMETER * self.parameters

    def speed(self, architecture: Architecture) -> SpeedModel:
        """The usual speed of an architecture: ``ps-sync`` or ``allreduce``."""
        return self.speeds["ps-sync" if architecture is Architecture.PS else "allreduce"]


def derive_speeds(*, parameters: int, batch: int, compute: Compute, hardware: Hardware) -> dict[str, dict[str, object]]:
    """Descriptions of the derived speeds, to six significant digits; the profile files hold what this gives.

    With M = 4 x parameters bytes, c = seconds per sample on one worker:

    - ``physical`` and ``allreduce`` take c, M, B, bandwidths and the fixed overhead as they are;
    - ``ps-sync``: a = c; b = overhead + 2 M / worker bandwidth (push and pull through the worker's own link);
      c = 2 M / PS bandwidth + M / update rate (all workers' gradients through the servers' links and sums);
      d, e = cost of one connection more. It takes the two links one after the other, where ``physical``
      takes the slower one, so it is the more cautious of the two.
    """
    seconds = _rounded(compute.seconds_per_sample)
    size = _BYTES_PER_PARAMETER * parameters
    theta = (
        seconds,
        _rounded(hardware.overhead + 2.0 * size / hardware.worker_bandwidth),
        _rounded(2.0 * size / hardware.ps_bandwidth + size / hardware.ps_update_rate),
        hardware.per_worker,
        hardware.per_ps,
    )
    common = {"batch": batch, "compute_seconds_per_sample": seconds, "model_bytes": size}
    return {
        "ps-sync": {"formula": "ps-sync", "theta": list(theta), "batch": batch},
        "physical": {
            "formula": "physical",
            **common,
            "worker_bandwidth_bytes_per_second": hardware.worker_bandwidth,
            "ps_bandwidth_bytes_per_second": hardware.ps_bandwidth,
            "overhead_seconds": hardware.overhead,
        },
        "allreduce": {
            "formula": "allreduce",
            **common,
            "bandwidth_bytes_per_second": hardware.worker_bandwidth,
            "latency_seconds": hardware.ring_latency,
            "overhead_seconds": hardware.overhead,
        },
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def profile_names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted; aliases are not listed."""
    return tuple(sorted(_files()))


@cache
def load_profile(name: str) -> Profile:
    """A shipped profile by name or alias.

    Raises
    ------
    WorkloadError
        There is none of this name.
    """
    files = _files()
    if name in files:
        return _read(name)
    for candidate in files:
        profile = _read(candidate)
        if name in profile.aliases:
            return profile
    known = ", ".join(sorted(files))
    raise WorkloadError("profile", f"there is no profile {name!r}{did_you_mean(name, files)}; shipped are {known}")


@cache
def _files() -> dict[str, str]:
    folder = resources.files("dl2d.simulation") / "profiles"
    return {entry.name.removesuffix(".json"): entry.name for entry in folder.iterdir() if entry.name.endswith(".json")}


@cache
def _read(name: str) -> Profile:
    file = resources.files("dl2d.simulation") / "profiles" / _files()[name]
    profile = parse_profile(json.loads(file.read_text(encoding="utf-8")), where=f"profile {name}")
    if profile.name != name:
        raise WorkloadError("name", f"is {profile.name!r} in the file of {name!r}", where=f"profile {name}")
    return profile


def parse_profile(given: object, *, where: str) -> Profile:
    """Read a profile strictly: every key is there, none is unknown.

    Raises
    ------
    WorkloadError
        A key is missing, unknown or bad.
    """
    fields = Fields(given, where=where)
    batch = fields.whole("batch", least=1, most=10**9)
    described = fields.value("speeds")
    of_speeds = Fields(described, where=where, prefix="speeds.")
    speeds: dict[str, SpeedModel] = {}
    for kind in SPEED_KINDS:
        if of_speeds.has(kind) or kind in _ALWAYS:
            speed = of_speeds.value(kind)
            try:
                speeds[kind] = parse_speed(speed)
            except WorkloadError as error:
                raise of_speeds.bad(f"{kind}.{error.key}".rstrip("."), error.problem) from None
            expected = Architecture.PS if kind in ("ps-sync", "physical") else Architecture.ALLREDUCE
            if speeds[kind].architecture is not expected:
                raise of_speeds.bad(kind, f"is of {speeds[kind].architecture}, not of {expected}")
    of_speeds.refuse_rest()
    aliases = fields.items("aliases", least=0, most=10)
    sources = fields.items("sources", most=20)
    profile = Profile(
        name=fields.name("name"),
        aliases=tuple(str(alias) for alias in aliases),
        title=fields.prose("title", most=200),
        task=fields.prose("task", most=200),
        parameters=fields.whole("parameters", least=1, most=10**12),
        batch=batch,
        samples_per_epoch=fields.whole("samples_per_epoch", least=1, most=10**12),
        worker=fields.resources("worker"),
        ps=fields.resources("ps"),
        max_workers=fields.whole("max_workers", least=1, most=MOST_TASKS),
        max_ps=fields.whole("max_ps", least=1, most=MOST_TASKS),
        compute=_compute(Fields(fields.value("compute"), where=where, prefix="compute.")),
        hardware=_hardware(Fields(fields.value("hardware"), where=where, prefix="hardware.")),
        speeds=speeds,
        derivation=fields.prose("derivation", most=4000),
        sources=tuple(str(source) for source in sources),
    )
    fields.refuse_rest()
    return profile


def _compute(fields: Fields) -> Compute:
    basis = fields.choice("basis", ("measured", "counted"))
    note = fields.prose("note", most=2000)
    if basis == "measured":
        compute = Compute(
            basis=basis, note=note, samples_per_second=fields.number("samples_per_second", above=0.0, most=1e9)
        )
    else:
        compute = Compute(
            basis=basis,
            note=note,
            forward_flops=fields.number("forward_flops", above=0.0, most=1e18),
            achieved_flops=fields.number("achieved_flops_per_second", above=0.0, most=1e18),
        )
    fields.refuse_rest()
    return compute


def _hardware(fields: Fields) -> Hardware:
    hardware = Hardware(
        worker=fields.prose("worker", most=200),
        worker_bandwidth=fields.number("worker_bandwidth_bytes_per_second", least=1.0, most=1e15),
        ps_bandwidth=fields.number("ps_bandwidth_bytes_per_second", least=1.0, most=1e15),
        ps_update_rate=fields.number("ps_update_bytes_per_second", least=1.0, most=1e15),
        overhead=fields.number("overhead_seconds", most=1e3),
        per_worker=fields.number("per_worker_seconds", most=1e3),
        per_ps=fields.number("per_ps_seconds", most=1e3),
        ring_latency=fields.number("ring_latency_seconds", most=1e3),
    )
    fields.refuse_rest()
    return hardware
