"""Workload files: a cluster, speeds of its models, and jobs (docs/workloads.md has the format)."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, PlainValidator, TypeAdapter

from dl2d.atomic_file import write_atomically
from dl2d.core.cluster import Node, submit_order
from dl2d.core.errors import WorkloadError, did_you_mean, printable, shown
from dl2d.core.input_validation import (
    NAME,
    Demand,
    Items,
    Kinds,
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
from dl2d.core.jobs import NOTHING, Allocation, Architecture, JobKey, JobRequest, Owner
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.simulation.speeds.model_profiles import load_profile
from dl2d.simulation.speeds.speed_models import MAX_INTERPOLATED, MAX_TASKS, SpeedModel, Table, parse_speed

MAX_JOBS = 200_000
MAX_MODELS = 1000
MAX_GROUPS = 10_000
MAX_NODES = 100_000
#: Latest slot in which a job may come: with slots of a second, almost four months.
MAX_SLOTS = 10_000_000
#: Most entries of ``capacity_changes``.
MAX_CHANGES = 100_000
_MAX_ID_LENGTH = 64
# Below this a length is a slip, and quotients of it could overflow.
_MIN_LENGTH = 1e-9


Length = Annotated[float, Number(1e9, above=_MIN_LENGTH)]
WorkerBound = Annotated[int, Whole(1, MAX_TASKS)]
LeastCount = Annotated[int, Whole(0, MAX_TASKS)]
Slot = Annotated[int, Whole(0, MAX_SLOTS)]
NodeCount = Annotated[int, Whole(0, MAX_NODES)]


def _identity(value: object) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18 else value
    plain = isinstance(text, str) and text.isascii() and text.replace("-", "_").replace("_", "a").isalnum()
    if not plain or len(str(text)) > _MAX_ID_LENGTH:
        raise bad("", f"expected up to {_MAX_ID_LENGTH} letters, digits, _ and -, got {shown(value)}")
    return str(text)


@dataclass(frozen=True, slots=True)
class NodeGroup(Record):
    """``count`` nodes that are alike."""

    count: NodeCount
    resources: Demand
    name: Name = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob(Record):
    """A job of a workload: what it asks for, and how long it really is."""

    #: Unique in the workload: letters, digits, _ and -.
    id: Annotated[str, PlainValidator(_identity)]
    #: Type of the model; one of the workload's speeds.
    model: Name
    #: Slot at whose start it is admitted, from 0.
    submit_slot: Slot
    #: Epochs after which it ends.
    epochs: Length
    #: Epochs that its user says it takes: all that a scheduler sees.
    declared_epochs: Length
    samples_per_epoch: Annotated[float, Number(1e15, above=_MIN_LENGTH)]
    #: Demand of one worker and of one parameter server; nothing for a PS of an all-reduce job.
    worker: Demand
    ps: Demand = NO_RESOURCES
    #: Bounds on a job that runs; it may always wait with none, so 0 means the same as 1. PS counts are 0 for allreduce.
    min_workers: LeastCount = 0
    max_workers: WorkerBound
    min_ps: LeastCount = 0
    max_ps: WorkerBound = 0
    #: Worker counts that it can run with, ascending; empty for any within the bounds.
    allowed_workers: Annotated[
        tuple[WorkerBound, ...], Items(MAX_TASKS), AfterValidator(lambda counts: tuple(sorted(counts)))
    ] = ()
    architecture: Architecture = Architecture.PS
    #: Type that its user says it is, where that is another.
    said_model: str = ""
    #: Whose job it is, where the site's guard has limits for users, accounts or partitions; None where that is unknown.
    owner: Owner | None = None
    #: See ``JobRequest``.
    asked_size: Allocation = NOTHING

    internal_fields: ClassVar[frozenset[str]] = frozenset({"said_model", "owner", "asked_size"})

    @property
    def least_workers(self) -> int:
        """Fewest workers that it runs with."""
        return next((count for count in self.allowed_workers if count >= self.min_workers), max(1, self.min_workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityChange(Record):
    """From the start of ``slot`` on, only the first ``up`` nodes of a name are there (see ``Workload.nodes``)."""

    slot: Slot
    #: Empty in a file: that of all nodes, or ``node``.
    name: Annotated[str, Text(128)] = ""
    up: NodeCount


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Input of a simulation. ``jobs`` are in submit order, then by id (ids that are numbers as numbers)."""

    slot_seconds: float
    cluster: tuple[NodeGroup, ...]
    #: By model; not to be changed.
    speeds: Mapping[str, SpeedModel]
    jobs: tuple[SimulatedJob, ...]
    #: For people: what it is and where it came from.
    description: str = ""
    #: By slot; nodes that have gone come back when a later change says so.
    capacity_changes: tuple[CapacityChange, ...] = ()

    @property
    def capacity(self) -> Resources:
        """All that the cluster has when every node is there."""
        return Resources.total(group.resources * group.count for group in self.cluster)

    def nodes(self) -> tuple[Node, ...]:
        """The nodes one by one, in file order: ``node-001`` ..., numbered through groups of one name.

        Numbers are padded so that names sort as the nodes stand.
        """
        totals = Counter[str]()
        for group in self.cluster:
            totals[group.name] += group.count
        numbers = Counter[str]()
        nodes: list[Node] = []
        for group in self.cluster:
            width = len(str(totals[group.name]))
            for _ in range(group.count):
                numbers[group.name] += 1
                nodes.append(Node(f"{group.name}-{numbers[group.name]:0{width}d}", group.resources))
        return tuple(nodes)

    def epochs_in_slot(self, job: SimulatedJob, workers: int, ps: int) -> float:
        """Epochs that the job does in one whole slot: speed x slot_seconds / samples_per_epoch."""
        speed = self.speeds[job.model].samples_per_second(workers, ps)
        return speed * self.slot_seconds / job.samples_per_epoch


