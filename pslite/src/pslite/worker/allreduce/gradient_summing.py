"""Summing of the gradients of an all-reduce step: which bytes each worker adds up, and how sums are exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from pslite.job.job_spec import JobSpec
from pslite.job.membership_plan import reduction
from pslite.job.reduction_tree import ROOT, TreeSum
from pslite.job.weight_blocks import Block
from pslite.net.shared_memory import SharedMemory
from pslite.numeric.gradient_sums import Array, Bundle, Contribution
from pslite.worker.allreduce.process_group import Bytes, Group, Work

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


class Summing:
    """Adds up gradients over a group; call `begin`, `add_up` and `total`, each when the work before is done.

    In exact mode every member gets one slice of all sums, adds it up along the tree and gives it to all: no byte is
    sent twice by anybody who has one node.  In fast mode it is torch's own all-reduce.
    """

    def __init__(self, spec: JobSpec, blocks: tuple[Block, ...]) -> None:
        self._exact = spec.mode == "exact"
        self._total = Bundle(spec, blocks)
        self._taken: list[Bytes] = []

    def reserve(self, memory: Sequence[Bytes]) -> None:
        """Take memory that a plan needs, by round."""
        for index, piece in enumerate(memory):
            if index == len(self._taken):
                self._taken.append(piece)
            elif piece.size > self._taken[index].size:
                self._taken[index] = piece

    def begin(self, group: Group, how: Division, contributions: Sequence[Contribution]) -> list[Work]:
        """Start to exchange sums."""
        if not self._exact:
            if contributions:
                bundle = contributions[0].bundle
            else:
                bundle = self._total
                bundle.clear()
            return [group.add(array) for array in bundle.arrays]
        sums = {contribution.node: contribution.bundle.memory for contribution in contributions}
        works = []
        for index in range(how.rounds):
            own = how.nodes[group.rank]
            given = sums[own[index]] if index < len(own) else np.empty(0, dtype=np.uint8)
            take = how.received(index, group.rank)
            self.reserve([np.empty(sum(take) if place == index else 0, dtype=np.uint8) for place in range(index + 1)])
            works.append(group.exchange(given, how.sent(index, group.rank), self._taken[index][: sum(take)], take))
        if not how.width(group.rank):
            works += self._share(group, how)
        return works

    def add_up(self, group: Group, how: Division) -> list[Work]:
        """Add up this worker's slice, and start to give it to the others."""
        width = how.width(group.rank)
        if not self._exact or group.size == 1 or not width:
            return []
        found: dict[int, Bytes] = {}
        for index in range(how.rounds):
            for place, node in enumerate(how.origins(index)):
                found[node] = self._taken[index][place * width : (place + 1) * width]
        low, high = how.slices[group.rank]
        self._total.memory[low:high] = add_slices(how.leaves, found, self._total, low)
        return self._share(group, how)

    def total(self, group: Group, contributions: Sequence[Contribution]) -> Bundle:
        """Return the sum over all members."""
        alone = group.size == 1 or (not self._exact and bool(contributions))
        return contributions[0].bundle if alone else self._total

    def _share(self, group: Group, how: Division) -> list[Work]:
        places = [(rank, *how.slices[rank]) for rank in how.active if how.width(rank)]
        return [group.broadcast(self._total.memory[low:high], rank) for rank, low, high in places]


def room(spec: JobSpec, how: Division, rank: int) -> list[Bytes]:
    """Make the memory that a member of a group needs for what it gets from others, by round; it is touched."""
    if spec.mode == "fast" or len(how.nodes) == 1:
        return []
    sizes = [sum(how.received(index, rank)) for index in range(how.rounds)]
    memory = [np.frombuffer(SharedMemory(size, shared=False).memory, dtype=np.uint8) for size in sizes]
    for piece in memory:
        piece.fill(0)
    return memory
