"""Which server owns which block: balance by bytes, moving as little as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def assign(sizes: Sequence[int], previous: Mapping[int, str], servers: Sequence[str]) -> tuple[int, ...]:
    """Give every block an owner.

    Only two kinds of block move: those whose owner is not among `servers`, and, from each server that holds more than
    the average, the ones that best fit its excess.  They go, largest first, to the server that is furthest below the
    average. Afterwards no two servers differ by more than twice the largest block, and with blocks of one size by more
    than one block.

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

    """
    if not servers:
        msg = "a plan needs at least one server"
        raise ValueError(msg)
    index = {name: i for i, name in enumerate(servers)}
    owners = [index.get(previous.get(block, ""), -1) for block in range(len(sizes))]
    loads = [0] * len(servers)
    for block, owner in enumerate(owners):
        if owner >= 0:
            loads[owner] += sizes[block]
    free = [block for block, owner in enumerate(owners) if owner < 0]
    average = sum(sizes) / len(servers)
    for server in range(len(servers)):
        free += _release(server, owners, loads, sizes, average)
    # largest first; equal ones in block order, so that every process computes the same plan
    for block in sorted(free, key=lambda b: (-sizes[b], b)):
        server = min(range(len(servers)), key=lambda s: (loads[s], s))
        owners[block] = server
        loads[server] += sizes[block]
    return tuple(owners)


def _release(server: int, owners: list[int], loads: list[int], sizes: Sequence[int], average: float) -> list[int]:
    """Take blocks from a server above the average, largest first, as long as that brings it nearer to the average."""
    mine = sorted((b for b, owner in enumerate(owners) if owner == server), key=lambda b: (-sizes[b], -b))
    released: list[int] = []
    for block in mine:
        if loads[server] - average > sizes[block] / 2:
            released.append(block)
            owners[block] = -1
            loads[server] -= sizes[block]
    return released