def to_request(job: SimulatedJob, workload: Workload) -> JobRequest:
    """The request that a scheduler sees: with the declared epochs and type, not the real ones."""
    speed = workload.speeds[job.model]
    has_ps = job.architecture is Architecture.PS
    return JobRequest(
        name=job.said_model or job.model,
        model=job.said_model or job.model,
        epochs=job.declared_epochs,
        samples_per_epoch=job.samples_per_epoch,
        steps_per_epoch=None,
        batch=speed.batch,
        worker=job.worker,
        ps=job.ps,
        min_workers=max(1, job.min_workers),
        max_workers=job.max_workers,
        min_ps=max(1, job.min_ps) if has_ps else 0,
        max_ps=job.max_ps if has_ps else 0,
        allowed_workers=job.allowed_workers,
        architecture=job.architecture,
        consistency=speed.consistency,
        asked_size=job.asked_size,
    )


def read_workload(source: str | os.PathLike[str] | Mapping[str, object], *, where: str = "") -> Workload:
    """Read and check a workload.

    Parameters
    ----------
    source
        Path of a JSON file, or the object that one would hold.
    where
        What errors call it; the path by default.

    Raises
    ------
    WorkloadError
        The file cannot be read, is no JSON, lacks a key or has an unknown or bad one, or cannot be run: an empty
        cluster, a job that fits no node or never gets on, an unknown model. Names file, job and key.
    """
    if isinstance(source, Mapping):
        return _parse(source, where or "workload")
    where = where or os.fspath(source)
    return _parse(_load(source, where), where)


