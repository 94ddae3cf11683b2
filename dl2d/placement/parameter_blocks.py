"""Which parameter server holds what of a model: Optimus' assignment, MXNet's, and how even they are.

A model is a sequence of blocks of parameters (one for each weight, bias, ...); sizes are counts of parameters. A piece
is one request in each pull and push, whatever its size, so both sizes and numbers of pieces should be even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

#: MXNet cuts blocks of at least so many parameters (MXNET_KVSTORE_BIGARRAY_BOUND).
MXNET_BOUND: Final = 1_000_000
#: Optimus counts a block as small up to one part in so many of a server's fair share.
_SMALL: Final = 100
_MXNET_PRIME: Final = 9973


class Piece(NamedTuple):
    """A part of a block, or all of it, on one server."""

    block: int
    size: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """The pieces of each server."""

    servers: tuple[tuple[Piece, ...], ...]

    @property
    def loads(self) -> tuple[int, ...]:
        """Parameters on each server."""
        return tuple(sum(piece.size for piece in pieces) for pieces in self.servers)

    @property
    def requests(self) -> tuple[int, ...]:
        """Pieces on each server."""
        return tuple(len(pieces) for pieces in self.servers)

    @property
    def load_imbalance(self) -> float:
        """Parameters on the fullest server over the mean, 1 or more: so many times longer does its traffic take."""
        return _imbalance(self.loads)

    @property
    def request_imbalance(self) -> float:
        """Pieces on the server with most over the mean, 1 or more."""
        return _imbalance(self.requests)


def optimus(sizes: Sequence[int], servers: int) -> Assignment:
    """Optimus' parameter assignment, PAA (Peng et al., EuroSys 2018, section 5.3).

    Blocks in descending size. One larger than a server's fair share is cut: it fills servers up to their share, the
    emptiest first, and its rest goes where a block of that size would. One that is at most a share goes to the server
    that it fits best, with the least room left of its share; where it fits none, to the emptiest. A small one, up to
    1 % of a share, goes to the server with the fewest pieces. Equal servers are taken in order.

    Without small blocks no server holds more than two shares, for what fits nowhere is no larger than a share and the
    emptiest server holds less than one. Only blocks larger than a share are cut, where MXNet cuts all large ones.

    Raises
    ------
    ValueError
        There is no server, or a size is not positive.
    """
    _check(sizes, servers)
    share = -(-sum(sizes) // servers)
    loads = [0] * servers
    counts = [0] * servers
    held: list[dict[int, int]] = [{} for _ in range(servers)]

    def give(server: int, block: int, size: int) -> None:
        loads[server] += size
        counts[server] += block not in held[server]
        held[server][block] = held[server].get(block, 0) + size

    def best_fit(size: int) -> int:
        fitting = [server for server in range(servers) if loads[server] + size <= share]
        if fitting:
            return max(fitting, key=lambda server: loads[server])
        return min(range(servers), key=lambda server: loads[server])

    for block in sorted(range(len(sizes)), key=lambda block: -sizes[block]):
        left = sizes[block]
        if left * servers * _SMALL <= sum(sizes):
            give(min(range(servers), key=lambda server: counts[server]), block, left)
            continue
        if left > share:
            for server in sorted(range(servers), key=lambda server: loads[server]):
                room = share - loads[server]
                if not 0 < room <= left:
                    break
                give(server, block, room)
                left -= room
        if left:
            give(best_fit(left), block, left)
    return _assignment(held)


def mxnet(sizes: Sequence[int], servers: int, *, bound: int = MXNET_BOUND) -> Assignment:
    """MXNet's assignment: a block below ``bound`` on one server by its number, others cut into equal parts for all.

    Source: ``EncodeDefaultKey`` of Apache MXNet's ``kvstore_dist.h``. Parts differ by one where they cannot be equal.

    Raises
    ------
    ValueError
        There is no server, or a size is not positive.
    """
    _check(sizes, servers)
    held: list[dict[int, int]] = [{} for _ in range(servers)]
    for block, size in enumerate(sizes):
        if size < bound:
            held[block * _MXNET_PRIME % servers][block] = size
            continue
        ends = [size * number // servers for number in range(servers + 1)]
        for server in range(servers):
            if ends[server + 1] > ends[server]:
                held[server][block] = ends[server + 1] - ends[server]
    return _assignment(held)


def _assignment(held: Sequence[dict[int, int]]) -> Assignment:
    return Assignment(tuple(tuple(Piece(block, size) for block, size in sorted(pieces.items())) for pieces in held))


def _imbalance(amounts: Sequence[int]) -> float:
    return max(amounts) * len(amounts) / sum(amounts) if sum(amounts) else 1.0


def _check(sizes: Sequence[int], servers: int) -> None:
    if servers < 1:
        msg = f"servers: must be at least 1, not {servers}"
        raise ValueError(msg)
    for block, size in enumerate(sizes):
        if size < 1:
            msg = f"sizes[{block}]: a block has at least one parameter, not {size}"
            raise ValueError(msg)
