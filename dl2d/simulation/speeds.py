"""Speed models: how many samples a job trains per second with so many workers and parameter servers.

All are frozen values with pure functions. ``parse_speed`` makes one from its JSON description and
``describe`` gives that description back. Times are in seconds, sizes in bytes, speeds in samples per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dl2d.core.errors import WorkloadError
from dl2d.core.jobs import Architecture, Consistency
from dl2d.core.wording import shown
from dl2d.simulation.fields import Fields

Grid = NDArray[np.float64]
N = TypeVar("N", float, Grid)

#: Most workers, and most parameter servers, that a table may speak of and a job may have.
MOST_TASKS: Final = 1000
#: Most measured points of a table.
MOST_POINTS: Final = 16_384
#: Most points that can be interpolated between: solving for weights takes four times 8 bytes x points squared, 200 MB.
MOST_INTERPOLATED: Final = 2500
#: A measurement below this share of the table's median is taken for a failed run (``drop_failed``).
FAILED_SHARE: Final = 0.05
_FASTEST = 1e12
_LARGEST_BATCH = 10**9
# Below this a time is either a slip or makes speeds that overflow.
_SHORTEST = 1e-12
_LONGEST = 1e9
_LARGEST_BYTES = 1e15


class SpeedModel(Protocol):
    """Speed of a job of one model type as a function of its size."""

    @property
    def architecture(self) -> Architecture:
        """Whether the model needs parameter servers (``ps``) or ignores them (``allreduce``)."""
        ...

    @property
    def batch(self) -> int | None:
        """Global batch size in samples; None where it is unknown or grows with the workers."""
        ...

    def samples_per_second(self, workers: int, ps: int) -> float:
        """Speed with ``workers`` workers and ``ps`` parameter servers; 0 where a needed count is 0.

        Raises
        ------
        ValueError
            A count is negative or above ``MOST_TASKS``, or a table is too large to interpolate.
        """
        ...

    def grid(self, max_workers: int, max_ps: int) -> Grid:
        """All speeds at once, bit for bit those of ``samples_per_second``.

        Returns
        -------
        Grid
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


class _Formula:
    """What the closed formulas share. Scalars and arrays go through the same operations, so results are the same."""

    __slots__ = ()
    architecture: ClassVar[Architecture] = Architecture.PS

    def _rate(self, workers: N, ps: N) -> N:
        """Samples per second for counts of 1 and more."""
        raise NotImplementedError

    def samples_per_second(self, workers: int, ps: int) -> float:
        """See ``SpeedModel``."""
        _check_counts(workers, ps)
        if not workers or (not ps and self.architecture is Architecture.PS):
            return 0.0
        return float(self._rate(float(workers), float(max(ps, 1))))

    def grid(self, max_workers: int, max_ps: int) -> Grid:
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

    theta: tuple[float, float, float, float, float]
    batch: int

    def _rate(self, workers: N, ps: N) -> N:
        a, b, c, d, e = self.theta
        return self.batch / (a * self.batch / workers + b + c * workers / ps + d * workers + e * ps)

    def describe(self) -> dict[str, object]:
        """See ``SpeedModel``."""
        return {"formula": "ps-sync", "theta": list(self.theta), "batch": self.batch}


