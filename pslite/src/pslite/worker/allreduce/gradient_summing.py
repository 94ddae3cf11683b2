"""Gradient slices of one all-reduce step: which tree nodes each worker computes, and which bytes it adds up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pslite.job.job_spec import JobSpec
from pslite.job.membership_plan import reduction
from pslite.job.reduction_tree import ROOT, TreeSum
from pslite.numeric.gradient_sums import Array, Bundle

Bytes = NDArray[np.uint8]

#: slices begin at multiples of it, so that they hold whole elements
_ALIGN = 8


class Division:
    """One step's work among the members of a group.

    Only members that have the version's weights can compute; the others (which are getting them) receive the sums.

    Parameters
    ----------
    spec
        the job.
    size
        members of the group.
    ready
        those that have the weights, by rank, in order; at most as many as there are shards are used.
    nbytes
        bytes of a bundle.

    """

    def __init__(self, spec: JobSpec, size: int, ready: Sequence[int], nbytes: int) -> None:
        #: those that compute, by rank
        self.active = tuple(ready[: spec.shards])
        how = reduction(spec, len(self.active))
        self.leaves = how.leaves
        #: by rank, the tree nodes whose sums it has
        self.nodes: tuple[tuple[int, ...], ...] = tuple(
            how.nodes[self.active.index(rank)] if rank in self.active else () for rank in range(size)
        )
        parts = len(self.active)
        bounds = [*(nbytes * i // parts // _ALIGN * _ALIGN for i in range(parts)), nbytes]
        places = dict(zip(self.active, pairwise(bounds), strict=True))
        #: by rank, the half-open range of bytes that it adds up
        self.slices: tuple[tuple[int, int], ...] = tuple(places.get(rank, (0, 0)) for rank in range(size))

    @property
    def rounds(self) -> int:
        """Most nodes of one member: every round each sends one of its sums, cut into slices."""
        return max(len(nodes) for nodes in self.nodes)

    def width(self, rank: int) -> int:
        """Return how many bytes a member adds up."""
        low, high = self.slices[rank]
        return high - low

    def place(self, rank: int) -> int:
        """Return the place of a member among those that compute; -1 if it does not."""
        return self.active.index(rank) if rank in self.active else -1

    def sent(self, round_: int, rank: int) -> list[int]:
        """Return how many bytes `rank` sends to each member in a round."""
        if round_ >= len(self.nodes[rank]):
            return [0] * len(self.nodes)
        return [self.width(other) for other in range(len(self.nodes))]

    def received(self, round_: int, rank: int) -> list[int]:
        """Return how many bytes `rank` gets from each member in a round."""
        return [self.width(rank) if round_ < len(nodes) else 0 for nodes in self.nodes]

    def origins(self, round_: int) -> list[int]:
        """Return the nodes whose sums come in a round, in the order of the members that send them."""
        return [nodes[round_] for nodes in self.nodes if round_ < len(nodes)]


def add_slices(leaves: int, found: Mapping[int, Bytes], like: Bundle, low: int) -> Bytes:
    """Add up one slice along the tree; uses the given memory.

    Parameters
    ----------
    leaves
        of the tree.
    found
        by node, bytes [low, low + n) of the memory of a bundle with its sum.
    like
        any bundle of the job: says which bytes are what.
    low
        where the slice begins.

    """
    arrays = {node: _typed(data, like, low) for node, data in found.items()}
    owners = {id(parts): found[node] for node, parts in arrays.items()}
    tree: TreeSum[list[Array]] = TreeSum(leaves, frozenset((ROOT,)))
    for node, parts in arrays.items():
        done = tree.add(node, parts, _add)
        if done is not None:
            return owners[id(done[1])]
    raise ValueError(f"the tree nodes {sorted(found)} do not cover all {leaves} leaves")


def _add(left: list[Array], right: list[Array]) -> list[Array]:
    for mine, theirs in zip(left, right, strict=True):
        np.add(mine, theirs, out=mine)
    return left


def _typed(data: Bytes, like: Bundle, low: int) -> list[Array]:
    """Return the arrays that a slice consists of."""
    high = low + data.size
    begin = like.memory.ctypes.data
    found: list[Array] = []
    for array in like.arrays:
        first = array.ctypes.data - begin
        start, stop = max(low, first), min(high, first + array.nbytes)
        if start < stop:
            found.append(data[start - low : stop - low].view(array.dtype))
    return found
