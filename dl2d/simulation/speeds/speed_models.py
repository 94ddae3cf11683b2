"""Speed models: how many samples a job trains per second with so many workers and parameter servers.

All are frozen values with pure functions. ``parse_speed`` makes one from its JSON description and
``describe`` gives that description back. Times are in seconds, sizes in bytes, speeds in samples per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import numpy as np
from pydantic import AfterValidator, TypeAdapter

from dl2d.core.array_types import Floats
from dl2d.core.errors import WorkloadError, did_you_mean, shown
from dl2d.core.input_validation import Flag, Items, Number, Record, Whole, bad, not_one_of, read, to_plain
from dl2d.core.jobs import Architecture, Consistency

N = TypeVar("N", float, Floats)

#: Most workers, and most parameter servers, that a table may speak of and a job may have.
MAX_TASKS = 1000
#: Most measured points of a table.
MAX_POINTS = 16_384
#: Most points that can be interpolated between: solving for weights takes four times 8 bytes x points squared, 200 MB.
MAX_INTERPOLATED = 2500
#: A measurement below this share of the table's median is taken for a failed run (``drop_failed``).
FAILED_SHARE = 0.05
_MAX_SPEED = 1e12
_MAX_BATCH = 10**9
# Below this a time is either a slip or makes speeds that overflow.
_MIN_SECONDS = 1e-12
_MAX_SECONDS = 1e9
_MAX_BYTES = 1e15

Batch = Annotated[int, Whole(1, _MAX_BATCH)]
Seconds = Annotated[float, Number(_MAX_SECONDS)]
Compute = Annotated[float, Number(_MAX_SECONDS, least=_MIN_SECONDS)]
Size = Annotated[float, Number(_MAX_BYTES)]
Bandwidth = Annotated[float, Number(_MAX_BYTES, least=1.0)]
Speed = Annotated[float, Number(_MAX_SPEED)]
PsCount = Annotated[int, Whole(0, MAX_TASKS)]
WorkerCount = Annotated[int, Whole(1, MAX_TASKS)]


def _some_time(theta: tuple[float, ...]) -> tuple[float, ...]:
    if max(theta) < _MIN_SECONDS:
        raise bad("", "a step must take time; at least one number must be above 0")
    return tuple(0.0 if value < _MIN_SECONDS else value for value in theta)


class SpeedModel(Protocol):
    """Speed of a job of one model type as a function of its size."""

    @property
    def architecture(self) -> Architecture:
        """Whether the model needs parameter servers (``ps``) or ignores them (``allreduce``)."""
        ...

    @property
    def consistency(self) -> Consistency:
        """Whether workers step together."""
        ...

    @property
    def batch(self) -> int | None:
        """Global batch size in samples; None where it is unknown or grows with the workers."""
        ...

    def samples_per_second(self, workers: int, ps: int) -> float:
        """Speed with ``workers`` workers and ``ps`` parameter servers; 0 where a needed count is 0.

        Raises ``ValueError`` if a count is negative or above ``MAX_TASKS``, or a table is too large to interpolate.
        """
        ...

    def grid(self, max_workers: int, max_ps: int) -> Floats:
        """All speeds at once, bit for bit those of ``samples_per_second``.

        Returns
        -------
        Floats
            float64, shape (max_ps + 1, max_workers + 1): ``grid[ps, workers]``, zeros where a needed count is 0.
            For ``allreduce`` all rows are alike, row 0 included. Callers keep it; it is computed on every call.

        Raises
        ------
        ValueError
            As ``samples_per_second``.
        """
        ...

    def describe(self) -> dict[str, object]:
        """The JSON description that ``parse_speed`` reads back to an equal model."""
        ...


class _Formula(Record):
    """What the closed formulas share. Scalars and arrays go through the same operations, so results are the same."""

    __slots__ = ()
    architecture: ClassVar[Architecture] = Architecture.PS
    consistency: ClassVar[Consistency] = Consistency.SYNC
    #: As ``formula`` has it in a file.
    formula: ClassVar[str]

    def describe(self) -> dict[str, object]:
        """See ``SpeedModel``."""
        return {"formula": self.formula, **to_plain(self)}

    def _rate(self, workers: N, ps: N) -> N:
        """Samples per second for counts of 1 and more."""
        raise NotImplementedError

    def samples_per_second(self, workers: int, ps: int) -> float:
        """See ``SpeedModel``."""
        _check_counts(workers, ps)
        if not workers or (not ps and self.architecture is Architecture.PS):
            return 0.0
        return float(self._rate(float(workers), float(max(ps, 1))))

    def grid(self, max_workers: int, max_ps: int) -> Floats:
        """See ``SpeedModel``."""
        _check_counts(max_workers, max_ps)
        speeds = np.zeros((max_ps + 1, max_workers + 1))
        first = 1 if self.architecture is Architecture.PS else 0
        workers = np.arange(1.0, max_workers + 1.0)[None, :]
        ps = np.maximum(np.arange(float(first), max_ps + 1.0), 1.0)[:, None]
        speeds[first:, 1:] = self._rate(workers, ps)
        return speeds


@dataclass(frozen=True, slots=True)
class PsSync(_Formula):
    """Synchronous training with parameter servers: ``steps/s = 1 / (a*B/w + b + c*w/p + d*w + e*p)``.

    B is the global batch, w workers, p parameter servers; samples/s = steps/s x B. In order the terms are computing the
    worker's share of the batch, what is fixed, w workers sharing the links of p servers, and the cost of every
    connection more on either side. Source: Peng et al., "Optimus", EuroSys 2018, section 3.2.

    ``theta`` = (a, b, c, d, e): seconds per sample, then seconds; none negative, not all zero.
    """

    theta: Annotated[tuple[Seconds, ...], Items(5, least=5), AfterValidator(_some_time)]
    batch: Batch

    formula: ClassVar[str] = "ps-sync"

    def _rate(self, workers: N, ps: N) -> N:
        a, b, c, d, e = self.theta
        return self.batch / (a * self.batch / workers + b + c * workers / ps + d * workers + e * ps)


@dataclass(frozen=True, slots=True)
class PsAsync(_Formula):
    """Asynchronous training with parameter servers: ``steps/s = w / (a + b*w/p + c*w + d*p)``.

    Every worker steps on its own with a batch of its own: B is the batch *per worker*, samples/s = steps/s x B.
    Source: Peng et al., "Optimus", EuroSys 2018, section 3.2.

    ``theta`` = (a, b, c, d): seconds; none negative, not all zero.
    """

    theta: Annotated[tuple[Seconds, ...], Items(4, least=4), AfterValidator(_some_time)]
    worker_batch: Batch

    formula: ClassVar[str] = "ps-async"
    consistency: ClassVar[Consistency] = Consistency.ASYNC
    file_keys: ClassVar[Mapping[str, str]] = {"worker_batch": "batch"}

    @property
    def batch(self) -> None:
        """There is no global batch."""
        return

    def _rate(self, workers: N, ps: N) -> N:
        a, b, c, d = self.theta
        return self.worker_batch * workers / (a + b * workers / ps + c * workers + d * ps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Derived(_Formula):
    """Synchronous training from what hardware and model are: computing, then communication, which do not overlap."""

    #: Global batch size in samples.
    batch: Batch
    #: Seconds one worker computes per sample, forward and backward.
    compute: Compute
    #: Size of the parameters, and of a gradient, in bytes.
    model_bytes: Size
    #: Seconds per step, whatever the size.
    overhead: Seconds = 0.0

    def local_seconds(self, workers: N) -> N:
        """Seconds of a step without communication. A worker has no less than one sample: more than B bring nothing."""
        seconds: N = self.overhead + self.compute * np.maximum(self.batch / workers, 1.0)
        return seconds


_DERIVED_KEYS = {"compute": "compute_seconds_per_sample", "overhead": "overhead_seconds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(_Derived):
    """Synchronous training with a ring all-reduce.

    ``step = overhead + compute * max(B/w, 1) + 2 (w-1)/w * bytes / bandwidth + latency * (w-1)`` seconds and
    samples/s = B / step. In a ring each worker sends and receives 2 (w-1)/w times the gradient (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms", JPDC 2009); ``latency`` is what each further worker adds.
    """

    #: Bytes per second between neighbours in the ring.
    bandwidth: Bandwidth
    #: Seconds per worker beyond the first.
    latency: Seconds = 0.0

    formula: ClassVar[str] = "allreduce"
    architecture: ClassVar[Architecture] = Architecture.ALLREDUCE
    file_keys: ClassVar[Mapping[str, str]] = {
        **_DERIVED_KEYS, "bandwidth": "bandwidth_bytes_per_second", "latency": "latency_seconds"
    }  # fmt: skip

    def _rate(self, workers: N, ps: N) -> N:
        del ps
        ring = 2.0 * (workers - 1.0) / workers * (self.model_bytes / self.bandwidth)
        return self.batch / (self.local_seconds(workers) + ring + self.latency * (workers - 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Physical(_Derived):
    """Synchronous training with parameter servers.

    ``step = overhead + compute * max(B/w, 1) + 2 * max(bytes / worker_bandwidth, w/p * bytes / ps_bandwidth)`` seconds
    and samples/s = B / step. Each worker pushes the gradient and pulls the weights through its own link, each server
    its p-th part of them for all w workers; the slower side sets the pace. Pull follows push. This is Optimus'
    reasoning (EuroSys 2018, section 3.2) with the workers' own links added.
    """

    #: Bytes per second of a worker's link, and of a server's, each way.
    worker_bandwidth: Bandwidth
    ps_bandwidth: Bandwidth

    formula: ClassVar[str] = "physical"
    file_keys: ClassVar[Mapping[str, str]] = {
        **_DERIVED_KEYS,
        "worker_bandwidth": "worker_bandwidth_bytes_per_second",
        "ps_bandwidth": "ps_bandwidth_bytes_per_second",
    }

    def _rate(self, workers: N, ps: N) -> N:
        one_way = np.maximum(
            self.model_bytes / self.worker_bandwidth, workers / ps * (self.model_bytes / self.ps_bandwidth)
        )
        rate: N = self.batch / (self.local_seconds(workers) + 2.0 * one_way)
        return rate


@dataclass(frozen=True)
class Table:
    """Measured speeds, and a linear radial-basis interpolation wherever nothing was measured.

    ``f(x) = sum_i weight_i * |x - x_i|`` over the measured points x_i = (ps, workers), Euclidean distance in raw
    counts, weights such that f equals every measurement (no smoothing, no polynomial); what comes out below 0 is 0.
    One point alone holds everywhere. Beyond the measured area this extrapolates. The same surface as in DL2's simulator
    (arXiv 1909.06040). Measured points are given back as they are.
    """

    #: (ps, workers, samples/s), ascending, no two for the same counts; ps is 0 for ``allreduce``.
    points: tuple[tuple[int, int, float], ...]
    architecture: Architecture = Architecture.PS
    #: Global batch size in samples, where known.
    batch: int | None = None
    consistency: Consistency = Consistency.SYNC

    def samples_per_second(self, workers: int, ps: int) -> float:
        """See ``SpeedModel``."""
        _check_counts(workers, ps)
        if self.architecture is Architecture.ALLREDUCE:
            ps = 0
        elif not ps:
            return 0.0
        if not workers:
            return 0.0
        measured = self._measured.get((ps, workers))
        return float(self._interpolated(ps, np.array([float(workers)]))[0]) if measured is None else measured

    def grid(self, max_workers: int, max_ps: int) -> Floats:
        """See ``SpeedModel``."""
        _check_counts(max_workers, max_ps)
        speeds = np.zeros((max_ps + 1, max_workers + 1))
        collective = self.architecture is Architecture.ALLREDUCE
        for ps in (0,) if collective else range(1, max_ps + 1):
            missing = [workers for workers in range(1, max_workers + 1) if (ps, workers) not in self._measured]
            if missing:
                speeds[ps, missing] = self._interpolated(ps, np.array(missing, float))
        for ps, workers, speed in self.points:
            if ps <= max_ps and workers <= max_workers:
                speeds[ps, workers] = speed
        if collective:
            speeds[:] = speeds[0]
        return speeds

    def fills(self, max_workers: int, max_ps: int) -> bool:
        """Whether every size up to these counts is measured, so that nothing need be interpolated."""
        if self.architecture is Architecture.ALLREDUCE:
            return all((0, workers) in self._measured for workers in range(1, max_workers + 1))
        inside = sum(ps <= max_ps and workers <= max_workers for ps, workers, _ in self.points)
        return inside == max_ps * max_workers

    def describe(self) -> dict[str, object]:
        """See ``SpeedModel``."""
        columns = max(workers for _, workers, _ in self.points)
        rows = max(1, *(ps for ps, _, _ in self.points))
        extra: dict[str, object] = {} if self.batch is None else {"batch": self.batch}
        if self.architecture is Architecture.ALLREDUCE:
            extra["architecture"] = str(self.architecture)
        if self.consistency is Consistency.ASYNC:
            extra["consistency"] = str(self.consistency)
        if len(self.points) == rows * columns:
            speeds = [speed for _, _, speed in self.points]
            return {"table": [speeds[row * columns : (row + 1) * columns] for row in range(rows)], **extra}
        return {"points": [list(point) for point in self.points], **extra}

    @cached_property
    def _measured(self) -> dict[tuple[int, int], float]:
        return {(ps, workers): speed for ps, workers, speed in self.points}

    @cached_property
    def _weights(self) -> Floats:
        if len(self.points) > MAX_INTERPOLATED:
            raise ValueError(
                f"a table of {len(self.points)} points has a hole; at most {MAX_INTERPOLATED} can be interpolated"
            )
        at = self._at
        distances = np.hypot(at[:, None, 0] - at[None, :, 0], at[:, None, 1] - at[None, :, 1])
        return np.linalg.solve(distances, np.array([speed for _, _, speed in self.points]))

    @cached_property
    def _at(self) -> Floats:
        return np.array([(ps, workers) for ps, workers, _ in self.points], float)

    def _interpolated(self, ps: int, workers: Floats) -> Floats:
        """Speeds at one PS count; sums run over the last axis, so they do not depend on how many are asked for."""
        if len(self.points) == 1:
            return np.full(len(workers), self.points[0][2])
        distances = np.hypot(self._at[None, :, 0] - float(ps), self._at[None, :, 1] - workers[:, None])
        speeds: Floats = np.maximum((distances * self._weights[None, :]).sum(axis=1), 0.0)
        return speeds


def _check_counts(workers: int, ps: int) -> None:
    if not (0 <= workers <= MAX_TASKS and 0 <= ps <= MAX_TASKS):
        raise ValueError(f"{workers} workers and {ps} parameter servers: each count must be from 0 to {MAX_TASKS}")


_FORMULAS: Mapping[str, TypeAdapter[Any]] = {
    each.formula: TypeAdapter(each) for each in (AllReduce, Physical, PsAsync, PsSync)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured(Record):
    """What tables and points have in common in a file."""

    architecture: Architecture = Architecture.PS
    consistency: Consistency = Consistency.SYNC
    batch: Batch | None = None
    #: Leave out what was measured below ``FAILED_SHARE`` of the median.
    drop_failed: Flag = False

    def at(self) -> list[tuple[int, int, float]]:
        """(ps, workers, speed) as they were measured, in any order; ps is 0 for ``allreduce``."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows(_Measured):
    """Row = PS count from 1 (the only row of an all-reduce has none), column = workers from 1."""

    table: Annotated[tuple[Annotated[tuple[Speed | None, ...], Items(MAX_TASKS)], ...], Items(MAX_TASKS)]
    #: Fill holes from the measured points.
    interpolate: Flag = False

    def at(self) -> list[tuple[int, int, float]]:
        """See ``_Measured``. Raises ``WorkloadError``."""
        collective = self.architecture is Architecture.ALLREDUCE
        width = max(map(len, self.table))
        if collective and len(self.table) > 1:
            raise WorkloadError("table", f"expected one row, for allreduce has no PS; got {len(self.table)}")
        if len(self.table) * width > MAX_POINTS:
            raise WorkloadError("table", f"{len(self.table)} x {width} is more than {MAX_POINTS} speeds")
        read: list[tuple[int, int, float]] = []
        for index, row in enumerate(self.table):
            for column in range(width):
                value = row[column] if column < len(row) else None
                if value is not None:
                    read.append((0 if collective else index + 1, column + 1, value))
                elif not self.interpolate:
                    size = f"{column + 1} workers" if collective else f"{index + 1} PS and {column + 1} workers"
                    raise WorkloadError(
                        f"table[{index}][{column}]",
                        f"a hole: there is no speed for {size}; give one, or set "
                        '"interpolate": true to have holes filled from the measured points',
                    )
        return read


@dataclass(frozen=True, slots=True, kw_only=True)
class _Points(_Measured):
    """Any sizes, each as ``[ps, workers, samples per second]``."""

    points: Annotated[tuple[Annotated[tuple[PsCount, WorkerCount, Speed], Items(3, least=3)], ...], Items(MAX_POINTS)]

    def at(self) -> list[tuple[int, int, float]]:
        """See ``_Measured``. Raises ``WorkloadError``."""
        collective = self.architecture is Architecture.ALLREDUCE
        seen: set[tuple[int, int]] = set()
        for index, (ps, workers, _) in enumerate(self.points):
            if bool(ps) is collective:
                expected = "0, for allreduce has no PS" if collective else f"a whole number from 1 to {MAX_TASKS}"
                raise WorkloadError(f"points[{index}][0]", f"expected {expected}, got {ps}")
            if (ps, workers) in seen:
                raise WorkloadError(f"points[{index}]", f"a second speed for {ps} PS and {workers} workers")
            seen.add((ps, workers))
        return list(self.points)


_MEASURED: Mapping[str, TypeAdapter[Any]] = {"table": TypeAdapter(_Rows), "points": TypeAdapter(_Points)}
_KINDS = ("table", "points", "formula")


def parse_speed(description: object, *, where: str = "") -> SpeedModel:
    """Read one description of a speed, as it stands in a workload file; ``docs/workloads.md`` has every key.

    Parameters
    ----------
    description
        ``{"table": ...}``, ``{"points": ...}`` or ``{"formula": ...}``.
    where
        File and model; stands first in every error.

    Raises
    ------
    WorkloadError
        A key is missing, unknown or has a bad value, or the table has holes and nothing says that they may be filled.
    """

    def bad_value(key: str, problem: str) -> WorkloadError:
        return WorkloadError(key, problem, where=where)

    if not isinstance(description, Mapping):
        raise bad_value("", f"expected an object {{...}}, got {shown(description)}")
    kinds = [kind for kind in _KINDS if kind in description]
    if len(kinds) != 1:
        hint = next((found for key in map(str, description) if (found := did_you_mean(key, _KINDS))), "")
        given = " and ".join(kinds) or f"{shown(description)}{hint}"
        raise bad_value("", f"expected exactly one of {', '.join(_KINDS)}, got {given}")
    kind = kinds[0]
    if kind == "formula":
        formula = description["formula"]
        if not isinstance(formula, str) or formula not in _FORMULAS:
            raise bad_value("formula", not_one_of(formula, _FORMULAS))
        rest = {key: value for key, value in description.items() if key != "formula"}
        model: SpeedModel = read(_FORMULAS[formula], rest, bad_value)
        return model
    measured: _Measured = read(_MEASURED[kind], description, bad_value)
    try:
        points = measured.at()
    except WorkloadError as error:
        raise bad_value(error.key, error.problem) from None
    if measured.drop_failed and points:
        # Runs that failed are logged with a speed of 0, or of next to nothing where they died late.
        least = FAILED_SHARE * float(np.median([speed for _, _, speed in points]))
        points = [point for point in points if point[2] > least]
    if not any(speed > 0.0 for _, _, speed in points):
        raise bad_value(kind, "has no measured speed above 0")
    return Table(tuple(sorted(points)), measured.architecture, measured.batch, measured.consistency)