@dataclass(frozen=True, slots=True)
class PsAsync(_Formula):
    """Asynchronous training with parameter servers: ``steps/s = w / (a + b*w/p + c*w + d*p)``.

    Every worker steps on its own with a batch of its own: B is the batch *per worker*, samples/s = steps/s x B.
    Source: Peng et al., "Optimus", EuroSys 2018, section 3.2.

    ``theta`` = (a, b, c, d): seconds; none negative, not all zero.
    """

    theta: tuple[float, float, float, float]
    worker_batch: int

    @property
    def batch(self) -> None:
        """There is no global batch."""
        return

    def _rate(self, workers: N, ps: N) -> N:
        a, b, c, d = self.theta
        return self.worker_batch * workers / (a + b * workers / ps + c * workers + d * ps)

    def describe(self) -> dict[str, object]:
        """See ``SpeedModel``."""
        return {"formula": "ps-async", "theta": list(self.theta), "batch": self.worker_batch}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(_Formula):
    """Synchronous training with a ring all-reduce.

    ``step = overhead + compute * max(B/w, 1) + 2 (w-1)/w * bytes / bandwidth + latency * (w-1)`` seconds and
    samples/s = B / step. In a ring each worker sends and receives 2 (w-1)/w times the gradient (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms", JPDC 2009); ``latency`` is what each further worker adds. A worker has
    no less than one sample, so workers beyond B bring nothing. Computing and sending do not overlap.
    """

    #: Global batch size in samples.
    batch: int
    #: Seconds one worker computes per sample, forward and backward.
    compute: float
    #: Size of the gradient in bytes.
    model_bytes: float
    #: Bytes per second between neighbours in the ring.
    bandwidth: float
    #: Seconds per worker beyond the first.
    latency: float = 0.0
    #: Seconds per step, whatever the size.
    overhead: float = 0.0

    architecture: ClassVar[Architecture] = Architecture.ALLREDUCE

    def _rate(self, workers: N, ps: N) -> N:
        del ps
        share = np.maximum(self.batch / workers, 1.0)
        ring = 2.0 * (workers - 1.0) / workers * (self.model_bytes / self.bandwidth)
        rate: N = self.batch / (self.overhead + self.compute * share + ring + self.latency * (workers - 1.0))
        return rate

    def describe(self) -> dict[str, object]:
        """See ``SpeedModel``."""
        return {
            "formula": "allreduce",
            "batch": self.batch,
            "compute_seconds_per_sample": self.compute,
            "model_bytes": self.model_bytes,
            "bandwidth_bytes_per_second": self.bandwidth,
            "latency_seconds": self.latency,
            "overhead_seconds": self.overhead,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Physical(_Formula):
    """Synchronous training with parameter servers, from what hardware and model are.

    ``step = overhead + compute * max(B/w, 1) + 2 * max(bytes / worker_bandwidth, w/p * bytes / ps_bandwidth)`` seconds
    and samples/s = B / step. Each worker pushes the gradient and pulls the weights through its own link, each server
    its p-th part of them for all w workers; the slower side sets the pace. Pull follows push, and neither overlaps
    with computing. This is Optimus' reasoning (EuroSys 2018, section 3.2) with the workers' own links added.
    """

    #: Global batch size in samples.
    batch: int
    #: Seconds one worker computes per sample, forward and backward.
    compute: float
    #: Size of the parameters in bytes.
    model_bytes: float
    #: Bytes per second of a worker's link, and of a server's, each way.
    worker_bandwidth: float
    ps_bandwidth: float
    #: Seconds per step, whatever the size.
    overhead: float = 0.0

    def _rate(self, workers: N, ps: N) -> N:
        share = np.maximum(self.batch / workers, 1.0)
        one_way = np.maximum(
            self.model_bytes / self.worker_bandwidth, workers / ps * (self.model_bytes / self.ps_bandwidth)
        )
        rate: N = self.batch / (self.overhead + self.compute * share + 2.0 * one_way)
        return rate

    def describe(self) -> dict[str, object]:
        """See ``SpeedModel``."""
        return {
            "formula": "physical",
            "batch": self.batch,
            "compute_seconds_per_sample": self.compute,
            "model_bytes": self.model_bytes,
            "worker_bandwidth_bytes_per_second": self.worker_bandwidth,
            "ps_bandwidth_bytes_per_second": self.ps_bandwidth,
            "overhead_seconds": self.overhead,
        }


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

    def grid(self, max_workers: int, max_ps: int) -> Grid:
        """See ``SpeedModel``."""
        _check_counts(max_workers, max_ps)
        speeds = np.zeros((max_ps + 1, max_workers + 1))
        collective = self.architecture is Architecture.ALLREDUCE
        for ps in (0,) if collective else range(1, max_ps + 1):
            missing = [workers for workers in range(1, max_workers + 1) if (ps, workers) not in self._measured]
            if missing:
                speeds[ps, missing] = self._interpolated(ps, np.array(missing, dtype=np.float64))
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
    def _weights(self) -> Grid:
        if len(self.points) > MOST_INTERPOLATED:
            msg = f"a table of {len(self.points)} points has a hole; at most {MOST_INTERPOLATED} can be interpolated"
            raise ValueError(msg)
        at = self._at
        distances = np.hypot(at[:, None, 0] - at[None, :, 0], at[:, None, 1] - at[None, :, 1])
        weights: Grid = np.linalg.solve(distances, np.array([speed for _, _, speed in self.points]))
        return weights

    @cached_property
    def _at(self) -> Grid:
        return np.array([(ps, workers) for ps, workers, _ in self.points], dtype=np.float64)

    def _interpolated(self, ps: int, workers: Grid) -> Grid:
        """Speeds at one PS count; sums run over the last axis, so they do not depend on how many are asked for."""
        if len(self.points) == 1:
            return np.full(len(workers), self.points[0][2])
        distances = np.hypot(self._at[None, :, 0] - float(ps), self._at[None, :, 1] - workers[:, None])
        speeds: Grid = np.maximum((distances * self._weights[None, :]).sum(axis=1), 0.0)
        return speeds


def _check_counts(workers: int, ps: int) -> None:
    if not (0 <= workers <= MOST_TASKS and 0 <= ps <= MOST_TASKS):
        msg = f"{workers} workers and {ps} parameter servers: each count must be from 0 to {MOST_TASKS}"
        raise ValueError(msg)


_KINDS: Final = ("table", "points", "formula")
_FORMULAS: Final = ("allreduce", "physical", "ps-async", "ps-sync")


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
    fields = Fields(description, where=where)
    kinds = [kind for kind in _KINDS if fields.has(kind)]
    if len(kinds) != 1:
        given = " and ".join(kinds) if kinds else f"{shown(description)}{fields.nearest(_KINDS)}"
        raise WorkloadError("", f"expected exactly one of {', '.join(_KINDS)}, got {given}", where=where)
    model = _parse_formula(fields) if kinds[0] == "formula" else _parse_table(fields, kinds[0])
    fields.refuse_rest()
    return model


def _parse_formula(fields: Fields) -> SpeedModel:
    name = fields.choice("formula", _FORMULAS)
    batch = fields.whole("batch", least=1, most=_LARGEST_BATCH)
    if name == "ps-sync":
        a, b, c, d, e = _theta(fields, 5)
        return PsSync((a, b, c, d, e), batch)
    if name == "ps-async":
        a, b, c, d = _theta(fields, 4)
        return PsAsync((a, b, c, d), batch)
    compute = fields.number("compute_seconds_per_sample", least=_SHORTEST, most=_LONGEST)
    model_bytes = fields.number("model_bytes", most=_LARGEST_BYTES)
    overhead = fields.number("overhead_seconds", most=_LONGEST, default=0.0)
    if name == "allreduce":
        return AllReduce(
            batch=batch,
            compute=compute,
            model_bytes=model_bytes,
            bandwidth=_bandwidth(fields, "bandwidth_bytes_per_second"),
            latency=fields.number("latency_seconds", most=_LONGEST, default=0.0),
            overhead=overhead,
        )
    return Physical(
        batch=batch,
        compute=compute,
        model_bytes=model_bytes,
        worker_bandwidth=_bandwidth(fields, "worker_bandwidth_bytes_per_second"),
        ps_bandwidth=_bandwidth(fields, "ps_bandwidth_bytes_per_second"),
        overhead=overhead,
    )


def _bandwidth(fields: Fields, key: str) -> float:
    return fields.number(key, least=1.0, most=_LARGEST_BYTES)


def _theta(fields: Fields, length: int) -> list[float]:
    theta = [
        fields.check_number(f"theta[{index}]", value, most=_LONGEST)
        for index, value in enumerate(fields.items("theta", least=length, most=length))
    ]
    if max(theta) < _SHORTEST:
        raise fields.bad("theta", "a step must take time; at least one number must be above 0")
    return [0.0 if value < _SHORTEST else value for value in theta]


def _parse_table(fields: Fields, kind: str) -> Table:
    architecture = Architecture(fields.choice("architecture", [*Architecture], Architecture.PS))
    collective = architecture is Architecture.ALLREDUCE
    drop_failed = fields.flag("drop_failed")
    batch = fields.whole("batch", least=1, most=_LARGEST_BATCH) if fields.has("batch") else None
    read = _rows(fields, collective=collective) if kind == "table" else _points(fields, collective=collective)
    if drop_failed and read:
        # Runs that failed are logged with a speed of 0, or of next to nothing where they died late.
        least = FAILED_SHARE * float(np.median([speed for _, _, speed in read]))
        read = [point for point in read if point[2] > least]
    if not any(speed > 0.0 for _, _, speed in read):
        raise fields.bad(kind, "has no measured speed above 0")
    consistency = Consistency(fields.choice("consistency", [*Consistency], Consistency.SYNC))
    return Table(tuple(sorted(read)), architecture, batch, consistency)


def _rows(fields: Fields, *, collective: bool) -> list[tuple[int, int, float]]:
    """Row = PS count from 1 (the only row of an all-reduce has none), column = workers from 1."""
    interpolate = fields.flag("interpolate")
    rows = fields.items("table", most=1 if collective else MOST_TASKS)
    for index, row in enumerate(rows):
        if not isinstance(row, list | tuple) or not 1 <= len(row) <= MOST_TASKS:
            raise fields.bad(f"table[{index}]", f"expected a list of 1 to {MOST_TASKS} speeds, got {shown(row)}")
    width = max(len(row) for row in rows if isinstance(row, list | tuple))
    if len(rows) * width > MOST_POINTS:
        raise fields.bad("table", f"{len(rows)} x {width} is more than {MOST_POINTS} speeds")
    read: list[tuple[int, int, float]] = []
    for index, row in enumerate(rows):
        assert isinstance(row, list | tuple)
        for column in range(width):
            value = row[column] if column < len(row) else None
            at = f"table[{index}][{column}]"
            if value is not None:
                ps = 0 if collective else index + 1
                read.append((ps, column + 1, fields.check_number(at, value, most=_FASTEST)))
            elif not interpolate:
                size = f"{column + 1} workers" if collective else f"{index + 1} PS and {column + 1} workers"
                raise fields.bad(
                    at,
                    f"a hole: there is no speed for {size}; give one, or set "
                    '"interpolate": true to have holes filled from the measured points',
                )
    return read


def _points(fields: Fields, *, collective: bool) -> list[tuple[int, int, float]]:
    seen: dict[tuple[int, int], float] = {}
    fewest = 0 if collective else 1
    for index, point in enumerate(fields.items("points", most=MOST_POINTS)):
        at = f"points[{index}]"
        if not isinstance(point, list | tuple) or len(point) != 3:
            raise fields.bad(at, f"expected [ps, workers, samples per second], got {shown(point)}")
        ps = fields.check_whole(f"{at}[0]", point[0], least=fewest, most=0 if collective else MOST_TASKS)
        workers = fields.check_whole(f"{at}[1]", point[1], least=1, most=MOST_TASKS)
        if (ps, workers) in seen:
            raise fields.bad(at, f"{ps} PS and {workers} workers are given twice")
        seen[ps, workers] = fields.check_number(f"{at}[2]", point[2], most=_FASTEST)
    return [(ps, workers, speed) for (ps, workers), speed in seen.items()]
