"""A named vector of resources with exact arithmetic."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dl2d.core.errors import RequestError

# Amounts are kept as whole thousandths: sums of fractional GPUs stay exact whatever their order,
# and no real cluster counts finer than that.
_SCALE = 1000
_MAX_AMOUNT = 10**12
_NAME = re.compile(r"[a-z][a-z0-9_.:/-]{0,63}")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
_MEBIBYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


#: Where some tasks get nodes of their own, each node has one of this resource, such a task demands it, and any other
#: task a small part of it, so that there is no room for it beside another task (``tick.exclusive_nodes``).
WHOLE_NODE = "whole-node"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """One resource of which there was too little: how much was wanted and how much there was."""

    resource: str
    wanted: float
    had: float

    def __str__(self) -> str:
        if self.resource == WHOLE_NODE:
            if self.wanted < 1:
                return "each node is kept for one task"
            return f"whole nodes: wanted {math.floor(self.wanted)}, had {math.floor(self.had)}"
        return f"{self.resource}: wanted {_plain(self.wanted)}, had {_plain(self.had)}"


class Resources(msgspec.Struct, frozen=True, gc=False):
    """Amounts by resource name, e.g. ``cpu``, ``gpu`` (counts) and ``memory`` (MiB). A name not listed is zero.

    ``thousandths`` is sorted by name and holds no zeros, so that equal vectors compare and hash equal.
    """

    thousandths: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, amounts: Mapping[str, float] | None = None, /, **more: float) -> Resources:
        """Build from amounts; ``Resources.of(cpu=2, gpu=0.5)``.

        Raises
        ------
        ValueError
            A name is not a resource name, or an amount is negative, not finite, absurdly large, or so small that it
            would be lost.
        """
        scaled: dict[str, int] = {}
        for name, amount in {**(amounts or {}), **more}.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a resource name (lower-case letters, digits, _ . : / -)")
            if isinstance(amount, bool) or not math.isfinite(amount) or amount < 0 or amount > _MAX_AMOUNT:
                raise ValueError(
                    f"{name}: an amount must be a finite number between 0 and {_MAX_AMOUNT:g}, not {amount!r}"
                )
            scaled[name] = round(amount * _SCALE)
            if amount and not scaled[name]:
                raise ValueError(f"{name}: {amount!r} is too small; amounts are counted in thousandths")
        return cls._exact(scaled)

    @classmethod
    def _exact(cls, scaled: Mapping[str, int]) -> Resources:
        return cls(tuple(sorted([entry for entry in scaled.items() if entry[1]])))

    @classmethod
    def total(cls, parts: Iterable[Resources]) -> Resources:
        """Sum of many vectors; cost grows with the number of entries."""
        scaled: dict[str, int] = {}
        for part in parts:
            for name, amount in part.thousandths:
                scaled[name] = scaled.get(name, 0) + amount
        return cls._exact(scaled)

    def __add__(self, other: Resources) -> Resources:
        if not self.thousandths or not other.thousandths:
            return self if self.thousandths else other
        return Resources.total((self, other))

    def __mul__(self, times: int) -> Resources:
        return Resources(tuple((name, amount * times) for name, amount in self.thousandths)) if times else Resources()

    def share(self, parts: int) -> Resources:
        """What each of so many equal parts has, rounded up to thousandths."""
        return Resources(tuple((name, -(-amount // parts)) for name, amount in self.thousandths))

    def minus(self, other: Resources) -> Resources:
        """Self less ``other``, never below zero: what a node has left however badly it was over-booked."""
        scaled = dict(self.thousandths)
        for name, amount in other.thousandths:
            if name in scaled:
                scaled[name] = max(0, scaled[name] - amount)
        return Resources._exact(scaled)

    def minimum(self, other: Resources) -> Resources:
        """The smaller amount of each resource."""
        return self.minus(self.minus(other))

    def maximum(self, other: Resources) -> Resources:
        """The larger amount of each resource."""
        return self + other.minus(self)

    def fits_in(self, room: Resources) -> bool:
        """Whether ``room`` has at least this much of everything."""
        have = dict(room.thousandths)
        for name, amount in self.thousandths:  # noqa: SIM110 - a generator takes twice as long, and this is asked often
            if have.get(name, 0) < amount:
                return False
        return True

    def shortfalls(self, room: Resources) -> tuple[Shortfall, ...]:
        """Every resource of which ``room`` has too little for this demand."""
        have = dict(room.thousandths)
        return tuple(
            Shortfall(name, amount / _SCALE, have.get(name, 0) / _SCALE)
            for name, amount in self.thousandths
            if have.get(name, 0) < amount
        )

    def lacking(self, room: Resources) -> str:
        """The shortfalls in words; empty if there are none."""
        return "; ".join(map(str, self.shortfalls(room)))

    def dominant_share(self, capacity: Resources) -> tuple[float, str]:
        """Largest fraction of ``capacity`` that this vector takes of any one resource, and which (DRF, section 4).

        A demand for something of which the cluster has none has share infinity.
        """
        whole = dict(capacity.thousandths)
        share, which = 0.0, ""
        for name, amount in self.thousandths:
            part = amount / whole[name] if whole.get(name) else math.inf
            if part > share:
                share, which = part, name
        return share, which

    def get(self, name: str) -> float:
        """Amount of one resource; 0 where it is not listed."""
        return dict(self.thousandths).get(name, 0) / _SCALE

    def in_order(self, names: Sequence[str]) -> list[int]:
        """Thousandths of the named resources, in the order of ``names``; 0 for those that are not listed."""
        amounts = dict(self.thousandths)
        return [amounts.get(name, 0) for name in names]

    def as_dict(self) -> dict[str, float]:
        """Amounts by name as plain numbers, whole ones as int."""
        return {name: _number(amount / _SCALE) for name, amount in self.thousandths}

    def __str__(self) -> str:
        return " ".join(f"{name}={_plain(_shown(name, amount))}" for name, amount in self.thousandths) or "nothing"


NO_RESOURCES = Resources()


def too_small_everywhere(demand: Resources, rooms: Mapping[str, Resources]) -> tuple[str, str] | None:
    """Name of the room that lacks the fewest resources for a demand, and what; None if one is large enough, or none is
    given.
    """
    short = {name: len(demand.shortfalls(room)) for name, room in rooms.items()}
    if not short or not all(short.values()):
        return None
    nearest = min(short, key=lambda name: (short[name], name))
    return nearest, demand.lacking(rooms[nearest])


def parse_resources(value: object, key: str) -> Resources:
    """Read a demand as users write it: a mapping, or text like ``cpu:2,gpu:a100:1,memory:4G``.

    ``memory`` is in MiB where it has no unit; K, M, G and T (powers of 1024) are understood.

    Raises
    ------
    RequestError
        The value is neither, or a name or an amount in it is bad; names ``key`` and the part at fault.
    """
    if isinstance(value, str):
        pairs: list[tuple[str, object]] = []
        for part in value.split(","):
            name, colon, given = part.strip().rpartition(":")
            if not colon:
                raise RequestError(key, f"{part.strip()!r} is not name:amount (write e.g. cpu:2,gpu:1,memory:4G)")
            pairs.append((name.strip(), given.strip()))
    elif isinstance(value, Mapping):
        pairs = [(str(name), amount) for name, amount in value.items()]
    else:
        raise RequestError(key, f"expected resources such as {{cpu: 2, gpu: 1}}, got {value!r}")
    amounts: dict[str, float] = {}
    for name, amount in pairs:
        if name in amounts:
            raise RequestError(key, f"{name} is given twice")
        amounts[name] = _amount(name, amount, key)
    try:
        return Resources.of(amounts)
    except ValueError as error:
        raise RequestError(key, str(error)) from None


def _amount(name: str, amount: object, key: str) -> float:
    if isinstance(amount, bool):
        raise RequestError(f"{key}.{name}", f"expected a number, got {amount!r}")
    if isinstance(amount, int | float):
        return float(min(max(amount, -2 * _MAX_AMOUNT), 2 * _MAX_AMOUNT))  # a whole number may be too large for a float
    text = str(amount).strip()
    if name == "memory" and (match := _MEMORY.fullmatch(text)):
        return float(match[1]) * _MEBIBYTES[match[2].upper()]
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{key}.{name}", f"expected a number, got {text!r}") from None


def _number(amount: float) -> float:
    return int(amount) if amount == int(amount) else amount


def _shown(name: str, amount: int) -> float:
    """An amount in thousandths as people read it."""
    return amount // _SCALE if name == WHOLE_NODE else amount / _SCALE


def _plain(amount: float) -> str:
    return str(_number(amount))
