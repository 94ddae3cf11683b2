"""What kinds of jobs of one architecture and consistency have in common, and how it is worked out from all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dl2d.core.measured import TrainingKind
from dl2d.throughput.recent import Recent
from dl2d.throughput.sizes import (
    MOST_OF_GROUP,
    SHARED_PART,
    Bounds,
    Group,
    Own,
    Sizes,
    codes_of,
    distances,
    factor_of,
    inverse_of_lower,
    matern,
    owns,
    root_of,
)
from dl2d.throughput.told import Kind, Measured

_Floats = NDArray[np.float64]

#: Added to what is to be positive definite.
_JITTER: Final = 1e-9
#: Most sizes at which the shared part is worked out; where there are more, neighbours are taken together.
_MOST_SHARED: Final = 64


@dataclass(frozen=True, slots=True)
class Points:
    """What a kind's own part and the shared one are told of it."""

    own: Own
    #: Less the centre.
    logs: _Floats
    #: Place of each size among those of the shared part.
    shared: NDArray[np.int64]


class Told(NamedTuple):
    """All that is known of a kind, or of one job."""

    points: Points
    sizes: Sizes
    kept: Measured
    alone: Measured | None


class Lattice:
    """U sizes at which a group of kinds has a part in common, before anything is measured."""

    def __init__(self, group: Group, at: _Floats) -> None:
        self.group, self.at = group, at
        #: Lower Cholesky factor of the covariance, (U, U), and its inverse.
        self.factor = factor_of(matern(distances(at, at, group), *SHARED_PART) + _JITTER * np.eye(len(at)))
        self._inverse = inverse_of_lower(self.factor)
        self._weights: Recent[Bounds, tuple[_Floats, _Floats]] = Recent(MOST_OF_GROUP)

    def nearest(self, at: _Floats) -> NDArray[np.int64]:
        """Which of its sizes is nearest to each of others."""
        places: NDArray[np.int64] = distances(at, self.at, self.group).argmin(axis=1)
        return places

    def weights(self, bounds: Bounds | None, at: _Floats) -> tuple[_Floats, _Floats]:
        """Of ``g``, at other sizes, kept by their bounds: shape (U, others); and what variance is left there."""
        return self._weigh(at) if bounds is None else self._weights.get(bounds, lambda: self._weigh(at))

    def _weigh(self, at: _Floats) -> tuple[_Floats, _Floats]:
        weights = self._inverse @ matern(distances(self.at, at, self.group), *SHARED_PART)
        return weights, np.maximum(SHARED_PART[1] - (weights**2).sum(axis=0), 0.0)


@dataclass(frozen=True, slots=True)
class Shared:
    """What a group of kinds has in common: ``factor @ g`` with g of mean ``mean``, covariance ``root.T @ root``."""

    lattice: Lattice
    told: dict[TrainingKind, Told]
    #: The factor times ``mean``, (U,), and ``root`` times the factor's transpose, (U, U).
    believed: _Floats
    spread: _Floats
    root: _Floats
    mean: _Floats

    @classmethod
    def of(cls, group: Group, found: Mapping[TrainingKind, Kind], centre: float, before: Lattice | None) -> Shared:
        """From all kinds; the lattice is that of ``before`` if it can be."""
        at, places = _together([kind.kept.sizes for kind in found.values()], _MOST_SHARED)
        lattice = before if before is not None and np.array_equal(before.at, at) else Lattice(group, at)
        size = len(at)
        kept = [kind.kept for kind in found.values()]
        ends = np.cumsum([len(each.logs) for each in kept]).tolist()
        shared = [places[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        points = [
            Points(own, each.logs - centre, where)
            for own, each, where in zip(owns([(each.sizes, each.noise) for each in kept]), kept, shared, strict=True)
        ]
        # One after the other, as bincount has it: sums are the same however much was taken over.
        where = np.concatenate([(each.shared[:, None] * size + each.shared).reshape(-1) for each in points])
        certain = np.concatenate([each.own.certain.reshape(-1) for each in points])
        certainty = np.bincount(where, certain, size * size).reshape(size, size)
        weighed = np.concatenate([each.own.certain @ each.logs for each in points])
        factor = lattice.factor
        root = root_of(np.eye(size) + factor.T @ certainty @ factor)
        mean = root.T @ (root @ (factor.T @ np.bincount(places, weighed, size)))
        every = {
            name: Told(told, kind.sizes, kind.kept, kind.alone)
            for (name, kind), told in zip(found.items(), points, strict=True)
        }
        return cls(lattice, every, factor @ mean, root @ factor.T, root, mean)

    def at(self, bounds: Bounds | None, at: _Floats) -> tuple[_Floats, _Floats, _Floats]:
        """Means, (sizes,), roots of covariances, (U, sizes), and what variance is left, at sizes as ``weights``."""
        weights, left = self.lattice.weights(bounds, at)
        return self.mean @ weights, self.root @ weights, left


def _together(sizes: Sequence[Sizes], most: int) -> tuple[_Floats, NDArray[np.int64]]:
    """log2 of at most so many distinct sizes, and which of them stands for each of those given, one after the other.

    Where there are more, those in one cell of a lattice, as fine as can be, are one: the middle of the cell.
    """
    counts = np.maximum(np.concatenate([some.counts for some in sizes]), 1)
    first, places = _distinct(codes_of(counts))
    at, of_each, cells = np.log2(counts[first]), places, 16.0
    distinct = at
    while len(distinct) > most:
        corners = np.round(at * cells)
        first, joined = _distinct(codes_of(corners.astype(np.int64)))
        distinct, places, cells = corners[first] / cells, joined[of_each], cells / 2.0
    return distinct, places


def _distinct(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each number is first, in the order of numbers, and which of these each one is; faster than numpy's."""
    order = codes.argsort(kind="stable")
    inside = codes[order]
    new = np.ones(len(codes), dtype=np.bool_)
    np.not_equal(inside[1:], inside[:-1], out=new[1:])
    places = np.empty(len(codes), dtype=np.int64)
    places[order] = new.cumsum() - 1
    return order[new], places
