"""Assignment of work: which worker computes which logical shards, which server owns which block.

A job has a fixed number of logical shards.  Shard i of V holds the samples [i*n//V, (i+1)*n//V) of a global batch of n
samples, whichever worker computes it; with n < V some shards are empty.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from itertools import accumulate

#: sorts after every block number
_ANY_BLOCK = 1 << 62
DEFAULT_SHARDS = 16


def ranges(shards: int, workers: int) -> tuple[tuple[int, int], ...]:
    """Cut [0, shards) into one contiguous, almost equal half-open range for each of `workers` <= shards workers."""
    if not 0 < workers <= shards:
        raise ValueError(f"{workers} workers cannot share {shards} shards: there must be 1 to {shards} workers")
    return tuple((i * shards // workers, (i + 1) * shards // workers) for i in range(workers))


def consecutive_ranges(shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Cut the shards into one contiguous half-open range for each worker, of so many shards each, at least one."""
    if not shares or min(shares) < 1:
        raise ValueError(f"the workers' numbers of shards are {tuple(shares)}: each must be at least 1")
    ends = list(accumulate(shares))
    return tuple(zip([0, *ends], ends, strict=False))


def sample_slice(low: int, high: int, shards: int, samples: int) -> tuple[int, int]:
    """Return the half-open range of positions in a batch of `samples` that shards [low, high) hold."""
    return low * samples // shards, high * samples // shards


def assign(
    sizes: Sequence[int], previous: Mapping[int, str], servers: Sequence[str], speeds: Sequence[float] = ()
) -> tuple[int, ...]:
    """Give every block an owner.

    Blocks whose owner is not among `servers` go, largest first, to the server that holds least.  Then, while two
    servers differ by more than the largest block, the fullest gives the emptiest the block that best fits half their
    difference.  Nothing else moves.  No server stays without a block while another has two.

    With speeds, how much a server holds is counted in the time that it takes for that, and two servers are level if
    neither would be done before the other although it got one block more, the largest.

    Parameters
    ----------
    sizes
        bytes of each block.
    previous
        block -> name of its present owner (empty for a new job).
    servers
        names of the servers of the new plan, in order, at least one.
    speeds
        of each server, above 0, in any unit; empty: all are alike.

    Returns
    -------
    For each block the index of its owner in `servers`.

    Raises
    ------
    ValueError
        there is no server.

    """
    if not servers:
        raise ValueError("a plan needs at least one server")
    rates = list(speeds) or [1] * len(servers)
    index = {name: i for i, name in enumerate(servers)}
    #: per server its blocks as (bytes, number), smallest first
    shelves: list[list[tuple[int, int]]] = [[] for _ in servers]
    orphans: list[tuple[int, int]] = []
    for block, size in enumerate(sizes):
        owner = index.get(previous.get(block, ""), -1)
        (shelves[owner] if owner >= 0 else orphans).append((size, block))
    for shelf in shelves:
        shelf.sort()
    loads = [sum(size for size, _ in shelf) for shelf in shelves]
    # largest first, equal ones in block order: every process computes the same plan
    for size, block in sorted(orphans, key=lambda item: (-item[0], item[1])):
        server = min(range(len(servers)), key=lambda s: ((loads[s] + size) / rates[s], s))
        insort(shelves[server], (size, block))
        loads[server] += size
    _level(shelves, loads, rates, max(sizes, default=0))
    owners = [0] * len(sizes)
    for server, shelf in enumerate(shelves):
        for _, block in shelf:
            owners[block] = server
    return tuple(owners)


def _level(shelves: list[list[tuple[int, int]]], loads: list[int], rates: Sequence[float], largest: int) -> None:
    """Move blocks from the fullest to the emptiest server until they differ by at most `largest` bytes."""
    places = range(len(shelves))
    while True:
        # no server gives its last block
        givers = [s for s in places if len(shelves[s]) > 1]
        if not givers:
            return
        taker = min(places, key=lambda s: (bool(shelves[s]), (loads[s] + largest) / rates[s], s))
        giver = max(givers, key=lambda s: (loads[s] / rates[s], -s))
        if shelves[taker] and loads[giver] / rates[giver] <= (loads[taker] + largest) / rates[taker]:
            return
        # so many bytes make both equal: half of the difference where they are equally fast
        gap = loads[giver] * rates[taker] - loads[taker] * rates[giver]
        half = gap / (rates[giver] + rates[taker])
        # the largest block of at most that; if all are larger, the smallest of them
        place = max(0, bisect_right(shelves[giver], (half, _ANY_BLOCK)) - 1)
        size, block = shelves[giver].pop(place)
        insort(shelves[taker], (size, block))
        loads[giver] -= size
        loads[taker] += size
