"""Conversion of logged or generated jobs (submit time, duration, GPUs) into jobs of a workload."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from dl2d.core.errors import RequestError, WorkloadError
from dl2d.core.jobs import Architecture
from dl2d.core.resources import NO_RESOURCES, Resources, parse_resources
from dl2d.simulation.parse_key_value_options import Options, one_of, within
from dl2d.simulation.speeds.model_profiles import load_profile, profile_names
from dl2d.simulation.speeds.speed_models import MAX_TASKS
from dl2d.simulation.workload.workload_file import (
    MAX_JOBS,
    MAX_NODES,
    MAX_SLOTS,
    Feasibility,
    NodeGroup,
    SimulatedJob,
    Workload,
    ordered,
)

#: Why jobs are left out.
TOO_LARGE = f"more than {MAX_TASKS} workers"
NO_ROOM = "larger than the cluster"
# A worker's share of a GPU is counted in thousandths, as resources are.
_MIN_SHARE = 0.001
_DIGITS = 9
_MAX_EPOCHS = 1e9
_MIN_EPOCHS = 2e-9


@dataclass(frozen=True, slots=True)
class PastJob:
    """One job as a log has it. ``submit`` and ``seconds`` (more than 0) are in seconds, ``submit`` from any origin."""

    id: str
    submit: float
    seconds: float
    #: GPUs it ran on; 0 for a job of CPUs only.
    gpus: int
    #: Cores it ran on; looked at only where it had no GPU.
    cpus: float = 0.0
    #: Share of each of its GPUs.
    gpu_share: float = 1.0
    #: Name of its profile; drawn where it is empty.
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Options):
    """Settings of logs and generators."""

    #: Length of a slot.
    slot_seconds: float = within(1200.0, 1e-3, 1e8)
    #: Nodes of the cluster; 0: as many as have the work fill ``load`` of them, and as the largest job needs.
    nodes: int = within(0, 0, MAX_NODES)
    #: What a node has.
    node: str = "cpu:64,gpu:8"
    #: Share of the cluster that the work would fill at the sizes it had, where ``nodes`` is 0.
    load: float = within(0.7, 1e-3, 1000.0)
    architecture: str = one_of(Architecture.PS.value, [each.value for each in Architecture])
    #: Profiles to draw from, with commas between; by default those on GPUs for a job that had one, else the others.
    models: str = ""
    #: Bounds of a job that ran with g workers: from floor(g x shrink), at least 1, to ceil(g x stretch).
    shrink: float = within(0.0, 0.0, 1.0)
    stretch: float = within(2.0, 1.0, MAX_TASKS)

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        for name in self.model_names:
            load_profile(name)
        _ = self.node_resources

    @property
    def node_resources(self) -> Resources:
        """Resources of a node, parsed from ``node``."""
        try:
            resources = parse_resources(self.node, "node")
        except RequestError as error:
            raise WorkloadError(error.key, error.problem) from None
        if not resources.thousandths:
            raise WorkloadError("node", "is nothing; give at least one resource an amount above 0")
        return resources

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names in ``models``; empty for the default."""
        return tuple(name.strip() for name in self.models.split(",")) if self.models else ()


@dataclass(frozen=True, slots=True)
class Converted:
    """A workload, and how many of the jobs given are not in it, by reason."""

    workload: Workload
    left_out: Mapping[str, int]


def model_by_hash(seed: int, job: PastJob, names: Sequence[str]) -> str:
    """The rule by which logged jobs get a model: the first 8 bytes of SHA-256 of ``SEED:ID``, modulo their number.

    It looks at nothing else, so a job keeps its model whatever part of the log is read.
    """
    digest = hashlib.sha256(f"{seed}:{job.id}".encode()).digest()
    return names[int.from_bytes(digest[:8], "big") % len(names)]


