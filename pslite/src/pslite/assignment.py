"""Which server owns which block: balance by bytes, moving as little as possible."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence

#: sorts after every block number
_ANY_BLOCK = 1 << 62


def assign(sizes: Sequence[int], previous: Mapping[int, str], servers: Sequence[str]) -> tuple[int, ...]:
    """Give every block an owner.

    Blocks whose owner is not among `servers` go, largest first, to the server that holds least.  Then, while two
    servers differ by more than the largest block, the fullest gives the emptiest the block that best fits half their
    difference.  Nothing else moves.  No server stays without a block while another has two.

    Parameters
    ----------
    sizes
        bytes of each block.
    previous
        block -> name of its present owner (empty for a new job).
    servers
        names of the servers of the new plan, in order, at least one.

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
        server = min(range(len(servers)), key=lambda s: (loads[s], s))
        insort(shelves[server], (size, block))
        loads[server] += size
    _level(shelves, loads, max(sizes, default=0))
    owners = [0] * len(sizes)
    for server, shelf in enumerate(shelves):
        for _, block in shelf:
            owners[block] = server
    return tuple(owners)


def _level(shelves: list[list[tuple[int, int]]], loads: list[int], largest: int) -> None:
    """Move blocks from the fullest to the emptiest server until they differ by at most `largest` bytes."""
    places = range(len(shelves))
    while True:
        taker = min(places, key=lambda s: (loads[s], s))
        if shelves[taker]:
            giver = max(places, key=lambda s: (loads[s], -s))
            if loads[giver] - loads[taker] <= largest:
                return
        else:
            giver = max(places, key=lambda s: (len(shelves[s]) > 1, loads[s], -s))
            if len(shelves[giver]) <= 1:
                return
        gap = loads[giver] - loads[taker]
        # the largest block of at most half the difference; if all are larger, the smallest of them
        place = max(0, bisect_right(shelves[giver], (gap // 2, _ANY_BLOCK)) - 1)
        size, block = shelves[giver].pop(place)
        insort(shelves[taker], (size, block))
        loads[giver] -= size
        loads[taker] += size