def write_workload(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Write a workload as JSON, replacing the file as a whole; ``read_workload`` gives an equal one back.

    Raises ``WorkloadError`` if the file cannot be written.
    """
    text = json.dumps(describe_workload(workload), indent=1, allow_nan=False) + "\n"
    try:
        write_atomically(Path(path), text)
    except OSError as error:
        raise WorkloadError("", f"cannot be written: {error.strerror or error}", where=os.fspath(path)) from None


def describe_workload(workload: Workload) -> dict[str, object]:
    """The workload as the object that a workload file holds."""
    changes = [to_plain(change) for change in workload.capacity_changes]
    return {
        **({"description": workload.description} if workload.description else {}),
        "slot_seconds": workload.slot_seconds,
        "cluster": [to_plain(group) for group in workload.cluster],
        **({"capacity_changes": changes} if changes else {}),
        "speeds": {model: speed.describe() for model, speed in workload.speeds.items()},
        # A PS of an all-reduce job asks for nothing.
        "jobs": [{key: value for key, value in to_plain(job).items() if value != {}} for job in workload.jobs],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _File(Record):
    """A workload file. Speeds and jobs are checked one by one, so that an error names the job."""

    slot_seconds: Annotated[float, Number(1e8, above=_MIN_LENGTH)]
    cluster: Annotated[tuple[NodeGroup, ...], Items(MAX_GROUPS)]
    speeds: Annotated[Mapping[str, Any], Kinds((Mapping,), f"an object of 1 to {MAX_MODELS} models")]
    jobs: Annotated[Sequence[Any], Kinds((list, tuple), f"a list of 1 to {MAX_JOBS} entries")]
    description: Annotated[str, Text(100_000)] = ""
    capacity_changes: Annotated[tuple[CapacityChange, ...], Items(MAX_CHANGES)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfProfile(Record):
    """A speed that a shipped profile has."""

    profile: Name
    kind: Literal["ps-sync", "physical", "allreduce", "measured"] = "ps-sync"

    def speed(self) -> SpeedModel:
        """The speed. Raises ``WorkloadError``."""
        profile = load_profile(self.profile)
        if self.kind not in profile.speeds:
            problem = f"the profile {profile.name} has only {', '.join(sorted(profile.speeds))}"
            raise WorkloadError("kind", problem)
        return profile.speeds[self.kind]


_FILE = TypeAdapter(_File)
_JOB = TypeAdapter(SimulatedJob)
_OF_PROFILE = TypeAdapter(_OfProfile)


def _load(path: str | os.PathLike[str], where: str) -> object:
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise WorkloadError.unreadable(where, error) from None

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise WorkloadError(printable(twice), f"is given twice in one object{_id_of(found)}", where=where)
        return found

    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise WorkloadError("", f"is not JSON: {error}", where=where) from None


def _id_of(found: Mapping[str, object]) -> str:
    return f" (id {shown(found['id'])})" if "id" in found else ""


def _parse(given: object, where: str) -> Workload:
    def refused(key: str, problem: str) -> WorkloadError:
        return WorkloadError(key, problem, where=where)

    file: _File = read(_FILE, given, refused)
    total = sum(group.count for group in file.cluster)
    if not 1 <= total <= MAX_NODES:
        raise refused("cluster", f"expected 1 to {MAX_NODES} nodes in all, got {total}")
    if not 1 <= len(file.jobs) <= MAX_JOBS:
        raise refused("jobs", f"expected a list of 1 to {MAX_JOBS} entries, got {shown(file.jobs)}")
    changes = _in_order(file.capacity_changes, file.cluster, refused)
    speeds = _speeds(file.speeds, where)
    jobs: dict[str, SimulatedJob] = {}
    # Whatever fits the last of the cluster's sizes can end, for that one stays.
    when = "after the last capacity change, " if changes else ""
    feasibility = Feasibility(_after(file.cluster, changes), speeds, where, when)
    for index, entry in enumerate(file.jobs):
        job = _job(entry, index, speeds, where)
        if job.id in jobs:
            raise WorkloadError("id", "two jobs have this id", where=where, job=job.id)
        feasibility.check(job)
        jobs[job.id] = job
    return Workload(
        slot_seconds=file.slot_seconds,
        cluster=file.cluster,
        speeds=speeds,
        jobs=ordered(jobs.values()),
        description=file.description,
        capacity_changes=changes,
    )


def ordered(jobs: Iterable[SimulatedJob]) -> tuple[SimulatedJob, ...]:
    """Jobs by slot and id, as ``dl2d.core.cluster.in_submit_order`` has them: 9 before 10, numbers before names."""
    return tuple(sorted(jobs, key=lambda job: (submit_order(JobKey("", job.id, job.submit_slot)), job.id)))


def _in_order(
    changes: tuple[CapacityChange, ...], groups: tuple[NodeGroup, ...], refused: Callable[[str, str], WorkloadError]
) -> tuple[CapacityChange, ...]:
    """The changes by slot and name; they must be of nodes that the cluster has."""
    totals = Counter[str]()
    for group in groups:
        totals[group.name] += group.count
    usual = next(iter(totals)) if len(totals) == 1 else "node"
    found: dict[tuple[int, str], CapacityChange] = {}
    for index, given in enumerate(changes):
        at = f"capacity_changes[{index}]"
        change = given if given.name else replace(given, name=usual)
        if change.name not in totals:
            raise refused(f"{at}.name", not_one_of(change.name, totals))
        if change.up > totals[change.name]:
            problem = f"expected a whole number from 0 to {totals[change.name]}, got {change.up}"
            raise refused(f"{at}.up", problem)
        if (change.slot, change.name) in found:
            raise refused(f"{at}.slot", f"two changes of {change.name} in slot {change.slot}")
        found[change.slot, change.name] = change
    return tuple(found[key] for key in sorted(found))


def _after(groups: tuple[NodeGroup, ...], changes: tuple[CapacityChange, ...]) -> tuple[NodeGroup, ...]:
    """The groups as the changes leave them."""
    left = {change.name: change.up for change in changes}
    after = []
    for group in groups:
        count = min(group.count, left.get(group.name, group.count))
        if group.name in left:
            left[group.name] -= count
        after.append(NodeGroup(count, group.resources, group.name))
    return tuple(after)


def _label(entry: object, index: int) -> str:
    given = entry.get("id") if isinstance(entry, Mapping) else None
    if isinstance(given, int | str) and not isinstance(given, bool) and given != "":
        return shown(given).strip("'")
    return f"number {index + 1} of the list"


def _speeds(described: Mapping[str, object], where: str) -> dict[str, SpeedModel]:
    if not 1 <= len(described) <= MAX_MODELS:
        problem = f"expected an object of 1 to {MAX_MODELS} models, got {shown(described)}"
        raise WorkloadError("speeds", problem, where=where)
    speeds: dict[str, SpeedModel] = {}
    for model, description in described.items():
        if not isinstance(model, str) or not re.fullmatch(NAME, model):
            problem = f"{shown(model)} is no name of a model (up to 128 plain characters)"
            raise WorkloadError("speeds", problem, where=where)
        try:
            if isinstance(description, Mapping) and "profile" in description:
                speeds[model] = read(_OF_PROFILE, description, WorkloadError).speed()
            else:
                speeds[model] = parse_speed(description)
        except WorkloadError as error:
            key = f"speeds.{model}.{error.key}".rstrip(".")
            raise WorkloadError(key, error.problem, where=where) from None
    return speeds


def _job(entry: object, index: int, speeds: Mapping[str, SpeedModel], where: str) -> SimulatedJob:
    label = ""

    def refused(key: str, problem: str) -> WorkloadError:
        return WorkloadError(key, problem, where=where, job=label or _label(entry, index))

    job: SimulatedJob = read(_JOB, _completed(entry, speeds), refused)
    if job.model not in speeds:
        known = ", ".join(sorted(speeds)[:20])
        problem = f"unknown model {job.model!r}{did_you_mean(job.model, speeds)}; speeds has {known}"
        raise refused("model", problem)
    needs = speeds[job.model].architecture
    if job.architecture is not needs:
        raise refused("architecture", f"{job.architecture}, but speeds.{job.model} is of {needs}")
    if needs is Architecture.PS and not (job.max_ps and job.ps.thousandths):
        raise refused("ps" if job.max_ps else "max_ps", "missing")
    if job.min_workers > job.max_workers:
        raise refused("min_workers", f"{job.min_workers} is more than max_workers, {job.max_workers}")
    if len(set(job.allowed_workers)) < len(job.allowed_workers):
        raise refused("allowed_workers", f"a count is given twice in {shown(job.allowed_workers)}")
    for count in job.allowed_workers:
        if not job.min_workers <= count <= job.max_workers:
            raise refused("allowed_workers", f"{count} is not within {job.min_workers} to {job.max_workers}")
    if job.min_ps > job.max_ps:
        raise refused("min_ps", f"{job.min_ps} is more than max_ps, {job.max_ps}")
    return job


_OF_SERVERS = frozenset({"ps", "min_ps", "max_ps"})


def _completed(entry: object, speeds: Mapping[str, SpeedModel]) -> object:
    """A job's entry with the defaults that depend on other parts of the file.

    What it says of servers is left out where its model has none, so that one list of jobs may serve both kinds.
    """
    if not isinstance(entry, Mapping):
        return entry
    model = entry.get("model")
    speed = speeds.get(model) if isinstance(model, str) else None
    architecture = Architecture.PS if speed is None else speed.architecture
    given = {"architecture": architecture, "declared_epochs": entry.get("epochs"), **entry}
    if given["architecture"] == Architecture.ALLREDUCE:
        for key in _OF_SERVERS:
            given.pop(key, None)
    return given


class Feasibility:
    """Whether jobs can run at all on an empty cluster; remembers answers, for most jobs are alike."""

    def __init__(
        self, groups: tuple[NodeGroup, ...], speeds: Mapping[str, SpeedModel], where: str, when: str = ""
    ) -> None:
        #: Stands before what is wrong.
        self._when = when
        self._groups = groups
        self._capacity = Resources.total(group.resources * group.count for group in groups)
        self._speeds = speeds
        self._where = where
        self._room: dict[Resources, int] = {}
        self._passed: set[tuple[object, ...]] = set()

    def check(self, job: SimulatedJob) -> None:
        """Refuse a job with tasks larger than any node, a minimum size larger than the cluster, or no speed at all."""
        kind = (
            job.model, job.worker, job.ps, job.min_workers, job.max_workers, job.min_ps, job.max_ps, job.allowed_workers
        )  # fmt: skip
        if kind not in self._passed:
            self._check_room(job)
            self._check_speed(job)
            self._passed.add(kind)

    def _check_room(self, job: SimulatedJob) -> None:
        workers, ps = job.least_workers, max(1, job.min_ps) if job.max_ps else 0
        for key, demand, count in (("worker", job.worker, workers), ("ps", job.ps, ps)):
            if count and self._fitting(demand, MAX_TASKS) < count:
                if not self._fitting(demand, 1):
                    problem = f"{self._when}no node has room for one task of {demand}"
                else:
                    problem = f"{self._when}the whole cluster has no room for {count} tasks of {demand} (min_{key}s)"
                raise WorkloadError(key, problem.replace("min_pss", "min_ps"), where=self._where, job=job.id)
        least = job.worker * workers + job.ps * ps
        if not least.fits_in(self._capacity):
            short = least.lacking(self._capacity)
            problem = f"its minimum size, {workers} workers and {ps} PS, is more than the cluster: {self._when}{short}"
            raise WorkloadError("worker", problem, where=self._where, job=job.id)

    def _fitting(self, demand: Resources, most: int) -> int:
        """How many tasks of this demand alone fit on the empty cluster, counted up to ``most``."""
        if demand not in self._room:
            room = 0
            for group in self._groups:
                if group.count and room < MAX_TASKS:
                    have = dict(group.resources.thousandths)
                    room += group.count * min(have.get(name, 0) // amount for name, amount in demand.thousandths)
            self._room[demand] = room
        return min(self._room[demand], most)

    def _check_speed(self, job: SimulatedJob) -> None:
        """Formulas are positive wherever a job may be; a table may be 0 all over the job's bounds."""
        speed = self._speeds[job.model]
        if not isinstance(speed, Table):
            return
        if len(speed.points) > MAX_INTERPOLATED and not speed.fills(job.max_workers, job.max_ps):
            problem = (
                f"speeds.{job.model} leaves sizes up to {job.max_workers} workers and {job.max_ps} PS unmeasured, and "
                f"has more than the {MAX_INTERPOLATED} points that can be interpolated between"
            )
            raise WorkloadError("max_workers", problem, where=self._where, job=job.id)
        allowed = job.allowed_workers
        if any(
            value > 0 and w <= job.max_workers and ps <= job.max_ps and (not allowed or w in allowed)
            for ps, w, value in speed.points
        ):
            return
        grid = speed.grid(job.max_workers, job.max_ps)
        if not (grid[:, allowed] if allowed else grid).any():
            problem = (
                f"would never progress: speeds.{job.model} is 0 up to {job.max_workers} workers and {job.max_ps} PS"
            )
            raise WorkloadError("max_workers", problem, where=self._where, job=job.id)