def convert(jobs: Iterable[PastJob], settings: Settings, *, seed: int, where: str, description: str) -> Converted:
    """Make a workload of logged jobs, such that each takes the time it took if it gets the size it had.

    A job of g GPUs has had g workers of one GPU each (and g PSs); one without GPU as many workers as its cores give.
    Its work is seconds x speed(g, g) samples, with the speed of its profile. It comes in slot
    floor((submit - earliest submit) / slot_seconds). What it declares is what it takes.

    Raises
    ------
    WorkloadError
        No job is left, there are too many, or they span too many slots; names ``where``.
    """
    given = sorted(jobs, key=lambda job: (job.submit, job.id))
    sized: list[tuple[PastJob, str, int]] = []
    left_out = Counter[str]()
    gpu_names, cpu_names = _candidates(settings.model_names)
    for job in given:
        names = gpu_names if job.gpus else cpu_names
        model = job.model or model_by_hash(seed, job, names)
        workers = job.gpus or max(1, math.ceil(job.cpus / max(load_profile(model).worker.get("cpu"), 1e-3)))
        if workers > MAX_TASKS:
            left_out[TOO_LARGE] += 1
        else:
            sized.append((job, model, workers))
    nodes = settings.nodes or _nodes_for(sized, settings, where)
    cluster = (NodeGroup(nodes, settings.node_resources),)
    architecture = Architecture(settings.architecture)
    speeds = {model: load_profile(model).speed(architecture) for model in sorted({model for _, model, _ in sized})}
    feasibility = Feasibility(cluster, speeds, where)
    kept: list[SimulatedJob] = []
    first = sized[0][0].submit if sized else 0.0
    for job, model, workers in sized:
        slot = (job.submit - first) / settings.slot_seconds
        if slot > MAX_SLOTS:
            problem = f"job {job.id} would come in slot {slot:.0f}, after slot {MAX_SLOTS}; take longer slots"
            raise WorkloadError("slot_seconds", problem, where=where)
        made = _simulated(job, model, workers, math.floor(slot + 1e-9), settings)
        try:
            feasibility.check(made)
        except WorkloadError:
            left_out[NO_ROOM] += 1
        else:
            kept.append(made)
    if not kept:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in left_out.items())
        raise WorkloadError("", f"no job can be used{f': {reasons}' if reasons else ''}", where=where)
    if len(kept) > MAX_JOBS:
        raise WorkloadError("jobs", f"{len(kept)} jobs, more than {MAX_JOBS}; take fewer", where=where)
    used = {job.model for job in kept}
    workload = Workload(
        slot_seconds=settings.slot_seconds,
        cluster=cluster,
        speeds={model: speed for model, speed in speeds.items() if model in used},
        jobs=ordered(kept),
        description=description,
    )
    return Converted(workload, dict(left_out))


@cache
def _candidates(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Profiles for jobs with GPUs and for jobs without: those named, or all that fit."""
    if names:
        return names, names
    known = profile_names()
    on_gpu = tuple(name for name in known if load_profile(name).worker.get("gpu"))
    return on_gpu, tuple(name for name in known if name not in on_gpu)


def _demands(job: PastJob, model: str, settings: Settings) -> tuple[Resources, Resources]:
    profile = load_profile(model)
    share = max(_MIN_SHARE, job.gpu_share) if job.gpus else 0.0
    return _demands_of(profile.name, share, settings.architecture)


@cache
def _demands_of(profile_name: str, share: float, architecture: str) -> tuple[Resources, Resources]:
    """Of one worker and one PS: the profile's, with the share of a GPU that the job had."""
    profile = load_profile(profile_name)
    amounts = profile.worker.as_dict()
    if share and "gpu" in amounts:
        amounts["gpu"] *= share
    return Resources.of(amounts), profile.ps if architecture == Architecture.PS else NO_RESOURCES


def _nodes_for(sized: Sequence[tuple[PastJob, str, int]], settings: Settings, where: str) -> int:
    """Nodes on which the work, at the sizes it had and spread from first submit to last end, fills ``load``."""
    if not sized:
        return 1
    work, most = Counter[str](), Counter[str]()
    for job, model, workers in sized:
        worker, ps = _demands(job, model, settings)
        for name, amount in (worker * workers + ps * workers).thousandths:
            work[name] += int(amount * max(1.0, job.seconds))
            most[name] = max(most[name], amount)
    span = max(job.submit + job.seconds for job, _, _ in sized) - sized[0][0].submit
    have = dict(settings.node_resources.thousandths)
    nodes = 1
    for name in sorted(work):
        if name in have:
            mean = Fraction(work[name]) / Fraction(max(span, 1.0))
            nodes = max(nodes, math.ceil(mean / Fraction(settings.load) / have[name]), -(-most[name] // have[name]))
    if nodes > MAX_NODES:
        problem = f"the work needs {nodes} nodes such as this, more than {MAX_NODES}; set nodes, or take larger ones"
        raise WorkloadError("node", problem, where=where)
    return nodes


def _simulated(job: PastJob, model: str, workers: int, slot: int, settings: Settings) -> SimulatedJob:
    profile = load_profile(model)
    worker, ps = _demands(job, model, settings)
    has_ps = settings.architecture == Architecture.PS
    epochs = job.seconds * _speed(profile.name, settings.architecture, workers) / profile.samples_per_epoch
    epochs = min(_MAX_EPOCHS, max(_MIN_EPOCHS, float(f"{epochs:.{_DIGITS}g}")))
    least = max(1, math.floor(workers * settings.shrink))
    most = min(MAX_TASKS, math.ceil(workers * settings.stretch))
    return SimulatedJob(
        id=job.id,
        model=model,
        submit_slot=slot,
        epochs=epochs,
        declared_epochs=epochs,
        samples_per_epoch=float(profile.samples_per_epoch),
        worker=worker,
        ps=ps,
        min_workers=least,
        max_workers=most,
        min_ps=least if has_ps else 0,
        max_ps=most if has_ps else 0,
        architecture=Architecture(settings.architecture),
    )


@cache
def _speed(profile_name: str, architecture: str, workers: int) -> float:
    """Samples per second at the size that the job had."""
    return load_profile(profile_name).speed(Architecture(architecture)).samples_per_second(workers, workers)
