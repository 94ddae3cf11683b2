"""Measured speeds of several kinds as one array: all are looked at together, in a tenth of the time of one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dl2d.core.jobs import Allocation
from dl2d.core.measured import MeasuredSpeeds, SpeedPoint, TrainingKind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Columns of a table, as ``SpeedPoint`` has them; where all speeds are of now those from the sixth on are left out.
WORKERS, PS, SPEED, TIMES, JOBS, AT, SINCE, BEFORE = range(8)
_COLUMNS: Final = 8
#: Bits of a count in the number of a size.
_BITS: Final = 21


@dataclass(frozen=True)
class Table:
    """Points of K kinds, n in all: those of each kind one after the other, in the order of sizes."""

    kinds: tuple[TrainingKind, ...]
    #: Where the points of each kind end, shape (K,).
    ends: Ints
    #: Shape (n, 8) or (n, 5).
    rows: Floats

    @classmethod
    def of(cls, measured: Iterable[MeasuredSpeeds]) -> Table:
        """What was measured."""
        speeds = tuple(measured)
        ends = np.cumsum([len(each.points) for each in speeds], dtype=np.int64)
        numbers = [
            (workers, ps, speed, times, jobs, at, since, before)
            for each in speeds
            for (workers, ps), speed, times, jobs, at, since, before in each.points
        ]
        rows = np.fromiter(chain.from_iterable(numbers), np.float64, _COLUMNS * len(numbers)).reshape(-1, _COLUMNS)
        table = cls(tuple([each.kind for each in speeds]), ends, rows)
        if (table.codes[1:] > table.codes[:-1]).all():
            return table
        return replace(table, rows=rows[np.lexsort((*rows.T[:PS:-1], table.codes))])

    @cached_property
    def kind_of(self) -> Ints:
        """Place of each point's kind, shape (n,)."""
        # Numbers of points: numpy's own differences take five times as long.
        many = self.ends.copy()
        many[1:] -= self.ends[:-1]
        return np.arange(len(self.kinds)).repeat(many)

    @cached_property
    def counts(self) -> Ints:
        """Workers and PSs, shape (n, 2)."""
        counts: Ints = self.rows[:, : PS + 1].astype(np.int64)
        return counts

    @cached_property
    def codes(self) -> Ints:
        """A number for each point, shape (n,), in the order of kinds, then workers, then PSs."""
        codes: Ints = (self.kind_of << 2 * _BITS) + (self.counts[:, WORKERS] << _BITS) + self.counts[:, PS]
        return codes

    @cached_property
    def parts(self) -> list[slice]:
        """Which points are of each kind."""
        ends = self.ends.tolist()
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def same(self, other: Table) -> bool:
        """Whether all is the same."""
        return (
            self.kinds == other.kinds
            and np.array_equal(self.ends, other.ends)
            and np.array_equal(self.rows, other.rows)
        )

    def measured(self) -> tuple[MeasuredSpeeds, ...]:
        """The points themselves."""
        points = [
            SpeedPoint(Allocation(int(workers), int(ps)), speed, int(times), int(jobs), *when)
            for workers, ps, speed, times, jobs, *when in self.rows.tolist()
        ]
        return tuple(
            [MeasuredSpeeds(kind, tuple(points[part])) for kind, part in zip(self.kinds, self.parts, strict=True)]
        )

    def some(self, which: Bools) -> Table:
        """Those of the points, of all the kinds."""
        return Table(self.kinds, np.concatenate([[0], which.cumsum()])[self.ends], self.rows[which])

    def among(self, kinds: tuple[TrainingKind, ...]) -> Table:
        """The points of these kinds, of some there may be none."""
        if kinds == self.kinds:
            return self
        parts = dict(zip(self.kinds, self.parts, strict=True))
        rows = [self.rows[parts[kind]] if kind in parts else self.rows[:0] for kind in kinds]
        return Table(
            kinds, np.cumsum([len(some) for some in rows], dtype=np.int64), np.concatenate([self.rows[:0], *rows])
        )

    def find(self, other: Table) -> tuple[Ints, Bools]:
        """Where points with the kinds and sizes of another table's are, or would be; and whether they are there."""
        places = self.codes.searchsorted(other.codes)
        there = np.zeros(len(places), dtype=np.bool_)
        inside = places < len(self.codes)
        there[inside] = self.codes[places[inside]] == other.codes[inside]
        return places, there

    def in_grids(self, grids: Mapping[TrainingKind, Floats]) -> Floats:
        """What grids by kind, as ``KnownSpeeds.grid`` has them, say of each point; 0 where they say nothing, (n,)."""
        there = [grids.get(kind, _NO_GRID) for kind in self.kinds]
        height, width = np.array([grid.shape for grid in there], dtype=np.int64).reshape(-1, 2).T[:, :, None]
        first = np.cumsum(height * width) - height[:, 0] * width[:, 0]
        workers, ps = self.counts.T
        height, width = height[self.kind_of, 0], width[self.kind_of, 0]
        # All-reduce jobs have one row, whatever servers they are given.
        ps = np.where(height > 1, ps, 0)
        inside = (ps < height) & (workers < width)
        values = np.concatenate([_NO_GRID[0], *(grid.reshape(-1) for grid in there)])
        return values[np.where(inside, 1 + first[self.kind_of] + ps * width + workers, 0)]


_NO_GRID: Final = np.zeros((1, 1))
