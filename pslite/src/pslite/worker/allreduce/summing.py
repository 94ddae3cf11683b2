"""The exchange of one step of an all-reduce job: from the sums of every worker to the sum over all, in all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pslite.job.blocks import Block
from pslite.job.job_spec import JobSpec
from pslite.net.shared_memory import SharedMemory
from pslite.numeric.gradient_sums import Bundle, Contribution
from pslite.worker.allreduce.gradient_summing import Division, add_slices
from pslite.worker.allreduce.process_group import Bytes, Group, Work


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
        """Add up our slice, and start to give it to the others."""
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
