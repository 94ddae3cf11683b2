"""The fixed reduction tree: sums that do not depend on who computed which part.

Leaves are logical shards 0 .. L-1, numbered like a binary heap over P = the next power of two: the root is 1, the
children of n are 2n and 2n+1, leaf i is P + i.  Leaves L .. P-1 do not exist; a node one of whose children does not
exist has the other child's value.  Floating-point addition is commutative, so the value of a node depends only on
its shape and its leaves: any partition of the leaves among workers gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

ROOT = 1

T = TypeVar("T")


def width(leaves: int) -> int:
    """Return the number of leaf places: the smallest power of two that is at least `leaves`."""
    return 1 << (leaves - 1).bit_length()


def span(node: int, leaves: int) -> tuple[int, int]:
    """Return the half-open range of existing leaves below `node` (empty if it has none)."""
    size = width(leaves) >> (node.bit_length() - 1)
    low = (node - (1 << (node.bit_length() - 1))) * size
    return min(low, leaves), min(low + size, leaves)


def cover(low: int, high: int, leaves: int) -> tuple[int, ...]:
    """Return the maximal nodes whose existing leaves all lie in [low, high), from left to right."""
    found: list[int] = []
    waiting = [ROOT]
    while waiting:
        node = waiting.pop()
        first, last = span(node, leaves)
        if first >= last or last <= low or first >= high:
            continue
        if low <= first and last <= high:
            found.append(node)
        else:
            waiting += (2 * node + 1, 2 * node)
    return tuple(found)


def held(nodes: Collection[int], leaves: int) -> int:
    """Return how many values there are at most while those of `nodes` are made, leaf by leaf.

    A leaf has no value of its own where it can be added to its sibling's (`TreeSum.take_sibling`).
    """
    values = most = 0

    def combine(left: bool, right: bool) -> bool:  # noqa: FBT001 - the tree's values, here only counted
        nonlocal values
        values -= 1
        return left and right

    tree: TreeSum[bool] = TreeSum(leaves, frozenset(nodes))
    for node in nodes:
        for leaf in range(*span(node, leaves)):
            place = width(leaves) + leaf
            if tree.take_sibling(place):
                tree.add(place >> 1, True, combine)
                continue
            values += 1
            most = max(most, values)
            tree.add(place, True, combine)
    return most


class TreeSum(Generic[T]):
    """Combines the values of tree nodes, in any order of arrival, up to given top nodes.

    `combine(a, b)` returns a + b; it may reuse either value, since neither is looked at again.
    """

    __slots__ = ("_leaves", "_present", "_tops")

    def __init__(self, leaves: int, tops: frozenset[int]) -> None:
        self._leaves = leaves
        self._tops = tops
        self._present: dict[int, T] = {}

    def add(self, node: int, value: T, combine: Callable[[T, T], T]) -> tuple[int, T] | None:
        """Add the value of `node`; return (top, sum) once everything below one of the tops has arrived."""
        while node not in self._tops:
            if node <= ROOT:
                raise ValueError(f"tree node {node} is not below a top node of this sum")
            sibling = node ^ 1
            first, last = span(sibling, self._leaves)
            if first < last:
                if sibling not in self._present:
                    self._present[node] = value
                    return None
                other = self._present.pop(sibling)
                value = combine(value, other) if node < sibling else combine(other, value)
            node >>= 1
        return node, value

    def take_sibling(self, node: int) -> T | None:
        """Take out the value of the left sibling of `node`, if it is there and `node` is no top node.

        The caller adds the value of `node` to it, and gives the sum to `add` as the value of their parent.
        """
        return self._present.pop(node ^ 1, None) if node & 1 and node not in self._tops else None
